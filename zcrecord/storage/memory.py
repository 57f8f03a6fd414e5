"""The bytes of an archive: a mapped file, a file read into memory or on demand, a private copy, a caller's buffer.

Knows mappings, aligned memory and reads by position; nothing of the bytes' meaning. Opening is left to `files`.

A mapped file holds no file descriptor: a process may have as few as 256. Python's mmap keeps a duplicate of its
descriptor, unless it is told not to, from Python 3.13 on. Before, on 64-bit Linux, Python maps anonymous memory, and
the C library maps the file over that; Python still guards and unmaps it. Elsewhere each mapping takes a descriptor.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import io
import mmap
import os
import sys
import weakref
from _thread import allocate_lock  # threading takes a millisecond to import
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, MAX_ALIGNMENT, too_short
from zcrecord.dtypes import Octets
from zcrecord.errors import RecordError, SourceError, SourceNotFoundError, UnsupportedError, located
from zcrecord.tensors.strides import address

from .files import Identity, absolute_path, identity_of, open_regular
from .scratch import PACKED
from .sink import flat_view

Mode = Literal["r", "c"]

_LIMITED_ADDRESSES = (
    "this process may not have as much address space as the file has bytes; raise its limit (ulimit -v), or make "
    "shards of it (zcrecord convert --max-shard-size), each mapped when needed"
)
READ_PIECE = 2 << 20  # bytes of one read, and of a huge page; many times a network's round trip is worth
READERS = 4  # reads under way at a time; a network file system answers each by itself
_HUGE = 4 << 20  # bytes from which huge pages are asked for, as by numpy
# Source: statfs(2), and linux/magic.h.
_NETWORK = {0x6969: "NFS", 0x0BD00BD0: "Lustre", 0x65735546: "FUSE", 0x01021997: "9p", 0x517B: "SMB", 0xFE534D42: "SMB",
            0xFF534D42: "SMB"}  # fmt: skip
_POSITION = allocate_lock()  # a descriptor has one for all threads: seeking and reading are one step

_GENERIC = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64", "riscv64", "i686", "armv7l")
_NORESERVE = 0x4000 if _GENERIC else 0  # MAP_NORESERVE, which Python does not name; some machines number it otherwise
_FIXED = 0x10  # MAP_FIXED, likewise
_abandoned: list[mmap.mmap] = []  # memory that others may own by now: it is never unmapped


class Memory(NamedTuple):
    """Bytes that an archive may be opened from."""

    octets: memoryview  # all of them, flat; writable only if nothing else uses them
    path: str | None = None  # of their file, as it was named
    mapping: mmap.mmap | None = None  # closed to release them; None for a buffer that was given
    identity: Identity | None = None  # of the mapped file, to tell whether it was replaced
    filled: list[tuple[int, int]] | None = None  # ranges that hold data in sparse memory; None if all of it does
    absolute: str | None = None  # the file's absolute path, by which it is opened again from any working folder

    @property
    def on_demand(self) -> bool:
        """True if `octets` is a `FileBytes`, which is read when it is used."""
        return not isinstance(self.octets, memoryview)

    @property
    def inode(self) -> tuple[int, ...] | None:
        """Device and inode of the file that it was read or mapped from; None without one."""
        return None if self.identity is None else self.identity[:2]


def _open_archive_file(path: str, least: int, opened: int | None) -> tuple[io.FileIO, Identity]:
    """Open a regular file of at least `least` bytes, by its path or a descriptor; return it and its identity."""
    file, identity = open_regular(path, opened)
    if identity[2] < least:
        with file:
            raise too_short(identity[2], os.read(file.fileno(), HEADER_SIZE)).located(path=path)
    return file, identity


@contextlib.contextmanager
def _typed_read_errors(path: str, out_of_memory: str = _LIMITED_ADDRESSES) -> Iterator[None]:
    """Raise an OSError as a SourceError, of a missing file as SourceNotFoundError; each RecordError names the path."""
    try:
        yield
    except RecordError as error:  # first, because a SourceError is an OSError, too
        raise error.located(path=path) from error.__cause__
    except FileNotFoundError as error:
        raise SourceNotFoundError("no such file", path=path, errno=error.errno) from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno == errno.ENOMEM:
            reason += f": {out_of_memory}"
        raise SourceError(f"cannot be read: {reason}", path=path, errno=error.errno) from error


def map_file(
    path: str, *, private: bool = False, least: int = 2 * HEADER_SIZE, opened: int | None = None, octets_of: Any = None
) -> Memory:
    """Map a whole file: read-only, or private, with pages that are copied when they are written.

    A private one reserves no memory for pages that may be written, so that files larger than memory can be mapped, too.

    A FormatError if the file has fewer bytes than `least`. `opened` is a descriptor of the file, if it is open: then
    that file is mapped, whatever is at the path now. `octets_of` is called with a descriptor and the identity, and
    returns the octets, such as FileBytes, or None to map.
    """
    with _typed_read_errors(path):
        absolute = absolute_path(path)
        file, identity = _open_archive_file(path, least, opened)
        with file:
            if not identity[2]:
                return Memory(memoryview(b""), path, None, identity, absolute=absolute)  # which cannot be mapped
            if octets_of is not None and (octets := octets_of(file.fileno(), identity)) is not None:
                return Memory(octets, path, None, identity, absolute=absolute)
            mapping = _map_checked(file.fileno(), identity[2], private)
    return Memory(memoryview(mapping), path, mapping, identity, absolute=absolute)


def _map_checked(fd: int, nbytes: int, private: bool) -> mmap.mmap:
    """Map an open file; SourceError if it has fewer bytes than `nbytes`, since touching those would end the process."""
    mapping = None
    with contextlib.suppress(ValueError):  # it is empty now
        mapping = map_descriptor(fd, private=private)
    if mapping is None or len(mapping) < nbytes:
        raise SourceError("became shorter while it was opened; is it still being written?", offset=0)
    return mapping


def _network_file_system(fd: int) -> str | None:
    """Return the name of an open file's network file system, whose files are read, not mapped; None on a local one."""
    call = c_function("fstatfs", "c_int", "c_int", "c_void_p") if sys.platform == "linux" else None
    status = np.zeros(64, np.uint64)  # struct statfs takes less than half of it
    if call is not None and call(fd, status.ctypes.data):  # as some of FUSE do
        return "an unknown file system"
    return _NETWORK.get(int(status.view(np.uint32)[0]))  # a long, on little-endian machines


def new_memory(nbytes: int, first: int = 0) -> Octets:
    """Return new memory, aligned as payloads are, for parallel reads of READ_PIECE bytes, of which one has `first`."""
    if nbytes < _HUGE:
        return aligned_empty(nbytes)
    ahead = -first % READ_PIECE & -ALIGNMENT  # so that no two reads fill one huge page, but for some bytes
    try:
        return np.frombuffer(aligned(ahead + nbytes, huge=True)[1][ahead:], np.uint8)
    except OSError as error:
        raise MemoryError(f"no {nbytes} bytes of memory are left") from error


def read_on_demand(path: str, *, unless_local: bool = False, **options: Any) -> Memory:
    """Open a file by `map_file`, its bytes read when used; with `unless_local` map it unless it is on a network."""

    def bytes_of(fd: int, identity: Identity) -> FileBytes | None:
        network = _network_file_system(fd) if unless_local else ""
        return None if network is None else FileBytes(fd, path, identity, network)

    return map_file(path, octets_of=bytes_of, **options)


def read_file(path: str, **options: Any) -> Memory:
    """Read a whole file, opened by `map_file`, into memory at an address that is a multiple of 65536."""
    memory = read_on_demand(path, **options)
    file: Any = memory.octets
    with _typed_read_errors(path, "too little memory for the whole file; map it instead"):
        block, octets = aligned(len(file), huge=len(file) >= _HUGE)
    if octets:
        with contextlib.closing(file):
            file.fill([(0, octets)])
    return memory._replace(octets=octets, mapping=block)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):  # for a file that was only read it means nothing
        os.close(fd)


class FileBytes:
    """Stands for a memoryview of an open file. Indexing takes slices of step 1 alone."""

    readonly = True
    _head: FileBytes | None = None  # the object that it is the tail of, which keeps the descriptor open

    def __init__(self, fd: int, path: str, identity: Identity, network: str) -> None:
        """Keep the file of a descriptor open until the last slice goes, or `close` is called."""
        self._fd, self._path, self._identity, self.network, self._start = os.dup(fd), path, identity, network, 0
        self.close = weakref.finalize(self, _close, self._fd)

    def __len__(self) -> int:
        return self._identity[2] - self._start

    def __getitem__(self, selected: slice) -> Any:
        """Read a slice with an end, and return a memoryview; without an end return `FileBytes`, and read nothing."""
        if not isinstance(selected, slice) or selected.step not in (None, 1):
            raise UnsupportedError(f"bytes of a file are read by slices of step 1, not by {selected}")
        start, stop, _ = selected.indices(len(self))
        if selected.stop is None:
            tail = copy.copy(self)
            tail._start, tail._head = self._start + start, self
            return tail
        octets = new_memory(max(0, stop - start)).data
        self.fill([(start, octets)])
        return octets.toreadonly()

    def __bytes__(self) -> bytes:
        return bytes(self[: len(self)])

    def toreadonly(self) -> FileBytes:
        """Return this object: it is read-only."""
        return self

    def readinto_at(self, offset: int, target: memoryview) -> None:
        """Fill memory with the bytes from an offset on."""
        self.fill([(offset, target)])

    def fill(self, requests: Sequence[tuple[int, memoryview]]) -> None:
        """Fill targets with the bytes from offsets on, by several reads at a time; SourceError if the file changed."""
        pieces = [
            (target[start : start + READ_PIECE], self._start + offset + start)
            for offset, target in requests
            for start in range(0, len(target), READ_PIECE)
        ]
        with located(path=self._path):
            if len(pieces) == 1:
                read_at(self._fd, *pieces[0])
            elif pieces:
                from .threads import each_piece  # here, because threading takes a millisecond to import

                each_piece(lambda piece: read_at(self._fd, *piece), pieces, threads=READERS)
            if identity_of(self._fd) != self._identity:
                raise SourceError("was changed while it was read; load it again")


def read_resource(resource: Any) -> Memory:
    """Read a resource of `importlib.resources` that is not a file, as in a zip, into memory at a multiple of 65536."""
    name = str(resource)
    try:
        stream = resource.open("rb")
    except FileNotFoundError as error:
        raise SourceNotFoundError("no such resource", path=name, errno=error.errno) from None
    except Exception as error:  # of a zip, or of another loader of the package
        raise SourceError(f"cannot be read: {error or type(error).__name__}", path=name) from error
    with located(path=name), stream:
        return read_stream(stream)


def read_stream(file: Any) -> Memory:
    """Read a binary file object to its end, into memory at a multiple of 65536; a BytesIO's own bytes uncopied."""
    from .stream_reader import check_readable  # here, because few archives are read from a stream

    check_readable(file)
    if isinstance(file, io.BytesIO):
        return Memory(memoryview(file.getvalue())[file.tell() :])  # shared until it is written to next
    pieces: list[memoryview] = []
    try:
        while len(piece := _flat_piece(file.read(READ_PIECE))):
            pieces.append(piece)
    except (RecordError, MemoryError):
        raise
    except Exception as error:  # of the system, a store, a decompressor, or that it is closed
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise SourceError(f"cannot be read: {reason}", errno=getattr(error, "errno", None)) from error
    offset = sum(map(len, pieces))
    block, octets = aligned(offset)
    while pieces:
        piece = pieces.pop()
        offset -= len(piece)
        octets[offset : offset + len(piece)] = piece
    return Memory(octets, None, block)


def _flat_piece(data: Any) -> memoryview:
    """Return the result of a file object's `read` as flat bytes, or raise if it is none."""
    if data is None:
        raise SourceError("the file object has no bytes ready; open it in blocking mode")
    try:
        return flat_view(data)
    except TypeError:
        raise UnsupportedError(f"read() of the file object returned {type(data).__name__}, expected bytes") from None


def private_copy(octets: memoryview, filled: list[tuple[int, int]] | None = None) -> Memory:
    """Return a writable copy of bytes, or of the filled ranges of them, at an address that is a multiple of 65536."""
    block, out = aligned(len(octets), sparse=filled is not None)
    for start, end in [(0, len(octets))] if filled is None else filled:
        out[start:end] = octets[start:end]
    return Memory(out, None, block, filled=filled)


def aligned_empty(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return new memory, not initialised, aligned as payloads are."""
    block = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address(block) % ALIGNMENT
    return block[start : start + nbytes]


def read_some(fd: int, buffer: memoryview, offset: int) -> int:
    """Read a file's bytes from an offset, as many as come at once; return how many, 0 at its end. For any thread."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    with _POSITION:
        os.lseek(fd, offset, os.SEEK_SET)
        data = os.read(fd, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_at(fd: int, target: memoryview, offset: int) -> int:
    """Fill `target` with a file's bytes from `offset` on; return their number. SourceError if the file ends before."""
    total = 0
    while total < len(target):
        try:
            nbytes = read_some(fd, target[total:], offset + total)
        except OSError as error:
            reason = os.strerror(error.errno or errno.EIO)
            raise SourceError(f"cannot be read: {reason}", offset=offset, errno=error.errno) from error
        if not nbytes:
            end = min(offset + total, os.fstat(fd).st_size)  # it may have become shorter still
            fault = f"became shorter while it was read: it ends at byte {end}; is it still being written?"
            raise SourceError(fault, offset=end)
        total += nbytes
    return total


def is_packed(octets: Any) -> bool:
    """Return True if bytes begin as zstd frames do; those of pzstd begin with one to be skipped."""
    return octets[1:4] in PACKED


def buffer_of(source: Any) -> memoryview:
    """Return any contiguous bytes-like as flat, read-only bytes; copies nothing. An UnsupportedError for others."""
    try:
        if isinstance(source, np.ndarray) and source.dtype.isbuiltin != 1:
            source = source.view(np.uint8)
        return memoryview(source).cast("B").toreadonly()
    except (TypeError, ValueError, BufferError) as error:
        kind = type(source).__name__
        raise UnsupportedError(f"a {kind} is neither a path nor contiguous bytes: {error}") from None


def map_descriptor(fd: int, *, private: bool = False) -> mmap.mmap:
    """Map a whole file by its descriptor, as `map_file`; a ValueError if it is empty."""
    if os.name != "posix":
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
    if private:
        flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, 0, flags, prot, trackfd=False)
    return _map_over_reserved(fd, flags, prot) or mmap.mmap(fd, 0, flags, prot)


def aligned(size: int, *, sparse: bool = False, huge: bool = False) -> tuple[mmap.mmap, memoryview]:
    """Return zeroed memory, as a mapping to be closed and as its aligned part of `size` bytes; sparse reserves none.

    With `huge` it is made of huge pages: filled at a third of the cost if one thread fills each, else at the double.
    """
    alignment = READ_PIECE if huge else MAX_ALIGNMENT
    private: dict[str, Any] = {}
    if os.name == "posix":  # not shared with the children of a fork, as Python's own default would be
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sparse else 0)}
    block = mmap.mmap(-1, size + alignment, **private)
    whole = memoryview(block)
    start = -address(whole) % alignment
    if huge and mmap.PAGESIZE == 4096 and hasattr(mmap, "MADV_HUGEPAGE"):  # of larger pages a huge one may have 512 MiB
        with contextlib.suppress(OSError):  # of a system without any
            block.madvise(mmap.MADV_HUGEPAGE, start, size // READ_PIECE * READ_PIECE)
    return block, whole[start : start + size]


def _map_over_reserved(fd: int, flags: int, prot: int) -> mmap.mmap | None:
    """Map a file over memory that Python reserved; None if that is not possible here."""
    nbytes = os.fstat(fd).st_size
    call = _c_mmap() if nbytes and not _abandoned else None
    if call is None:
        return None
    reserved = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot)
    start = np.frombuffer(reserved, np.uint8).ctypes.data
    if call(start, nbytes, prot, flags | _FIXED, fd, 0) == start:
        return reserved
    # Linux may have unmapped it before it failed, and another thread may have that place now: it is never closed.
    _abandoned.append(reserved)
    return None


def advise(start: int, nbytes: int, advice: int) -> None:
    """Advise the system (`mmap.MADV_...`) on the pages that hold memory from an address on, where that can be done."""
    if (call := c_function("madvise", "c_int", "c_void_p", "c_size_t", "c_int")) is not None:
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        call(first, start + nbytes - first, advice)


@functools.cache
def _c_mmap() -> Callable[..., int | None] | None:
    if not _GENERIC or sys.maxsize < 1 << 32:  # arguments may have other sizes: off_t has 64 bits where pointers have
        return None
    return c_function("mmap", "c_void_p", "c_void_p", "c_size_t", "c_int", "c_int", "c_int", "c_long")


@functools.cache
def c_function(name: str, result: str, *arguments: str) -> Callable[..., int | None] | None:
    """Return a function of the C library, with its types by their names in ctypes; None if it cannot be called."""
    try:
        import ctypes  # here, because a Python may have been built without it

        function: Any = getattr(ctypes.CDLL(None), name)
    except (ImportError, OSError, AttributeError, TypeError):  # TypeError: there is no CDLL(None) on Windows
        return None
    function.restype, function.argtypes = getattr(ctypes, result), [getattr(ctypes, kind) for kind in arguments]
    call: Callable[..., int | None] = function
    return call
