"""Files that an archive cannot be attached to: text, scripts, zip files, signed programs, models.

Parses just enough of Mach-O to find a signature; `codec.layout` parses Windows programs. The result is for people.
"""

from __future__ import annotations

import codecs
from typing import Literal

from zcrecord.codec.file_types import read_elsewhere
from zcrecord.codec.layout import certificate_table

_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE, _ZIP_COMMENT = 22, 65535  # bytes of a zip's last entry, and of the comment that may follow it
_MACHO_SIGNATURE = 0x1D  # LC_CODE_SIGNATURE
_HEAD = 4096  # bytes by which text and programs are distinguished: programs have zeros among them
_MOST_SLICES = 32  # of a universal program; a file with a larger count is a Java class


def objection(program: memoryview) -> str | None:
    """Return the reason why a program would not work with an archive attached; None if it would."""
    if _is_zip(program):
        return "it ends in a zip's directory (a zipapp?), which has to be last; put the archive into the zip, stored"
    if bytes(program[:2]) == b"#!":
        return "it is a script, whose interpreter would read on into the archive; leave the archive beside it"
    if _is_text(program):
        return "it is text, and no executable"
    if (table := certificate_table(program)) is not None and table[1]:
        return "it has an Authenticode signature, which would no longer hold; attach first, then sign"
    if _is_signed_macho(program):
        return "it has a code signature, which would no longer hold; take it off, attach, and sign it again"
    if (model := read_elsewhere(program)) is not None:
        return f"{model}, whose readers would not see the archive; leave it beside it"
    return None


def _number(data: memoryview, offset: int, order: Literal["little", "big"] = "little") -> int:
    """Return an unsigned number of 4 bytes; bytes past the end count as zeros."""
    return int.from_bytes(data[offset : offset + 4], order)


def _is_text(program: memoryview) -> bool:
    """Return True if a file starts as text: UTF-8 without control characters, except white space and escapes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(bytes(program[:_HEAD]), final=len(program) < _HEAD)  # it may end inside a character
    except UnicodeDecodeError:
        return False
    return not any(c < " " and c not in "\t\n\v\f\r\x1b" for c in text)


def _is_zip(program: memoryview) -> bool:
    tail = bytes(program[-(_ZIP_END_SIZE + _ZIP_COMMENT) :])
    offset = tail.rfind(_ZIP_END)
    while offset >= 0:
        if offset + _ZIP_END_SIZE + int.from_bytes(tail[offset + 20 : offset + 22], "little") == len(tail):
            return True
        offset = tail.rfind(_ZIP_END, 0, offset)
    return False


def _is_signed_macho(program: memoryview) -> bool:
    """Return True if a file is a Mach-O program, or a universal one, with a code signature."""
    if bytes(program[:4]) == b"\xca\xfe\xba\xbe" and (count := _number(program, 4, "big")) <= _MOST_SLICES:
        starts = [_number(program, 8 + 20 * i + 8, "big") for i in range(count)]
        return any(_has_signature(program[start:]) for start in starts)
    return _has_signature(program)


def _has_signature(program: memoryview) -> bool:
    if bytes(program[:4]) not in (b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe"):
        return False
    offset = 32 if program[0] == 0xCF else 28
    end = min(offset + _number(program, 20), len(program))
    for _ in range(_number(program, 16)):
        if offset >= end:
            return False
        if _number(program, offset) == _MACHO_SIGNATURE:
            return True
        offset += max(_number(program, offset + 4), 8)
    return False
