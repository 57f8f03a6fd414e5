"""Sources that make an archive part of a program: chooses the generator, checks its options, reports.

The generators (`asm`, `blob`, `c`, `python`, `rust`) make the text of the sources; `write_files` writes them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from zcrecord.archive.name_patterns import Patterns
from zcrecord.errors import UnsupportedError
from zcrecord.onnx import tuned
from zcrecord.record.record import Record
from zcrecord.storage.files import open_sink, open_source, scratch_folder
from zcrecord.storage.folders import local_folder

from . import asm, c, python, rust
from . import blob as blobs
from .identifiers import check_name, stem_of
from .plan import Plan, plan, record_of
from .write_files import make_folder, write

Language = Literal["c", "cpp", "asm", "rust", "python"]
BlobForm = blobs.Form

LANGUAGES: dict[str, frozenset[str]] = {  # each with its options
    "c": frozenset({"alignment", "blob", "prefix", "reader", "section"}),
    "cpp": frozenset({"alignment", "blob", "prefix", "reader", "section"}),
    "asm": frozenset({"alignment", "blob", "prefix", "section"}),
    "rust": frozenset({"alignment", "assembly", "prefix", "reader", "section"}),
    "python": frozenset(),
}
_PIECE = 1 << 20  # bytes of a file copied at a time
_READERS = {"c": "zcrecord.h", "cpp": "zcrecord.h", "rust": "zcrecord.rs"}


@dataclass(frozen=True, slots=True)
class EmbedReport:
    """Report of `generate`.

    `nbytes` is the size of the program's constants: the bytes of the tensors, shared ones counted once, or the whole
    archive. `shared` tensors lie in another's bytes, `empty` ones have no bytes and no symbol, `left_out` ones were not
    selected. `renamed` are names whose identifiers are numbered, or avoid a reserved word. Strided tensors are
    `repacked`: their bytes are put into C order, into a file of their own. In a blob they are `unplaced`: the blob has
    no member for them.
    """

    archive: str
    lang: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    shared: int
    empty: int
    left_out: int
    renamed: tuple[tuple[str, str], ...]
    repacked: tuple[str, ...]
    unplaced: tuple[str, ...]


def generate(
    source: Any,
    directory: Any,
    *,
    lang: Language,
    blob: BlobForm | None = None,
    assembly: bool = False,
    select: Patterns | None = None,
    exclude: Patterns | None = None,
    prefix: str | None = None,
    name: str | None = None,
    section: str | None = None,
    alignment: int | None = None,
    reader: bool = False,
    force: bool = False,
) -> EmbedReport:
    """Write sources that make an archive's tensors constants of a program; all of them or none.

    For C, C++, assembler and Rust the bytes stay in the archive, and the build reads them from it. Exceptions: tensors
    that are not in C order are written to a second file, and sources for `blob="string"` and Python contain the bytes.
    The part that tuning added for ONNX Runtime is left out: a program that includes a whole archive gets a copy without
    that part, STEM_untuned.zcr.

    Args:
        source: an archive's path, or a record loaded from one.
        directory: the folder for the files; it is made if it does not exist.
        lang: "c" (.S and .h), "cpp" (.S and .hpp), "asm" (.S and .inc), "rust" (.rs), "python" (.py and .pyi).
        blob: C, C++, assembler: the archive as one constant, by .incbin; C and C++ also by C23's #embed or as literals.
        assembly: Rust: each tensor placed by `global_asm!`, so that the linker drops unused ones.
        select, exclude: shell patterns of names; one that matches a module stands for all below it.
        prefix: before every identifier, may be empty. By default the file's stem and an underscore; empty for C++ and
            Rust, which have a namespace or module.
        name: the name of files, namespace and module; by default the archive's stem, as an identifier.
        section: the section for payloads; one that ends in a dot gets each identifier added to it. `.rodata.` by
            default.
        alignment: the least alignment of every tensor, from 16 to 65536. A blob, and Rust without `assembly`, use the
            archive's own offsets: the archive has to have that alignment.
        reader: write `zcrecord.h` or `zcrecord.rs`, too, which open archives at run time.
        force: replace files that were not generated before.

    Raises:
        UnsupportedError: the language does not have an option; the archive is not a file of its own; a prefix is not an
        identifier; or a strided tensor has an unknown element type. TensorNotFoundError: a pattern matches nothing.
        DestinationExistsError: a file exists that was not generated. FormatError, SourceError: as `load_record`.
        LimitError: the archive is too large for the form.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"layer": {"w": np.ones((2, 3), np.float32)}}, "model.zcr")
        >>> generate("model.zcr", "out", lang="c").files
        ('out/model.S', 'out/model.h')
    """
    options = {"blob": blob, "assembly": assembly, "section": section, "prefix": prefix, "alignment": alignment}
    if fault := out_of_place(lang, {**options, "reader": reader}):
        raise UnsupportedError(fault)
    folder, record = local_folder(directory), record_of(source)
    path = str(record.archive.path)
    stem = stem_of(path) if name is None else check_name(name)
    form = _Form(lang, blob, assembly, section, reader)
    with _untuned_copy(record, folder, form) as untuned:
        selection: dict[str, Any] = {"select": select, "exclude": exclude, "prefix": prefix, "alignment": alignment}
        planned = plan(untuned or record, name=stem, **selection)
        copies: dict[str, Iterable[bytes]] = {}
        if untuned is not None and form.reads_archive:  # compilers read it
            copy = f"{stem}_untuned.zcr"
            copies[copy] = _pieces(untuned)
            planned = replace(planned, archive=os.path.join(folder, copy))
        paths = write({**form.files(planned, folder), **copies}, folder, force=force)
    return _report_of(planned, path, form, paths)


class _Form(NamedTuple):
    """The form of the sources, as the arguments of `generate` choose it."""

    lang: Language
    blob: BlobForm | None
    assembly: bool
    section: str | None
    reader: bool

    @property
    def reads_archive(self) -> bool:
        """True if the compiler reads the whole archive from its file."""
        return self.blob in ("incbin", "embed") or (self.lang == "rust" and not self.assembly)

    @property
    def has_archive(self) -> bool:
        """True if the program contains the whole archive."""
        return self.reads_archive or self.blob is not None or self.lang == "python"

    def files(self, planned: Plan, folder: str) -> dict[str, Iterable[bytes]]:
        """Return the files of a plan, with the reader's file if it was asked for."""
        section = self.section
        if self.lang == "python":
            files = python.files(planned)
        elif self.lang == "rust":
            files = rust.files(planned, folder, assembly=self.assembly, section=section)
        elif self.blob is not None:
            files = blobs.files(planned, folder, language=self.lang, form=self.blob, section=section)
        elif self.lang == "asm":
            files = asm.files(planned, folder, section=section)
        else:
            files = c.files(planned, folder, language=self.lang, section=section)
        return {**files, **({_READERS[self.lang]: [reader_source(self.lang)]} if self.reader else {})}


@contextlib.contextmanager
def _untuned_copy(record: Record, folder: str, form: _Form) -> Iterator[str | None]:
    """Yield a scratch copy of the archive from before it was tuned; None if it is not tuned, or not needed whole."""
    archive = record.archive.root
    part = tuned.read_tuned(archive) if form.has_archive else None
    if part is None:
        yield None
        return
    make_folder(folder)
    with scratch_folder(os.path.join(folder, "untuned")) as scratch:
        path = os.path.join(scratch, os.path.basename(str(archive.path)))
        with open_sink(path, durable=False) as sink:
            for offset, data in tuned.bytes_before(archive, part):
                sink.write(bytes(offset - sink.position))
                sink.write(data)
        yield path


def _pieces(path: str) -> Iterator[bytes]:
    with open_source(path)[0] as file:
        yield from iter(lambda: file.read(_PIECE), b"")


def _report_of(planned: Plan, path: str, form: _Form, files: list[str]) -> EmbedReport:
    """Return the report of files that were generated from a plan of the archive at `path`."""
    constants, lang, is_blob = planned.constants, form.lang, form.blob is not None
    strided = tuple(constant.name for constant in constants if constant.repacked)
    has_archive = is_blob or (lang == "python" and not planned.left_out)
    renamed = [(constant.name, constant.identifier) for constant in constants if constant.renamed and lang != "python"]
    if lang in ("cpp", "rust") and not is_blob:  # these have local names
        renamed = [(constant.name, constant.local) for constant in constants if constant.renamed_locally]
    if lang == "rust":
        renamed = [(name, local.upper()) for name, local in renamed]
    return EmbedReport(
        archive=path,
        lang=lang,
        files=tuple(files),
        tensors=len(constants),
        nbytes=planned.archive_size if has_archive else planned.nbytes,
        shared=sum(constant.base is not None for constant in constants),
        empty=sum(not constant.nbytes for constant in constants),
        left_out=planned.left_out,
        renamed=tuple(renamed),
        repacked=() if is_blob or lang == "python" else strided,
        unplaced=strided if is_blob else (),
    )


def out_of_place(lang: str, options: dict[str, Any]) -> str | None:
    """Return the fault of the first argument of `generate` that is wrong for the language; None if all are right."""
    if lang not in LANGUAGES:
        return f"lang {lang!r} is not known; {', '.join(LANGUAGES)}"
    for name, value in options.items():
        if value not in (None, False) and name not in LANGUAGES[lang]:
            languages = ", ".join(language for language, names in LANGUAGES.items() if name in names)
            return f"{name} means nothing to {lang}; it is for {languages}"
    if (blob := options.get("blob")) not in (None, *get_args(BlobForm)):
        return f"blob {blob!r} is not known; {', '.join(get_args(BlobForm))}"
    return None


def reader_source(lang: str) -> bytes:
    """Return the file that opens archives at run time: `zcrecord.h` for C and C++, `zcrecord.rs` for Rust.

    Raises:
        UnsupportedError: that language has no reader.

    Example:
        >>> reader_source("c").splitlines()[0]
        b'/* SPDX-License-Identifier: 0BSD'
    """
    if lang not in _READERS:
        raise UnsupportedError(f"there is no reader for lang {lang!r}; there is one for {', '.join(_READERS)}")
    return (Path(__file__).parent / _READERS[lang]).read_bytes()
