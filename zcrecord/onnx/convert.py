"""ONNX to an archive in one forward pass: values stream through, the rest of the model becomes its skeleton.

The archive has the model's tensors, named by `names`, and the skeleton as the bytes attribute "onnx.graph" of the
record: the ModelProto byte for byte, but each TensorProto has, in the place of its values, data_location EXTERNAL and
one external_data entry, "zcrecord" -> the tensor's number in the model. `graph` undoes that. Each model of a folder
becomes a module with its file's name and a skeleton of its own; equal payloads are stored once. Time, host and version
do not enter the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from zcrecord.archive.name_patterns import NameFilter, Patterns
from zcrecord.codec.entries import Entries, PayloadId
from zcrecord.codec.layout import ALIGNMENT, NONE
from zcrecord.dtypes import by_onnx
from zcrecord.errors import (
    ExternalDataError,
    IntegrityError,
    LimitError,
    NameCollisionError,
    OnnxError,
    SourceError,
    TensorNotFoundError,
    UnsupportedError,
    located,
    printable,
)
from zcrecord.foreign.readers import open_beside
from zcrecord.onnx.protobuf.reader import ProtobufReader, Skeleton
from zcrecord.onnx.protobuf.scanner import Scanner, TensorSink, check_start, stub
from zcrecord.onnx.protobuf.tensors import TensorMessage, TensorReader
from zcrecord.record.save import Metadata, metadata_entries, metadata_now
from zcrecord.storage import files
from zcrecord.storage.compressed import PeekableStream, decompressed
from zcrecord.storage.files import Binary, Progress, absolute_path, path_or_none
from zcrecord.storage.sink import NullSink, Sink
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.writing.module_tree import ModuleTreeBuilder
from zcrecord.writing.writers import ConvertReport, SaveReport, StreamWriter, conversion_report

from . import external_data
from .names import GRAPH_ATTRIBUTE, LEFT_OUT, NamedTensor, Scope, entries_by_columns, name_tensors, plain_name

_SUFFIX = ".onnx"  # of the models in a folder
_new = tuple.__new__  # called by a NamedTuple's own constructor, which takes twice the time
_GRAPH, _EXPANDED = 16 << 20, 16  # bytes a graph may take, beyond so many times the compressed bytes it comes from


def convert(
    source: str | os.PathLike[str] | Binary,
    dest: str | os.PathLike[str] | Binary,
    *,
    alignment: int = ALIGNMENT,
    force: bool = False,
    durable: bool = True,
    allow_links: bool = False,
    select: Patterns | None = None,
    exclude: Patterns | None = None,
    verify: bool = False,
    dry_run: bool = False,
    metadata: Metadata | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write an ONNX model as an archive; reads `source` once, forward, and never holds a payload.

    Both may be pipes; a source compressed by zstd or gzip is decompressed on the way. A path at `dest` holds the old
    file or the whole new one at any time, and is replaced only with `force`. A folder is converted whole: of several
    models each becomes a module with its file's name, which `session` takes as `module`; equal weights are stored once.
    A `dest` that is a folder, or a new path that does not end in .zcr, gets the archive as model.zcr, and copies of the
    configuration and tokenizer files.

    Args:
        source, dest: paths or binary file objects. External data are looked for in the folder of the model. `dest` may
            be a URL; there, as in a pipe, equal weights of more than 512 KiB are stored again.
        alignment, durable, metadata, storage_options: of `save_record`; `metadata` may be a function, called last.
        allow_links: take external data behind symbolic and hard links to any place.
        select, exclude: for one model, shell patterns of names; one that matches a module stands for all below it. The
            archive then has the tensors that `select` matches and `exclude` does not, and no graph.
        verify: before `dest` is replaced, read the source again and the archive back, and compare. Both must be paths.
        dry_run: write nothing, and report the sizes as if it had; equal digests are then taken for equal bytes.
        progress: called with the bytes read so far and, if that is known, how many there are; for a compressed source
            by path its own bytes. External data counts on top.

    Example:
        >>> _ = convert("model.onnx", "model.zcr")
        >>> convert("model.onnx", "bias.zcr", select="*.bias").left_out
        4

    Raises:
        OnnxError: not a valid model, or one with unsupported features; with the offset. ExternalDataError: its external
        data breaks a rule. DestinationExistsError: `dest` exists and `force` was not given, or is the source.
        TensorNotFoundError: the patterns leave no tensor. FormatError: a compressed source is damaged. LimitError: a
        shape no archive holds, or little compressed data that expands to a huge graph. IntegrityError: `verify` found a
        difference. DependencyError: a package is missing. NameCollisionError: two models have one name. SourceError: a
        folder has no model, or the file system refused.
    """
    started, source_path = time.perf_counter(), path_or_none(source)
    if verify and (dry_run or source_path is None or path_or_none(dest) is None or files.is_url(dest)):
        raise UnsupportedError("to verify reads source and archive again: give both as local paths, and no dry run")
    name_filter = None if select is None and exclude is None else NameFilter(select, exclude)
    models = _models(source, source_path, name_filter)
    conversion = _Conversion(models, source_path, alignment, allow_links, name_filter, 1 + verify, metadata, progress)
    settings = {"force": force, "durable": durable, "dry_run": dry_run}
    with _destination(models, source_path, dest, storage_options, **settings) as (sink, dest_path):
        written = conversion.write(sink)
        if verify:
            conversion.verify(written, dest_path)
    return conversion_report(
        started,
        source=source_path,
        dest=dest_path,
        tensors=written.saved.tensors,
        modules=written.modules,
        renamed=written.renamed,
        payload_bytes=written.saved.payload_bytes,
        archive_bytes=written.saved.archive_bytes,
        input_bytes=written.input_bytes,
        shared_bytes=written.saved.deduplicated,
        left_out=written.left_out,
        verified=verify,
        dry_run=dry_run,
    )


class _ModelSource(NamedTuple):
    """A model to convert: a stream or a path; the path if it is one; the key of its module, "" for the record."""

    source: Any
    path: str | None
    module: str
    in_folder: bool = False  # it was found in one, whose links may lead anywhere


def _models(source: Any, path: str | None, name_filter: NameFilter | None) -> list[_ModelSource]:
    """Return the model, or those of a folder, in the order of their names; SourceError for a folder without one."""
    if path is None or not os.path.isdir(path):
        return [_ModelSource(source, path, "")]
    with files.refusals(path):
        names = sorted(name for name in os.listdir(path) if name.lower().endswith(_SUFFIX))
        names = [name for name in names if name[0] != "." and not os.path.isdir(os.path.join(path, name))]
    modules: dict[str, str] = {}
    for name in names:
        module = name[: -len(_SUFFIX)]
        if (other := modules.setdefault(module, name)) != name:
            fault = f"{printable(other)} and {printable(name)} would both be module '{printable(module)}'"
            raise NameCollisionError(f"{fault}; rename one", path=path)
    if not modules:
        raise SourceError(f"is a folder without a model (*{_SUFFIX}); name one", path=path, errno=errno.EISDIR)
    if len(modules) > 1 and name_filter is not None:
        raise UnsupportedError(f"select and exclude are for one model, and the folder has {len(modules)}", path=path)
    paths = {module: os.path.join(path, name) for module, name in modules.items()}
    return [_ModelSource(file, file, module if len(paths) > 1 else "", True) for module, file in paths.items()]


@contextlib.contextmanager
def _destination(
    models: list[_ModelSource],
    source: str | None,
    dest: Any,
    options: Mapping[str, Any] | None,
    *,
    force: bool,
    durable: bool,
    dry_run: bool,
) -> Iterator[tuple[Sink, str | None]]:
    """Yield a sink for the archive, closed at the end, and its path; from a folder to one, copy other files, too."""
    path = path_or_none(dest)
    with contextlib.ExitStack() as stack:
        if source is not None and path is not None and os.path.isdir(source):
            from zcrecord.storage import folders  # here, because most sources are files

            if folders.takes_folder(path):
                if not dry_run:
                    dest = stack.enter_context(folders.model_folder(source, path, force=force, durable=durable))
                path = os.path.join(path, folders.MODEL)
        replaces = None
        for model in models:
            replaces = files.check_destination(model.path, path, force or dry_run, options)
        if dry_run:
            yield NullSink(), path
        else:
            sink = files.open_sink(dest, durable=durable, options=options, replaces=replaces)
            yield stack.enter_context(sink), path


class _OpenModel(NamedTuple):
    """An open model: a stream of its bytes; the compressed stream, if there is one; its size, if known; its folder."""

    stream: Any
    compressed: PeekableStream | None
    nbytes: int | None
    folder: external_data.ModelFolder | None

    @property
    def external_bytes(self) -> int:
        """Bytes read of its external data."""
        return 0 if self.folder is None else self.folder.nbytes


@dataclass(slots=True)
class _Pass:
    """One pass over the models: the archive that is written, and the counts for the report."""

    out: StreamWriter
    outline: ModuleTreeBuilder = field(default_factory=ModuleTreeBuilder)
    entries: Entries | None = None  # of the tensors, in place of the outline
    input_bytes: int = 0
    bytes_read: int = 0  # of the compressed form if there is one
    renamed: int = 0
    left_out: int = 0
    modules: int = 0
    saved: SaveReport = field(init=False)

    def add_model(
        self, source: _OpenModel, module: str, name_filter: NameFilter | None, report: Callable[[int], None] | None
    ) -> None:
        """Write all payloads of a model, the skeleton last; `report` is called with the bytes of the model read."""
        skeleton = Skeleton()
        on_read = report if source.compressed is None else _graph_limit(skeleton, source.compressed, report)
        reader = ProtobufReader(source.stream, skeleton, on_read)
        check_start(reader)
        selection = None if name_filter is None else _Selection(name_filter)
        sink = _ArchiveSink(reader, self.out, selection, source.folder, report)
        Scanner(reader, sink).scan()
        input_bytes = reader.base + reader.limit + source.external_bytes
        if not module and selection is None:  # then the graph is the payload that comes next
            self.entries = entries_by_columns(sink.named, input_bytes, PayloadId(self.out.payloads))
        if self.entries is None:
            self.renamed += name_tensors(sink.named, input_bytes, self.outline, module)
        self.left_out += sum(tensor.payload == LEFT_OUT for tensor in sink.named)
        self.input_bytes += input_bytes
        self.bytes_read += input_bytes if source.compressed is None else source.compressed.position
        if selection is not None:
            selection.check(sink.named)
            return
        sink.named.clear()  # frees memory before the skeleton is put together
        self._add_skeleton(skeleton, module)

    def _add_skeleton(self, skeleton: Skeleton, module: str) -> None:
        self.out.begin(len(skeleton))
        for part in skeleton.finish():
            self.out.write(part)
        graph = PayloadId(self.out.end())
        if self.entries is None:
            self.outline.attribute((module, GRAPH_ATTRIBUTE) if module else (GRAPH_ATTRIBUTE,), graph)

    def finish(self, metadata: Metadata | None) -> None:
        """Write the index, with the metadata if there is any."""
        entries = self.outline.entries() if self.entries is None else self.entries
        if metadata is not None:
            entries.metadata = metadata_entries(metadata_now(metadata))
        self.modules = len(entries.modules if entries.module_columns is None else entries.module_columns.names)
        self.saved = self.out.finish(entries)


class _Conversion(NamedTuple):
    """The arguments of one conversion, which may take two passes over the models."""

    models: list[_ModelSource]
    path: str | None  # of the source
    alignment: int
    allow_links: bool
    name_filter: NameFilter | None
    passes: int
    metadata: Metadata | None
    progress: Progress | None

    def write(self, sink: Sink, bytes_before: int = 0) -> _Pass:
        """Pass over the models once, everything into the sink; `bytes_before` were read by an earlier pass."""
        conversion_pass = _Pass(StreamWriter(sink, alignment=self.alignment))
        for model in self.models:
            with located(path=model.path):
                if model.module:
                    conversion_pass.outline.check_name((model.module,))
                with self._open_model(model) as source:
                    report = self._report(source, bytes_before + conversion_pass.bytes_read)
                    conversion_pass.add_model(source, model.module, self.name_filter, report)
        conversion_pass.finish(self.metadata)
        return conversion_pass

    @contextlib.contextmanager
    def _open_model(self, model: _ModelSource) -> Iterator[_OpenModel]:
        """Open a model, decompressed if it is compressed; a path is closed at the end, the caller's stream is not."""
        if model.path is None:
            peeked = PeekableStream(model.source)
            yield _OpenModel(decompressed(peeked), peeked, None, None)
            return
        folder = external_data.ModelFolder(os.path.dirname(absolute_path(model.path)), allow_links=self.allow_links)
        open_stream = partial(StreamReader, regular=model.in_folder)
        if model.in_folder and not self.allow_links:
            opening = open_beside(model.path, os.path.basename(model.path), open_stream)
        else:
            opening = open_stream(model.path)
        with opening as file:
            peeked = PeekableStream(file)
            stream = decompressed(peeked)
            if stream is not peeked:
                yield _OpenModel(stream, peeked, file.nbytes, folder)
                return
            if file.seekable:
                file.seek(0)
            yield _OpenModel(file if file.seekable else peeked, None, file.nbytes, folder)

    def _report(self, source: _OpenModel, bytes_before: int) -> Callable[[int], None] | None:
        """Return a function that passes on the bytes read of a model to the caller's progress; None without one."""
        progress, total = self.progress, source.nbytes
        if progress is None:
            return None
        if len(self.models) > 1:
            total = sum(os.path.getsize(model.source) for model in self.models)
        total_of_passes = None if total is None else self.passes * total

        def report(bytes_read: int) -> None:
            position = bytes_read if source.compressed is None else source.compressed.position
            progress(bytes_before + position + source.external_bytes, total_of_passes)

        return report

    def verify(self, written: _Pass, dest_path: str | None) -> None:
        """Read the source again and the archive back; IntegrityError if either differs from what was written."""
        repeated = self.write(NullSink(), written.bytes_read)
        if repeated.out.index != written.out.index:
            fault = "read again, it is another model than the one converted; it was changed meanwhile, convert it again"
            raise IntegrityError(fault, path=self.path)
        with located(path=dest_path):
            written.out.verify_written()


def _graph_limit(
    skeleton: Skeleton, compressed: PeekableStream, report: Callable[[int], None] | None
) -> Callable[[int], None]:
    """Return a progress callback that refuses a huge graph in little compressed data, as it is held in memory."""

    def check_graph(bytes_read: int) -> None:
        if len(skeleton) > _GRAPH + _EXPANDED * compressed.position:
            fault = f"{compressed.position} compressed bytes expand to a graph of more than {len(skeleton)} bytes"
            advice = "if you trust the file, decompress it first"
            raise LimitError(f"{fault}, without its values; {advice}", offset=compressed.position)
        if report is not None:
            report(bytes_read)

    return check_graph


class _ArchiveSink(TensorSink):
    """Numbers the tensors of a scan in order of appearance and writes the values of each as a payload."""

    def __init__(
        self,
        reader: ProtobufReader,
        out: StreamWriter,
        selection: _Selection | None,
        folder: external_data.ModelFolder | None,
        report: Callable[[int], None] | None,
    ) -> None:
        super().__init__()
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._data: list[memoryview] = []  # of tensors in a row, to be written together
        self._first = 0  # the id of the first of their payloads
        self._is_written = True  # False while the values of a tensor that is left out come
        self._out = out
        self._selection = selection
        self._folder = folder
        self._report = report
        self._reader = reader

    def add_whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
                  data: memoryview) -> bytes:  # fmt: skip
        if self._selection is not None and not self._selection.takes(scope, field, place, name):
            payload = LEFT_OUT
        else:
            if not self._data:
                self._first = self._out.payloads
            payload = self._first + len(self._data)
            self._data.append(data)
        named, shape = self.named, tuple(dims)
        shape = self._shapes.setdefault(shape, shape)  # one tuple for all tensors of a shape
        named.append(_new(NamedTensor, (scope, field, place, name, offset, by_onnx[code], shape, payload)))
        return stub(len(named) - 1)

    def write_whole(self) -> None:
        if self._data:
            self._out.add_all(self._data)
            self._data.clear()

    def begin(self, t: TensorMessage, nbytes: int) -> None:
        self._is_written = self._selection is None or self._selection.may_take(t)
        if self._is_written:
            self._out.begin(nbytes)

    def write(self, data: Any) -> None:
        if self._is_written:
            self._out.write(data)

    def end(self) -> int:
        return self._out.end() if self._is_written else NONE

    def finish(self, t: TensorMessage, tensors: TensorReader) -> None:
        if t.external:
            self._copy_external(t, tensors)
        shape = tensors.finish(t)
        payload = t.values.payload if self._selection is None else self._selection.settle(t, self._out)
        kind = by_onnx[t.data_type]
        self.named[t.index] = NamedTensor(t.scope, t.field, t.place, t.name, t.offset, kind, shape, payload)

    def _copy_external(self, t: TensorMessage, tensors: TensorReader) -> None:
        """Write a tensor's external data as its values; only count them if the tensor is left out."""
        reference = external_data.reference_of(t)
        if reference is None:
            return  # empty, or `TensorReader.finish` names its fault
        if self._selection is not None and not self._selection.takes(t.scope, t.field, t.place, t.name):
            tensors.count(t, reference.length)
            return
        if self._folder is None:
            fault = "lies beside the model, and a stream has no folder; convert the file itself"
            raise ExternalDataError(f"external data '{reference.location}' {fault}")
        for chunk in self._folder.read(reference):
            tensors.write(t, chunk, reference.length)
            if self._report is not None:
                self._report(self._reader.base + self._reader.pos)


class _Selection:
    """Decides for each tensor of a model, by its name as in `names`, if it is converted; duplicates have no "~2" yet.

    A tensor's name mostly comes before its values; then the values of a tensor that is left out are not written. An
    initializer whose values come first, as typed ones do, is written and, if it is left out, removed again.
    """

    def __init__(self, name_filter: NameFilter) -> None:
        self._takes_name = name_filter

    def takes(self, scope: Scope, field: int, place: int, name: bytes) -> bool:
        """Return True if a tensor is selected, by its name as far as it is known."""
        return self._takes_name(plain_name(scope, field, place, name) or "")

    def may_take(self, t: TensorMessage) -> bool:
        """Return True if a tensor's values, which come next, are to be written: always if its name is not known yet."""
        name = plain_name(t.scope, t.field, t.place, t.name)
        return name is None or self._takes_name(name)

    def settle(self, t: TensorMessage, out: StreamWriter) -> int:
        """Return the payload of a finished tensor; if it is not selected, remove the payload, and return LEFT_OUT.

        Raises:
            OnnxError: its values were left out, and a name that came later selects it. UnsupportedError: the payload
                went into a pipe.
        """
        is_taken, payload = self.takes(t.scope, t.field, t.place, t.name), t.values.payload
        if is_taken and payload == NONE and t.expected():
            raise _named_too_late(t.label, t.offset)
        if not is_taken and payload != NONE:
            out.forget(payload)
        return payload if is_taken else LEFT_OUT

    def check(self, tensors: Sequence[NamedTensor]) -> None:
        """Raise OnnxError if a name that came late changes a decision, TensorNotFoundError if no tensor is selected."""
        names = [plain_name(*tensor[:4]) or "" for tensor in tensors]
        for name, tensor in zip(names, tensors, strict=True):
            if self._takes_name(name) != (tensor.payload != LEFT_OUT):
                raise _named_too_late(name, tensor.offset)
        if all(tensor.payload == LEFT_OUT for tensor in tensors):
            raise TensorNotFoundError(self._takes_name.text, lambda: names)


def _named_too_late(name: str, offset: int) -> OnnxError:
    fault = "it is named after its values, too late for a choice by name"
    return OnnxError(f"byte {offset:#x}: {fault}; convert everything, and choose when loading", tensor=name)
