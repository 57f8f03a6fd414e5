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
from .comments import description, forms, head, literal, path_between
from .plan import Constant, Plan, check_places

_TRACKED = 16 << 20  # bytes; for more, a compiler takes seconds and hundreds of MB, and it fails for a GB

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
    texts = itertools.chain([head(plan, _about(plan, assembly)), "\n", _MODULE], body, ["}\n"])
    return {f"{plan.stem}.rs": map(str.encode, texts), **packed_file(plan)}


def _about(plan: Plan, assembly: bool) -> list[str]:
    """Return the lines of the comment at the top of a Rust file."""
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
        *forms(plan.constants, "u8", "[u8; NBYTES]"),
    ]


def _include_bytes_form(plan: Plan, directory: str, section: str | None) -> Iterator[str]:
    """Yield the form with one static for the archive, and one for the tensors that were put into C order."""
    upper = plan.stem.upper()
    alignment = max([plan.base_alignment, *(c.alignment for c in plan.constants)])
    wrapped = "{}" if section is None else "zcr_static! {{ _, {} }}"
    yield _archive_constant(plan, directory)
    if section is not None:
        attribute = f'link_section = "{section}{plan.stem if section.endswith(".") else ""}"'
        new, old = (f"#[cfg_attr({_ELF}, {attribute})] $($item)*" for attribute in (f"unsafe({attribute})", attribute))
        yield _BY_EDITION.format(name="zcr_static", new=new, old=old)
    static = wrapped.format("static ZCR__BLOB: Blob = Blob(*ZCR__FILE);")
    yield _BLOB.format(kind="Blob", nbytes=plan.archive_size, static=static, alignment=alignment)
    yield _ARCHIVE.format(upper=upper)
    if plan.packed_size:
        path = _string(f"{plan.stem}_packed.bin")
        yield _FILE.format(const="ZCR__PACKED_FILE", nbytes=plan.packed_size, path=path)
        static = wrapped.format("static ZCR__PACKED: Packed = Packed(*ZCR__PACKED_FILE);")
        yield _BLOB.format(kind="Packed", nbytes=plan.packed_size, static=static, alignment=alignment)
    for c in plan.constants:
        blob = "ZCR__PACKED" if c.place == "packed" else "ZCR__BLOB"
        yield _declaration(c, f"&*({blob}.0.as_ptr().add({c.offset}) as *const {_type(c)})")


def _assembly_form(plan: Plan, directory: str, arguments: dict[str, str]) -> Iterator[str]:
    """Yield the form with a symbol for each tensor."""
    if plan.archive_size < _TRACKED:
        yield _archive_constant(plan, directory)  # not linked; by it the compiler notices changes
    yield "\n// Each symbol has a section of its own, which a linker drops where nothing uses it.\n"
    yield "macro_rules! symbols {\n    ($($line:literal)*) => {\n"
    for cfg, (form, aligned, mark) in _TARGETS.items():
        macros = "".join(f'    r##"{line}"##,\n' for line in _macros(arguments[form], aligned, mark, elf=cfg == _ELF))
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
    for c in plan.constants:
        if c.nbytes:
            yield f'    #[link_name = "{c.identifier}"]\n    static ZCR__AT_{c.identifier.upper()}: {_type(c)};\n'
    yield "}\n"
    for c in plan.constants:
        yield _declaration(c, f"&ZCR__AT_{c.identifier.upper()}")


def _macros(section: str, aligned: Iterable[str], mark: str, *, elf: bool) -> list[str]:
    """Return the assembler's macros that define a symbol, and that name a part of one."""
    hidden = [r".hidden \name", r".type \name, %object", r".size \name, \nbytes"] if elf else []
    out = [".macro zcr_at name, log2, nbytes", f".section {section}", *aligned]
    out += [rf".globl {mark}\name", *hidden, rf"{mark}\name:", ".endm"]
    out += [".macro zcr_set name, base, offset, nbytes", rf".globl {mark}\name", *hidden]
    return [*out, rf".set {mark}\name, {mark}\base + \offset", ".endm"]


def _symbol_lines(plan: Plan, directory: str) -> Iterator[str]:
    """Yield a symbol for each tensor, with its bytes from the file at an absolute path."""
    places = {"archive": plan.archive, "packed": os.path.join(directory, f"{plan.stem}_packed.bin")}
    paths = {place: literal(real_path(path).encode(errors="surrogateescape")) for place, path in places.items()}
    for c in plan.constants:
        if c.base is not None:
            yield f"zcr_set {c.identifier}, {c.base}, {c.base_offset}, {c.nbytes}"
        elif c.nbytes:
            yield f"zcr_at {c.identifier}, {c.alignment.bit_length() - 1}, {c.nbytes}"
            yield f".incbin {paths[c.place or '']}, {c.offset}, {c.nbytes}"


def _archive_constant(plan: Plan, directory: str) -> str:
    """Return the archive's bytes as a constant, and a check that they are still the same."""
    path = path_between(directory, plan.archive)
    included = _FILE.format(const="ZCR__FILE", nbytes=plan.archive_size, path=_string(path))
    return included + (_CHECK.format(crc=plan.last_word) if plan.has_digests else "")


def _fingerprint(plan: Plan) -> int:
    """Return a value that changes with the archive: its CRCs or, if these do not cover the payloads, a hash of it."""
    if plan.has_digests:
        return plan.last_word
    with StreamReader(plan.archive) as reader:
        return digest_of_pieces(reader.pieces(plan.archive_size))


def _declaration(c: Constant, value: str) -> str:
    name = c.local.upper()
    kind = "u64" if max(c.shape, default=0) >> 32 else "usize"
    static = f"pub static {name}: &{_type(c)} = unsafe {{ {value} }};\n" if c.nbytes else ""
    about = f"/// {description(c)}\n" if c.nbytes else f"// {description(c)}\n"
    out = f"\n{about}{static}pub const {name}_NAME: &str = {_string(c.name)};\n"
    out += f"pub const {name}_DTYPE: &str = {_string(c.dtype.name)};\npub const {name}_BITS: u8 = {c.bits};\n"
    return out + f"pub const {name}_SHAPE: [{kind}; {len(c.shape)}] = [{', '.join(map(str, c.shape))}];\n"


def _string(text: str) -> str:
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\u{{{ord(c):x}}}" for c in text)
    return f'"{"".join(plain)}"'


def _type(c: Constant) -> str:
    if c.dtype.rust is None or c.bits < 8:
        return f"[u8; {c.nbytes}]"
    out = c.dtype.rust
    for dim in reversed(c.shape):
        out = f"[{out}; {dim}]"
    return out
