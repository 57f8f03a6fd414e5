"""The layout of an archive: header and trailer, alignment, limits. Pure arithmetic, no I/O."""

from __future__ import annotations

import contextlib
import struct
import sys
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import Advice, FormatError, IntegrityError, LimitError, RecordError, VersionError

Array = np.ndarray[Any, np.dtype[np.uint64]]

if sys.byteorder != "little":
    raise ImportError("zcrecord archives are little-endian and used in place; this machine is big-endian")

MAGIC = b"\x89ZCR\r\n\x1a\n"  # the idea is PNG's: a text-mode transfer damages it
VERSION = 1  # never changes: FORMAT.md, "Versions"
DRAFT = 0  # of zcrecord before 1.0; read in a block of `reading_drafts` alone
HEADER_SIZE = 64  # of header and trailer alike
SEALED_FIELDS = slice(10, 60)  # bytes of a header that are zero if it was written before the index
KNOWN_FEATURES = 0  # bit 0 is kept for payloads in other files

ALIGNMENT = 64  # a cache line, an AVX-512 register, Arrow's choice
LARGE_PAYLOAD = 1 << 20  # payloads of this size and more ...
LARGE_ALIGNMENT = 16384  # ... start on a page, Apple's included: each can be mapped or handed to a GPU by itself
MIN_ALIGNMENT = 16
MAX_ALIGNMENT = 65536

MAX_ARCHIVE_SIZE = 1 << 56  # so that no sum of two sizes overflows 64 bits, signed or not
MAX_INDEX_SIZE = (1 << 31) - 1  # FlatBuffers' own limit
MAX_RANK = 64  # numpy's
MAX_DEPTH = 100  # of nested modules
NONE = 0xFFFFFFFF
INDEX_ALLOWANCE = 16  # spans and lists may take this many times the index's size of their pools, an item as 16 bytes
DIGEST_ALLOWANCE = 64  # for a content digest distinct strided views may add up to this many times index and payloads

ATTACHED_MAGIC = b"\x89ZCA\r\n\x1a\n"
ATTACHED_SIZE = 32  # of the note before an attached archive
ATTACHED_ALIGNMENT = MAX_ALIGNMENT  # no system's pages or units of mapping are larger: it can be mapped by itself

_reads_drafts: ContextVar[bool] = ContextVar("reads_drafts", default=False)
_HEADER = struct.Struct("<8sBBBBIQQQQQII")
_ATTACHED = struct.Struct("<8sQQII")
_U16, _U32 = struct.Struct("<H"), struct.Struct("<I")
_OPEN_ATTACHED = Advice("{} opens it as it is", "embedded", "suffix")
_DIRECTORIES = {0x10B: 120, 0x20B: 136}  # from a Windows program's PE header to its data directories: 32 and 64 bits


def u16_at(buffer: memoryview, offset: int) -> int:
    """Return the little-endian unsigned number of 16 bits at `offset`."""
    return int(_U16.unpack_from(buffer, offset)[0])


class Header(NamedTuple):
    """The 64 bytes at both ends of an archive. Offsets and sizes in bytes from the archive's first byte."""

    alignment: int
    base_alignment: int
    index_offset: int
    index_size: int
    payload_offset: int
    archive_size: int
    index_crc: int
    required_features: int = 0
    version: int = VERSION

    @classmethod
    def of_payloads(cls, nbytes: int, start: int = 0, end: int = 0) -> Header:
        """Return a header for payloads in a file of `nbytes` without an index; bytes [start, end) identify the file."""
        return cls(1, 1, index_offset=start, index_size=end - start, payload_offset=0, archive_size=nbytes, index_crc=0)

    def encode(self) -> bytes:
        """Return the 64 bytes of a sealed header or trailer, CRC included."""
        log2, base_log2 = self.alignment.bit_length() - 1, self.base_alignment.bit_length() - 1
        flags = 0, 0, self.required_features
        sizes = self.index_offset, self.index_size, self.payload_offset, self.archive_size
        body = _HEADER.pack(MAGIC, self.version, log2, base_log2, *flags, *sizes, self.index_crc, 0)[:60]
        return body + struct.pack("<I", zlib.crc32(body))

    @property
    def is_draft(self) -> bool:
        """True for an archive of version 0, which only `reading_drafts` admits."""
        return self.version == DRAFT

    @property
    def front(self) -> bool:
        """True if the index lies before the payloads."""
        return self.index_offset == HEADER_SIZE and self.payload_offset >= HEADER_SIZE + self.index_size

    @property
    def payload_region(self) -> tuple[int, int]:
        """Start and end of the payloads and the gaps around them, between header, index and trailer."""
        if self.front:
            return HEADER_SIZE + self.index_size, self.archive_size - HEADER_SIZE
        return HEADER_SIZE, self.index_offset

    @property
    def payload_room(self) -> int:
        """Bytes from `payload_offset` to the end of the region of payloads."""
        return self.payload_region[1] - self.payload_offset


def encode_unsealed(alignment: int) -> bytes:
    """Return the header of an archive written forward, before its index is known: zeros from byte 10 to 59."""
    body = MAGIC + bytes([VERSION, alignment.bit_length() - 1]) + bytes(50)
    return body + struct.pack("<I", zlib.crc32(body))


@contextlib.contextmanager
def reading_drafts() -> Iterator[None]:
    """Let readers in this block, and in its thread, take archives of version 0; they differ in R30 (see `draft`)."""
    token = _reads_drafts.set(True)
    try:
        yield
    finally:
        _reads_drafts.reset(token)


def _check_version(version: int, part: str) -> None:
    """Raise VersionError unless this reader knows a version; `part` is 'header' or 'trailer'."""
    if version == DRAFT and not _reads_drafts.get():
        raise VersionError(f"{part}: format version 0, a draft; `zcrecord convert OLD NEW` makes version 1 of it")
    if version not in (VERSION, DRAFT):
        raise VersionError(f"{part}: format version {version}, this reader knows {VERSION}; upgrade zcrecord")


def decode_header(data: bytes, part: str = "header") -> Header | None:
    """Decode and check (R1 to R12) the 64 bytes of a header or trailer, `part` in errors; None if it is unsealed."""
    if data[:8] != MAGIC:
        raise FormatError(_fault_without_magic(data, part))
    (_, version, log2, base_log2, zero8, zero32, features, index_offset, index_size, payload_offset, archive_size,
     index_crc, crc) = _HEADER.unpack(data)  # fmt: skip
    _check_version(version, part)
    if zlib.crc32(data[:60]) != crc:
        raise IntegrityError(f"{part}: its CRC does not match; the file is damaged, copy it again")
    if not 4 <= log2 <= 16:
        raise FormatError(f"{part}: alignment 2^{log2} is outside 2^4 to 2^16")
    if not any(data[SEALED_FIELDS]):
        return None
    if zero8 or zero32:
        raise FormatError(f"{part}: reserved bytes 11 to 15 are not zero")
    if not log2 <= base_log2 <= 16:
        raise FormatError(f"{part}: base alignment 2^{base_log2} is outside 2^{log2} to 2^16")
    if features & ~KNOWN_FEATURES:
        bits = [i for i in range(64) if features >> i & 1 and not KNOWN_FEATURES >> i & 1]
        raise VersionError(f"{part}: needs features (bits {bits}) this reader does not know; upgrade zcrecord")
    if archive_size > MAX_ARCHIVE_SIZE:
        raise LimitError(f"{part}: archive_size {archive_size} is more than 2^56")
    sizes = index_offset, index_size, payload_offset, archive_size, index_crc
    header = Header(1 << log2, 1 << base_log2, *sizes, features, version)
    _check_extents(header, part)
    return header


def _check_extents(h: Header, part: str) -> None:
    """Raise FormatError unless header, index, payloads and trailer tile the archive in either order (R10 to R12)."""
    end = h.archive_size - HEADER_SIZE
    if not 0 < h.index_size <= MAX_INDEX_SIZE or h.index_size % 8:
        raise FormatError(f"{part}: index_size {h.index_size} is not a multiple of 8 from 8 to 2^31 - 8")
    if h.payload_offset % h.alignment or h.payload_offset > end:
        raise FormatError(f"{part}: payload_offset {h.payload_offset} is unaligned or past the end")
    if h.front:
        gap = h.payload_offset - HEADER_SIZE - h.index_size
        if gap >= h.base_alignment:
            raise FormatError(f"{part}: {gap} bytes between index and payloads, at most {h.base_alignment - 1}")
    elif h.payload_offset != align_up(HEADER_SIZE, h.alignment):
        raise FormatError(f"{part}: payload_offset {h.payload_offset} fits neither index order")
    elif h.index_offset < h.payload_offset or h.index_offset % h.alignment:
        raise FormatError(f"{part}: index_offset {h.index_offset} is unaligned or before the payloads")
    elif h.index_offset + h.index_size != end:
        index_end = h.index_offset + h.index_size
        raise FormatError(f"{part}: the index ends at {index_end:#x}, the trailer starts at {end:#x}")


def _fault_without_magic(data: bytes, part: str) -> str:
    """Return the error message for 64 bytes that do not start with the magic: damaged, or another type of file."""
    if part == "trailer":
        return "trailer: its magic is missing; the file is truncated or has bytes appended, copy it again"
    if data[:4] == b"\x89ZCR" or data[1:4] == b"ZCR":
        return "the magic is damaged, as by a transfer in text mode; copy the file again in binary mode"
    from .file_types import wrong_type  # here, as below, because few files are no archives

    return wrong_type(data, "a zcrecord archive") or "not a zcrecord archive: the first 8 bytes are not its magic"


def too_short(size: int, start: bytes) -> RecordError:
    """Return the error for a file of `size` bytes, fewer than an archive has; `start` are its first bytes, up to 64."""
    if not size:
        return FormatError("the file is empty")
    try:
        if start != MAGIC:  # a file of the magic alone has no version to complain about
            decode_header(start.ljust(HEADER_SIZE, b"\0"))
    except IntegrityError:
        pass
    except FormatError as error:
        return error
    return FormatError(f"{size} bytes are too few for an archive (at least {2 * HEADER_SIZE}); the file is truncated")


def locate(source: memoryview, embedded: str | None) -> tuple[memoryview, Header, int]:
    """Return an archive's own bytes in `source`, its header, and its offset, at the end for "suffix" (R14 to R16)."""
    size = len(source)
    if size < 2 * HEADER_SIZE:
        raise too_short(size, bytes(source[:HEADER_SIZE]))
    if embedded == "prefix":
        header = decode_header(bytes(source[:HEADER_SIZE]))
        if header is None:
            raise FormatError("header: not sealed, so its size is not known; open the whole file, or write it to one")
        if header.archive_size > size:
            raise FormatError(f"the archive has {header.archive_size} bytes, only {size} are there; it is truncated")
        source = source[: header.archive_size]
    start = 0
    if embedded == "suffix":
        end = unsigned_size(source)
        trailer = decode_header(bytes(source[end - HEADER_SIZE : end]), "trailer") if end >= HEADER_SIZE else None
        if trailer is None or not 2 * HEADER_SIZE <= trailer.archive_size <= end:
            raise FormatError(f"trailer: no archive of a size up to {end} ends here")
        start = end - trailer.archive_size
        source = source[start:end]
    return source, _agreed_header(source), start


def certificate_table(program: memoryview) -> tuple[int, int] | None:
    """Return offset and size of a Windows program's table of signatures, as its headers claim; None if it has none.

    Source: Microsoft's PE format: the fifth data directory of the optional header counts from the file's start.
    """
    size = len(program)
    if size < 64 or bytes(program[:2]) != b"MZ":
        return None
    header = _U32.unpack_from(program, 60)[0]
    if size - header < 26 or bytes(program[header : header + 4]) != b"PE\0\0":
        return None
    directories = header + _DIRECTORIES.get(u16_at(program, header + 24), size)
    if size - directories < 40 or _U32.unpack_from(program, directories - 4)[0] < 5:
        return None
    start, nbytes = struct.unpack_from("<II", program, directories + 32)
    return start, nbytes


def unsigned_size(program: memoryview) -> int:
    """Return the offset at which a program's own bytes, and so an attached archive, end: before its signature, if any.

    The signature of a Windows program is a table at the file's end, after at most 7 zeros. No signature covers bytes in
    the table, so no archive is looked for there (R16).
    """
    size = len(program)
    table, nbytes = certificate_table(program) or (size, 0)
    if not nbytes or table + nbytes != size:
        return size
    for padding in range(min(8, table - HEADER_SIZE + 1)):
        end = table - padding
        if program[end - HEADER_SIZE : end - HEADER_SIZE + 8] == MAGIC:
            return end
        if program[end - 1]:
            break
    return table


def ends_in_archive(source: memoryview) -> bool:
    """Return True for a program, or other bytes, with an archive attached at their end, placed as R18 asks.

    FormatError if its elements might be misaligned, or the bytes are a model, or a program without an archive.
    """
    if len(source) < 2 * HEADER_SIZE or source[:8] == MAGIC:
        return False
    from .file_types import HEAD, describe_data, program_of

    end = unsigned_size(source)
    try:
        trailer = decode_header(bytes(source[end - HEADER_SIZE : end]), "trailer") if end >= HEADER_SIZE else None
    except VersionError:
        return True  # opening it raises this error
    except RecordError:
        trailer = None
    start = 0 if trailer is None else end - trailer.archive_size
    if trailer is None or start <= 0 or source[start : start + 8] != MAGIC:
        if (kind := program_of(bytes(source[:HEAD]))) is not None and describe_data(source) is None:
            raise _nothing_attached(kind, is_signed=end < len(source))
        return False
    if (model := describe_data(source)) is not None:
        fault = f"{model}, with a zcrecord archive attached, whose tensors other readers of this file do not see"
        raise FormatError(f"{fault}; copy it with `zcrecord detach --keep`", advice=_OPEN_ATTACHED)
    if start % trailer.base_alignment:
        where = f"from offset {start}, which is no multiple of its base alignment {trailer.base_alignment}"
        fault = f"not a zcrecord archive; one is at its end, but {where}"
        raise FormatError(f"{fault}; place it with `zcrecord attach`", advice=_OPEN_ATTACHED)
    return True


def _nothing_attached(kind: str, *, is_signed: bool) -> FormatError:
    """Return the error for a program without an archive; `kind` is its article and kind, as 'an ELF'."""
    if is_signed:
        fault = "signed, with no archive before its signature; attach it, then sign"
        return FormatError(f"this is {kind} program, {fault}")
    advice = "`strip` takes an attached one off, and bytes behind one hide it; attach it with `zcrecord attach`"
    return FormatError(f"this is {kind} program with no archive at its end; {advice}")


def encode_attached(program_size: int) -> bytes:
    """Return the note of ATTACHED_SIZE bytes that stands right before an archive attached to a program."""
    body = _ATTACHED.pack(ATTACHED_MAGIC, program_size, 0, 0, 0)[: ATTACHED_SIZE - 4]
    return body + struct.pack("<I", zlib.crc32(body))


def decode_attached(before: memoryview) -> int | None:
    """Return the size of a program by the note at the end of the bytes before its archive; None without a note."""
    note = bytes(before[len(before) - ATTACHED_SIZE :]) if len(before) >= ATTACHED_SIZE else b""
    if note[:8] != ATTACHED_MAGIC:
        return None
    _, size, reserved0, reserved1, crc = _ATTACHED.unpack(note)
    if zlib.crc32(note[:-4]) != crc:
        raise IntegrityError("the note before the archive: its CRC does not match; the file is damaged")
    padded = align_up(size + ATTACHED_SIZE, ATTACHED_ALIGNMENT) if size <= MAX_ARCHIVE_SIZE else 0
    if reserved0 or reserved1 or padded != len(before) or any(before[size : len(before) - ATTACHED_SIZE]):
        raise FormatError(f"the note before the archive: it does not follow a program of {size} bytes and zeros")
    return int(size)


def _agreed_header(archive: memoryview) -> Header:
    """Return the header, or the trailer of an unsealed one; FormatError unless both agree (R8, R9)."""
    first, last, size = bytes(archive[:HEADER_SIZE]), bytes(archive[-HEADER_SIZE:]), len(archive)
    header = decode_header(first)
    if header is not None and header.archive_size != size:
        truncated = header.archive_size > size
        state = "truncated, copy it again" if truncated else "followed by other bytes"
        fault = f"the archive has {header.archive_size} bytes, the source {size}; it is {state}"
        raise FormatError(fault, advice=None if truncated else Advice("{} ignores them", "embedded", "prefix"))
    trailer = header if first == last else decode_header(last, "trailer")
    if trailer is None:
        raise FormatError("trailer: not sealed")
    if trailer.archive_size != size:
        raise FormatError(f"trailer: the archive has {trailer.archive_size} bytes, the source {size}; copy it again")
    if header is not None and first != last:
        raise FormatError("header and trailer differ; the file is damaged, copy it again")
    if header is None and first[9] != last[9]:
        raise FormatError("header and trailer differ in their alignment; the file is damaged, copy it again")
    return trailer


def align_up(offset: int, alignment: int) -> int:
    """Return the least multiple of `alignment`, a power of two, that is at least `offset`."""
    return (offset + alignment - 1) & -alignment


def check_alignment(alignment: int) -> int:
    """Return `alignment`, or raise LimitError unless it is a power of two from 16 to 65536."""
    in_range = isinstance(alignment, int) and MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT
    if not in_range or alignment & (alignment - 1):
        raise LimitError(f"alignment {alignment!r} is not a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}")
    return alignment


def payload_alignment(nbytes: int, alignment: int) -> int:
    """Return the alignment of a payload of `nbytes` bytes: large ones start on a page of their own."""
    return max(alignment, LARGE_ALIGNMENT) if nbytes >= LARGE_PAYLOAD else alignment


def plan_payloads(sizes: Array, alignment: int) -> tuple[Array, int, int]:
    """Return the offsets of payloads of these sizes from `payload_offset`, their aligned end, and base alignment."""
    padded = (sizes + np.uint64(alignment - 1)) & np.uint64(2**64 - alignment)
    offsets = np.zeros(len(sizes) + 1, np.uint64)
    np.cumsum(padded, out=offsets[1:])
    strongest = alignment
    for i in np.flatnonzero(sizes >= LARGE_PAYLOAD).tolist():
        strongest = payload_alignment(int(sizes[i]), alignment)
        gap = -int(offsets[i]) % strongest
        if gap:
            offsets[i:] += np.uint64(gap)
    return offsets[:-1], int(offsets[-1]), strongest


def front_header(index: bytes | bytearray, alignment: int, base: int, end: int) -> Header:
    """Return the header of an archive with this index before its payloads, of base alignment and end as planned."""
    start = align_up(HEADER_SIZE + len(index), base)
    size = start + end + HEADER_SIZE
    return Header(alignment, base, HEADER_SIZE, len(index), start, size, zlib.crc32(index))


def back_header(index: bytes | bytearray, alignment: int, base: int, start: int, end: int) -> Header:
    """Return the header of an archive with this index behind its payloads, which lie in [start, end)."""
    offset = align_up(end, alignment)
    size = offset + len(index) + HEADER_SIZE
    return Header(alignment, base, offset, len(index), start, size, zlib.crc32(index))


def first_children(parents: Any, modules: int) -> Any:
    """Return by module the position of its first child among all children, which are sorted by `parents`."""
    counts = np.bincount(parents, minlength=modules) if len(parents) else np.zeros(modules, np.int64)
    return np.cumsum(counts) - counts
