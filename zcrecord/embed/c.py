"""Tensors as typed constants of C and C++: headers that declare the symbols of `asm`.

Declares each element type and shape; the bytes come from `asm` and `blob`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from .asm import ENDIAN, packed_file, source
from .comments import description, head_comment, type_notes
from .plan import Constant, Plan

Language = Literal["c", "cpp"]
OCTETS = "uint8_t", "uint8_t[NBYTES]"  # the types of a byte and of bytes
_FLOAT_SIZES = {"float": 4, "double": 8}  # in the archive

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
    """Return the files for a C or C++ program: `.S`, `.h` or `.hpp`, and the packed file if there is one."""
    suffix, header = ("h", _header) if language == "c" else ("hpp", _cpp_header)
    return {
        f"{plan.stem}.S": source(plan, directory, section),
        f"{plan.stem}.{suffix}": header(plan, in_flash(section)),
        **packed_file(plan),
    }


def in_flash(section: str | None) -> bool:
    """Return True for a section of AVR's program memory, an address space that pointers do not read."""
    return section is not None and section.startswith(".progmem")


def declarator(constant: Constant, name: str, prefix: str = "") -> str:
    """Return a declarator of a constant's type: `float name[64][128]`; `prefix` is put before types of <stdint.h>."""
    element, shape = _array_type(constant)
    if element not in _FLOAT_SIZES:
        element = prefix + element
    return f"{element} {name}" + "".join(f"[{dim}]" for dim in shape)


def _array_type(constant: Constant) -> tuple[str, Sequence[int]]:
    """Return the C type of an element, and the dimensions of an array of them; packed elements are bytes."""
    if constant.dtype.c is None or constant.bits < 8:
        return "uint8_t", (constant.nbytes,)
    return constant.dtype.c, (*constant.shape, 2) if constant.dtype.name.startswith("complex") else constant.shape


def dimensions(constant: Constant) -> str:
    """Return the macros of a constant's numbers; rank 0 has no shape macro, since C99 has no initialiser `{}`."""
    upper = constant.identifier.upper()
    out = [f"#define {upper}_{word.upper()} {value}\n" for word, value in constant.numbers.items()]
    if constant.shape:
        out.append(f"#define {upper}_SHAPE {{{', '.join(map(str, constant.shape))}}}\n")
    return "".join(out)


def alignment_macro(stem: str) -> str:
    """Return the macro that aligns a declaration, and the #error for big-endian machines."""
    return ENDIAN + "\n" + _ALIGNMENT_MACRO.format(upper=stem.upper())


def assertions(plan: Plan) -> str:
    """Return checks that a C compiler's floating-point types have the archive's sizes; some small machines' differ."""
    elements = {_array_type(constant)[0] for constant in plan.constants if constant.nbytes}
    return "".join(
        f"typedef char {plan.stem}_check_{element}[sizeof({element}) == {nbytes} ? 1 : -1];\n"
        for element, nbytes in _FLOAT_SIZES.items()
        if element in elements
    )


def _header(plan: Plan, flash: bool) -> Iterator[bytes]:
    """Yield the C header; with `flash`, for tensors in AVR's program memory."""
    upper = plan.stem.upper()
    yield head_comment(plan, _about(plan, "h")).encode()
    yield f"#ifndef {upper}_H\n#define {upper}_H\n\n#include <stdint.h>\n".encode()
    yield f"{PROGMEM if flash else ''}\n{alignment_macro(plan.stem)}\n".encode()
    yield f'#ifdef __cplusplus\nextern "C" {{\n#endif\n\n{assertions(plan)}\n'.encode()
    yield _is_current_function(plan, "", flash).encode()
    for constant in plan.constants:
        yield f"\n/* {description(constant)} */\n{_extern(plan, constant)}{dimensions(constant)}".encode()
    yield f"\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {upper}_H */\n".encode()


def _extern(plan: Plan, constant: Constant, prefix: str = "") -> str:
    """Return the declaration of a constant's symbol, "" for an empty one; `prefix` is that of `declarator`."""
    if not constant.nbytes:
        return ""
    variable = declarator(constant, constant.identifier, prefix)
    return f"extern {plan.stem.upper()}_ALIGNED({constant.alignment}) const {variable};\n"


def _is_current_function(plan: Plan, prefix: str, flash: bool) -> str:
    """Return the function `STEM_is_current`, which compares the archive's two CRCs; a comment without digests."""
    if not plan.has_digests:
        return NO_DIGESTS
    word = f"pgm_read_dword(&{plan.stem}_check[{{}}])" if flash else f"{plan.stem}_check[{{}}]"
    values: dict[str, object] = {"index_crc": plan.last_word & 0xFFFFFFFF, "header_crc": plan.last_word >> 32}
    values |= {"upper": plan.stem.upper(), "stem": plan.stem, "word": f"{prefix}uint32_t"}
    return _IS_CURRENT.format(first=word.format(0), second=word.format(1), **values)


def _about(plan: Plan, suffix: str) -> list[str]:
    """Return the paragraphs at the head of the header."""
    stem, nbytes = plan.stem, plan.nbytes
    build = "cc -I. program.c" if suffix == "h" else "c++ -I. program.cpp"
    return [
        f"{len(plan.constants)} tensors in {nbytes} bytes of read-only memory; no RAM, nothing to initialise, nothing"
        f" to free. Their bytes come from {stem}.S, which takes them from the archive; each has a section of its own,"
        " and --gc-sections drops those that nothing uses. All are in C order and aligned as declared.",
        f"   {build} {stem}.S -Wl,--gc-sections",
        "Beside each are its rank, its dimensions, how many elements and bytes it has, how many bits an element, its"
        " type's code in the format's table, and its shape as an initialiser.",
        *type_notes(plan.constants, *OCTETS),
    ]


def _cpp_header(plan: Plan, flash: bool) -> Iterator[bytes]:
    """Yield the C++ header: the same symbols in a namespace, without the prefix; `flash` as in `_header`."""
    upper, namespace = plan.stem.upper(), plan.stem
    yield head_comment(plan, [*_about(plan, "hpp"), f"Names are in namespace {namespace}."]).encode()
    yield f"#ifndef {upper}_HPP\n#define {upper}_HPP\n\n#include <cstddef>\n#include <cstdint>\n".encode()
    yield f"{PROGMEM if flash else ''}\n{alignment_macro(namespace)}\n{_INLINE.format(upper=upper)}\n".encode()
    yield f"namespace {namespace} {{\n\n".encode()
    yield f'extern "C" {{\n{_is_current_function(plan, "std::", flash)}}}\n\n{assertions(plan)}'.encode()
    for constant in plan.constants:
        yield _cpp_constant(plan, constant).encode()
    yield f"\n}} /* namespace {namespace} */\n\n#undef {upper}_INLINE\n#endif /* {upper}_HPP */\n".encode()


def _cpp_constant(plan: Plan, constant: Constant) -> str:
    """Return the C++ declarations of a constant: its symbol, a reference by its local name, and its numbers."""
    inline, name = f"{plan.stem.upper()}_INLINE", constant.local
    out = f"\n/* {description(constant)} */\n"
    if constant.nbytes:
        out += f'extern "C" {{\n{_extern(plan, constant, "std::")}}}\n'
    if constant.nbytes and name != constant.identifier:
        by_reference = f"(&{name})" if _array_type(constant)[1] else f"&{name}"  # g++ warns of needless parentheses
        out += f"{inline} const {declarator(constant, by_reference, 'std::')} = {constant.identifier};\n"
    for word, value in constant.numbers.items():
        if not word.startswith("dim"):  # the shape has them
            out += f"{inline} std::size_t {name}_{word} = {value};\n"
    if constant.shape:
        out += f"{inline} std::size_t {name}_shape[] = {{{', '.join(map(str, constant.shape))}}};\n"
    return out
