"""Reads GGUF: tensors as they are, quantised ones as blocks under the `zcr:quantized` convention.

The header is parsed here: every count and length is compared with the bytes left in the file before memory is
allocated for it, which `gguf.GGUFReader` does not do. The `gguf` package has the table of type numbers.

Source: the GGUF specification, versions 2 and 3 (ggml, docs/gguf.md).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.entries import ValueType, WordList
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.dtypes import DTYPES, DType, by_name
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError, missing_package, printable
from zcrecord.storage.stream_reader import PIECE
from zcrecord.writing.module_tree import state_path

from .readers import Reader
from .receiver import Receiver, Wrapper

QUANTIZED = "zcr:quantized"
MAGIC = b"GGUF"
_BLOCKS = "data"  # the name of blocks in their module

_VERSIONS = (2, 3)
_STRING, _ARRAY, _BOOL = 8, 9, 7
_NUMBERS = {
    code: np.dtype(kind)
    for code, kind in {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "u1",
                       10: "<u8", 11: "<i8", 12: "<f8"}.items()
}  # fmt: skip
_MIN_FIELD, _MIN_TENSOR = 13, 24  # bytes of the smallest metadata entry and the smallest description of a tensor
_MAX_HEADER = 1 << 28  # bytes; a vocabulary takes some ten million
_MAX_NAME = 65535
_WINDOW = 1 << 16  # bytes of texts whose sizes are read at once
_MAX_SINGLE = 256  # texts behind a window that are read one by one
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
    `gguf.quants.dequantize` takes that `data`. Names are split at their dots, as those of a `state_dict()`. A file that
    has another tensor of the name of a quantised one's `data` is refused, since no name is changed. The file's
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
    reader.described = 0, header.end
    for key, value in header.metadata.items():
        out.metadata[key] = value.values() if out.reads and isinstance(value, WordList) else value
    forms, wrappers = [(form.dtype, form.shape) for form in header.forms], [form.wrapper for form in header.forms]
    suffixes = ["" if wrapper is None else f".{_BLOCKS}" for wrapper in wrappers]
    names = [name + suffixes[form] for name, form in zip(header.names, header.form_ids.tolist(), strict=True)]
    ranges = (reader, header.offsets, header.sizes)
    if out.reads or not out.put_state(names, forms, header.form_ids, [ranges], wrappers):
        for name, form, offset in zip(header.names, header.form_ids.tolist(), header.offsets.tolist(), strict=True):
            _put_tensor(reader, header.forms[form], offset, state_path(name, header.names), out)
    return reader.nbytes


class _GgufType(NamedTuple):
    """One of ggml's element types: blocks of so many elements in so many bytes; `plain` if archives have it, too."""

    name: str
    block: int
    nbytes: int
    plain: DType | None


class _GgufForm(NamedTuple):
    """Tensors of one type and shape, as they are stored: blocks as their bytes, in a module."""

    dtype: DType
    shape: tuple[int, ...]
    nbytes: int
    wrapper: Wrapper | None  # class name and attributes of that module; None of a plain tensor


def _types() -> dict[int, _GgufType]:
    """Return ggml's element types by their numbers; DependencyError if gguf, which knows them, is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise missing_package("gguf", extra="gguf") from error
    types = {}
    for kind, (block, nbytes) in gguf.GGML_QUANT_SIZES.items():
        types[int(kind)] = _GgufType(kind.name, block, nbytes, _PLAIN.get(kind.name) if block == 1 else None)
    return types


class _GgufHeader:
    """Header of a GGUF file, read forward; every count is compared with the bytes left in the file.

    Attributes:
        metadata: Python's own values by key; lists as the words that an index has of them.
        names: of the tensors, in the file's order, as those of the columns `form_ids`, `offsets` (in the file; 0 of one
            without bytes) and `sizes`.
        forms: types and shapes that there are.
    """

    def __init__(self, file: Reader, size: int, types: dict[int, _GgufType]) -> None:
        self._file, self._size, self._types = file, size, types
        self._buffer, self._base, self._pos = b"", 0, 0  # bytes read, where they lie in the file, how many are used
        self._memory_left = _MEMORY + _TIMES * size
        tensors, fields = self._read_counts()
        self.metadata: dict[str, Any] = {}
        for _ in range(fields):
            self._read_field()
        self.names: dict[str, int] = {}  # and where each is described
        self.forms: list[_GgufForm] = []
        self._form_numbers: dict[bytes, int] = {}  # by their bytes in the file
        self._form_costs: list[int] = []
        places: list[tuple[int, int]] = []
        while len(places) < tensors:
            places.append(self._read_description())
            places += self._read_known_forms(tensors - len(places))
        self.end = self._position
        self._buffer = b""
        self._set_columns(places, self.end + -self.end % self._alignment())

    def _error(self, fault: str, kind: type[RecordError] = FormatError) -> RecordError:
        """Return an error that names the position in the file."""
        return kind(f"byte {self._position:#x}: {fault}", offset=self._position)

    @property
    def _position(self) -> int:
        return self._base + self._pos

    def _read_bytes(self, count: int, label: str) -> bytes:
        """Return the next bytes, called by the label in errors; FormatError, LimitError as `_fill`."""
        if count > len(self._buffer) - self._pos:
            self._fill(count, label)
        start, self._pos = self._pos, self._pos + count
        return self._buffer[start : self._pos]

    def _fill(self, count: int, label: str) -> None:
        """Read at least the next `count` bytes into the buffer; FormatError, LimitError if a file may not have them."""
        remaining = self._size - self._position
        if count > remaining:
            raise self._error(f"{label} takes {count} bytes, {remaining} are left; the file is truncated or damaged")
        if self._position + count > _MAX_HEADER:
            raise self._error(f"more than {_MAX_HEADER >> 20} MiB of metadata", LimitError)
        unread, self._base, self._pos = self._buffer[self._pos :], self._position, 0
        self._buffer = unread + self._file.read(max(count - len(unread), PIECE))
        if len(self._buffer) < count:
            raise self._error("the file became shorter while it was read")

    def _reserve(self, nbytes: int, label: str) -> None:
        """Subtract memory that will be allocated from the limit; LimitError if there is not so much."""
        self._memory_left -= nbytes
        if self._memory_left < 0:
            limit = f"more than {_MEMORY >> 20} MiB and {_TIMES} times the file"
            raise self._error(f"{label} would take {limit} in memory", LimitError)

    def _read_number(self, nbytes: int, label: str) -> int:
        return int.from_bytes(self._read_bytes(nbytes, label), "little")

    def _read_count(self, min_nbytes: int, label: str) -> int:
        """Read a number of items; FormatError if so many, of at least `min_nbytes` each, do not fit into the file."""
        count = self._read_number(8, f"the number of {label}")
        remaining = self._size - self._position
        if count * min_nbytes > remaining:
            fault = f"{count} {label} are claimed, {remaining} bytes are left"
            raise self._error(f"{fault}; the file is truncated or damaged")
        return count

    def _read_name(self, label: str) -> str:
        """Read a text with its length; FormatError unless it is UTF-8 without NUL, of 1 to 65535 bytes."""
        nbytes = self._read_number(8, f"the length of {label}")
        if not 0 < nbytes <= _MAX_NAME:
            raise self._error(f"{label} has {nbytes} bytes; 1 to {_MAX_NAME} are legal")
        raw = self._read_bytes(nbytes, label)
        with contextlib.suppress(UnicodeDecodeError):
            if b"\0" not in raw:
                return raw.decode()
        raise self._error(f"{label} is not UTF-8 without NUL: {raw[:40]!r}")

    def _read_counts(self) -> tuple[int, int]:
        """Return the claimed numbers of tensors and metadata entries."""
        head = self._read_bytes(min(HEAD, self._size), "the start")
        self._pos = len(MAGIC)
        if not head.startswith(MAGIC):
            fault = wrong_type(head, "a GGUF file") or "not a GGUF file: it does not start with 'GGUF'"
            raise FormatError(fault if head else "the file is empty", offset=0)
        version = self._read_number(4, "the version")
        if version and not version & 0xFFFF:
            raise UnsupportedError("a big-endian GGUF file; convert it with gguf's gguf_convert_endian.py first")
        if version not in _VERSIONS:
            raise FormatError(f"GGUF version {version}; versions 2 and 3 can be read", offset=4)
        return self._read_count(_MIN_TENSOR, "tensors"), self._read_count(_MIN_FIELD, "metadata entries")

    def _read_field(self) -> None:
        """Read an entry of the metadata into `metadata`."""
        key = self._read_name("a metadata key")
        if key in self.metadata:
            raise self._error(f"metadata key '{printable(key)}' is there twice")
        self._reserve(_FIELD_COST, "the metadata")
        kind = self._value_type(key)
        if kind == _ARRAY:
            self.metadata[key] = self._read_list(key)
        else:
            values = self._values(kind, 1, key)
            (self.metadata[key],) = values.values() if isinstance(values, WordList) else values

    def _value_type(self, key: str) -> int:
        kind = self._read_number(4, "a metadata type")
        if kind not in {_STRING, _ARRAY, *_NUMBERS}:
            raise self._error(f"metadata '{printable(key)}' is of the unknown type {kind}")
        return kind

    def _read_list(self, key: str) -> Any:
        """Return the list of a metadata entry, as `_values` has it."""
        kind = self._value_type(key)
        if kind == _ARRAY:
            raise self._error(f"metadata '{printable(key)}' has lists within a list", UnsupportedError)
        nbytes, cost = (_NUMBERS[kind].itemsize, _NUMBER_COST) if kind in _NUMBERS else (8, _TEXT_COST)
        count = self._read_count(nbytes, f"items of metadata '{printable(key)}'")
        self._reserve(count * cost, f"the list '{printable(key)}'")
        return self._values(kind, count, key)

    def _values(self, kind: int, count: int, key: str) -> Any:
        """Return the next values, of one type, as a WordList; an empty list, or one of bytes if a text is not UTF-8."""
        label = f"metadata '{printable(key)}'"
        if not count:
            return []
        if kind == _STRING:
            return self._texts(count, label)
        values = np.frombuffer(self._read_bytes(count * _NUMBERS[kind].itemsize, label), _NUMBERS[kind])
        if kind == _BOOL and values.max() > 1:
            raise self._error(f"{label} is a bool that is neither 0 nor 1")
        if values.dtype.kind == "f":
            return WordList(ValueType.FLOAT, values.astype(np.float64).view(np.uint64))
        is_large = values.dtype == np.uint64 and values.max() >> np.uint64(63)
        value_type = ValueType.BOOL if kind == _BOOL else ValueType.UINT if is_large else ValueType.INT
        return WordList(value_type, values.astype(np.uint64 if is_large else np.int64).view(np.uint64))

    def _texts(self, count: int, label: str) -> Any:
        """Return the next texts where they lie, with NUL in the place of their lengths; bytes if one is not UTF-8."""
        lengths, text = self._raw_texts(count, label)
        starts = np.cumsum(lengths + 8) - lengths
        octets = np.frombuffer(text, np.uint8)
        for i in range(-8, -8 + (int(lengths.max()).bit_length() + 7) // 8):  # other bytes of the lengths are NUL
            octets[starts + i] = 0
        try:
            text.decode()
        except UnicodeDecodeError:
            ranges = zip(starts.tolist(), lengths.tolist(), strict=True)
            return [bytes(text[start : start + length]) for start, length in ranges]
        lengths <<= 32  # in place: there may be millions
        return WordList(ValueType.TEXT, (starts | lengths).view(np.uint64), text)

    def _raw_texts(self, count: int, label: str) -> tuple[Any, bytearray]:
        """Return the lengths of the next texts, and their bytes, each behind 8 bytes for its length."""
        parts: list[bytes] = []
        lengths: list[Any] = []
        size_at, remaining = struct.Struct("<Q").unpack_from, count
        while remaining:
            buffer, start = self._buffer, self._pos
            short = _short_texts(np.frombuffer(buffer, np.uint8)[start : start + _WINDOW])[:remaining]
            pos, single = start + int(short.sum()) + 8 * len(short), []
            with contextlib.suppress(struct.error):  # at the end of the buffer
                for _ in range(min(remaining - len(short), _MAX_SINGLE)):
                    (size,) = size_at(buffer, pos)
                    if pos + 8 + size > len(buffer):
                        break
                    single.append(size)
                    pos += 8 + size
            self._pos = pos
            parts.append(buffer[start:pos])
            if pos == start:  # this text is not in the buffer as a whole
                single.append(self._read_number(8, label))
                parts += bytes(8), self._read_bytes(single[0], label)
            lengths += short, np.array(single, np.int64)
            remaining -= len(short) + len(single)
        return np.concatenate(lengths), bytearray().join(parts)

    def _alignment(self) -> int:
        """Return the alignment of the tensors' bytes in the file; FormatError if it is no power of two."""
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
            raise FormatError(f"general.alignment is {alignment!r}; a power of two is expected")
        return alignment

    def _read_known_forms(self, count: int) -> Iterator[tuple[int, int]]:
        """Yield the next tensors as `_read_description`, faster; end before one of a new form, or a wrong one."""
        number_at, rank_at = struct.Struct("<Q").unpack_from, struct.Struct("<I").unpack_from
        buffer, pos, names = self._buffer, self._pos, self.names
        with contextlib.suppress(struct.error, UnicodeDecodeError, OverflowError):
            for _ in range(count):
                name_end = pos + 8 + number_at(buffer, pos)[0]
                form_end = name_end + 8 + 8 * rank_at(buffer, name_end)[0]
                offset = number_at(buffer, form_end)[0]
                name = buffer[pos + 8 : name_end].decode()
                form = self._form_numbers.get(buffer[name_end + 4 : form_end])
                if form is None or not 0 < name_end - pos - 8 <= _MAX_NAME or "\0" in name or name in names:
                    break
                memory_left = self._memory_left - self._form_costs[form] - _MODULE_COST * name.count(".")
                if memory_left < 0:
                    break
                pos = form_end + 8
                names[name], self._memory_left, self._pos = len(names), memory_left, pos
                yield form, offset

    def _read_description(self) -> tuple[int, int]:
        """Read the description of a tensor; return the number of its form, and its offset behind the header."""
        name = self._read_name("a tensor's name")
        if name in self.names:
            raise self._error("this name is there twice").located(tensor=name)
        self.names[name] = len(self.names)
        try:
            rank = self._read_number(4, "the rank")
            if rank > MAX_RANK:
                raise self._error(f"rank {rank}; at most {MAX_RANK} is legal")
            described = self._read_bytes(8 * rank + 4, "the dimensions")
            number = self._form_numbers.get(described)
            if number is None:
                number = self._form_numbers[described] = len(self.forms)
                self.forms.append(self._form(described))
                self._form_costs.append(_BLOCKS_COST if self.forms[number].wrapper else _TENSOR_COST)
            self._reserve(self._form_costs[number] + _MODULE_COST * name.count("."), "the tensors' descriptions")
            return number, self._read_number(8, "the offset")
        except RecordError as error:
            raise error.located(tensor=name) from None

    def _form(self, described: bytes) -> _GgufForm:
        """Return the type and shape that these bytes describe; FormatError if ggml has none such."""
        *dims, number = struct.unpack(f"<{len(described) // 8}QI", described)
        kind = self._types.get(number)
        if kind is None:
            raise self._error(f"ggml type {number} is not known; a later gguf package may know it")
        if prod(d or 1 for d in dims) * kind.nbytes > MAX_ARCHIVE_SIZE:
            raise self._error(f"dimensions {dims} claim more than 2^56 bytes")
        if kind.plain is None and (not dims or dims[0] % kind.block):
            raise self._error(f"rows of {dims[:1]} elements are not whole blocks of {kind.block} ({kind.name})")
        shape, nbytes = dims[::-1], prod(dims) // kind.block * kind.nbytes
        if kind.plain is not None:
            return _GgufForm(kind.plain, tuple(shape), nbytes, None)
        values = {"ggml_type": kind.name, "shape": shape, "block": kind.block, "block_nbytes": kind.nbytes}
        stored = (*shape[:-1], shape[-1] // kind.block * kind.nbytes)
        return _GgufForm(by_name["uint8"], stored, nbytes, (QUANTIZED, values))

    def _set_columns(self, described: list[tuple[int, int]], start: int) -> None:
        """Set `form_ids`, `sizes` and `offsets` of tensors, which lie from `start` on.

        FormatError unless they are aligned, in the file, and apart: else a small file could claim terabytes.
        """
        alignment, total = self._alignment(), np.uint64(self._size)
        self.form_ids = np.array([form for form, _ in described], np.intp)
        offsets = np.array([offset for _, offset in described], np.uint64)
        self.sizes = np.array([form.nbytes for form in self.forms], np.uint64)[self.form_ids]
        names = list(self.names)
        is_unaligned = offsets % np.uint64(alignment) != 0
        if is_unaligned.any():
            i = int(is_unaligned.argmax())
            raise FormatError(f"its offset {offsets[i]:#x} is no multiple of general.alignment", tensor=names[i])
        has_bytes = self.sizes > 0
        self.offsets = np.where(has_bytes, np.uint64(start) + np.minimum(offsets, total), np.uint64(0))
        is_outside = has_bytes & (self.offsets + self.sizes > total)
        if is_outside.any():
            i = int(is_outside.argmax())
            begin = start + int(offsets[i])
            fault = f"its bytes [{begin:#x}, {begin + int(self.sizes[i]):#x}) end past the end of the file ({total:#x})"
            raise FormatError(f"{fault}; the file is truncated, copy it again", tensor=names[i], offset=begin)
        # Tensors that overlap could claim terabytes of a small file.
        order = np.flatnonzero(has_bytes)[np.argsort(self.offsets[has_bytes], kind="stable")]
        begins = self.offsets[order]
        is_overlapped = begins[1:] < (begins + self.sizes[order])[:-1]
        if is_overlapped.any():
            previous, i = order[is_overlapped.argmax() :][:2].tolist()
            fault = f"its bytes overlap those of tensor '{printable(names[previous])}'"
            raise FormatError(fault, tensor=names[i], offset=int(self.offsets[i]))


def _short_texts(octets: Any) -> Any:
    """Return the sizes of texts from the first byte on, as far as each is shorter than 256 bytes, and has no NUL."""
    is_nul = octets == 0
    two_nul = is_nul[:-1] & is_nul[1:]  # from a byte on
    four_nul = two_nul[:-2] & two_nul[2:]
    places = np.flatnonzero(four_nul[1:-3] & four_nul[4:])  # seven NUL follow: it may be the first byte of a size
    sizes = octets[places].astype(np.int64)
    starts = np.cumsum(sizes + 8) - sizes - 8
    is_size = (places == starts) & (starts + 8 + sizes <= len(octets))
    return sizes if is_size.all() else sizes[: is_size.argmin()]


def _put_tensor(reader: Reader, form: _GgufForm, offset: int, path: tuple[str, ...], out: Receiver) -> None:
    """Put one tensor, or the module of a quantised one, into `out`."""
    if form.wrapper is not None:
        type_name, values = form.wrapper
        out.module(path, type_name=type_name)
        for key, value in values.items():
            out.attribute((*path, key), value)
        path = (*path, _BLOCKS)
    out.put_range(path, form.dtype, form.shape, reader, offset, form.nbytes)
