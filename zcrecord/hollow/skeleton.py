"""An archive without its tensors' bytes: the index, what attributes hold, and where each payload lies in the file.

Knows how to make memory for the payloads, and how to read them from the file in one forward pass. Which of them are
wanted is left to `hollow`.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.codec.digests import RunningDigest
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.index import Index
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, NONE, plan_payloads
from zcrecord.errors import IntegrityError, SourceError, UnsupportedError
from zcrecord.storage.memory import Memory, aligned

__all__ = ["Shell", "put"]

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 1 << 20  # bytes read from a file at a time


class Shell:
    """What is left of an archive without its tensors' bytes. Small, and can be pickled.

    `places` says where payloads lie in the archive: offset, nbytes and digest, if those are known; `blobs` has the
    bytes of those that attributes and metadata use; `seal` is the header, empty for another format's file; `pins` has
    the SHA-256 of payloads, by their offsets, where a remote record was held to them.
    """

    def __init__(
        self,
        index: Index,
        places: Array,
        blobs: dict[int, bytes],
        seal: bytes = b"",
        path: str | None = None,
        pins: dict[int, bytes] | None = None,
    ) -> None:
        """For `of`, and for who unpickles it."""
        self.index, self.places, self.blobs, self.seal, self.path = index, places, blobs, seal, path
        self.pins = pins or {}

    @classmethod
    def of(cls, archive: Archive) -> Shell:
        """Return what an archive's index and attributes say; of the payloads only those of attributes are read."""
        archive.ensure_all()
        ix = archive.index
        header = archive.header
        places = ix.payloads.copy()
        places["offset"] += np.uint64(header.payload_offset)
        blobs = {number: bytes(archive.payload(number)) for number in _blob_numbers(ix)}
        path = archive.absolute or archive.path
        pins = None if archive.remote is None else archive.remote.pins
        return cls(_own(ix), places, blobs, header.encode() if header.payload_offset else b"", path, pins)

    def is_of(self, archive: Archive) -> bool:
        """Return whether this is what is left of an archive: the same index."""
        found, mine = archive.index, self.index
        columns = ("payloads", "tensors", "dims", "strides")
        return found.text == mine.text and all(
            getattr(found, c).tobytes() == getattr(mine, c).tobytes() for c in columns
        )

    def within(self, archive: Archive) -> Archive | None:
        """Return the archive that this is what is left of: this very one, or the part of it; None if there is none."""
        if self.is_of(archive):
            return archive
        if not self.seal or archive.mode != "r" or archive.header.encode() != self.seal:
            return None
        known = {row: number for number, row in enumerate(archive.index.payloads.tolist())}
        numbers = [known.get(row, NONE) for row in self.index.payloads.tolist()]
        return None if NONE in numbers else archive.part(self.index, numbers)

    def offset(self, number: int) -> int:
        """Return where a payload lies in the archive."""
        return int(self.places["offset"][number])

    def nbytes(self, number: int) -> int:
        """Return how many bytes a payload has."""
        return int(self.places["nbytes"][number])

    def room(self, tensors: bool) -> tuple[memoryview, Archive]:
        """Return memory for payloads (without `tensors`, for those of attributes alone), and the archive over it."""
        sizes = self.index.payloads["nbytes"].copy()
        if not tensors:
            sizes[[n for n in range(len(sizes)) if n not in self.blobs]] = 0
        offsets, end, _ = plan_payloads(sizes, ALIGNMENT)
        block, octets = aligned(max(end, 1), sparse=True)
        for number, blob in self.blobs.items():
            start = int(offsets[number])
            octets[start : start + len(blob)] = blob
        payloads = self.index.payloads.copy()
        payloads["offset"], payloads["digest"] = offsets, 0
        index = self.index._replace(payloads=payloads, digest_kind=0)
        return octets, Archive.foreign(Memory(octets, None, block), index)

    def read(self, file: Any, wanted: Collection[int]) -> Iterator[tuple[list[int], Iterator[memoryview]]]:
        """Yield payloads with their bytes in chunks, read forward from the archive's first byte on, each once.

        Payloads that lie in the same place come together. All chunks have to be taken before the next are asked for;
        each is good until then. A file that can seek is not read where nothing is wanted.

        Raises:
            IntegrityError: the file is another archive, or was changed. SourceError: it ends early.
        """
        reader = _Forward(file, self.path)
        if self.seal:
            self._check_seal(bytes(b"".join(map(bytes, reader.chunks(0, HEADER_SIZE)))))
        groups: dict[tuple[int, int, int], list[int]] = {}
        for number in sorted(wanted):
            groups.setdefault(self.places[number].item(), []).append(number)
        for (offset, nbytes, digest), numbers in groups.items():
            yield numbers, self._checked(reader.chunks(offset, nbytes), offset, digest)

    def check(self, number: int, octets: memoryview) -> None:
        """Raise IntegrityError unless these are the bytes of a payload, as far as its digest, or SHA-256, tells."""
        chunks = (octets[at : at + _CHUNK] for at in range(0, len(octets), _CHUNK))
        for _ in self._checked(chunks, self.offset(number), int(self.places["digest"][number])):
            pass  # what is read is what counts

    def _check_seal(self, start: bytes) -> None:
        if start != self.seal and (start[:8] != self.seal[:8] or any(start[10:60])):  # or not sealed
            raise IntegrityError("the file is not the archive that the hollow record is of", path=self.path)

    def _checked(self, chunks: Iterator[memoryview], offset: int, digest: int) -> Iterator[memoryview]:
        pin = self.pins.get(offset)
        if pin is None and not self.index.digest_kind:
            yield from chunks
            return
        running: Any = RunningDigest()
        if pin is not None:
            import hashlib  # here, because it takes 3 ms

            running = hashlib.sha256()
        for chunk in chunks:
            running.update(chunk)
            yield chunk
        if running.digest() != (pin or digest.to_bytes(8, "big")):
            what = "a payload's digest does not match; the file is damaged, or not the one the hollow record is of"
            raise IntegrityError(what, path=self.path)

    def __getstate__(self) -> tuple[Any, ...]:
        columns = self.index._asdict()
        columns["memory"] = bytes(self.index.memory)
        columns["text"] = len(self.index.text)
        return columns, self.places, self.blobs, self.seal, self.path, self.pins

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        columns, self.places, self.blobs, self.seal, self.path, self.pins = state
        memory = memoryview(columns["memory"])
        self.index = Index(**{**columns, "memory": memory, "text": memory[: columns["text"]]})


def _own(ix: Index) -> Index:
    """Return an index over memory of its own: it keeps no mapping."""
    memory = memoryview(bytes(ix.text) + bytes(64))  # names are compared 32 bytes at a time
    columns: dict[str, Any] = {k: v.copy() for k, v in ix._asdict().items() if isinstance(v, np.ndarray)}
    return ix._replace(memory=memory, text=memory[: len(ix.text)], **columns)


def _blob_numbers(ix: Index) -> set[int]:
    found: set[int] = set()
    for rows in (ix.attributes, ix.metadata):
        for a in unflatten.attribute_entries(ix, rows, PayloadId):
            values = a.value if isinstance(a.value, list | tuple) else [a.value]
            found |= {int(v) for v in values if isinstance(v, PayloadId)}
    return found - {NONE}


class _Forward:
    """A binary file object that is read forward, into one buffer."""

    def __init__(self, file: Any, path: str | None) -> None:
        if isinstance(file, io.TextIOBase):
            raise UnsupportedError("the file was opened as text; open it as bytes, with mode 'rb'", path=path)
        if getattr(file, "closed", False) is True:
            raise SourceError("the file object is closed; open it again", path=path)
        self._file, self._path = file, path
        self._at = 0
        self._buffer = memoryview(bytearray(_CHUNK))
        self._seek = callable(getattr(file, "seekable", None)) and file.seekable()

    def chunks(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        """Yield the bytes from an offset on, counted from where the file was at first; all of them, or an error."""
        if self._seek and offset > self._at:
            self._file.seek(offset - self._at, 1)
            self._at = offset
        for chunk in self._some(offset - self._at, offset):
            del chunk
        yield from self._some(nbytes, offset + nbytes)

    def _some(self, nbytes: int, end: int) -> Iterator[memoryview]:
        while nbytes:
            try:
                got = self._readinto(self._buffer[: min(nbytes, _CHUNK)])
            except OSError as error:
                raise SourceError(f"cannot be read: {error}", path=self._path, errno=error.errno) from error
            if not got:
                raise SourceError(f"the file ends at {self._at:#x}, {end:#x} bytes are needed", path=self._path)
            self._at += got
            nbytes -= got
            yield self._buffer[:got].toreadonly()

    def _readinto(self, target: memoryview) -> int:
        if hasattr(self._file, "readinto"):
            return int(self._file.readinto(target) or 0)
        data = self._file.read(len(target)) or b""
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) > len(target):
            what = f"read({len(target)}) gave a {type(data).__name__} of {len(data)}, and not that many bytes at most"
            raise UnsupportedError(what, path=self._path)
        target[: len(data)] = data
        return len(data)


def put(payloads: list[memoryview], chunks: Iterable[memoryview]) -> None:
    """Put the bytes of whole payloads where they lie, whatever tensors they are."""
    done = 0
    for chunk in chunks:
        for octets in payloads:
            octets[done : done + len(chunk)] = chunk
        done += len(chunk)
