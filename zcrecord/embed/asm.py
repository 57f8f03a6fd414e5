"""Assembler source with a symbol for each tensor: `.incbin` reads its bytes from the archive, into its own section.

For GNU as and clang, after the C preprocessor; for ELF, Mach-O, COFF and WebAssembly. `c` declares the symbols for C
and C++.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from zcrecord.errors import UnsupportedError, printable

from .comments import description, head_comment, literal, path_between
from .plan import Constant, Plan

_SECTION_NAME = re.compile(r"[A-Za-z._$][A-Za-z0-9._$-]{0,100}")
_CHECK_SIZE = 8  # bytes of the archive's end, two CRCs

ENDIAN = """\
#if defined(__BYTE_ORDER__) && defined(__ORDER_LITTLE_ENDIAN__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the archive is little-endian and used as it lies"
#endif
"""

_MACROS = """\
#if defined(_WIN32) || defined(__CYGWIN__) || defined(__UEFI__)
#define {upper}_COFF 1
#elif !defined(__ELF__) && !defined(__APPLE__) && !defined(__wasm__)
#error "no sections are known for this target; what any C compiler takes is: zcrecord embed --lang c --blob string"
#endif
#if defined(__APPLE__) || (defined({upper}_COFF) && defined(__i386__))
#define {upper}_UNDERSCORE 1 /* C's names have one before them */
#endif

{macro}
.macro zcr_symbol name, nbytes
#if defined({upper}_UNDERSCORE)
.globl _\\name
_\\name:
#else
.globl \\name
{typed}\\name:
#endif
.endm

.macro zcr_shared name, base, offset, nbytes
#if defined({upper}_UNDERSCORE)
.globl _\\name
.set _\\name, _\\base + \\offset
#else
.globl \\name
{typed}.set \\name, \\base + \\offset
#endif
.endm
"""

_TYPED = """\
#if defined(__ELF__)
.type \\name, %object
.size \\name, \\nbytes
#elif defined(__wasm__)
.type \\name, @object
.size \\name, \\nbytes
#endif
"""

_SECTION = """\
.macro zcr_section name, log2
#if defined(__ELF__)
.section {elf}
#elif defined(__APPLE__)
.section {macho}
#elif defined(__wasm__)
.section {wasm}
#else
.section {coff}
#endif
#if defined({upper}_COFF)
.if \\log2 > 13 /* COFF knows no more than 8192 */
.p2align 13
.else
.p2align \\log2
.endif
#else
.p2align \\log2
#endif
.endm
"""

_CONSTANT = """
.macro {macro} name, skip, nbytes, log2
zcr_section \\name, \\log2
zcr_symbol \\name, \\nbytes
.incbin {file}, \\skip, \\nbytes
.endm

/* The last bytes of {file}: read up to its end, so that another size is noticed. */
.macro {macro}_last name, skip, nbytes, log2
zcr_section \\name, \\log2
zcr_symbol \\name, \\nbytes
1:
.incbin {file}, \\skip
.if . - 1b - \\nbytes
.error "{file} is not the file that this one was generated from: generate it again"
.endif
.endm
"""

NOTES = """
#if defined(__ELF__)
.section .note.GNU-stack, "", %progbits
#if defined(__CET__) /* without this note a program would lose its shadow stack */
#include <cet.h>
#endif
#if defined(__ARM_FEATURE_BTI_DEFAULT) && defined(__aarch64__)
.section .note.gnu.property, "a", %note
.p2align 3
.long 4, 16, 5, 0x00554e47, 0xc0000000, 4, 3, 0
#endif
#endif
"""


def files(plan: Plan, directory: str, *, section: str | None = None) -> dict[str, Iterable[bytes]]:
    """Return the files for a program in assembler: `.S`, `.inc` with constants, and the packed file if there is one."""
    sources = {f"{plan.stem}.S": source(plan, directory, section), f"{plan.stem}.inc": equates(plan)}
    return {**sources, **packed_file(plan)}


def packed_file(plan: Plan) -> dict[str, Iterable[bytes]]:
    """Return the content of the packed file, with the bytes of strided tensors, by its name; empty without such."""
    return {f"{plan.stem}_packed.bin": plan.packed_chunks()} if plan.packed_size else {}


def source(plan: Plan, directory: str, section: str | None) -> Iterator[bytes]:
    """Yield the assembler file: a symbol for each tensor, and one for the archive's last 8 bytes, its check."""
    stem, upper = plan.stem, plan.stem.upper()
    about = [
        f"Every tensor as a symbol, its bytes taken from the archive. Assemble it with cc -c {stem}.S; -I has to name"
        f" this file's folder, or -D{upper}_ZCR='\"...\"' the archive.",
        "Assemble it again when the archive changes: a build system does not see what .incbin reads.",
        f"Sections: {'.rodata.NAME' if section is None else section}.",
    ]
    yield head_comment(plan, about).encode()
    yield macros(plan, directory, section).encode()
    if plan.packed_size:
        yield f'\n#ifndef {upper}_PACKED\n#define {upper}_PACKED "{stem}_packed.bin"\n#endif\n'.encode()
        yield _CONSTANT.format(macro="zcr_packed", file=f"{upper}_PACKED").encode()
    yield symbol_to_end(f"{stem}_check", plan.archive_size - _CHECK_SIZE, _CHECK_SIZE, alignment=4).encode()
    for constant in plan.constants:
        if constant.nbytes:
            yield f"\n/* {description(constant)} */\n{_symbol(constant, plan.packed_size)}".encode()
    yield NOTES.encode()


def _symbol(constant: Constant, packed_size: int) -> str:
    """Return the macro call that defines a constant's symbol."""
    if constant.base is not None:
        return f"zcr_shared {constant.identifier}, {constant.base}, {constant.base_offset}, {constant.nbytes}\n"
    macro = "zcr_constant"
    if constant.repacked:
        macro = "zcr_packed" if constant.offset + constant.nbytes < packed_size else "zcr_packed_last"
    log2 = constant.alignment.bit_length() - 1
    return f"{macro} {constant.identifier}, {constant.offset}, {constant.nbytes}, {log2}\n"


def symbol_to_end(name: str, offset: int, nbytes: int, alignment: int) -> str:
    """Return a symbol over the archive's bytes from `offset` to its end, so that the assembler checks its size."""
    return f"\nzcr_constant_last {name}, {offset}, {nbytes}, {alignment.bit_length() - 1}\n"


def macros(plan: Plan, directory: str, section: str | None) -> str:
    """Return the archive's path, relative to `directory`, and the macros that define symbols."""
    upper = plan.stem.upper()
    path = literal(path_between(directory, plan.archive).encode(errors="surrogateescape"))
    path_macro = f"\n#ifndef {upper}_ZCR\n#define {upper}_ZCR {path}\n#endif\n\n"
    section_macro = _SECTION.format(upper=upper, **sections(section))
    symbol_macros = _MACROS.format(upper=upper, macro=section_macro, typed=_TYPED)
    constant_macros = _CONSTANT.format(macro="zcr_constant", file=f"{upper}_ZCR")
    return f"\n{ENDIAN}{path_macro}{symbol_macros}{constant_macros}"


def sections(section: str | None) -> dict[str, str]:
    """Return the arguments of `.section` in each object format, for a symbol `\\name`.

    A section that ends in a dot gets each identifier added to it. Each ELF section is in a group of its own, so that a
    linker can drop unused ones although they have one name. (`unique` does the same, but only in binutils 2.35 and
    later.) Every linker script puts the default, `.rodata.`, into flash; a section that it does not name is left out,
    or copied to RAM. UnsupportedError if a section cannot have that name.
    """
    name = ".rodata." if section is None else section
    if not _SECTION_NAME.fullmatch(name):
        fault = "a section's name is letters, digits, '.', '_', '$' and '-', and does not start with a digit"
        raise UnsupportedError(f"section '{printable(name)}': {fault}")
    elf, coff = f'{name}, "aG", %progbits, \\name', name
    if name.endswith("."):
        elf, coff = f'{name}\\name, "a", %progbits', f"{name}\\name"
    coff = ".rdata$\\name" if section is None else coff
    return {"elf": elf, "macho": "__TEXT,__const", "wasm": '.rodata.\\name, "", @', "coff": f'{coff}, "dr"'}


def equates(plan: Plan, *, offsets: bool = False) -> Iterator[bytes]:
    """Yield constants for assembler programs; with `offsets`, also each tensor's offset in the archive."""
    about_symbols = "Numbers of the tensors, whose symbols are the .S's."
    yield head_comment(plan, ["Where the tensors lie in the archive." if offsets else about_symbols]).encode()
    for constant in plan.constants:
        numbers = constant.numbers | ({"offset": constant.offset} if offsets and constant.place == "archive" else {})
        yield f"\n/* {description(constant, placed=not offsets)} */\n".encode()
        for word, value in numbers.items():
            yield f".equ {constant.identifier.upper()}_{word.upper()}, {value}\n".encode()
