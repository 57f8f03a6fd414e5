"""Headers of .npy arrays, read without pickle; numpy's strings as StringTensors and back; arrays over .npy files.

`npz` reads and writes the members of .npz files.

Source: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, versions 1.0 to 3.0.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError, printable
from zcrecord.storage.memory import map_file
from zcrecord.tensors.packed import StringTensor

_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 65535  # bytes; numpy's own stay far below
_ROWS = 1 << 14  # strings converted at a time
_SPACE = " \t\n\r\f"  # as Python's own parser has it, by which numpy reads a header
_FIELD = re.compile(
    rf"""[{_SPACE}]*(?:'(?P<name>\w+)'|"(?P<also>\w+)")[{_SPACE}]*:[{_SPACE}]*"""
    r"""(?:'(?P<text>[^'\\\n]*)'|"(?P<quoted>[^"\\\n]*)"|(?P<truth>True|False)|"""
    rf"""\((?P<dims>[0-9{_SPACE},L]*)\)|(?P<list>\[.*\]))[{_SPACE}]*(?:,|$)""",
    re.DOTALL,
)
_DESCR = re.compile(r"[<>|=]?(?P<kind>[?a-zA-Z])(?P<size>[0-9]{0,10})(?P<unit>\[[^\]]*\])?")


class NpyHeader(NamedTuple):
    """Header of a .npy array, and its own length in bytes."""

    dtype: np.dtype[Any]
    fortran: bool
    shape: tuple[int, ...]
    nbytes: int

    @property
    def data_nbytes(self) -> int:
        """Bytes of the array's elements."""
        return prod(self.shape) * self.dtype.itemsize


def read_npy_header(read: Callable[[int], Any]) -> NpyHeader:
    """Return the header at the start of a stream; `read` returns exactly so many next bytes of it.

    Raises:
        FormatError: the bytes are not a valid header. UnsupportedError: an array of objects, of structures, or of
        another type that archives do not have.
    """
    start = read(8)
    if start[:6] != _MAGIC:
        raise FormatError("not an array of numpy: the magic of .npy is missing")
    if not 1 <= start[6] <= 3 or start[7]:
        raise FormatError(f"version {start[6]}.{start[7]} of .npy is not known")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(read(width), "little")
    if length > _MAX_HEADER:
        raise FormatError(f"its .npy header would have {length} bytes, more than {_MAX_HEADER}")
    try:
        text = str(read(length), "utf-8" if start[6] == 3 else "latin-1")
    except UnicodeDecodeError:
        raise FormatError("its .npy header is not UTF-8") from None
    fields = _fields(text)
    dtype, shape = _dtype(fields["descr"]), _shape(fields["shape"])
    if prod(d or 1 for d in shape) * max(dtype.itemsize, 1) > MAX_ARCHIVE_SIZE:
        raise FormatError(f"its shape {shape} claims more than 2^56 bytes")
    return NpyHeader(dtype, fields["fortran_order"] == "True", shape, 8 + width + length)


def map_npy(path: str) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the array of a .npy file, over its mapping.

    Raises:
        SourceError: the file cannot be read. FormatError, UnsupportedError: as `read_npy_header`; or the file's length
        does not fit the array.
    """
    octets, position = map_file(path, least=0).octets, 0

    def read(nbytes: int) -> bytes:
        nonlocal position
        position += nbytes
        if position > len(octets):
            raise FormatError("ends within its .npy header; it is truncated, copy it again")
        return bytes(octets[position - nbytes : position])

    try:
        header = read_npy_header(read)
        if len(octets) - position != header.data_nbytes:
            fault = f"its array has {header.data_nbytes} bytes, {len(octets) - position} follow the header"
            raise FormatError(f"{fault}; copy it again")
    except RecordError as error:
        raise error.located(path=path) from error.__cause__
    data = np.frombuffer(octets, np.uint8)[position:]
    return np.ndarray(header.shape, header.dtype, data, order="F" if header.fortran else "C")


def _fields(text: str) -> dict[str, str]:
    """Return the three fields of the header's dict, as text that is not evaluated; FormatError unless it has them."""
    text = text.strip(_SPACE)
    groups_of = {"descr": ("text", "quoted", "list"), "fortran_order": ("truth",), "shape": ("dims",)}
    out: dict[str, str] = {}
    if text[:1] != "{" or text[-1:] != "}":
        raise FormatError("its .npy header is no dict")
    body, pos = text[1:-1].rstrip(_SPACE), 0
    while pos < len(body):
        field = _FIELD.match(body, pos)
        if field is None:
            raise FormatError(f"its .npy header cannot be read: '{printable(body[pos:], 60)}'")
        pos = field.end()
        name = field["name"] or field["also"]
        value = next((field[kind] for kind in groups_of.get(name, ()) if field[kind] is not None), None)
        if value is None or name in out:
            raise FormatError(f"its .npy header has '{printable(name)}' twice, of the wrong kind, or unexpectedly")
        out[name] = value
    if len(out) < len(groups_of):
        raise FormatError(f"its .npy header lacks {', '.join(groups_of.keys() - out.keys())}")
    return out


def _dtype(descr: str) -> np.dtype[Any]:
    """Return the dtype of a header's `descr`; raises RecordError if archives cannot have it."""
    if descr.startswith("["):
        raise UnsupportedError("a structured array; save each of its fields as an array of its own")
    match = _DESCR.fullmatch(descr)
    if match is None:
        raise FormatError(f"its dtype '{printable(descr)}' is not one of numpy's")
    if match["kind"] == "O":
        raise UnsupportedError("an array of objects is a pickle, which may run anything; save it with a plain dtype")
    if match["kind"] == "V" or (match["kind"], match["size"]) == ("f", "1"):
        fault = "raw bytes of unknown meaning (numpy names bfloat16, float8 and their like so)"
        raise UnsupportedError(f"{fault}; save them viewed as uint8 or uint16")
    if match["kind"] not in "?biufcSU":
        raise UnsupportedError(f"dtype {printable(descr)} has no place in an archive; save it as numbers")
    try:
        return np.dtype(descr)
    except (TypeError, ValueError, OverflowError):
        raise FormatError(f"its dtype '{printable(descr)}' is not one of numpy's") from None


def _shape(dims: str) -> tuple[int, ...]:
    """Return the shape in the text between a tuple's parentheses; FormatError if numpy reads it as none."""
    parts = [part.strip() for part in dims.split(",")]
    if parts and not parts[-1]:
        parts.pop()
    digits = [part.removesuffix("L") for part in parts]  # the form of Python 2's long integers
    are_numbers = all(re.fullmatch("0+|[1-9][0-9]{0,19}", text) for text in digits)
    if not are_numbers or (digits and "," not in dims):  # numpy takes (3) and (03,) for no shape either
        raise FormatError(f"its shape ({printable(dims)}) is not a tuple of dimensions")
    if len(digits) > MAX_RANK:
        raise FormatError(f"{len(digits)} dimensions, at most {MAX_RANK} are legal")
    return tuple(map(int, digits))


def encode_npy_header(descr: str, shape: tuple[int, ...], *, fortran: bool = False) -> bytes:
    """Return a header as numpy writes it, magic included."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": descr, "fortran_order": fortran, "shape": shape})
    return out.getvalue()


def string_tensor(array: np.ndarray[Any, Any]) -> StringTensor:
    """Return an array of numpy's strings, 'U' or 'S', as a StringTensor of UTF-8 or bytes; RecordError for no text."""
    flat = array.reshape(-1)
    if not len(flat):
        return StringTensor.from_strings([], array.shape)
    ends = np.zeros(len(flat) + 1, "<u8")
    texts: list[bytes] = []
    for start in range(0, len(flat), _ROWS):
        strings = _encode_strings(flat[start : start + _ROWS])
        texts.append(b"".join(strings))
        ends[start + 1 : start + 1 + len(strings)] = list(map(len, strings))
    np.cumsum(ends, out=ends)
    data = b"".join([*texts, bytes(-int(ends[-1]) % 8), ends.data])
    return StringTensor(np.frombuffer(data, np.uint8), array.shape)


def _encode_strings(rows: np.ndarray[Any, Any]) -> list[bytes]:
    """Return the bytes of each of some strings; raises what `string_tensor` does."""
    if rows.dtype.kind == "S":
        strings: list[bytes] = rows.tolist()
        return strings
    if int(rows.astype(rows.dtype.newbyteorder("<")).view("<u4").max(initial=0)) > 0x10FFFF:
        raise FormatError("its strings have a character that is not in Unicode")
    try:
        return [text.encode() for text in rows.tolist()]
    except UnicodeEncodeError:
        raise UnsupportedError("a text with lone surrogates, which are not UTF-8") from None


def string_rows(tensor: StringTensor, *, octets: bool, max_nbytes: int) -> tuple[str, Iterator[bytes]]:
    """Return numpy's dtype for the strings of a tensor, and an iterator over their bytes in that dtype.

    The dtype is 'S' with `octets`, or if a string is not UTF-8; else 'U'.

    Raises:
        UnsupportedError: a string ends with NUL, which numpy drops. LimitError: padded to one width they take more
        than `max_nbytes`.
    """
    count, max_characters, max_octets = 0, 0, 0
    for string in tensor.strings():
        count += 1
        max_octets = max(max_octets, len(string))
        if string[-1:] == b"\0":
            raise UnsupportedError("a string that ends with NUL, which numpy's strings drop; save it as uint8")
        if not octets:
            try:
                max_characters = max(max_characters, len(string.decode()))
            except UnicodeDecodeError:
                octets = True
    nbytes = count * (max_octets if octets else 4 * max_characters)
    if nbytes > max_nbytes:
        raise LimitError(f"its strings, padded to the width of the longest, would take {nbytes} bytes; save them apart")
    dtype = np.dtype(f"|S{max_octets or 1}" if octets else f"<U{max_characters or 1}")
    values: Iterator[Any] = tensor.strings() if octets else (string.decode() for string in tensor.strings())
    batches = iter(lambda: list(itertools.islice(values, _ROWS)), [])
    return dtype.str, (np.array(batch, dtype).tobytes() for batch in batches)
