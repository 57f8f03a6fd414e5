"""Reads GGUF: tensors as they are, quantised ones as blocks under the `zcr:quantized` convention.

The header is parsed here: every count and length is compared with the bytes left in the file before memory is
allocated for it, which `gguf.GGUFReader` does not do. The `gguf` package has the table of type numbers.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

from __future__ import annotations

import struct
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.dtypes import DTYPES, DType, by_name
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError, missing_package, printable
from zcrecord.storage.stream_reader import PIECE
from zcrecord.writing.module_tree import state_path

from .readers import Reader
from .receiver import Receiver

QUANTIZED = "zcr:quantized"
MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    code: np.dtype(kind)
    for code, kind in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1",
                       10: "<u8", 11: "<i8", 12: "<f8"}.items()
}  # fmt: skip
_LEAST_FIELD, _LEAST_TENSOR = 13, 24  # bytes of the smallest metadata entry and the smallest description of a tensor
_MOST_HEADER = 1 << 28  # bytes; a vocabulary takes some ten million
_LONGEST_NAME = 65535
# Bytes of memory that metadata and descriptions of tensors may take in addition to so many times the file; and the cost
# of each, mostly while the archive's index is encoded. Without the limit a file of short ones takes 300 times its size.
_MEMORY, _TIMES = 64 << 20, 16
_FIELD_COST, _TEXT_COST, _NUMBER_COST = 640, 320, 96
_BLOCKS_COST, _TENSOR_COST, _MODULE_COST = 3500, 600, 900  # of a quantised tensor, of another, of a dot in its name
_PLAIN: dict[str, DType] = {d.safetensors: d for d in DTYPES if d.safetensors}  # F32, BF16, I8: ggml's names too


def read(reader: Reader, out: Receiver) -> int:
    """Give a GGUF file's tensors and metadata to `out`; returns the bytes of input.

    Dimensions come in numpy's order, the reverse of GGUF's. A tensor of floats or integers becomes a tensor. A tensor
    of quantised blocks becomes a module of type name `zcr:quantized`. It has the tensor `data`, uint8, whose rows are
    the unchanged blocks, and the attributes `ggml_type`, `shape`, `block` and `block_nbytes`.
    `gguf.quants.dequantize` takes that `data`. Names are split at their dots, as those of a `state_dict()`. The file's
    metadata becomes the archive's: text, int, float, bool, and lists of one of these. Text that is not UTF-8 becomes
    bytes, and so does a list that has such a text.

    Raises:
        FormatError: the file is not a valid GGUF file. LimitError: metadata of more than 256 MiB, or so many short
            texts, numbers or tensors that they would take far more memory than the file has bytes. UnsupportedError:
            big-endian, or lists within lists. DependencyError: gguf is not installed. SourceError: the file cannot be
            read.
    """
    types = _types()
    if reader.nbytes is None:
        raise UnsupportedError("not a regular file; GGUF is read by seeking, write it to one first")
    header = _GgufHeader(reader, reader.nbytes, types)
    _check_apart(header.tensors)
    reader.described = 0, header.end
    out.metadata.update(header.metadata)
    names = {t.name for t in header.tensors}
    for t in header.tensors:
        _give(reader, t, state_path(t.name, names), out)
    return reader.nbytes


class _GgufType(NamedTuple):
    """One of ggml's element types: a plain one, or blocks of so many elements in so many bytes."""

    name: str
    block: int
    nbytes: int
    plain: DType | None


class _GgufTensor(NamedTuple):
    """One tensor as the header describes it, with its offset in the file."""

    name: str
    kind: _GgufType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _types() -> dict[int, _GgufType]:
    try:
        import gguf
    except ImportError as error:
        raise missing_package("gguf", extra="gguf") from error
    known = {}
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        known[int(kind)] = _GgufType(kind.name, block, nbytes, _PLAIN.get(kind.name) if block == 1 else None)
    return known


class _GgufHeader:
    """Header of a GGUF file, read forward; every count is compared with the bytes left in the file.

    Attributes:
        metadata: Python's own values by key.
        tensors: in the file's order.
    """

    def __init__(self, file: Reader, size: int, types: dict[int, _GgufType]) -> None:
        self._file, self._size, self._types = file, size, types
        self._buffer, self._base, self._pos = b"", 0, 0  # bytes read, where they lie in the file, how many are used
        self._room = _MEMORY + _TIMES * size
        tensors, fields = self._start()
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            self._field()
        described = self._described(tensors)
        self.end = self._position
        start = self.end + -self.end % self._alignment()
        self.tensors = [self._placed(t, start) for t in described]

    def _fail(self, what: str, kind: type[RecordError] = FormatError) -> RecordError:
        return kind(f"byte {self._position:#x}: {what}", offset=self._position)

    @property
    def _position(self) -> int:
        return self._base + self._pos

    def _take(self, count: int, what: str) -> bytes:
        if count > len(self._buffer) - self._pos:
            self._fill(count, what)
        start, self._pos = self._pos, self._pos + count
        return self._buffer[start : self._pos]

    def _fill(self, count: int, what: str) -> None:
        """Read at least the next `count` bytes into the buffer."""
        left = self._size - self._position
        if count > left:
            raise self._fail(f"{what} takes {count} bytes, {left} are left; the file is truncated or damaged")
        if self._position + count > _MOST_HEADER:
            raise self._fail(f"more than {_MOST_HEADER >> 20} MiB of metadata", LimitError)
        rest, self._base, self._pos = self._buffer[self._pos :], self._position, 0
        self._buffer = rest + self._file.read(max(count - len(rest), PIECE))
        if len(self._buffer) < count:
            raise self._fail("the file became shorter while it was read")

    def _reserve(self, nbytes: int, what: str) -> None:
        """Subtract memory that will be allocated from the limit."""
        self._room -= nbytes
        if self._room < 0:
            limit = f"more than {_MEMORY >> 20} MiB and {_TIMES} times the file"
            raise self._fail(f"{what} would take {limit} in memory", LimitError)

    def _number(self, nbytes: int, what: str) -> int:
        return int.from_bytes(self._take(nbytes, what), "little")

    def _count(self, least: int, what: str) -> int:
        """Return the number of items, each of at least `least` bytes."""
        count = self._number(8, f"the number of {what}")
        if count * least > self._size - self._position:
            raise self._fail(f"{count} {what} are claimed, {self._size - self._position} bytes are left")
        return count

    def _name(self, what: str) -> str:
        nbytes = self._number(8, f"the length of {what}")
        if not 0 < nbytes <= _LONGEST_NAME:
            raise self._fail(f"{what} has {nbytes} bytes; 1 to {_LONGEST_NAME} are legal")
        raw = self._take(nbytes, what)
        try:
            if b"\0" not in raw:
                return raw.decode()
        except UnicodeDecodeError:
            pass
        raise self._fail(f"{what} is not UTF-8 without NUL: {raw[:40]!r}")

    def _start(self) -> tuple[int, int]:
        """Return the claimed numbers of tensors and metadata entries."""
        head = self._take(min(HEAD, self._size), "the start")
        self._pos = len(MAGIC)
        if not head.startswith(MAGIC):
            what = wrong_type(head, "a GGUF file") or "not a GGUF file: it does not start with 'GGUF'"
            raise FormatError(what if head else "the file is empty", offset=0)
        version = self._number(4, "the version")
        if version and not version & 0xFFFF:
            raise UnsupportedError("a big-endian GGUF file; convert it with gguf's gguf_convert_endian.py first")
        if version not in _VERSIONS:
            raise FormatError(f"GGUF version {version}; versions 2 and 3 can be read", offset=4)
        return self._count(_LEAST_TENSOR, "tensors"), self._count(_LEAST_FIELD, "metadata entries")

    def _field(self) -> None:
        key = self._name("a metadata key")
        if key in self.metadata:
            raise self._fail(f"metadata key '{printable(key)}' is there twice")
        self._reserve(_FIELD_COST, "the metadata")
        kind = self._number(4, "a metadata type")
        self.metadata[key] = self._list(key) if kind == _ARRAY else self._values(kind, 1, key)[0]

    def _list(self, key: str) -> list[Any]:
        kind = self._number(4, "a metadata type")
        if kind == _ARRAY:
            raise self._fail(f"metadata '{printable(key)}' has lists within a list", UnsupportedError)
        least, cost = (_NUMBERS[kind].itemsize, _NUMBER_COST) if kind in _NUMBERS else (8, _TEXT_COST)
        count = self._count(least, f"items of metadata '{printable(key)}'")
        self._reserve(count * cost, f"the list '{printable(key)}'")
        return self._values(kind, count, key)

    def _values(self, kind: int, count: int, key: str) -> list[Any]:
        """Return values of one type; all texts become bytes if one is not UTF-8."""
        what = f"metadata '{printable(key)}'"
        if kind == _STRING:
            raw = self._texts(count, what)
            try:
                return [text.decode() for text in raw]
            except UnicodeDecodeError:
                return raw
        if kind not in _NUMBERS:
            raise self._fail(f"{what} is of the unknown type {kind}")
        values = np.frombuffer(self._take(count * _NUMBERS[kind].itemsize, what), _NUMBERS[kind])
        if kind != _BOOL:
            return list(values.tolist())
        if count and values.max() > 1:
            raise self._fail(f"{what} is a bool that is neither 0 nor 1")
        return list(map(bool, values))

    def _texts(self, count: int, what: str) -> list[bytes]:
        """Return texts, as they lie; those of a vocabulary are read without a call for each."""
        out: list[bytes] = []
        sizes = struct.Struct("<Q").unpack_from
        for _ in range(count):
            buffer, pos = self._buffer, self._pos
            end = pos + 8 + sizes(buffer, pos)[0] if pos + 8 <= len(buffer) else len(buffer) + 1
            if end <= len(buffer):
                out.append(buffer[pos + 8 : end])
                self._pos = end
            else:
                out.append(self._take(self._number(8, what), what))
        return out

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise FormatError(f"general.alignment is {alignment!r}; a power of two is expected")
        return alignment

    def _described(self, count: int) -> list[_GgufTensor]:
        tensors: dict[str, _GgufTensor] = {}
        for _ in range(count):
            name = self._name("a tensor's name")
            if name in tensors:
                raise self._fail("this name is there twice").located(tensor=name)
            try:
                tensors[name] = self._tensor(name)
            except RecordError as error:
                raise error.located(tensor=name) from None
        return list(tensors.values())

    def _tensor(self, name: str) -> _GgufTensor:
        """Read the description of a tensor after its name."""
        rank = self._number(4, "the rank")
        if rank > MAX_RANK:
            raise self._fail(f"rank {rank}; at most {MAX_RANK} is legal")
        dims = np.frombuffer(self._take(8 * rank, "the dimensions"), "<u8").tolist()
        number, offset = self._number(4, "the type"), self._number(8, "the offset")
        kind = self._types.get(number)
        if kind is None:
            raise self._fail(f"ggml type {number} is not known; a later gguf package may know it")
        if prod(d or 1 for d in dims) * kind.nbytes > MAX_ARCHIVE_SIZE:
            raise self._fail(f"dimensions {dims} claim more than 2^56 bytes")
        if kind.plain is None and (not dims or dims[0] % kind.block):
            raise self._fail(f"rows of {dims[:1]} elements are not whole blocks of {kind.block} ({kind.name})")
        cost = _BLOCKS_COST if kind.plain is None else _TENSOR_COST
        self._reserve(cost + _MODULE_COST * name.count("."), "the tensors' descriptions")
        return _GgufTensor(name, kind, tuple(reversed(dims)), offset, prod(dims) // kind.block * kind.nbytes)

    def _placed(self, t: _GgufTensor, start: int) -> _GgufTensor:
        """Return a tensor with its place in the file, which must hold it."""
        if t.offset % self._alignment():
            raise FormatError(f"its offset {t.offset:#x} is no multiple of general.alignment", tensor=t.name)
        begin = start + t.offset
        if t.nbytes and begin + t.nbytes > self._size:
            what = f"its bytes [{begin:#x}, {begin + t.nbytes:#x}) end past the end of the file ({self._size:#x})"
            raise FormatError(f"{what}; the file is truncated, copy it again", tensor=t.name, offset=begin)
        return t._replace(offset=begin)


def _check_apart(tensors: list[_GgufTensor]) -> None:
    """Raise FormatError if tensors overlap, by which a small file could claim terabytes."""
    end, last = 0, ""
    for t in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        if t.offset < end:
            raise FormatError(f"its bytes overlap those of tensor '{printable(last)}'", tensor=t.name, offset=t.offset)
        end, last = t.offset + t.nbytes, t.name


def _give(reader: Reader, t: _GgufTensor, path: tuple[str, ...], out: Receiver) -> None:
    """Give one tensor, or the module of a quantised one."""
    dtype, shape = t.kind.plain, t.shape
    if dtype is None:
        out.module(path, type_name=QUANTIZED)
        for key, value in _attributes(t).items():
            out.attribute((*path, key), value)
        path = (*path, "data")
        shape = (*t.shape[:-1], t.shape[-1] // t.kind.block * t.kind.nbytes)
    out.put_range(path, dtype or by_name["uint8"], shape, reader, t.offset if t.nbytes else 0, t.nbytes)


def _attributes(t: _GgufTensor) -> dict[str, Any]:
    kind = t.kind
    return {"ggml_type": kind.name, "shape": list(t.shape), "block": kind.block, "block_nbytes": kind.nbytes}
