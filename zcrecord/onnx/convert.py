"""ONNX to an archive in one forward pass: values stream through, the rest of the model becomes its skeleton.

The archive has the model's tensors, under the names that `names` gives them, and the skeleton as the bytes attribute
"onnx.graph" of the record: the ModelProto byte for byte, but each TensorProto keeps all fields but its values and gets
data_location EXTERNAL and one external_data entry, "zcrecord" -> the tensor's number in the model. `graph` undoes
that. The models of a folder come one after the other, each into a module that has its file's name, with a skeleton of
its own; equal payloads are stored once. Nothing of the time, the host or a version enters the bytes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from zcrecord.archive.name_patterns import NameFilter, Patterns
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.layout import ALIGNMENT, NONE
from zcrecord.dtypes import by_onnx
from zcrecord.errors import (
    ExternalDataError,
    IntegrityError,
    LimitError,
    NameCollisionError,
    RecordError,
    SourceError,
    UnsupportedError,
    printable,
)
from zcrecord.onnx.protobuf.reader import ProtobufReader, Skeleton
from zcrecord.onnx.protobuf.scanner import Scanner, TensorSink, check_start, stub
from zcrecord.onnx.protobuf.tensors import TensorMessage, TensorReader
from zcrecord.record.save import Metadata, metadata_entries, metadata_now
from zcrecord.storage.compressed import PeekableStream, decompressed
from zcrecord.storage.files import (
    Binary,
    Progress,
    absolute_path,
    check_destination,
    is_url,
    open_sink,
    path_or_none,
    refusals,
)
from zcrecord.storage.sink import NullSink, Sink
from zcrecord.storage.stream_reader import StreamReader
from zcrecord.writing.module_tree import ModuleTreeBuilder
from zcrecord.writing.writers import ConvertReport, SaveReport, StreamWriter, conversion_report

from . import external_data
from .names import GRAPH_ATTRIBUTE, LEFT_OUT, NamedTensor, Scope, name_tensors
from .selection import Selection

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
    _check_verifiable(source_path, dest, verify, dry_run)
    test = None if select is None and exclude is None else NameFilter(select, exclude)
    models = _models(source, source_path, test)
    work = _ModelConversion(models, source_path, alignment, allow_links, test, 1 + verify, metadata, progress)
    settings = {"force": force, "durable": durable, "dry_run": dry_run}
    with _destination(models, source_path, dest, storage_options, **settings) as (sink, dest_path):
        done = work.write(sink)
        if verify:
            work.check(done, dest_path)
    return done.report(started, source=source_path, dest=dest_path, verified=verify, dry_run=dry_run)


def _check_verifiable(source: str | None, dest: Any, verify: bool, dry_run: bool) -> None:
    if not verify:
        return
    if dry_run or source is None or path_or_none(dest) is None or is_url(dest):
        raise UnsupportedError("to verify reads the source again and the archive back: both must be files by path")


class _ModelSource(NamedTuple):
    """A model to convert: a stream or a path, the path if it is one, the key of its module, "" for the record."""

    given: Any
    path: str | None
    module: str


def _models(source: Any, path: str | None, test: NameFilter | None) -> list[_ModelSource]:
    """Return the model, or those of a folder, in the order of their names."""
    if path is None or not os.path.isdir(path):
        return [_ModelSource(source, path, "")]
    with refusals(path):
        names = sorted(name for name in os.listdir(path) if name.lower().endswith(_SUFFIX))
        names = [name for name in names if name[0] != "." and not os.path.isdir(os.path.join(path, name))]
    files: dict[str, str] = {}
    for name in names:
        module = name[: -len(_SUFFIX)]
        if (other := files.setdefault(module, name)) != name:
            what = f"{printable(other)} and {printable(name)} would both be module '{printable(module)}'"
            raise NameCollisionError(f"{what}; rename one", path=path)
    if not files:
        raise SourceError(f"is a folder without a model (*{_SUFFIX})", path=path, errno=errno.EISDIR)
    if len(files) > 1 and test is not None:
        raise UnsupportedError(f"select and exclude are for one model, and the folder has {len(files)}", path=path)
    paths = {module: os.path.join(path, name) for module, name in files.items()}
    return [_ModelSource(file, file, module if len(paths) > 1 else "") for module, file in paths.items()]


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
    """Yield a sink for the archive, and its path once all is done; of a folder, copy the other files, too."""
    path = path_or_none(dest)
    with contextlib.ExitStack() as stack:
        if source is not None and path is not None and os.path.isdir(source):
            from zcrecord.storage import folders  # here, because most sources are files

            if folders.takes_folder(path):
                if not dry_run:
                    dest = stack.enter_context(folders.model_folder(source, path, force=force, durable=durable))
                path = os.path.join(path, folders.MODEL)
        new = None
        for model in models:
            new = check_destination(model.path, path, force or dry_run, options)
        sink = None if dry_run else open_sink(dest, durable=durable, options=options, replaces=new)
        yield (NullSink() if sink is None else stack.enter_context(sink)), path


class _PassResult(NamedTuple):
    """Result of one pass over a model."""

    saved: SaveReport
    out: StreamWriter
    modules: int
    input_bytes: int
    passed: int  # bytes read, of the compressed form if there is one
    renamed: int
    left_out: int

    def report(self, started: float, **more: Any) -> ConvertReport:
        saved = self.saved
        return conversion_report(
            started,
            tensors=saved.tensors,
            modules=self.modules,
            renamed=self.renamed,
            payload_bytes=saved.payload_bytes,
            archive_bytes=saved.archive_bytes,
            input_bytes=self.input_bytes,
            shared_bytes=saved.deduplicated,
            left_out=self.left_out,
            **more,
        )


class _ModelConversion(NamedTuple):
    """The arguments of one conversion, which may take two passes over the models."""

    models: list[_ModelSource]
    path: str | None  # of the source
    alignment: int
    allow_links: bool
    test: NameFilter | None
    passes: int
    metadata: Metadata | None
    progress: Progress | None

    def write(self, sink: Sink, before: int = 0) -> _PassResult:
        """Pass over the models once, everything into the sink."""
        out, outline = StreamWriter(sink, alignment=self.alignment), ModuleTreeBuilder()
        input_bytes = passed = renamed = left_out = 0
        for model in self.models:
            try:
                if model.module:
                    outline.check_name((model.module,))
                with self._opened(model) as source:
                    report = self._report(source, before + passed)
                    nbytes, *counts = _stream(source, out, outline, model.module, self.test, report)
            except RecordError as error:
                raise error.located(path=model.path) from error.__cause__
            input_bytes += nbytes
            passed += source.packed.position if source.packed is not None else nbytes
            renamed, left_out = renamed + counts[0], left_out + counts[1]
        entries = outline.entries()
        if self.metadata is not None:
            entries.metadata = metadata_entries(metadata_now(self.metadata))
        saved = out.finish(entries)
        return _PassResult(saved, out, len(entries.modules), input_bytes, passed, renamed, left_out)

    @contextlib.contextmanager
    def _opened(self, model: _ModelSource) -> Iterator[_OpenModel]:
        if model.path is None:
            peeked = PeekableStream(model.given)
            yield _OpenModel(decompressed(peeked), peeked, None, None)
            return
        folder = external_data.ModelFolder(os.path.dirname(absolute_path(model.path)), allow_links=self.allow_links)
        with StreamReader(model.path) as file, folder:
            peeked = PeekableStream(file)
            stream = decompressed(peeked)
            if stream is not peeked:
                yield _OpenModel(stream, peeked, file.nbytes, folder)
                return
            if file.seekable:
                file.seek(0)
            yield _OpenModel(file if file.seekable else peeked, None, file.nbytes, folder)

    def _report(self, source: _OpenModel, before: int) -> Callable[[int], None] | None:
        progress, total = self.progress, source.total
        if progress is None:
            return None
        if len(self.models) > 1:
            total = sum(os.path.getsize(model.given) for model in self.models)
        all_passes = None if total is None else self.passes * total

        def report(passed: int) -> None:
            outside = source.folder.nbytes if source.folder is not None else 0
            progress(before + (passed if source.packed is None else source.packed.position) + outside, all_passes)

        return report

    def check(self, done: _PassResult, dest_path: str | None) -> None:
        """Read the source again and the archive back, and compare them."""
        again = self.write(NullSink(), done.passed)
        if again.out.index != done.out.index:
            what = "read again, it is another model than the one converted; it was changed meanwhile, convert it again"
            raise IntegrityError(what, path=self.path)
        try:
            done.out.verify_written()
        except RecordError as error:
            raise error.located(path=dest_path) from error.__cause__


class _OpenModel(NamedTuple):
    """An open model: a stream of its bytes; the compressed stream, if it is one; its size, if known; its folder."""

    stream: Any
    packed: PeekableStream | None
    total: int | None
    folder: external_data.ModelFolder | None


def _stream(
    source: _OpenModel,
    out: StreamWriter,
    outline: ModuleTreeBuilder,
    module: str,
    test: NameFilter | None,
    report: Callable[[int], None] | None,
) -> tuple[int, int, int]:
    """Write all payloads, the skeleton last; return the bytes read, names changed, tensors left out."""
    skeleton = Skeleton()
    reader = ProtobufReader(
        source.stream, skeleton, report if source.packed is None else _bounded(skeleton, source, report)
    )
    check_start(reader)
    selection = None if test is None else Selection(test)
    sink = _ArchiveSink(reader, out, selection, source.folder, report)
    Scanner(reader, sink).scan()
    input_bytes = reader.base + reader.limit + (source.folder.nbytes if source.folder is not None else 0)
    renamed = name_tensors(sink.named, input_bytes, outline, module)
    left_out = sum(f.payload == LEFT_OUT for f in sink.named)
    if selection is not None:
        selection.check(sink.named)
    sink.named.clear()
    if selection is None:
        above = (module,) if module else ()
        outline.attribute((*above, GRAPH_ATTRIBUTE), _write_skeleton(out, skeleton))
    return input_bytes, renamed, left_out


def _bounded(skeleton: Skeleton, source: _OpenModel, report: Callable[[int], None] | None) -> Callable[[int], None]:
    """Return a progress callback that refuses a huge graph in little compressed data: it would be held in memory."""

    def bounded(passed: int) -> None:
        packed = source.packed.position if source.packed is not None else passed
        if len(skeleton) > _GRAPH + _EXPANDED * packed:
            what = f"{packed} compressed bytes expand to a graph of more than {len(skeleton)} bytes, without its values"
            raise LimitError(f"{what}; if it is to be trusted, decompress it first", offset=packed)
        if report is not None:
            report(passed)

    return bounded


class _ArchiveSink(TensorSink):
    """Numbers the tensors of a scan in order of appearance and writes the values of each as a payload."""

    def __init__(
        self,
        reader: ProtobufReader,
        out: StreamWriter,
        selection: Selection | None,
        folder: external_data.ModelFolder | None,
        report: Callable[[int], None] | None,
    ) -> None:
        super().__init__()
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._data: list[memoryview] = []  # of tensors in a row, to be written together
        self._next = 0  # the id of the first of them
        self._writing = True  # the payload that is open
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
                self._next = self._out.payloads
            payload = self._next + len(self._data)
            self._data.append(data)
        named, shape = self.named, tuple(dims)
        shape = self._shapes.setdefault(shape, shape)  # most have the shape of others
        named.append(_new(NamedTensor, (scope, field, place, name, offset, by_onnx[code], shape, payload)))
        return stub(len(named) - 1)

    def write_whole(self) -> None:
        if self._data:
            self._out.add_all(self._data)
            self._data.clear()

    def begin(self, t: TensorMessage, nbytes: int) -> None:
        self._writing = self._selection is None or self._selection.decide(t)
        if self._writing:
            self._out.begin(nbytes)

    def write(self, data: Any) -> None:
        if self._writing:
            self._out.write(data)

    def end(self) -> int:
        return self._out.end() if self._writing else NONE

    def finish(self, t: TensorMessage, tensors: TensorReader) -> None:
        try:
            if t.external:
                self._load(t, tensors)
            shape = tensors.finish(t)
            payload = t.values.payload if self._selection is None else self._selection.settle(t, self._out)
        except RecordError as error:
            raise error.located(tensor=t.label or None, offset=t.offset) from error.__cause__
        kind = by_onnx[t.data_type]
        self.named[t.index] = NamedTensor(t.scope, t.field, t.place, t.name, t.offset, kind, shape, payload)

    def _load(self, t: TensorMessage, tensors: TensorReader) -> None:
        reference = external_data.reference_of(t)
        if reference is None:
            return  # empty, or wrong: `finish` says how
        if self._selection is not None and not self._selection.takes(t.scope, t.field, t.place, t.name):
            tensors.count(t, reference.length)
            return
        if self._folder is None:
            what = "lies beside the model, and a stream has no folder; convert the file itself"
            raise ExternalDataError(f"external data '{reference.location}' {what}")
        for chunk in self._folder.read(reference):
            tensors.write(t, chunk, reference.length)
            if self._report is not None:
                self._report(self._reader.base + self._reader.pos)


def _write_skeleton(out: StreamWriter, skeleton: Skeleton) -> PayloadId:
    out.begin(len(skeleton))
    for part in skeleton.finish():
        out.write(part)
    return PayloadId(out.end())
