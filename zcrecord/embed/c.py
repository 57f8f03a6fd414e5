"""Tensors as typed constants of C and C++: headers that declare the symbols of `asm`.

Declares each element type and shape; the bytes come from `asm` and `blob`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from .asm import ENDIAN, packed_file, source
from .comments import description, forms, head
from .plan import Constant, Plan

Language = Literal["c", "cpp"]
OCTETS = "uint8_t", "uint8_t[NBYTES]"  # the types of a byte and of bytes

_ALIGNMENT_MACRO = """\
#ifndef {upper}_ALIGNED
#if defined(_WIN32) /* where nothing is aligned to more than 8192 */
#define {upper}_ALIGNMENT(n) ((n) > 8192 ? 8192 : (n))
#else
#define {upper}_ALIGNMENT(n) (n)
#endif
#if defined(__GNUC__) || defined(__clang__)
#define {upper}_ALIGNED(n) __attribute__((aligned({upper}_ALIGNMENT(n))))
#elif defined(_MSC_VER)
#define {upper}_ALIGNED(n) __declspec(align({upper}_ALIGNMENT(n)))
#else
#define {upper}_ALIGNED(n)
#endif
#endif
"""

NO_DIGESTS = """\
/* The archive was saved without digests, so nothing short tells whether it is still the same. */
"""

_IS_CURRENT = """\
/* The archive's last 8 bytes, which tell archives apart. */
extern {upper}_ALIGNED(4) const {word} {stem}_check[2];

/* Whether the archive is the one that this header was generated from; costs nothing where it is not called. */
static inline int {stem}_is_current(void)
{{
    return {first} == 0x{index_crc:08x}UL && {second} == 0x{header_crc:08x}UL;
}}
"""

PROGMEM = """\
#include <avr/pgmspace.h> /* the section is no part of the memory that a pointer reads */
"""

_INLINE = """\
#if defined(__cpp_inline_variables)
#define {upper}_INLINE inline constexpr
#else
#define {upper}_INLINE static constexpr
#endif
"""


def files(
    plan: Plan, directory: str, *, language: Language = "c", section: str | None = None
) -> dict[str, Iterable[bytes]]:
    """Return the files for a C or C++ program: `.S`, `.h` or `.hpp`, and the packed file if there is one.

    No pointer table, no initialiser, no run time: each tensor is a symbol with its type.
    """
    flash = in_flash(section)
    suffix, header = ("h", _header) if language == "c" else ("hpp", _cpp_header)
    return {
        f"{plan.stem}.S": source(plan, directory, section),
        f"{plan.stem}.{suffix}": header(plan, flash),
        **packed_file(plan),
    }


def in_flash(section: str | None) -> bool:
    """Return True for a section of AVR's program memory, an address space that pointers do not read."""
    return section is not None and section.startswith(".progmem")


def declarator(c: Constant, name: str, prefix: str = "") -> str:
    """Return a declarator of a constant's type: `float name[64][128]`; `prefix` comes before the type's name."""
    kind, shape = _form(c)
    return f"{kind if kind in ('float', 'double') else prefix + kind} {name}" + "".join(f"[{dim}]" for dim in shape)


def _form(c: Constant) -> tuple[str, Sequence[int]]:
    """Return the C type of an element, and the dimensions of an array of them."""
    if c.dtype.c is None or c.bits < 8:
        return "uint8_t", (c.nbytes,)
    return c.dtype.c, (*c.shape, 2) if c.dtype.name.startswith("complex") else c.shape


def dimensions(c: Constant) -> str:
    """Return the macros of a constant's numbers; rank 0 has no shape macro, since C99 has no initialiser `{}`."""
    upper = c.identifier.upper()
    out = [f"#define {upper}_{word.upper()} {value}\n" for word, value in c.numbers.items()]
    if c.shape:
        out.append(f"#define {upper}_SHAPE {{{', '.join(map(str, c.shape))}}}\n")
    return "".join(out)


def alignment_macro(stem: str) -> str:
    """Return the macro that aligns a declaration, and the #error for big-endian machines."""
    return ENDIAN + "\n" + _ALIGNMENT_MACRO.format(upper=stem.upper())


def assertions(plan: Plan) -> str:
    """Return checks that a C compiler's floating-point types have the archive's sizes; some small machines' differ."""
    used = {_form(c)[0] for c in plan.constants if c.nbytes}
    sizes = {"float": 4, "double": 8}
    return "".join(
        f"typedef char {plan.stem}_check_{kind}[sizeof({kind}) == {nbytes} ? 1 : -1];\n"
        for kind, nbytes in sizes.items()
        if kind in used
    )


def _header(plan: Plan, flash: bool) -> Iterator[bytes]:
    upper = plan.stem.upper()
    yield head(plan, _about(plan, "h")).encode()
    yield f"#ifndef {upper}_H\n#define {upper}_H\n\n#include <stdint.h>\n".encode()
    yield f"{PROGMEM if flash else ''}\n{alignment_macro(plan.stem)}\n".encode()
    yield f'#ifdef __cplusplus\nextern "C" {{\n#endif\n\n{assertions(plan)}\n'.encode()
    yield _is_current_function(plan, "", flash).encode()
    for c in plan.constants:
        yield f"\n/* {description(c)} */\n{_extern(plan, c)}{dimensions(c)}".encode()
    yield f"\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {upper}_H */\n".encode()


def _extern(plan: Plan, c: Constant, prefix: str = "") -> str:
    if not c.nbytes:
        return ""
    return f"extern {plan.stem.upper()}_ALIGNED({c.alignment}) const {declarator(c, c.identifier, prefix)};\n"


def _is_current_function(plan: Plan, prefix: str, flash: bool) -> str:
    if not plan.has_digests:
        return NO_DIGESTS
    words = [f"pgm_read_dword(&{plan.stem}_check[{i}])" if flash else f"{plan.stem}_check[{i}]" for i in range(2)]
    crcs = {"index_crc": plan.last_word & 0xFFFFFFFF, "header_crc": plan.last_word >> 32}
    values = {**crcs, "first": words[0], "second": words[1]}
    return _IS_CURRENT.format(upper=plan.stem.upper(), stem=plan.stem, word=f"{prefix}uint32_t", **values)


def _about(plan: Plan, suffix: str) -> list[str]:
    stem, nbytes = plan.stem, plan.nbytes
    build = "cc -I. program.c" if suffix == "h" else "c++ -I. program.cpp"
    return [
        f"{len(plan.constants)} tensors in {nbytes} bytes of read-only memory; no RAM, nothing to initialise, nothing"
        f" to free. Their bytes come from {stem}.S, which takes them from the archive; each has a section of its own,"
        " and --gc-sections drops those that nothing uses. All are in C order and aligned as declared.",
        f"   {build} {stem}.S -Wl,--gc-sections",
        "Beside each are its rank, its dimensions, how many elements and bytes it has, how many bits an element, its"
        " type's code in the format's table, and its shape as an initialiser.",
        *forms(plan.constants, *OCTETS),
    ]


def _cpp_header(plan: Plan, flash: bool) -> Iterator[bytes]:
    """Yield the C++ header: the same symbols in a namespace, without the prefix."""
    upper, space = plan.stem.upper(), plan.stem
    yield head(plan, [*_about(plan, "hpp"), f"Names are in namespace {space}."]).encode()
    yield f"#ifndef {upper}_HPP\n#define {upper}_HPP\n\n#include <cstddef>\n#include <cstdint>\n".encode()
    yield f"{PROGMEM if flash else ''}\n{alignment_macro(space)}\n{_INLINE.format(upper=upper)}\n".encode()
    yield f"namespace {space} {{\n\n".encode()
    yield f'extern "C" {{\n{_is_current_function(plan, "std::", flash)}}}\n\n{assertions(plan)}'.encode()
    for c in plan.constants:
        name = c.local
        yield f"\n/* {description(c)} */\n".encode()
        if c.nbytes:
            yield f'extern "C" {{\n{_extern(plan, c, "std::")}}}\n'.encode()
        if c.nbytes and name != c.identifier:
            reference = declarator(c, f"(&{name})" if _form(c)[1] else f"&{name}", "std::")  # g++ warns of others
            yield f"{upper}_INLINE const {reference} = {c.identifier};\n".encode()
        sizes = {word: value for word, value in c.numbers.items() if not word.startswith("dim")}  # the shape has them
        values = "".join(f"{upper}_INLINE std::size_t {name}_{word} = {value};\n" for word, value in sizes.items())
        if c.shape:
            values += f"{upper}_INLINE std::size_t {name}_shape[] = {{{', '.join(map(str, c.shape))}}};\n"
        yield values.encode()
    yield f"\n}} /* namespace {space} */\n\n#undef {upper}_INLINE\n#endif /* {upper}_HPP */\n".encode()
