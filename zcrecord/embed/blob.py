"""A whole archive as one constant: by `.incbin`, by C23's `#embed`, or as string literals that every compiler takes.

For toolchains without an assembler that reads files, and for `zcrecord.h`, which opens an archive in memory. The header
declares each tensor with its type at its offset. Symbols of single tensors are left to `asm` and `c`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal

from zcrecord.codec.layout import align_up
from zcrecord.errors import IntegrityError, UnsupportedError, printable
from zcrecord.storage.stream_reader import StreamReader

from .asm import NOTES, equates, macros, sections, symbol_to_end
from .c import NO_DIGESTS, OCTETS, PROGMEM, Language, alignment_macro, assertions, declarator, dimensions, in_flash
from .comments import description, head_comment, path_between, type_notes
from .plan import Constant, Plan, check_places

Form = Literal["incbin", "embed", "string"]

_HALVES = (range(4), range(4, 8))  # of the last 8 bytes, for shorter lines
_PIECE = 4_000  # bytes of a literal: C99 guarantees 4,095 ...
_LINE = 256  # ... and MSVC takes parts of up to 2,048 characters; an escaped byte has 4
_ESCAPED = [chr(c) if 32 <= c < 127 and chr(c) not in '"\\?' else f"\\{c:03o}" for c in range(256)]

_HEADER = """\
#ifndef {upper}_BLOB_H
#define {upper}_BLOB_H

#include <stddef.h>
#include <stdint.h>
{included}
{aligned}
#ifndef {upper}_EXTENSION
#if defined(__GNUC__) || defined(__clang__)
#define {upper}_EXTENSION __extension__ /* members without a name, which C99 has not */
#else
#define {upper}_EXTENSION
#endif
#endif

#ifdef __cplusplus
extern "C" {{
#endif

{assertions}
/* The tensors where they lie. */
struct {stem}_blob_at {{
{members}}};
{pieces}
union {stem}_blob_union {{
{first}    unsigned char bytes[{nbytes}]; /* what zcr_open takes */
    struct {stem}_blob_at at;
}};

extern {upper}_ALIGNED({alignment}) const union {stem}_blob_union {stem}_blob;

{current}
typedef char {stem}_blob_check[sizeof(union {stem}_blob_union) == {nbytes} ? 1 : -1];
"""

_IS_CURRENT = """\
/* Whether the archive is the one that this header was generated from; costs nothing where it is not called. */
static inline int {stem}_is_current(void)
{{
    const unsigned char *last = {stem}_blob.bytes + {last};
    return {bytes};
}}
"""

_SOURCE = """\
#include "{stem}_blob.h"

{preamble}{upper}_ALIGNED({alignment}) const union {stem}_blob_union {stem}_blob{attribute} = {{{{
"""

_STRINGS = """\
#if !defined(__cplusplus) /* whose arrays have room for a literal's zero; C's may have none, and compilers warn */
#if defined(__clang__) && defined(__has_warning)
#if __has_warning("-Wunterminated-string-initialization")
#pragma clang diagnostic ignored "-Wunterminated-string-initialization"
#endif
#elif defined(__GNUC__) && __GNUC__ >= 15
#pragma GCC diagnostic ignored "-Wunterminated-string-initialization"
#endif
#endif

"""

_EMBED = """\
#ifndef {upper}_ZCR
#define {upper}_ZCR "{path}"
#endif

#if !defined(__has_embed)
#error "this compiler has no #embed; generate the blob by .incbin, or as a string"
#endif
#if defined(__clang__) /* 19 takes the bytes for signed ones; older standards than C23 have it as an extension */
#pragma clang diagnostic ignored "-Wsign-conversion"
#pragma clang diagnostic ignored "-Wc23-extensions"
#ifdef __cplusplus
#pragma clang diagnostic ignored "-Wc++11-narrowing"
#endif
#endif

"""


def files(
    plan: Plan, directory: str, *, form: Form, language: Language | Literal["asm"] = "c", section: str | None = None
) -> dict[str, Iterable[bytes]]:
    """Return the files that define the whole archive as one constant, `STEM_blob`: their content by name.

    The constant is aligned as its payloads need; the header declares the selected tensors alone. C and C++ take the
    same files. With the form 'string' the source is three to four times as large as the archive.

    Raises:
        UnsupportedError: an assembler does not have that form; a section cannot have that name; a tensor's offset is
            not a multiple of the alignment asked for. Where the content is read: `#embed` cannot name that path.
        IntegrityError: where the content of the form 'string' is read: the archive has changed.
    """
    name = f"{plan.stem}_blob"
    check_places(plan)
    header = _header(plan, form, in_flash(section))
    if form == "incbin":
        about = head_comment(plan, [f"The archive as one constant, {name}: cc -I. -c {name}.S"])
        symbol = symbol_to_end(name, 0, plan.archive_size, plan.base_alignment)
        assembler = [f"{about}{macros(plan, directory, section)}{symbol}{NOTES}".encode()]
        declarations = {f"{name}.inc": equates(plan, offsets=True)} if language == "asm" else {f"{name}.h": header}
        return {f"{name}.S": assembler, **declarations}
    if language == "asm":
        raise UnsupportedError(f"a blob by '{form}' is C; for an assembler there is 'incbin'")
    sections(section)  # raises for an illegal name
    return {f"{name}.c": _source(plan, directory, form, section), f"{name}.h": header}


def _header(plan: Plan, form: Form, flash: bool) -> Iterator[bytes]:
    """Yield the header: the constant's type, with a member for each tensor, and macros of the tensors' numbers."""
    stem, strings = plan.stem, form == "string"
    yield head_comment(plan, _about(plan, form)).encode()
    yield _HEADER.format(
        upper=stem.upper(),
        stem=stem,
        aligned=alignment_macro(stem),
        assertions=assertions(plan),
        members="".join(_members(plan)),
        pieces=_pieces_declared(plan) if strings else "",
        first=f"    struct {stem}_blob_pieces pieces;\n" if strings else "",
        nbytes=plan.archive_size,
        alignment=plan.base_alignment,
        included=PROGMEM if flash else "",
        current=_is_current_function(plan, flash),
    ).encode()
    for number, constant in enumerate(plan.constants):
        upper = constant.identifier.upper()
        out = f"\n/* {description(constant, placed=False)}: {_member(plan, constant)} */\n{dimensions(constant)}"
        if constant.place == "archive":
            condition = f"offsetof(struct {stem}_blob_at, {constant.local}) == {upper}_OFFSET"
            out += f"#define {upper}_OFFSET {constant.offset}\n"
            out += f"typedef char {stem}_blob_check_{number}[{condition} ? 1 : -1];\n"
        yield out.encode()
    yield f"\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {stem.upper()}_BLOB_H */\n".encode()


def _is_current_function(plan: Plan, flash: bool) -> str:
    """Return the function `STEM_is_current`, which compares the archive's last bytes; a comment without digests."""
    if not plan.has_digests:
        return NO_DIGESTS
    last = plan.last_word.to_bytes(8, "little")
    byte = "pgm_read_byte(last + {})" if flash else "last[{}]"
    lines = (" && ".join(f"{byte.format(i)} == {last[i]}" for i in half) for half in _HALVES)
    comparison = " &&\n        ".join(lines)
    return _IS_CURRENT.format(stem=plan.stem, last=plan.archive_size - 8, bytes=comparison)


def _about(plan: Plan, form: Form) -> list[str]:
    """Return the paragraphs at the head of the header."""
    name = f"{plan.stem}_blob"
    build = {
        "incbin": f"{name}.S takes it from the file: cc -I. program.c {name}.S",
        "embed": f"{name}.c takes it from the file by #embed: cc -std=c23 program.c {name}.c",
        "string": f"{name}.c holds it: cc program.c {name}.c",
    }
    return [
        f"The archive as one constant, {name}, of {plan.archive_size} bytes of read-only memory; no RAM. {build[form]}",
        f"{name}.at.NAME is a tensor with its type: no cast, and no pointer that a linker or loader would have to fill"
        f" in. {name}.bytes is what zcrecord.h opens.",
        *type_notes(plan.constants, *OCTETS),
    ]


def _member(plan: Plan, constant: Constant) -> str:
    """Return the C expression of a constant, or the reason why there is none, for a comment."""
    if constant.repacked:
        return "strided, so it has no constant here; zcrecord.h reads it"
    return f"{plan.stem}_blob.at.{constant.local}" if constant.nbytes else "empty"


def _members(plan: Plan) -> Iterator[str]:
    """Yield the members of a struct in which each tensor lies at its offset; tensors that share bytes are in a union.

    Gaps are explicit members, so that no compiler adds its own. Their names have capitals, which tensors' names lack.
    """
    position = 0
    gaps = (f"unsigned char Gap{number}" for number in itertools.count())
    for group in _groups_sharing_bytes(constant for constant in plan.constants if constant.place == "archive"):
        start, end = group[0].offset, max(constant.offset + constant.nbytes for constant in group)
        if start > position:
            yield f"    {next(gaps)}[{start - position}];\n"
        position = end
        if len(group) == 1:
            yield f"    {declarator(group[0], group[0].local)};\n"
            continue
        position = align_up(end, 8)  # every compiler's size of the union, whatever it aligns a double to
        extension = f"{plan.stem.upper()}_EXTENSION"
        yield f"    {extension} union {{\n        {next(gaps)}[{position - start}];\n"
        for constant in group:
            member = f"{declarator(constant, constant.local)};"
            if constant.offset > start:
                member = f"{extension} struct {{ {next(gaps)}[{constant.offset - start}]; {member} }};"
            yield f"        {member}\n"
        yield "    };\n"
    if not position:
        yield f"    {next(gaps)}[1];\n"


def _groups_sharing_bytes(constants: Iterable[Constant]) -> list[list[Constant]]:
    """Return constants by offset, in groups that do not overlap one another."""
    groups: list[list[Constant]] = []
    end = 0
    for constant in sorted(constants, key=lambda constant: (constant.offset, -constant.nbytes)):
        if not groups or constant.offset >= end:
            groups.append([])
        groups[-1].append(constant)
        end = max(end, constant.offset + constant.nbytes)
    return groups


def _source(plan: Plan, directory: str, form: Form, section: str | None) -> Iterator[bytes]:
    """Yield the C source that defines the constant; UnsupportedError for a path that `#embed` cannot name."""
    upper, preamble = plan.stem.upper(), _STRINGS
    if form == "embed":
        path = path_between(directory, plan.archive)
        if any(c in path for c in '"\\\n\r'):
            fault = f"#embed cannot name '{printable(path)}'; rename it, or generate the blob by .incbin"
            raise UnsupportedError(fault, path=plan.archive)
        preamble = _EMBED.format(upper=upper, path=path)
    names = {"upper": upper, "stem": plan.stem, "alignment": plan.base_alignment}
    attribute = "" if section is None else f' __attribute__((section("{section}")))'
    yield head_comment(plan, [f"The archive as one constant; {plan.stem}_blob.h says more."]).encode()
    yield _SOURCE.format(**names, preamble=preamble, attribute=attribute).encode(errors="surrogateescape")
    if form == "embed":
        yield f"#embed {upper}_ZCR\n".encode()
    else:
        for number, piece in enumerate(_pieces(plan)):
            yield _initialiser(piece, number).encode()
    yield b"}};\n"


def _pieces(plan: Plan) -> Iterator[bytes]:
    """Yield the archive in pieces for literals: each ends in a zero byte, if there is one within _PIECE bytes.

    C++ always stores a literal's final zero: it should be one of the archive. IntegrityError if that was changed.
    """
    pending, nbytes_read = b"", 0
    with StreamReader(plan.archive) as reader:
        for block in reader.pieces(plan.archive_size):
            pending += bytes(block)
            nbytes_read += len(block)
            while len(pending) >= _PIECE or (pending and nbytes_read == plan.archive_size):
                piece = pending[:_PIECE]
                piece = piece[: piece.rfind(b"\0") + 1] or piece
                yield piece
                pending = pending[len(piece) :]
            last = bytes(block)[-8:]
    if last != plan.last_word.to_bytes(8, "little"):
        raise IntegrityError("was changed while constants were made of it; start again", path=plan.archive)


def _pieces_declared(plan: Plan) -> str:
    """Return a struct with an array for each piece of the archive."""
    sizes = "".join(f"    unsigned char part{i}[{len(piece)}];\n" for i, piece in enumerate(_pieces(plan)))
    about = "/* The archive in parts that are no longer than compilers' string literals. */"
    return f"\n{about}\nstruct {plan.stem}_blob_pieces {{\n{sizes}}};\n"


def _initialiser(piece: bytes, number: int) -> str:
    """Return the string literal of a piece; also numbers, for C++, of a piece that does not end in a zero."""
    text = piece.rstrip(b"\0")  # elements without an initialiser are zero
    lines = [text[i : i + _LINE] for i in range(0, len(text), _LINE)] or [b""]
    literals = "\n".join('"' + "".join(map(_ESCAPED.__getitem__, line)) + '"' for line in lines)
    if len(text) == len(piece):
        numbers = "{" + ",\n".join(",".join(map(str, line)) for line in lines) + "}"
        literals = f"#ifdef __cplusplus\n{numbers}\n#else\n{literals}\n#endif"
    return (",\n" if number else "") + literals + "\n"
