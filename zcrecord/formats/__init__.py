"""Conversion from and to other formats: `convert`.

A format is a row of FORMATS (`zcrecord.codec.file_types`). A module of `zcrecord.foreign` with the row's name reads it.
A module of this folder with that name writes it, with one piece of a tensor in memory:

    write(record: Record, dest, *, durable, progress, storage_options) -> int   write a record; returns bytes written

The first bytes of a file give its format, or else its suffix. Archives and ONNX are not in this folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from zcrecord import onnx
from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.codec.file_types import FORMATS, FileType, Format, sniff_file_type
from zcrecord.codec.layout import ALIGNMENT, DRAFT, check_alignment, reading_drafts
from zcrecord.errors import Advice, FormatError, UnsupportedError, located, printable
from zcrecord.foreign.folders import format_by_suffix, model_in
from zcrecord.foreign.readers import path_beside
from zcrecord.onnx.tuned import untuned_record
from zcrecord.record.load import load_record
from zcrecord.record.own_shards import check_no_own_shard
from zcrecord.record.record import Record
from zcrecord.record.record_writer import RecordWriter
from zcrecord.record.save import Metadata, metadata_now, save_record
from zcrecord.storage.compressed import SUFFIXES, PeekableStream, decompressed
from zcrecord.storage.files import (
    Binary,
    Progress,
    check_destination,
    is_url,
    open_source,
    path_or_none,
    place_for,
    refusals,
    scratch_file,
)
from zcrecord.storage.folders import model_folder, names_folder, takes_folder
from zcrecord.writing.writers import ConvertReport, conversion_report

from .copying import copy_file, open_fetched

__all__ = ["FORMATS", "ConvertReport", "Format", "convert"]

ARCHIVE, ONNX, SAFETENSORS = "zcr", "onnx", "safetensors"
_OWN_NAMES = ("adapter_model", "diffusion_pytorch_model")  # names of weights that PEFT and Diffusers expect
_PIECE = 1 << 20  # bytes read at a time of a packed archive


def convert(
    source: str | os.PathLike[str] | Binary,
    dest: str | os.PathLike[str] | Binary,
    *,
    source_format: str | None = None,
    dest_format: str | None = None,
    force: bool = False,
    alignment: int = ALIGNMENT,
    durable: bool = True,
    max_shard_size: int | None = None,
    metadata: Metadata | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Convert a file to another format, in bounded memory; one of the two is usually an archive.

    A path at `dest` has the old file or the whole new one at any time, and is replaced only with `force`. A conversion
    between two other formats writes an archive beside `dest`, and removes it. An archive becomes an archive with a new
    layout; an archive of version 0, a draft of the format, loses its signatures and its tuned part.

    Args:
        source, dest: paths or URLs. For formats that are read or written in one forward pass also binary file objects
            and, for `source`, compressed files. A folder at `source` is read as the one model in it, or as all its
            .onnx (see `onnx.convert`). A folder at `dest` (one that exists, or a name that ends in "/") gets model.zcr
            or the like, with its companions (an adapter as adapter_model.zcr). At a URL ONNX and safetensors are read
            forward, archives fetched into memory, other files copied to a temporary one.
        source_format, dest_format: names of FORMATS. By default the first bytes of `source` decide, or else its
            suffix; for `dest` the suffix, and a file object gets an archive.
        alignment, durable, storage_options: those of `save_record`; the last for `source`, too.
        max_shard_size: write files of at most so many bytes of tensors, and a catalogue (safetensors: index) of them.
        metadata: added to the archive's; a function in its place is called once `source` was read.
        progress: called with the bytes of input converted so far (for an archive: of its tensors) and the number of
            all, if known.

    Raises:
        FormatError: the source is damaged or has another format. UnsupportedError: the format is not known, cannot be
        written, or does not have a value of the record. DestinationExistsError: `dest` exists and `force` was not
        given, or `dest` is the source. DependencyError: a package is missing. SourceError: the file system refused.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> _ = convert("model.zcr", "copy.safetensors")
        >>> convert("copy.safetensors", "again.zcr").tensors
        1
    """
    started = time.perf_counter()
    remote: Any = None
    if is_url(source):
        from zcrecord.remote.open_url import remote_file  # here, because few sources are URLs

        opened = remote_file(source, storage_options)
        if isinstance(opened, str):  # of a file: URL its path
            source = opened
        else:
            remote = opened
    folder = path_or_none(source)
    if folder is not None and os.path.isdir(folder):
        source = model_in(folder, source_format)
        if source != folder:
            path_beside(source, os.path.basename(source))  # raises for a link out of the folder
    source_path, dest_path = path_or_none(source), path_or_none(dest)
    is_into_folder = dest_path is not None and _goes_into_folder(folder, dest_path, dest_format)
    target = _choose_dest_format(None if is_into_folder else dest_path, dest_format)
    _check_options(target, dest_path, alignment, max_shard_size, metadata)
    with contextlib.ExitStack() as stack:
        stack.enter_context(reading_drafts())
        if is_into_folder and dest_path is not None:
            dest = stack.enter_context(_open_model_folder(source, folder, dest_path, target, force, durable))
            dest_path = os.path.join(dest_path, os.path.basename(dest))
        dest = place_for(dest, check_destination(source_path, dest_path, force, storage_options), storage_options)
        fetch: Any = None
        if remote is not None:
            source_path, fetch = remote.shown, partial(open_fetched, remote, str(source), storage_options)
        stream, kind = stack.enter_context(_open_input(remote or source, source_path, source_format, fetch))
        options = force, alignment, durable, max_shard_size, metadata, progress or (lambda *_: None), storage_options
        work = _Conversion(started, path_or_none(dest), *options)
        stack.enter_context(located(path=source_path))
        if target == ARCHIVE:
            report = work.to_archive(kind, stream, dest)
        elif kind == ARCHIVE:
            report = work.from_archive(stream, target, dest)
        else:
            report = work.through_archive(kind, stream, target, dest)
    seconds = time.perf_counter() - started
    return dataclasses.replace(report, source=source_path, dest=dest_path, seconds=seconds)


@contextlib.contextmanager
def _open_model_folder(
    source: Any, folder: str | None, dest: str, target: str, force: bool, durable: bool
) -> Iterator[str]:
    """Yield a path for a model folder's weights, with its companions; DestinationExistsError if the source is there."""
    stem = os.path.basename(path_or_none(source) or "").partition(".")[0]
    weights = f"{stem if stem in _OWN_NAMES else 'model'}{FORMATS[target].suffixes[0]}"
    for name in (weights, f"{weights}.index.json"):
        check_destination(path_or_none(source), os.path.join(dest, name), force=True)
    beside = folder if folder is not None and os.path.isdir(folder) else None
    with model_folder(beside, dest, weights, force=force, durable=durable) as path:
        yield path


@dataclasses.dataclass(frozen=True, slots=True)
class _Conversion:
    """One conversion, with the options of `convert`; `dest` is where to write, `dest_path` its path, None if none."""

    started: float
    dest_path: str | None
    force: bool
    alignment: int
    durable: bool
    max_shard_size: int | None
    metadata: Metadata | None
    progress: Progress
    storage_options: Mapping[str, Any] | None

    def to_archive(self, kind: str, source: Any, dest: Any) -> ConvertReport:
        """Convert a source of any format to an archive."""
        options = dict[str, Any](alignment=self.alignment, durable=self.durable, storage_options=self.storage_options)
        if kind == ONNX:
            if self.max_shard_size is not None:
                raise UnsupportedError("a shard size is not for ONNX; convert the archive that is made of it")
            options |= {"metadata": self.metadata, "progress": self.progress}
            return onnx.convert(source, dest, force=self.force, **options)
        options |= {"max_shard_size": self.max_shard_size}
        if kind == ARCHIVE:
            with _load_archive(source) as loaded:
                is_draft = loaded.archive.header.version == DRAFT
                record = untuned_record(loaded) if is_draft or self.max_shard_size is not None else loaded
                metadata = _without_signatures(record.metadata) if is_draft else record.metadata
                options["metadata"] = {**metadata, **metadata_now(self.metadata)}
                saved, modules = save_record(record, dest, progress=self.progress, **options), len(record.modules)
                nbytes = loaded.archive_nbytes
        else:
            with RecordWriter(dest, **options) as out:
                nbytes = copy_file(kind, source, out, self.progress)
                out.metadata.update(metadata_now(self.metadata))
            assert out.report is not None
            saved, modules = out.report, out.modules
        return conversion_report(
            self.started,
            tensors=saved.tensors,
            modules=modules,
            payload_bytes=saved.payload_bytes,
            archive_bytes=saved.archive_bytes,
            input_bytes=nbytes,
            shared_bytes=saved.deduplicated,
        )

    def from_archive(self, source: Any, target: str, dest: Any) -> ConvertReport:
        """Convert an archive to another format."""
        options = dict[str, Any](durable=self.durable, progress=self.progress, storage_options=self.storage_options)
        if target == SAFETENSORS:
            options |= {"max_shard_size": self.max_shard_size, "force": self.force}
        with _load_archive(source) as loaded:
            check_no_own_shard(loaded, self.dest_path)
            record = untuned_record(loaded)
            writer: Any = importlib.import_module(f".{target}", __name__)  # here, because a conversion needs one
            written = writer.write(record, dest, **options)
            repeated, nbytes = _tied_bytes(record)
            return conversion_report(
                self.started,
                tensors=len(record),
                modules=len(record.modules),
                payload_bytes=nbytes,
                archive_bytes=written,
                input_bytes=loaded.archive_nbytes,
                repeated_bytes=repeated,
            )

    def through_archive(self, kind: str, source: Any, target: str, dest: Any) -> ConvertReport:
        """Convert between two other formats, by a scratch archive beside `dest`, or in the temporary folder."""
        beside = self.dest_path
        if beside is None or is_url(beside) or (os.path.exists(beside) and not os.path.isfile(beside)):  # a pipe
            beside = os.path.join(tempfile.gettempdir(), "zcrecord")
        with contextlib.ExitStack() as stack:
            with refusals(beside):
                handle, between = stack.enter_context(scratch_file(f"{os.path.abspath(beside)}-between", 0o600))
            with refusals(beside), open(handle.fileno(), "w+b", buffering=0, closefd=False) as file:
                scratch = dataclasses.replace(self, durable=False, max_shard_size=None)
                read_report = scratch.to_archive(kind, source, file)
            write_report = self.from_archive(between, target, dest)
        return dataclasses.replace(write_report, input_bytes=read_report.input_bytes, renamed=read_report.renamed)


def _load_archive(source: Any) -> Record:
    """Return the record of an archive: a record already, a path, bytes or a stream."""
    if isinstance(source, Record):
        return source
    return load_record(source if isinstance(source, str | bytearray) else source.read())


def _decompress(stream: Any, packed: PeekableStream, nbytes: int | None) -> bytearray:
    """Return the archive in a packed stream of `nbytes` bytes, None if unknown; LimitError if it is far larger."""
    from zcrecord.transport.frames import check_expansion  # here, because few archives are packed

    out = bytearray()
    while piece := stream.read(_PIECE):
        out += piece
        check_expansion(len(out), packed.position if nbytes is None else nbytes)
    return out


def _without_signatures(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a draft's metadata without signatures, whose content digest is computed in another way in version 1."""
    unsigned = {name: value for name, value in metadata.items() if not name.startswith(SIGNATURE_PREFIX)}
    if len(unsigned) < len(metadata):
        message = "the signatures of a draft of the format (version 0) are left out; sign the new archive"
        logging.getLogger("zcrecord").warning(message)
    return unsigned


def _tied_bytes(record: Record) -> tuple[int, int]:
    """Return the bytes of those tensors that are tied to an earlier one, and the bytes of all tensors."""
    seen: set[int] = set()
    repeated = total = 0
    for info in record.infos():
        total += info.nbytes
        if info.payload in seen:
            repeated += info.nbytes
        elif info.payload is not None:
            seen.add(info.payload)
    return repeated, total


def _check_options(
    target: str, dest: str | None, alignment: int, max_shard_size: int | None, metadata: Metadata | None
) -> None:
    """Raise UnsupportedError for options of `convert` that the output's format does not have."""
    check_alignment(alignment)
    if target != ARCHIVE and metadata is not None:
        raise UnsupportedError(f"metadata can be added to archives; {target} has that of the record")
    if target != ARCHIVE and alignment != ALIGNMENT:
        raise UnsupportedError(f"alignment is for archives; {target} has none to choose")
    if max_shard_size is not None and (target not in (ARCHIVE, SAFETENSORS) or dest is None or max_shard_size < 1):
        raise UnsupportedError("a shard size is for archives and safetensors written to a path, in bytes from 1 on")


def _choose_dest_format(path: str | None, dest_format: str | None) -> str:
    """Return the format asked for, or that of a path's suffix; UnsupportedError if it is not written."""
    kind = dest_format if dest_format is not None else ARCHIVE if path is None else format_by_suffix(path)
    written = ", ".join(f.name for f in FORMATS.values() if f.writes)
    if kind is None:
        advice = Advice(f"name one by {{}}: {written}", "dest_format")
        raise UnsupportedError("no format has its suffix", path=path, advice=advice)
    if kind == ONNX:
        raise UnsupportedError("zcrecord to-onnx (zcrecord.onnx.to_onnx) writes a model from its archive", path=path)
    if kind not in FORMATS or not FORMATS[kind].writes:
        raise UnsupportedError(f"{printable(kind)} is not written; choose one of {written}", path=path)
    return kind


@contextlib.contextmanager
def _open_input(source: Any, path: str | None, source_format: str | None, fetch: Any) -> Iterator[tuple[Any, str]]:
    """Yield the source as its format's reader takes it, and its format; a path that is no regular file is opened once.

    A remote file is read forward, or brought here by `fetch`, which is called with its format.
    """
    if path is not None and os.path.isdir(path):  # several models of ONNX
        yield path, ONNX
        return
    with contextlib.ExitStack() as stack:
        stream, nbytes = source, None
        if fetch is not None:
            from zcrecord.remote.files import ForwardReader

            stream = ForwardReader(source)
        elif path is not None:
            stream, nbytes = open_source(path)
            stack.enter_context(stream)
        peeked = PeekableStream(stream)
        stream = decompressed(peeked)
        is_packed = stream is not peeked
        if is_packed:
            stream = PeekableStream(stream)
        file_type = sniff_file_type(stream.head)
        kind = source_format
        if kind is None:
            kind = _format_by_content(file_type, stream.head, path) or format_by_suffix(path or "", SUFFIXES)
        kind = _guess_format(file_type, path) if kind is None else kind
        if kind not in FORMATS:
            raise UnsupportedError(f"format {printable(kind)} is not known; {', '.join(FORMATS)}", path=path)
        if path is not None and nbytes is not None and not is_packed:
            stream = path
        elif fetch is not None and (kind == ARCHIVE or not (is_packed or FORMATS[kind].streams)):
            stream, is_packed = stack.enter_context(fetch(FORMATS[kind])), False
        elif not FORMATS[kind].streams:
            reason = "compressed; decompress it first" if is_packed else "from a pipe; write it to a file first"
            raise UnsupportedError(f"{kind} cannot be read {reason}", path=path)
        yield _decompress(stream, peeked, nbytes) if is_packed and kind == ARCHIVE else stream, kind


def _format_by_content(file_type: FileType | None, head: bytes, path: str | None) -> str | None:
    """Return the format of a file by its first bytes and type; None if these may be those of several formats."""
    if head.lstrip()[:1] == b"{" and path is not None and path.lower().endswith(".json"):
        return SAFETENSORS  # an index of shards
    return file_type.format if file_type is not None and file_type.format != ONNX else None


def _guess_format(file_type: FileType | None, path: str | None) -> str:
    """Return the format of a file without a known suffix by its first bytes; FormatError if they leave doubt."""
    if file_type is not None and file_type.format is not None:
        return file_type.format
    if file_type is not None and not file_type.text.startswith("this is a zip"):
        advice = f"; {file_type.advice}" if file_type.advice else ""
        raise FormatError(f"{file_type.text}, which is not converted{advice}", path=path)
    text = "it has no format's first bytes, nor a suffix that is known" if file_type is None else file_type.text
    raise FormatError(text, path=path, advice=Advice(f"name its format by {{}}: {', '.join(FORMATS)}", "source_format"))


def _goes_into_folder(source: str | None, dest: str, dest_format: str | None) -> bool:
    """Return True if the output goes into a folder `dest`; depends on `dest`, its suffix, and the source's path."""
    if is_url(dest):
        return False
    is_from_folder, has_suffix = source is not None and os.path.isdir(source), format_by_suffix(dest) is not None
    if names_folder(dest):
        return is_from_folder or not has_suffix or dest.endswith("/")
    return is_from_folder and not has_suffix and dest_format is None and takes_folder(dest)
