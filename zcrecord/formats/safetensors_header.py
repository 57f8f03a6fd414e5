"""The header of a safetensors file: scanned with care, every rule a typed error, and written.

A file is the header's length (u64), the header (JSON: names to dtype, shape and offsets) and the tensors' bytes. The
scanner goes once through the text and keeps nothing but entries, so no header costs more than a small constant times
its length. Where the bytes go is left to `safetensors`.

Source: https://github.com/huggingface/safetensors#format; limits and rules as in its own reader, and the ones it lacks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # the stubs lack it
from math import prod
from typing import NamedTuple

from zcrecord.converting import what_it_is
from zcrecord.dtypes import DType, by_safetensors, nbytes
from zcrecord.errors import FormatError, LimitError, RecordError, printable
from zcrecord.layout import MAX_ARCHIVE_SIZE, MAX_RANK, align_up
from zcrecord.tree import encodable

__all__ = ["MAX_HEADER", "METADATA", "Entry", "check_length", "decode_header", "encode_header"]

MAX_HEADER = 100_000_000  # bytes; the limit of safetensors' own reader, which writers have to keep, too
METADATA = "__metadata__"
_ALIGNMENT = 8  # of the tensors' bytes in the file, by its own writer's habit
_DIGITS = 20  # of a 64-bit number
_COPY = "the file is damaged, copy it again"

_NUMBER = rf"(?:0|[1-9][0-9]{{0,{_DIGITS - 1}}})"
_USUAL = re.compile(  # an entry as writers write it
    rf'"([^"\\\x00-\x1f]*+)":\{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,63}})?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
_SPACE = re.compile(r"[ \t\n\r]*+")
_INTEGER = re.compile(r"-?[0-9]++(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]*+)?")


class Entry(NamedTuple):
    """One tensor: its bytes are [start, end) of those behind the header."""

    name: str
    kind: DType
    shape: tuple[int, ...]
    start: int
    end: int


def check_length(head: bytes, file_nbytes: int | None) -> int:
    """Return how long the header is by the file's first 8 bytes; more of them tell what a wrong file is.

    Raises:
        FormatError: too short, or the header would be too large for any file, or for this one.
    """
    if len(head) < 8:
        raise FormatError(f"{len(head)} bytes are too few for a safetensors file")
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER:
        what = what_it_is(head)
        if what is not None:
            raise FormatError(f"{what}, not a safetensors file", offset=0)
        raise FormatError(f"its header would have {length} bytes, at most {MAX_HEADER} are legal; {_COPY}", offset=0)
    if file_nbytes is not None and length > file_nbytes - 8:
        raise FormatError(f"its header of {length} bytes ends past the end of the file ({file_nbytes})", offset=0)
    return length


def decode_header(header: bytes, data_nbytes: int | None) -> tuple[list[Entry], dict[str, str]]:
    """Return the tensors in the order of their bytes, and the metadata; `data_nbytes` follow the header, if known.

    Raises:
        FormatError: a rule is broken; says which, of which tensor, and at which byte of the file.
    """
    try:
        text = header.decode()
    except UnicodeDecodeError as error:
        offset = 8 + error.start
        raise FormatError(f"byte {offset:#x}: the header is not UTF-8; {_COPY}", offset=offset) from None
    entries, metadata = _Scanner(text).header()
    entries.sort(key=lambda e: e[3:])
    end = 0
    for entry in entries:
        try:
            _check_entry(entry, end, data_nbytes)
        except RecordError as error:
            raise error.located(tensor=entry.name) from None
        end = entry.end
    if data_nbytes is not None and end < data_nbytes:
        offset = 8 + len(header) + end
        raise FormatError(f"{data_nbytes - end} bytes behind the last tensor belong to none", offset=offset)
    return entries, metadata


def _check_entry(entry: Entry, expected: int, data_nbytes: int | None) -> None:
    if prod(d or 1 for d in entry.shape) * entry.kind.bits > 8 * MAX_ARCHIVE_SIZE:
        raise FormatError(f"its shape {entry.shape} claims more than 2^56 bytes")
    count, start, end = prod(entry.shape), entry.start, entry.end
    if start > end:
        raise FormatError(f"data_offsets [{start}, {end}] are the wrong way round")
    if data_nbytes is not None and end > data_nbytes:
        raise FormatError(f"data_offsets [{start}, {end}] end past the last of {data_nbytes} bytes; is it truncated?")
    if count * entry.kind.bits % 8:
        raise FormatError(f"{count} elements of {entry.kind.name} do not fill whole bytes")
    if (need := nbytes(count, entry.kind.bits)) != end - start:
        what = f"shape {entry.shape} of {entry.kind.name} takes {need} bytes"
        raise FormatError(f"{what}, data_offsets [{start}, {end}] say {end - start}")
    if start != expected:
        what = "overlaps the tensor before it" if start < expected else "leaves a hole before it"
        raise FormatError(f"data_offsets [{start}, {end}], {expected} is where it has to start: it {what}")


class _Scanner:
    """One pass through a header's text, for the few things it may hold."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0

    def _fail(self, what: str, pos: int | None = None, *, tensor: str | None = None) -> FormatError:
        offset = 8 + len(self._text[: self._pos if pos is None else pos].encode(errors="replace"))
        return FormatError(f"byte {offset:#x}: {what}; {_COPY}", offset=offset, tensor=tensor)

    def header(self) -> tuple[list[Entry], dict[str, str]]:
        """Return entries as they come, and the metadata."""
        entries: list[Entry] = []
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
                    metadata = self._metadata()
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
        """Return whether an object or array ends here; otherwise a comma has to."""
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

    def _usual(self) -> Entry | None:
        """Return an entry that is written as most are, None where it has to be looked at closely."""
        found = _USUAL.match(self._text, self._pos)
        if found is None:
            return None
        name, dtype, dims, start, end = found.groups()
        kind = by_safetensors.get(dtype)
        if kind is None or not name or name == METADATA:
            return None
        self._pos = found.end()
        return Entry(name, kind, tuple(map(int, dims.split(","))) if dims else (), int(start), int(end))

    def _metadata(self) -> dict[str, str]:
        out: dict[str, str] = {}
        self._expect("{")
        if self._skip("}"):
            return out
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
                return out

    def _entry(self, name: str, at: int) -> Entry:
        try:
            if not name or "\0" in name:
                raise self._fail("a name that is empty or has NUL", at)
            found = self._fields()
        except RecordError as error:
            raise error.located(tensor=name) from None
        return Entry(name, *found)

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


def encode_header(entries: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
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
