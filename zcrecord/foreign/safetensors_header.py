"""The header of a safetensors file: scanned with care, every rule a typed error, and written.

A file is the header's length (u64), the header (JSON: names to dtype, shape and offsets) and the tensors' bytes. A
header in the form that writers use is split by one regular expression. Any other goes through a scanner, which decides
what is legal, passes once through the text and keeps nothing but entries: no header costs more than a small constant
times its length. Where the bytes go is left to `safetensors`.

Source: https://github.com/huggingface/safetensors#format; limits and rules as in its own reader, and the ones it lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from json.decoder import scanstring  # type: ignore[attr-defined]  # the stubs lack it
from math import prod
from typing import NamedTuple

import numpy as np

from zcrecord.codec.entries import encodable
from zcrecord.codec.file_types import wrong_type
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE, MAX_RANK, align_up
from zcrecord.dtypes import DType, by_safetensors, nbytes
from zcrecord.errors import FormatError, LimitError, RecordError, printable

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader, which writers have to keep, too
METADATA = "__metadata__"
_ALIGNMENT = 8  # of the tensors' bytes in the file, by its own writer's habit
_DIGITS = 20  # of a 64-bit number
# Bytes of memory that metadata may take, in addition to so many times the header; and the cost of an entry, mostly
# while the archive's index is encoded. Without the limit a header of short ones takes 70 times its size.
_MEMORY, _TIMES, _ENTRY_COST = 64 << 20, 16, 400
_COPY = "the file is damaged, copy it again"

_NUMBER = rf"(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
_USUAL = re.compile(  # an entry as writers write it: its name, its type and shape (see `_usual_form`), its offsets
    r'"([^"\\]++)": ?\{"dtype": ?"([^]]*+)\], ?"data_offsets": ?\[([^]]*+)\]\}'
)
_FORM = re.compile(rf'([^"]*+)", ?"shape": ?\[({_NUMBER}(?:, ?{_NUMBER}){{0,{MAX_RANK - 1}}})?')
_FIRST = re.compile(rf'\{{"{METADATA}": ?')
_SPACE = re.compile(r"[ \t\n\r]*+")
_INTEGER = re.compile(r"-?[0-9]++(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]*+)?")


class HeaderEntry(NamedTuple):
    """One tensor: its bytes are [start, end) of those behind the header."""

    name: str
    kind: DType
    shape: tuple[int, ...]
    start: int
    end: int


class SafetensorsHeader(NamedTuple):
    """Columns of a header: tensors lie one after the other, in this order."""

    names: list[str]
    form_ids: list[int]  # of each tensor, among `forms`
    forms: list[tuple[DType, tuple[int, ...]]]
    bounds: list[int]  # where each tensor starts, and where the last one ends, behind the header
    metadata: dict[str, str]


def check_length(head: bytes, file_nbytes: int | None) -> int:
    """Return the header's length from a file's first 8 bytes or more; FormatError if no such file can have it."""
    if len(head) < 8:
        raise FormatError(f"{len(head)} bytes are too few for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        fault = wrong_type(head, "a safetensors file")
        if fault is not None:
            raise FormatError(fault, offset=0)
        raise FormatError(f"its header would have {length} bytes, at most {MAX_HEADER} are legal; {_COPY}", offset=0)
    if file_nbytes is not None and length > file_nbytes - 8:
        raise FormatError(f"its header of {length} bytes ends past the end of the file ({file_nbytes})", offset=0)
    return length


def decode_header(header: bytes, data_nbytes: int | None) -> SafetensorsHeader:
    """Decode a header; `data_nbytes` follow it, if known.

    Raises:
        FormatError: a rule is broken; says which, of which tensor, and at which byte of the file. LimitError: so many
            short entries of metadata that they would take far more memory than the file has bytes.
    """
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        offset = 8 + error.start
        raise FormatError(f"byte {offset:#x}: the header is not UTF-8; {_COPY}", offset=offset) from None
    usual = _decode_usual(text, data_nbytes) if header and np.frombuffer(header, np.uint8).min() >= 0x20 else None
    return usual or _decode_any(text, len(header), data_nbytes)


def _decode_any(text: str, header_nbytes: int, data_nbytes: int | None) -> SafetensorsHeader:
    """Decode a header of any form by the scanner; raises what `decode_header` does."""
    entries, metadata = _HeaderScanner(text).header()
    entries.sort(key=lambda e: e[3:])
    end = 0
    for entry in entries:
        try:
            _check_entry(entry, end, data_nbytes)
        except RecordError as error:
            raise error.located(tensor=entry.name) from None
        end = entry.end
    if data_nbytes is not None and end < data_nbytes:
        offset = 8 + header_nbytes + end
        raise FormatError(f"{data_nbytes - end} bytes behind the last tensor belong to none", offset=offset)
    numbers = {form: i for i, form in enumerate(dict.fromkeys(entry[1:3] for entry in entries))}
    bounds = [0, *(entry.end for entry in entries)]
    names, form_ids = [entry.name for entry in entries], [numbers[entry[1:3]] for entry in entries]
    return SafetensorsHeader(names, form_ids, list(numbers), bounds, metadata)


def _decode_usual(text: str, data_nbytes: int | None) -> SafetensorsHeader | None:
    """Decode a header in the form that writers use; return None for any other, legal or not.

    `text` has no control characters.
    """
    metadata: dict[str, str] = {}
    body = text[1:]
    if metadata_start := _FIRST.match(text):
        metadata, end = _HeaderScanner(text, metadata_start.end()).metadata()
        body = text[end + 1 :].lstrip(" ") if text[end : end + 1] == "," else ""
    parts = _USUAL.split(body.rstrip(" "))
    between, names, written_forms, placed = (parts[i::4] for i in range(4))
    comma = ", " if placed and " " in placed[0] else ","  # as json.dumps has it by default, or compact
    if text[:1] != "{" or between != ["", *[comma] * (len(names) - 1), "}"]:
        return None
    distinct = set(names)
    numbers = {form: i for i, form in enumerate(dict.fromkeys(written_forms))}
    forms = [form for form in map(_usual_form, numbers) if form is not None]
    if len(distinct) != len(names) or METADATA in distinct or len(forms) != len(numbers):
        return None
    form_ids = list(map(numbers.__getitem__, written_forms))
    sizes = [nbytes(prod(shape), kind.bits) for kind, shape in forms]
    bounds = [0, *accumulate(map(sizes.__getitem__, form_ids))]
    if bounds[-1] != data_nbytes and (data_nbytes is not None or bounds[-1] > MAX_ARCHIVE_SIZE):
        return None
    if placed != list(map(comma.join, pairwise(map(str, bounds)))):
        return None
    return SafetensorsHeader(names, form_ids, forms, bounds, metadata)


def _usual_form(written: str) -> tuple[DType, tuple[int, ...]] | None:
    """Return the element type and shape of an entry in the usual form; None unless they are legal."""
    match = _FORM.fullmatch(written)
    kind = None if match is None else by_safetensors.get(match[1])
    if match is None or kind is None:
        return None
    shape = tuple(map(int, match[2].split(","))) if match[2] else ()
    return None if _form_fault(kind, shape) else (kind, shape)


def _form_fault(kind: DType, shape: tuple[int, ...]) -> str | None:
    """Return the fault of a type and shape; None if they are legal."""
    if prod(d or 1 for d in shape) * kind.bits > 8 * MAX_ARCHIVE_SIZE:
        return f"its shape {shape} claims more than 2^56 bytes"
    count = prod(shape)
    return f"{count} elements of {kind.name} do not fill whole bytes" if count * kind.bits % 8 else None


def _check_entry(entry: HeaderEntry, expected: int, data_nbytes: int | None) -> None:
    """Raise FormatError unless a tensor is legal, and its bytes are as many as it takes, from `expected` on."""
    if fault := _form_fault(entry.kind, entry.shape):
        raise FormatError(fault)
    start, end = entry.start, entry.end
    if start > end:
        raise FormatError(f"data_offsets [{start}, {end}] are the wrong way round")
    if data_nbytes is not None and end > data_nbytes:
        raise FormatError(f"data_offsets [{start}, {end}] end past the last of {data_nbytes} bytes; is it truncated?")
    if (needed := nbytes(prod(entry.shape), entry.kind.bits)) != end - start:
        fault = f"shape {entry.shape} of {entry.kind.name} takes {needed} bytes"
        raise FormatError(f"{fault}, data_offsets [{start}, {end}] say {end - start}")
    if start != expected:
        fault = "overlaps the tensor before it" if start < expected else "leaves a hole before it"
        raise FormatError(f"data_offsets [{start}, {end}], {expected} is where it has to start: it {fault}")


class _HeaderScanner:
    """Scanner of a header's text: methods read what comes next, and raise FormatError with its offset in the file."""

    def __init__(self, text: str, pos: int = 0) -> None:
        self._text = text
        self._pos = pos

    def _fail(self, fault: str, pos: int | None = None, *, tensor: str | None = None) -> FormatError:
        offset = 8 + len(self._text[: self._pos if pos is None else pos].encode(errors="replace"))
        return FormatError(f"byte {offset:#x}: {fault}; {_COPY}", offset=offset, tensor=tensor)

    def header(self) -> tuple[list[HeaderEntry], dict[str, str]]:
        """Return the entries of the whole header in the order of the text, and the metadata."""
        entries: list[HeaderEntry] = []
        metadata: dict[str, str] = {}
        names: set[str] = set()
        if not self._text.startswith("{"):
            raise self._fail("a header starts with '{'", 0)
        for position in self._items("{", "}"):
            name = self._key()
            if name in names:
                raise self._fail("this name is there twice", position, tensor=name)
            names.add(name)
            if name == METADATA:
                metadata, _ = self.metadata()
            else:
                entries.append(self._entry(name, position))
        if self._space() != len(self._text):
            raise self._fail("something behind the header's object")
        return entries, metadata

    def metadata(self) -> tuple[dict[str, str], int]:
        """Return the metadata that comes next, and where it ends; LimitError for too many entries."""
        limit = (_MEMORY + _TIMES * len(self._text)) // _ENTRY_COST
        out: dict[str, str] = {}
        for position in self._items("{", "}"):
            if len(out) == limit:
                fault = f"more than {limit} entries of metadata take far more memory than the file"
                raise LimitError(f"{fault}; keep them in a tensor")
            name = self._key()
            if not name or "\0" in name:
                raise self._fail("a name in the metadata that is empty or has NUL", position)
            if name in out:
                raise self._fail(f"metadata '{printable(name)}' is there twice", position)
            if self._text[self._space() : self._pos + 1] != '"':
                raise self._fail(f"metadata '{printable(name)}' is no string")
            out[name] = self._string()
        return out, self._pos

    def _entry(self, name: str, position: int) -> HeaderEntry:
        """Return the entry of a name, which was at a position of the text."""
        try:
            if not name or "\0" in name:
                raise self._fail("a name that is empty or has NUL", position)
            return HeaderEntry(name, *self._fields())
        except RecordError as error:
            raise error.located(tensor=name) from None

    def _fields(self) -> tuple[DType, tuple[int, ...], int, int]:
        """Read one entry's dtype, shape and offsets, each once, in any order."""
        kind: DType | None = None
        shape: tuple[int, ...] | None = None
        offsets: tuple[int, ...] | None = None
        for position in self._items("{", "}"):
            field = self._key()
            if field == "dtype" and kind is None:
                kind = self._dtype()
            elif field == "shape" and shape is None:
                shape = self._integers(MAX_RANK, "dimensions")
            elif field == "data_offsets" and offsets is None:
                offsets = self._integers(2, "data_offsets")
            else:
                raise self._fail(f"field '{printable(field)}' is unknown, or there twice", position)
        if kind is None or shape is None or offsets is None:
            raise self._fail("one of dtype, shape and data_offsets is missing")
        if len(offsets) != 2:
            raise self._fail("data_offsets are not two numbers")
        return kind, shape, offsets[0], offsets[1]

    def _dtype(self) -> DType:
        """Return the element type that comes next, by safetensors' name for it."""
        position = self._space()
        dtype = self._string()
        if dtype not in by_safetensors:
            raise self._fail(f"dtype '{printable(dtype)}' is not known; it knows {', '.join(by_safetensors)}", position)
        return by_safetensors[dtype]

    def _integers(self, limit: int, label: str) -> tuple[int, ...]:
        """Return an array of at most `limit` whole numbers, called by the label in errors."""
        out: list[int] = []
        for position in self._items("[", "]"):
            number = _INTEGER.match(self._text, position)
            digits = number.group() if number else self._text[position : position + 1]
            if not (digits.isascii() and digits.isdigit()) or (digits[0] == "0" and len(digits) > 1):
                raise self._fail(f"expected a whole number from 0 on, got '{printable(digits, 40)}'")
            if len(digits) > _DIGITS:
                raise self._fail(f"a number of {len(digits)} digits")
            if len(out) == limit:
                raise self._fail(f"more than {limit} {label}")
            out.append(int(digits))
            self._pos += len(digits)
        return tuple(out)

    def _items(self, opening: str, closing: str) -> Iterator[int]:
        """Yield the position of each item of an object or array; before the next one the caller must have read it."""
        self._expect(opening)
        if self._skip(closing):
            return
        while True:
            yield self._space()
            if self._skip(closing):
                return
            self._expect(",")

    def _key(self) -> str:
        name = self._string()
        self._expect(":")
        return name

    def _string(self) -> str:
        """Return a string of JSON, decoded."""
        self._expect('"')
        start = self._pos
        try:
            text: str
            text, self._pos = scanstring(self._text, start, True)
        except ValueError as error:
            raise self._fail(f"no string of JSON ({printable(str(error).partition(':')[0])})", start) from None
        if not encodable(text):
            raise self._fail("a string with lone surrogates, which are not UTF-8", start)
        return text

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            char = self._text[self._pos : self._pos + 1]
            raise self._fail(f"expected '{token}', got '{printable(char)}'" if char else f"ends where '{token}' is due")

    def _skip(self, token: str) -> bool:
        """Return True, and pass it, if one character comes next, perhaps behind white space."""
        if not self._text.startswith(token, self._space()):
            return False
        self._pos += 1
        return True

    def _space(self) -> int:
        self._pos = _SPACE.match(self._text, self._pos).end()  # type: ignore[union-attr]  # it matches everywhere
        return self._pos


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return length and header, as safetensors' own writer has them, aligned; LimitError if it is too large to read."""

    def dumped(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

    parts = [f'"{METADATA}":{dumped(dict(metadata))}'] if metadata else []
    parts += [
        f'{dumped(name)}:{{"dtype":"{kind.safetensors}","shape":[{",".join(map(str, shape))}],'
        f'"data_offsets":[{start},{end}]}}'
        for name, kind, shape, start, end in entries
    ]
    header = f"{{{','.join(parts)}}}".encode()
    header = header.ljust(align_up(len(header), _ALIGNMENT))
    if len(header) > MAX_HEADER:
        fault = f"names, attributes and metadata come to {len(header)} bytes, a safetensors header has at most"
        raise LimitError(f"{fault} {MAX_HEADER}; leave some out by select()")
    return len(header).to_bytes(8, "little") + header
