"""Tensors as typed constants of C and C++: headers that declare the symbols of `asm`.

Declares each element type and shape; the bytes come from `asm` and `blob`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Literal

from .asm import ENDIAN, packed_file, source
from .comments import description, head
from .plan import Constant, Plan

Language = Literal["c", "cpp"]

_FORMS = {
    "bool": "bool is uint8_t, 0 or 1.",
    "half": "16-bit floats are uint16_t: their bits.",
    "narrow": "8-bit floats are uint8_t: their bits.",
    "complex": "A complex element is two numbers, its real and its imaginary part: the last axis.",
    "packed": "Elements below 8 bits are packed into uint8_t[NBYTES]: element i is bits [i * BITS, (i + 1) * BITS),"
    " counted from the least significant bit of the first byte on.",
    "string": "Strings are uint8_t[NBYTES]: their bytes, zeros to a multiple of 8, then COUNT + 1 offsets of 64 bits.",
    "unknown": "What has an element type that the generator did not know is uint8_t[NBYTES].",
}

_ALIGNED = """\
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

NOT_TELLING = """\
/* The archive was saved without digests, so nothing short tells whether it is still the same. */
"""

_CURRENT = """\
/* The archive's last 8 bytes, which tell archives apart. */
extern {upper}_ALIGNED(4) const {word} {stem}_check[2];

/* Whether the archive is the one that this header was generated from; costs nothing where it is not called. */
static inline int {stem}_is_current(void)
{{
    return {first} == 0x{index_crc:08x}UL && {second} == 0x{header_crc:08x}UL;
}}
"""


_PROGMEM = """\
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

    No pointer table, no initialiser, no run time: each tensor is a symbol with its type. Args as in `asm.files`.

    Example:
        >>> import numpy as np, zcrecord
        >>> from zcrecord.embed.plan import plan
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> header = b"".join(files(plan("model.zcr"), ".")["model.h"]).decode()
        >>> "const float model_w[2][3];" in header and "#define MODEL_W_SHAPE {2, 3}" in header
        True
    """
    flash = in_other_memory(section)
    name, made = (".h", _header(plan, flash)) if language == "c" else (".hpp", _cpp_header(plan, flash))
    header = {plan.stem + name: made}
    return {f"{plan.stem}.S": source(plan, directory, section), **header, **packed_file(plan)}


def in_other_memory(section: str | None) -> bool:
    """Return True for a section of AVR's program memory, an address space that pointers do not read."""
    return section is not None and section.startswith(".progmem")


def declared(c: Constant, name: str, prefix: str = "") -> str:
    """Return a declarator of a constant's type: `float name[64][128]`; `prefix` comes before the type's name."""
    kind, shape = _form(c)
    return f"{kind if kind in ('float', 'double') else prefix + kind} {name}" + "".join(f"[{dim}]" for dim in shape)


def _form(c: Constant) -> tuple[str, Sequence[int]]:
    """Return the C type of an element, and the dimensions of an array of them."""
    if c.dtype.c is None or c.bits < 8:
        return "uint8_t", (c.nbytes,)
    return c.dtype.c, (*c.shape, 2) if c.dtype.name.startswith("complex") else c.shape


def forms(constants: Iterable[Constant]) -> list[str]:
    """Return notes on the element types that occur, for readers of the header."""
    kinds: dict[str, None] = {}
    for c in constants:
        name = c.dtype.name
        if c.dtype.c is None:
            kinds["unknown" if c.dtype.bits else "string"] = None
        elif c.bits < 8:
            kinds["packed"] = None
        elif name == "bool" or name.startswith("complex"):
            kinds[name.rstrip("0123456789")] = None
        elif "float" in name and c.dtype.c.startswith("uint"):
            kinds["half" if c.bits == 16 else "narrow"] = None
    return [text for kind, text in _FORMS.items() if kind in kinds]


def numbers(c: Constant) -> dict[str, int]:
    """Return a constant's numbers, by the word that is appended to its name for each."""
    dims = {f"dim{i}": dim for i, dim in enumerate(c.shape)}
    return {"rank": len(c.shape), **dims, "count": prod(c.shape), "nbytes": c.nbytes, "bits": c.bits,
            "dtype": c.dtype.code}  # fmt: skip


def dimensions(c: Constant) -> str:
    """Return the macros of a constant's numbers; rank 0 has no shape macro, since C99 has no initialiser `{}`."""
    upper = c.identifier.upper()
    out = [f"#define {upper}_{word.upper()} {value}\n" for word, value in numbers(c).items()]
    if c.shape:
        out.append(f"#define {upper}_SHAPE {{{', '.join(map(str, c.shape))}}}\n")
    return "".join(out)


def aligned(stem: str) -> str:
    """Return the macro that aligns a declaration, and the #error for big-endian machines."""
    return ENDIAN + "\n" + _ALIGNED.format(upper=stem.upper())


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
    """Yield the C header, which C++ takes, too."""
    upper = plan.stem.upper()
    yield head(plan, _about(plan, "h")).encode()
    yield f"#ifndef {upper}_H\n#define {upper}_H\n\n#include <stdint.h>\n".encode()
    yield f"{included(flash)}\n{aligned(plan.stem)}\n".encode()
    yield f'#ifdef __cplusplus\nextern "C" {{\n#endif\n\n{assertions(plan)}\n{_current(plan, "", flash)}'.encode()
    for c in plan.constants:
        yield f"\n/* {description(c)} */\n{_extern(plan, c)}{dimensions(c)}".encode()
    yield f"\n#ifdef __cplusplus\n}}\n#endif\n\n#endif /* {upper}_H */\n".encode()


def _extern(plan: Plan, c: Constant, prefix: str = "") -> str:
    if not c.nbytes:
        return ""
    return f"extern {plan.stem.upper()}_ALIGNED({c.alignment}) const {declared(c, c.identifier, prefix)};\n"


def included(flash: bool) -> str:
    """Return the #include lines of a header for constants in another memory."""
    return _PROGMEM if flash else ""


def _current(plan: Plan, prefix: str, flash: bool) -> str:
    if not plan.telling:
        return NOT_TELLING
    words = [f"pgm_read_dword(&{plan.stem}_check[{i}])" if flash else f"{plan.stem}_check[{i}]" for i in range(2)]
    values = {"index_crc": plan.index_crc, "header_crc": plan.header_crc, "first": words[0], "second": words[1]}
    return _CURRENT.format(upper=plan.stem.upper(), stem=plan.stem, word=f"{prefix}uint32_t", **values)


def _about(plan: Plan, suffix: str) -> list[str]:
    stem, own = plan.stem, [c for c in plan.constants if c.nbytes and c.base is None]
    nbytes = sum(c.nbytes for c in own)
    compiler = "cc" if suffix == "h" else "c++"
    return [
        f"{len(plan.constants)} tensors in {nbytes} bytes of read-only memory; no RAM, nothing to initialise, nothing"
        f" to free. Their bytes come from {stem}.S, which takes them from the archive; each has a section of its own,"
        " and --gc-sections drops those that nothing uses. All are in C order and aligned as declared.",
        f"   {compiler} -I. program.{'c' if suffix == 'h' else 'cpp'} {stem}.S -Wl,--gc-sections",
        "Beside each are its rank, its dimensions, how many elements and bytes it has, how many bits an element, its"
        " type's code in the format's table, and its shape as an initialiser.",
        *forms(plan.constants),
    ]


def _cpp_header(plan: Plan, flash: bool) -> Iterator[bytes]:
    """Yield the C++ header: the same symbols in a namespace, without the prefix."""
    upper, space = plan.stem.upper(), plan.stem
    yield head(plan, [*_about(plan, "hpp"), f"Names are in namespace {space}."]).encode()
    yield f"#ifndef {upper}_HPP\n#define {upper}_HPP\n\n#include <cstddef>\n#include <cstdint>\n".encode()
    yield f"{included(flash)}\n{aligned(plan.stem)}\n{_INLINE.format(upper=upper)}\nnamespace {space} {{\n\n".encode()
    yield f'extern "C" {{\n{_current(plan, "std::", flash)}}}\n\n{assertions(plan)}'.encode()
    for c, name in zip(plan.constants, plan.local, strict=True):
        yield f"\n/* {description(c)} */\n".encode()
        if c.nbytes:
            yield f'extern "C" {{\n{_extern(plan, c, "std::")}}}\n'.encode()
        if c.nbytes and name != c.identifier:
            reference = declared(c, f"(&{name})" if _form(c)[1] else f"&{name}", "std::")  # g++ warns of others
            yield f"{upper}_INLINE const {reference} = {c.identifier};\n".encode()
        sizes = {word: value for word, value in numbers(c).items() if not word.startswith("dim")}  # the shape has them
        values = "".join(f"{upper}_INLINE std::size_t {name}_{word} = {value};\n" for word, value in sizes.items())
        shape = ", ".join(f"{dim}" for dim in c.shape)
        values += f"{upper}_INLINE std::size_t {name}_shape[] = {{{shape}}};\n" if c.shape else ""
        yield values.encode()
    yield f"\n}} /* namespace {space} */\n\n#undef {upper}_INLINE\n#endif /* {upper}_HPP */\n".encode()
