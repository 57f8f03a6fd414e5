"""Tensors as typed statics of Rust: a module without std; each static is a reference into the archive's own bytes.

Declares each element type and shape. Two forms: the archive as one aligned static, by `include_bytes!`, or each tensor
a symbol of its own, by `global_asm!`. `plan` says which tensors share bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator

from zcrecord.codec.digests import digest_of_pieces
from zcrecord.storage.files import real_path
from zcrecord.storage.stream_reader import StreamReader

from .asm import packed_file, sections
from .comments import description, head_comment, literal, path_between, type_notes
from .plan import Constant, Plan, check_places

_MOST_TRACKED = 16 << 20  # bytes; for more, a compiler takes seconds and hundreds of MB, and it fails for a GB

_MODULE = """\
#[allow(unused_imports)]
pub use constants::*;

#[allow(dead_code, unsafe_code, clippy::all)] // whatever the program does not use
mod constants {
#[cfg(not(target_endian = "little"))]
compile_error!("the archive is little-endian and used as it lies");
"""

_FILE = """
const {const}: &[u8; {nbytes}] = include_bytes!({path}); // another size: generate this file again
"""

_CHECK = """
const ZCR__CHECK: u64 = {{
    let [.., a, b, c, d, e, f, g, h] = *ZCR__FILE;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}};
const _: () = assert!(
    ZCR__CHECK == {crc:#018x},
    "the archive is not the one that this file was generated from: generate it again"
);
"""

_BLOB = """
#[repr(C, align({alignment}))]
struct {kind}([u8; {nbytes}]);
{static}
"""

_ARCHIVE = """
/// All bytes of the archive, as `zcrecord::Archive::open` takes them.
pub static {upper}_ARCHIVE: &[u8] = &ZCR__BLOB.0;
"""

# Edition 2024 demands an `unsafe` that older compilers do not know. Only in that edition macros match `_` as an
# expression.
_BY_EDITION = """
#[allow(unused_macros)]
macro_rules! {name} {{
    ($edition_2024:expr, $($item:tt)*) => {{ {new} }};
    (_, $($item:tt)*) => {{ {old} }};
}}
"""

_ELF = 'not(any(target_vendor = "apple", windows, target_family = "wasm"))'
_COFF = (r".if \log2 > 13", ".p2align 13", ".else", r".p2align \log2", ".endif")  # no alignment past 8192
_NO_WASM = """\
#[cfg(target_family = "wasm")]
compile_error!("WebAssembly has no assembler here: generate this module again, without --assembly");
"""
_TARGETS = {  # object format, alignment directives, and the character before names
    _ELF: ("elf", (r".p2align \log2",), ""),
    'target_vendor = "apple"': ("macho", (r".p2align \log2",), "_"),
    'all(windows, target_arch = "x86")': ("coff", _COFF, "_"),
    'all(windows, not(target_arch = "x86"))': ("coff", _COFF, ""),
}


def files(
    plan: Plan, directory: str, *, assembly: bool = False, section: str | None = None
) -> dict[str, Iterable[bytes]]:
    """Return the module for a Rust program, and the packed file if there is one; `core` alone, rustc 1.63 and later.

    With `assembly` each tensor is a symbol, by `global_asm!` and the archive's absolute path; otherwise the whole
    archive is one static. For large archives: the compiler does not read the bytes, and the linker drops unused
    tensors. The build then notices a changed archive only if it has less than 16 MiB.

    Raises:
        UnsupportedError: a section cannot have that name; or, without `assembly`, a tensor's offset is not a multiple
            of the alignment asked for.
    """
    arguments = sections(section)
    if not assembly:
        check_places(plan)
    body = _assembly_form(plan, directory, arguments) if assembly else _include_bytes_form(plan, directory, section)
    texts = itertools.chain([head_comment(plan, _about(plan, assembly)), "\n", _MODULE], body, ["}\n"])
    return {f"{plan.stem}.rs": map(str.encode, texts), **packed_file(plan)}


def _about(plan: Plan, assembly: bool) -> list[str]:
    """Return the paragraphs of the comment at the top of a Rust file."""
    linking = (
        "Each is a symbol of its own, and the linker drops those that nothing uses."
        if assembly
        else "They refer to one static, which holds the whole archive; for large ones see --assembly."
    )
    return [
        f"{len(plan.constants)} tensors in {plan.nbytes} bytes of read-only memory; no RAM, nothing to initialise, no"
        f" std. All are in C order and aligned. {linking}",
        f"   mod {plan.stem};",
        "or, where build.rs generates it,",
        f'   mod {plan.stem} {{ include!(concat!(env!("OUT_DIR"), "/{plan.stem}.rs")); }}',
        "In a crate that forbids unsafe code this module has to be a crate of its own: bytes become arrays here, which"
        " is sound for numbers, whose every pattern of bits is one.",
        *type_notes(plan.constants, "u8", "[u8; NBYTES]"),
    ]


def _include_bytes_form(plan: Plan, directory: str, section: str | None) -> Iterator[str]:
    """Yield the form with one static for the archive, and one for the tensors that were put into C order."""
    upper = plan.stem.upper()
    alignment = max([plan.base_alignment, *(constant.alignment for constant in plan.constants)])
    in_section = "{}" if section is None else "zcr_static! {{ _, {} }}"
    yield _archive_constant(plan, directory)
    if section is not None:
        attribute = f'link_section = "{section}{plan.stem if section.endswith(".") else ""}"'
        new, old = (f"#[cfg_attr({_ELF}, {attribute})] $($item)*" for attribute in (f"unsafe({attribute})", attribute))
        yield _BY_EDITION.format(name="zcr_static", new=new, old=old)
    static = in_section.format("static ZCR__BLOB: Blob = Blob(*ZCR__FILE);")
    yield _BLOB.format(kind="Blob", nbytes=plan.archive_size, static=static, alignment=alignment)
    yield _ARCHIVE.format(upper=upper)
    if plan.packed_size:
        path = _string(f"{plan.stem}_packed.bin")
        yield _FILE.format(const="ZCR__PACKED_FILE", nbytes=plan.packed_size, path=path)
        static = in_section.format("static ZCR__PACKED: Packed = Packed(*ZCR__PACKED_FILE);")
        yield _BLOB.format(kind="Packed", nbytes=plan.packed_size, static=static, alignment=alignment)
    for constant in plan.constants:
        blob = "ZCR__PACKED" if constant.place == "packed" else "ZCR__BLOB"
        yield _declaration(constant, f"&*({blob}.0.as_ptr().add({constant.offset}) as *const {_array_type(constant)})")


def _assembly_form(plan: Plan, directory: str, arguments: dict[str, str]) -> Iterator[str]:
    """Yield the form with a symbol for each tensor; `arguments` are those of `.section`, from `asm.sections`."""
    if plan.archive_size < _MOST_TRACKED:
        yield _archive_constant(plan, directory)  # not linked; by it the compiler notices changes
    yield "\n// Each symbol has a section of its own, which a linker drops where nothing uses it.\n"
    yield "macro_rules! symbols {\n    ($($line:literal)*) => {\n"
    for cfg, (object_format, alignment, prefix) in _TARGETS.items():
        lines = _macros(arguments[object_format], alignment, prefix, elf=cfg == _ELF)
        macros = "".join(f'    r##"{line}"##,\n' for line in lines)
        end = '$($line,)* ".purgem zcr_at", ".purgem zcr_set", ".text", options(raw)'
        yield f"#[cfg({cfg})]\ncore::arch::global_asm!(\n{macros}    {end}\n);\n"
    yield _NO_WASM
    yield "    };\n}\n\n// The first line changes with the archive, for incremental builds to see it.\n"
    yield f'symbols! {{\n    r##".set .Lzcr_{_fingerprint(plan):016x}, 0"##\n'
    for line in _symbol_lines(plan, directory):
        yield f'    r##"{line}"##\n'
    yield "}\n"
    yield _BY_EDITION.format(name="zcr_symbols", new='unsafe extern "C" { $($item)* }', old='extern "C" { $($item)* }')
    yield "\nzcr_symbols! { _,\n"
    for constant in plan.constants:
        if constant.nbytes:
            static = f"static ZCR__AT_{constant.identifier.upper()}: {_array_type(constant)};"
            yield f'    #[link_name = "{constant.identifier}"]\n    {static}\n'
    yield "}\n"
    for constant in plan.constants:
        yield _declaration(constant, f"&ZCR__AT_{constant.identifier.upper()}")


def _macros(section: str, alignment: Iterable[str], prefix: str, *, elf: bool) -> list[str]:
    """Return the lines of two assembler macros: one defines a symbol, one names a part; `prefix` goes before names."""
    attributes = [r".hidden \name", r".type \name, %object", r".size \name, \nbytes"] if elf else []
    out = [".macro zcr_at name, log2, nbytes", f".section {section}", *alignment]
    out += [rf".globl {prefix}\name", *attributes, rf"{prefix}\name:", ".endm"]
    out += [".macro zcr_set name, base, offset, nbytes", rf".globl {prefix}\name", *attributes]
    return [*out, rf".set {prefix}\name, {prefix}\base + \offset", ".endm"]


def _symbol_lines(plan: Plan, directory: str) -> Iterator[str]:
    """Yield the assembler's lines that define each tensor's symbol, with its bytes from a file at an absolute path."""
    files_by_place = {"archive": plan.archive, "packed": os.path.join(directory, f"{plan.stem}_packed.bin")}
    paths = {place: literal(real_path(file).encode(errors="surrogateescape")) for place, file in files_by_place.items()}
    for constant in plan.constants:
        if constant.base is not None:
            yield f"zcr_set {constant.identifier}, {constant.base}, {constant.base_offset}, {constant.nbytes}"
        elif constant.nbytes:
            yield f"zcr_at {constant.identifier}, {constant.alignment.bit_length() - 1}, {constant.nbytes}"
            yield f".incbin {paths[constant.place or '']}, {constant.offset}, {constant.nbytes}"


def _archive_constant(plan: Plan, directory: str) -> str:
    """Return the archive's bytes as a constant, and a check at compile time that the archive is still the same."""
    path = path_between(directory, plan.archive)
    included = _FILE.format(const="ZCR__FILE", nbytes=plan.archive_size, path=_string(path))
    return included + (_CHECK.format(crc=plan.last_word) if plan.has_digests else "")


def _fingerprint(plan: Plan) -> int:
    """Return a value that changes with the archive: its CRCs or, if these do not cover the payloads, a hash of it."""
    if plan.has_digests:
        return plan.last_word
    with StreamReader(plan.archive) as reader:
        return digest_of_pieces(reader.pieces(plan.archive_size))


def _declaration(constant: Constant, value: str) -> str:
    """Return a constant's static with this value, none if it is empty, and constants of its name, type and shape."""
    name = constant.local.upper()
    out = f"\n// {description(constant)}\n"
    if constant.nbytes:
        out = f"\n/// {description(constant)}\npub static {name}: &{_array_type(constant)} = unsafe {{ {value} }};\n"
    out += f"pub const {name}_NAME: &str = {_string(constant.name)};\n"
    out += f"pub const {name}_DTYPE: &str = {_string(constant.dtype.name)};\n"
    out += f"pub const {name}_BITS: u8 = {constant.bits};\n"
    integer = "u64" if max(constant.shape, default=0) >> 32 else "usize"
    dims = ", ".join(map(str, constant.shape))
    return out + f"pub const {name}_SHAPE: [{integer}; {len(constant.shape)}] = [{dims}];\n"


def _string(text: str) -> str:
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\u{{{ord(c):x}}}" for c in text)
    return f'"{"".join(plain)}"'


def _array_type(constant: Constant) -> str:
    """Return the Rust type of a constant: an array of arrays, or of bytes if Rust has no such elements."""
    if constant.dtype.rust is None or constant.bits < 8:
        return f"[u8; {constant.nbytes}]"
    out = constant.dtype.rust
    for dim in reversed(constant.shape):
        out = f"[{out}; {dim}]"
    return out
