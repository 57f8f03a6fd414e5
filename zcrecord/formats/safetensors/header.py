"""The header of a safetensors file: scanned with care, every rule a typed error, and written.

A file is the header's length (u64), the header (JSON: names to dtype, shape and offsets) and the tensors' bytes. The
scanner goes once through the text and keeps nothing but entries, so no header costs more than a small constant times
its length; one that is written as writers write it is read all at once. Where the bytes go is left to `safetensors`.

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

__all__ = [
    "MAX_HEADER",
    "METADATA",
    "HeaderEntry",
    "SafetensorsHeader",
    "check_length",
    "decode_header",
    "encode_header",
]

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader, which writers have to keep, too
METADATA = "__metadata__"
_ALIGNMENT = 8  # of the tensors' bytes in the file, by its own writer's habit
_DIGITS = 20  # of a 64-bit number
_COPY = "the file is damaged, copy it again"

_NUMBER = rf"(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
_USUAL = re.compile(  # an entry as writers write it: its name, _usual_form's part, and offsets
    rf'"([^"\\\x00-\x1f]*+)":\{{"dtype":"([^]]*+)\],"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
_DIMS = re.compile(rf"(?:{_NUMBER}(?:,{_NUMBER}){{0,{MAX_RANK - 1}}})?")
_NAMED, _SHAPED, _PLACED, _ENDED = '":{"dtype":"', '","shape":[', '],"data_offsets":[', ']},"'  # between what differs
_FIRST = f'{{"{METADATA}":'
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

    def entries(self) -> Iterator[HeaderEntry]:
        """Yield the tensors one by one."""
        for name, form, (start, end) in zip(self.names, self.form_ids, pairwise(self.bounds), strict=True):
            yield HeaderEntry(name, *self.forms[form], start, end)


def check_length(head: bytes, file_nbytes: int | None) -> int:
    """Return the length of the header from the file's first 8 bytes; more of them name the type of a wrong file.

    Raises:
        FormatError: too short, or the header would be too large for any file, or for this one.
    """
    if len(head) < 8:
        raise FormatError(f"{len(head)} bytes are too few for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        what = wrong_type(head, "a safetensors file")
        if what is not None:
            raise FormatError(what, offset=0)
        raise FormatError(f"its header would have {length} bytes, at most {MAX_HEADER} are legal; {_COPY}", offset=0)
    if file_nbytes is not None and length > file_nbytes - 8:
        raise FormatError(f"its header of {length} bytes ends past the end of the file ({file_nbytes})", offset=0)
    return length


def decode_header(header: bytes, data_nbytes: int | None) -> SafetensorsHeader:
    """Decode a header; `data_nbytes` follow it, if known.

    Raises:
        FormatError: a rule is broken; says which, of which tensor, and at which byte of the file.
    """
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        offset = 8 + error.start
        raise FormatError(f"byte {offset:#x}: the header is not UTF-8; {_COPY}", offset=offset) from None
    found = _decode_usual(text, data_nbytes) if header and np.frombuffer(header, np.uint8).min() >= 0x20 else None
    return found or _decode_any(text, len(header), data_nbytes)


def _decode_any(text: str, header_nbytes: int, data_nbytes: int | None) -> SafetensorsHeader:
    """Decode a header character by character."""
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
    return SafetensorsHeader(
        [e.name for e in entries], [numbers[e[1:3]] for e in entries], list(numbers), bounds, metadata
    )


def _decode_usual(text: str, data_nbytes: int | None) -> SafetensorsHeader | None:
    """Decode a header in the form that writers use; return None for any other, legal or not.

    `text` has no control characters.
    """
    start, before = 1, "{"
    metadata: dict[str, str] = {}
    if text.startswith(_FIRST):
        metadata, start = _HeaderScanner(text, len(_FIRST)).metadata()
        start, before = start + 1, ","
    end = text.rfind("}") + 1
    if text[start - 1 : start + 1] != before + '"' or text[end - 3 : end] != "]}}" or text[end:].strip(" "):
        return None
    found = _usual_tensors(text[start + 1 : end - 3], data_nbytes)
    return found and found._replace(metadata=metadata)


def _usual_tensors(body: str, data_nbytes: int | None) -> SafetensorsHeader | None:
    """Decode a header written in the usual form without a JSON parser; return None if it is not usual or not legal.

    `body` is the text between the first quote and the last bracket. It is split at the texts that all entries have in
    common, which leaves names, types and shapes; the offsets are computed from these. Then the header is encoded again:
    if that gives the same text, it was decoded correctly. Names have no backslashes, control characters or quotes, so
    they need no decoding.
    """
    parts = body.replace(_NAMED, "\n").replace(_PLACED, "\n").replace(_ENDED, "\n").split("\n")
    names, said, placed = parts[0::3], parts[1::3], parts[2::3]
    count, distinct = len(placed), set(names)
    if len(distinct) != count or "" in distinct or METADATA in distinct or "\\" in body or '"' in "".join(names):
        return None
    numbers = {form: i for i, form in enumerate(dict.fromkeys(said))}
    forms = [form for form in map(_usual_form, numbers) if form is not None]
    if len(forms) != len(numbers) or len(parts) != 3 * count:
        return None
    form_ids = list(map(numbers.__getitem__, said))
    sizes = [nbytes(prod(shape), kind.bits) for kind, shape in forms]
    bounds = [0, *accumulate(map(sizes.__getitem__, form_ids))]
    if bounds[-1] != data_nbytes and (data_nbytes is not None or bounds[-1] > MAX_ARCHIVE_SIZE):
        return None
    again = [_NAMED] * (2 * len(parts) - 1)
    again[0::2] = parts
    again[3::6], again[5::6] = [_PLACED] * count, [_ENDED] * (count - 1)
    same = "".join(again) == body and placed == list(map(",".join, pairwise(map(str, bounds))))
    return SafetensorsHeader(names, form_ids, forms, bounds, {}) if same else None


def _usual_form(said: str) -> tuple[DType, tuple[int, ...]] | None:
    """Return the element type and shape between _NAMED and _PLACED, None unless they are written as usual and legal."""
    dtype, _, dims = said.partition(_SHAPED)
    kind = by_safetensors.get(dtype)
    if kind is None or not _DIMS.fullmatch(dims):
        return None
    shape = tuple(map(int, dims.split(","))) if dims else ()
    return None if _fault(kind, shape) else (kind, shape)


def _fault(kind: DType, shape: tuple[int, ...]) -> str | None:
    """Return the fault of a type and shape; None if they are legal."""
    if prod(d or 1 for d in shape) * kind.bits > 8 * MAX_ARCHIVE_SIZE:
        return f"its shape {shape} claims more than 2^56 bytes"
    count = prod(shape)
    return f"{count} elements of {kind.name} do not fill whole bytes" if count * kind.bits % 8 else None


def _check_entry(entry: HeaderEntry, expected: int, data_nbytes: int | None) -> None:
    if fault := _fault(entry.kind, entry.shape):
        raise FormatError(fault)
    count, start, end = prod(entry.shape), entry.start, entry.end
    if start > end:
        raise FormatError(f"data_offsets [{start}, {end}] are the wrong way round")
    if data_nbytes is not None and end > data_nbytes:
        raise FormatError(f"data_offsets [{start}, {end}] end past the last of {data_nbytes} bytes; is it truncated?")
    if (need := nbytes(count, entry.kind.bits)) != end - start:
        what = f"shape {entry.shape} of {entry.kind.name} takes {need} bytes"
        raise FormatError(f"{what}, data_offsets [{start}, {end}] say {end - start}")
    if start != expected:
        what = "overlaps the tensor before it" if start < expected else "leaves a hole before it"
        raise FormatError(f"data_offsets [{start}, {end}], {expected} is where it has to start: it {what}")


class _HeaderScanner:
    """One pass through a header's text, for the few things it may hold."""

    def __init__(self, text: str, pos: int = 0) -> None:
        self._text = text
        self._pos = pos

    def _fail(self, what: str, pos: int | None = None, *, tensor: str | None = None) -> FormatError:
        offset = 8 + len(self._text[: self._pos if pos is None else pos].encode(errors="replace"))
        return FormatError(f"byte {offset:#x}: {what}; {_COPY}", offset=offset, tensor=tensor)

    def header(self) -> tuple[list[HeaderEntry], dict[str, str]]:
        """Return entries as they come, and the metadata."""
        entries: list[HeaderEntry] = []
        metadata: dict[str, str] = {}
        names: set[str] = set()
        if not self._text.startswith("{"):
            raise self._fail("a header starts with '{'", 0)
        self._pos = 1
        if not self._skip("}"):
            while True:
                at = self._space()
                entry = self._usual()
                name = self._key() if entry is None else entry.name
                if name in names:
                    raise self._fail("this name is there twice", at, tensor=name)
                names.add(name)
                if name == METADATA:
                    metadata, _ = self.metadata()
                else:
                    entries.append(entry or self._entry(name, at))
                if self._closed("}"):
                    break
        if self._space() != len(self._text):
            raise self._fail("something behind the header's object")
        return entries, metadata

    def _space(self) -> int:
        found = _SPACE.match(self._text, self._pos)
        assert found is not None
        self._pos = found.end()
        return self._pos

    def _skip(self, what: str) -> bool:
        """Pass one character and the space before it, if it is the next."""
        if self._text[self._space() : self._pos + 1] != what:
            return False
        self._pos += 1
        return True

    def _expect(self, what: str) -> None:
        if not self._skip(what):
            found = self._text[self._pos : self._pos + 1]
            raise self._fail(f"expected '{what}', got '{printable(found)}'" if found else f"ends where '{what}' is due")

    def _closed(self, end: str) -> bool:
        """Return True if an object or array ends here; otherwise a comma has to follow."""
        if self._skip(end):
            return True
        self._expect(",")
        self._space()
        return False

    def _string(self) -> str:
        self._expect('"')
        start = self._pos
        try:
            scanned: tuple[str, int] = scanstring(self._text, start, True)
        except ValueError as error:
            raise self._fail(f"no string of JSON ({printable(str(error).partition(':')[0])})", start) from None
        found, self._pos = scanned
        if not encodable(found):
            raise self._fail("a string with lone surrogates, which are not UTF-8", start)
        return found

    def _key(self) -> str:
        name = self._string()
        self._expect(":")
        return name

    def _usual(self) -> HeaderEntry | None:
        """Return an entry that is written as most are, None where it has to be looked at closely."""
        found = _USUAL.match(self._text, self._pos)
        form = found and _usual_form(found[2])
        if not found or not form or not found[1] or found[1] == METADATA:
            return None
        self._pos = found.end()
        return HeaderEntry(found[1], *form, int(found[3]), int(found[4]))

    def metadata(self) -> tuple[dict[str, str], int]:
        """Return the metadata that is next, and where it ends."""
        out: dict[str, str] = {}
        self._expect("{")
        if self._skip("}"):
            return out, self._pos
        while True:
            at = self._space()
            name = self._key()
            if not name or "\0" in name:
                raise self._fail("a name in the metadata that is empty or has NUL", at)
            if name in out:
                raise self._fail(f"metadata '{printable(name)}' is there twice", at)
            self._space()
            if self._text[self._pos : self._pos + 1] != '"':
                raise self._fail(f"metadata '{printable(name)}' is no string")
            out[name] = self._string()
            if self._closed("}"):
                return out, self._pos

    def _entry(self, name: str, at: int) -> HeaderEntry:
        try:
            if not name or "\0" in name:
                raise self._fail("a name that is empty or has NUL", at)
            found = self._fields()
        except RecordError as error:
            raise error.located(tensor=name) from None
        return HeaderEntry(name, *found)

    def _fields(self) -> tuple[DType, tuple[int, ...], int, int]:
        kind: DType | None = None
        shape: tuple[int, ...] | None = None
        offsets: tuple[int, ...] | None = None
        self._expect("{")
        while True:
            at = self._space()
            field = self._key()
            if field == "dtype" and kind is None:
                kind = self._dtype()
            elif field == "shape" and shape is None:
                shape = self._integers(MAX_RANK, "dimensions")
            elif field == "data_offsets" and offsets is None:
                offsets = self._integers(2, "data_offsets")
            else:
                raise self._fail(f"field '{printable(field)}' is unknown, or there twice", at)
            if self._closed("}"):
                break
        if kind is None or shape is None or offsets is None:
            raise self._fail("one of dtype, shape and data_offsets is missing")
        if len(offsets) != 2:
            raise self._fail("data_offsets are not two numbers")
        return kind, shape, offsets[0], offsets[1]

    def _dtype(self) -> DType:
        at = self._space()
        dtype = self._string()
        if dtype not in by_safetensors:
            raise self._fail(f"dtype '{printable(dtype)}' is not known; it knows {', '.join(by_safetensors)}", at)
        return by_safetensors[dtype]

    def _integers(self, most: int, what: str) -> tuple[int, ...]:
        out: list[int] = []
        self._expect("[")
        if self._skip("]"):
            return ()
        while True:
            found = _INTEGER.match(self._text, self._space())
            digits = found.group() if found else self._text[self._pos : self._pos + 1]
            if not (digits.isascii() and digits.isdigit()) or (digits[0] == "0" and len(digits) > 1):
                raise self._fail(f"expected a whole number from 0 on, got '{printable(digits, 40)}'")
            if len(digits) > _DIGITS:
                raise self._fail(f"a number of {len(digits)} digits")
            if len(out) == most:
                raise self._fail(f"more than {most} {what}")
            out.append(int(digits))
            self._pos += len(digits)
            if self._closed("]"):
                return tuple(out)


def encode_header(entries: Iterable[HeaderEntry], metadata: Mapping[str, str]) -> bytes:
    """Return length and header, as safetensors' own writer has them, padded so that the bytes behind start aligned.

    Raises:
        LimitError: no reader would take a header this large.
    """

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
        what = "names, attributes and metadata come to"
        raise LimitError(f"{what} {len(header)} bytes, a safetensors header has at most {MAX_HEADER}")
    return len(header).to_bytes(8, "little") + header
