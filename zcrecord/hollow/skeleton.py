"""An archive without its tensors' bytes: its index, the bytes of attributes, and the place of each payload in the file.

Allocates memory for the payloads, and reads and verifies those that `hollow_record` chooses in one forward pass.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.payloads import check_blobs
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.digests import RunningDigest
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.index import Index
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, MAGIC, NONE, plan_payloads
from zcrecord.errors import IntegrityError, SourceError, located
from zcrecord.storage.memory import Memory, aligned
from zcrecord.storage.stream_reader import StreamReader

_CHUNK = 1 << 20  # bytes verified at a time


class _ExpectedDigest(NamedTuple):
    """The expected SHA-256 of a box of a payload, which is the whole of it unless it is split over shards."""

    sha256: bytes
    shape: tuple[int, ...]  # of the payload, in bytes: that of its elements, and the size of one
    box: tuple[tuple[int, int], ...] = ()

    def matches(self, payload: Any) -> bool:
        """Return True if the box of a whole payload, given as bytes, has this SHA-256; copies the box."""
        slices = tuple(slice(start, end) for start, end in self.box)
        octets = np.frombuffer(payload, np.uint8).reshape(self.shape)[slices]
        return bool(_sha256(np.ascontiguousarray(octets).data).digest() == self.sha256)


@dataclass(eq=False)
class RecordSkeleton:
    """An archive without its tensors' bytes; small, and can be pickled."""

    index: Index  # a copy, which keeps no mapping
    places: np.ndarray[Any, np.dtype[Any]]  # of each payload the offset in the archive, nbytes and digest
    blobs: dict[int, bytes]  # the bytes of the payloads that attributes and metadata use, by number
    header: bytes  # of the archive; empty for a file of another format
    path: str | None
    seal: bytes  # as `Archive.seal` has it
    file: tuple[str, tuple[int, ...]] | None  # absolute path and identity of the mapped file
    pins: dict[Any, Any]  # the expected SHA-256 of payloads, if a remote record was checked against them
    expected: dict[int, list[_ExpectedDigest]]  # the same by a payload's number

    @classmethod
    def from_archive(cls, archive: Archive) -> RecordSkeleton:
        """Return an archive's skeleton; of the payloads only those of attributes and metadata are read."""
        archive.ensure_all()
        ix, header, pins = archive.index, archive.header, archive.source.pins()
        check_filled(archive, ix.payloads["nbytes"].sum(dtype=np.float64))
        check_blobs(archive)
        places = ix.payloads.copy()
        places["offset"] += np.uint64(header.payload_offset)
        blobs = {number: bytes(archive.payload(number)) for number in _blob_numbers(ix)}
        encoded_header = header.encode() if header.payload_offset else b""
        index, path, file = _index_of(_columns(ix)), archive.absolute or archive.path, archive.source.file
        expected = _expected_digests(archive) if pins else {}
        return cls(index, places, blobs, encoded_header, path, archive.seal(), file, pins, expected)

    def is_replaced(self, archive: Archive) -> bool:
        """Return True if an archive has another seal than the skeleton's, or its file another identity."""
        if archive.seal() != self.seal:
            return True
        file = archive.source.file  # its path and identity; another path may be a copy
        return self.file is not None and file is not None and self.file[0] == file[0] and self.file != file

    def find_in(self, archive: Archive) -> Archive | None:
        """Return the archive, or the part of it, that this is the skeleton of; None if it is another archive's."""
        other, own = archive.index, self.index
        columns = ("payloads", "tensors", "dims", "strides")
        if other.text == own.text and all(getattr(other, c).tobytes() == getattr(own, c).tobytes() for c in columns):
            return archive
        if not self.header or archive.mode != "r" or archive.header.encode() != self.header:
            return None
        number_of = {row: number for number, row in enumerate(other.payloads.tolist())}
        numbers = [number_of.get(row, NONE) for row in own.payloads.tolist()]
        return None if NONE in numbers else archive.part(own, numbers)

    def nbytes(self, number: int) -> int:
        """Return a payload's size in bytes."""
        return int(self.places["nbytes"][number])

    def allocate(self, *, tensors: bool) -> tuple[memoryview, Archive]:
        """Return new memory for all payloads or those of attributes alone, and an archive over it; fills attributes."""
        sizes = self.index.payloads["nbytes"].copy()
        if not tensors:
            sizes[[n for n in range(len(sizes)) if n not in self.blobs]] = 0
        offsets, end, _ = plan_payloads(sizes, ALIGNMENT)
        owner, octets = aligned(max(end, 1), sparse=True)
        for number, blob in self.blobs.items():
            start = int(offsets[number])
            octets[start : start + len(blob)] = blob
        payloads = self.index.payloads.copy()
        payloads["offset"], payloads["digest"] = offsets, 0
        index = self.index._replace(payloads=payloads, digest_kind=0)
        return octets, Archive.foreign(Memory(octets, None, owner), index)

    def read(self, file: Any, payloads: Collection[int]) -> Iterator[tuple[list[int], Iterator[memoryview]]]:
        """Yield (payload numbers, chunks) of the given payloads, read forward from the archive's first byte on.

        Payloads that lie in the same place come together. Read all chunks before the next payload; each is valid until
        the next is read. IntegrityError for another archive or a wrong digest, SourceError if the file ends early.
        """
        groups: dict[tuple[int, int, int], list[int]] = {}
        for number in sorted(payloads):
            groups.setdefault(self.places[number].item(), []).append(number)
        with located(path=self.path):
            reader = StreamReader(file)
            if self.header:
                start = b"".join(_chunks(reader, file, 0, HEADER_SIZE))
                is_unsealed = start.startswith(MAGIC) and not any(start[10:60])  # as `encode_unsealed` writes it
                if start != self.header and not is_unsealed:
                    raise IntegrityError("the file is not the archive that the hollow record is of")
            for (offset, nbytes, _), numbers in groups.items():
                yield numbers, self._verify_chunks(_chunks(reader, file, offset, nbytes), numbers)

    @property
    def has_digests(self) -> bool:
        """True if the index has digests of payloads, or their SHA-256 is known."""
        return bool(self.index.digest_kind or self.expected)

    def verify_payload(self, number: int, octets: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a payload in chunks; raises IntegrityError after the last unless they match its digest."""
        chunks = (octets[start : start + _CHUNK] for start in range(0, len(octets), _CHUNK))
        return self._verify_chunks(chunks, [number])

    def _verify_chunks(self, chunks: Iterator[memoryview], numbers: list[int]) -> Iterator[memoryview]:
        """Yield the chunks of payloads that lie in one place; IntegrityError after the last if they do not match."""
        expected = list(dict.fromkeys(e for number in numbers for e in self.expected.get(number, ())))
        if not expected and not self.index.digest_kind:
            yield from chunks
            return
        running = _sha256() if expected else RunningDigest()
        split_payload = bytearray() if any(e.box for e in expected) else None  # whose boxes have digests of their own
        for chunk in chunks:
            running.update(chunk)
            if split_payload is not None:
                split_payload += chunk
            yield chunk
        if expected:
            matches = all(e.matches(split_payload) if e.box else running.digest() == e.sha256 for e in expected)
        else:
            matches = running.digest() == int(self.places["digest"][numbers[0]]).to_bytes(8, "big")
        if not matches:
            message = "a payload's digest does not match; the file is damaged, or not the one the hollow record is of"
            raise IntegrityError(message, path=self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "index": _columns(self.index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, index=_index_of(state["index"]))


def check_filled(archive: Archive, nbytes: float) -> None:
    """Raise LimitError if the bytes to fill are out of all proportion to the files of an archive; opens no shard.

    Sizes of shards are those in the catalogue: `HollowRecord` asks the shards themselves when they are opened.
    """
    source, table = archive.source, archive.source.piece_table()
    stored_nbytes = archive.header.archive_size
    if table is not None:
        stored_nbytes = sum(source.file_size(file) for file in {NONE, *table.files()})  # NONE: the catalogue itself
    check_apart(int(nbytes), stored_nbytes, archive.path)


def _columns(ix: Index) -> dict[str, Any]:
    """Return copies of the columns of an index, which keep no mapping."""
    columns = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in ix._asdict().items()}
    return {**columns, "memory": None, "text": bytes(ix.text)}


def _index_of(columns: dict[str, Any]) -> Index:
    """Return the index that has these columns, with its own copy of the text."""
    memory, size = memoryview(columns["text"] + bytes(64)), len(columns["text"])  # names are compared by 32 bytes
    return Index(**{**columns, "memory": memory, "text": memory[:size]})


def _blob_numbers(ix: Index) -> set[int]:
    """Return the numbers of the payloads that attributes and metadata use."""
    numbers: set[int] = set()
    for rows in (ix.attributes, ix.metadata):
        for entry in unflatten.attribute_entries(ix, rows, PayloadId):
            values = entry.value if isinstance(entry.value, list | tuple) else [entry.value]
            numbers |= {int(v) for v in values if isinstance(v, PayloadId)}
    return numbers - {NONE}


def _expected_digests(archive: Archive) -> dict[int, list[_ExpectedDigest]]:
    """Return the SHA-256 that each payload, or each piece of one, is expected to have, by payload."""
    expected: dict[int, list[_ExpectedDigest]] = {}
    for number, nbytes in enumerate(archive.index.payloads["nbytes"].tolist()):
        pins = archive.source.expected_sha256(number)
        digests = [pin or b"" for pin in pins]  # a piece without a pin matches nothing
        if len(pins) > 1 and any(pins):
            expected[number] = _expected_boxes(archive, number, digests)
        elif any(pins):
            expected[number] = [_ExpectedDigest(digests[0], (nbytes,))]
    return expected


def _expected_boxes(archive: Archive, number: int, digests: list[bytes]) -> list[_ExpectedDigest]:
    """Return the expected digests of the boxes that a split payload consists of, one for each SHA-256."""
    tensor_number = int(np.flatnonzero(archive.index.tensors["payload"] == number)[0])
    row = archive.row(tensor_number)
    shape = *archive.shape(row), row.bits >> 3
    origins, extents = archive.boxes(tensor_number)  # each of (boxes, axes)
    boxes = np.stack((origins, origins + extents), axis=-1).tolist()
    return [_ExpectedDigest(sha, shape, tuple(map(tuple, box))) for sha, box in zip(digests, boxes, strict=True)]


def _sha256(data: Any = b"") -> Any:
    import hashlib  # here, because it takes 3 ms

    return hashlib.sha256(data)


def _chunks(reader: StreamReader, file: Any, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of `file` in chunks, skipping forward to it with its reader; SourceError if the file ends early."""
    if offset > reader.position and callable(getattr(file, "seekable", None)) and file.seekable():
        file.seek(offset - reader.position, os.SEEK_CUR)
        reader.position = offset
    end = offset + nbytes
    while reader.position < end:
        is_before = reader.position < offset
        chunk = reader.piece((offset if is_before else end) - reader.position)
        if not len(chunk):
            raise SourceError(f"the file ends at {reader.position:#x}, {end:#x} bytes are needed; copy it again")
        if not is_before:
            yield chunk.toreadonly()
