"""Tuning: ONNX Runtime's optimised graph and packed weights for this machine, written into the archive of a model.

ONNX Runtime makes them in a scratch folder beside the archive; they are stored as `tuned` says.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive, takes_one_file
from zcrecord.codec.conventions import SIGNATURE_PREFIX, TUNED_TYPE
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import AttributeEntry, Entries, ModuleEntry, ModuleKind, PayloadId
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, LARGE_PAYLOAD, NONE
from zcrecord.errors import IntegrityError, SourceError, UnsupportedError, located
from zcrecord.onnx.protobuf.interfaces import difference, interface_of
from zcrecord.onnx.protobuf.reader import encode_field
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, rewrite
from zcrecord.onnx.protobuf.scanner import STUB_KEY
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.record.save import stored_entries
from zcrecord.storage import files, folders
from zcrecord.storage.files import Progress
from zcrecord.storage.new_files import FileSink
from zcrecord.storage.sink import Sink
from zcrecord.writing.writers import StreamWriter

from . import graph, tuned
from .linked_models import LinkedModel, check_places, linked_models, rewrite_models
from .runtime import compares_packed, onnxruntime_module, optimise, session, tuning
from .target import TuningTarget, this_target
from .tuned import TunedPart, TunedTarget

_MODEL, _WEIGHTS = "model.onnx", "weights"  # in the scratch folder
_KEY = "onnx.tuned"  # of the module; "~2", "~3", ... is appended where it is taken
_INITIALIZER = 5  # of GraphProto
_PER_ITEM = 16  # bytes of an item of a list in the index, at most
_PAGE = 4096  # ONNX Runtime 1.32 takes packed weights at multiples of 256 alone, and packs others privately


@dataclass(frozen=True, slots=True)
class TuneReport:
    """Report of tuning an archive, or of taking the tuned part out. Sizes in bytes.

    Attributes:
        source, dest: the archive that was read, and the one that was written.
        targets: those that the archive has now, as `TuningTarget.encode` writes them; none after `untune`.
        modules: those of the models that were tuned, "" for the record itself; none after `untune`.
        weights: stored initializers of the tuned graphs.
        packed: those of them that ONNX Runtime finds packed.
        packed_bytes: the sum of their packed buffers.
        input_bytes: the archive's size before.
        archive_bytes: its size now.
        content_digest_before: the content digest before, without any tuned part. It is that of the untuned part now.
        content_digest: the content digest of the whole archive now.
        lapsed: the ids of keys whose signatures were left out, since they were of another content digest.
        models: the paths of models beside the archive, whose weights lie in it, that were written again.
        verified: True if the tuned graphs were run, and gave the models' answers.
        seconds: all of it.
    """

    source: str
    dest: str
    targets: tuple[str, ...]
    modules: tuple[str, ...]
    weights: int
    packed: int
    packed_bytes: int
    input_bytes: int
    archive_bytes: int
    content_digest_before: str
    content_digest: str
    lapsed: tuple[str, ...]
    models: tuple[str, ...]
    verified: bool
    seconds: float


def tune(
    archive: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    threads: int | None = None,
    verify: bool = False,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Add to an archive what lets `session` answer as fast as from the .onnx, on this machine, from one shared copy.

    ONNX Runtime optimises the graph and packs the weights once; both are stored beside the graph and the weights as
    they are, which stay untouched. `session` uses them where CPU, ONNX Runtime and provider are those that they were
    made for, and the original graph elsewhere. Of several models all are tuned, and what is equal is stored once. An
    archive may be tuned for several machines, one after the other; tuning again for the same one replaces. The result
    is whole, or the archive is as it was. Takes the memory that ONNX Runtime takes for a session of the largest model,
    and disk space for the packed weights twice meanwhile, beside the archive.

    The tuned graph has the model's inputs and outputs. An initializer that is an input, too, is a constant in models of
    IR version 3; from version 4 on it is a default, which a caller may override as before, and is not packed.

    The content digest covers the tuned part, so signatures lapse: they are left out, and `untune` brings them back.
    Models in the archive's folder that `to_onnx(external=True)` wrote for it are written again, if it is replaced.

    Args:
        archive: the path of an archive that `convert` made, or of a folder with one.
        dest: a path for the tuned archive, or a URL, to which it is sent once it is whole; None replaces the archive.
        threads: those that ONNX Runtime may use meanwhile; None for one for each core.
        verify: run the model and the tuned graph once, on inputs made up for the model's shapes, and compare their
            answers, before anything is at `dest`. Takes the memory of both, and disk space for the archive once more.
            If the model runs on no such inputs, the logger "zcrecord" is told.
        force, durable, storage_options: replace what is at `dest`; those of `save_record`.
        progress: called with the bytes written and all that will be written, with 0 before the first.

    Example:
        >>> from zcrecord.onnx import convert, session
        >>> _ = convert("model.onnx", "model.zcr")
        >>> report = tune("model.zcr")
        >>> len(report.targets), report.content_digest == report.content_digest_before
        (1, False)

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: it holds no ONNX model, has no digests, is
            packed, remote or attached to a program, a model beside it needs its tensors at places that would change,
            ONNX Runtime is older than 1.21, or its graph has other inputs, outputs or answers. IntegrityError: it is
            damaged. DestinationExistsError: something is at `dest`. SourceError: the file system refused, or the
            archive was replaced meanwhile. OnnxError: ONNX Runtime refuses the model.
    """
    if files.is_url(dest):
        arguments = {"threads": threads, "verify": verify, "progress": progress}
        return _sent(tune, archive, dest, force, storage_options, arguments)
    started = time.perf_counter()
    ort = onnxruntime_module()
    with _opened(archive, dest, force, durable) as work:
        record, base = work.record, Record(work.base)
        modules = graph.models_of(base.archive) or [graph.opened_model(base, None).module]
        if not base.archive.index.digest_kind:
            what = "has no digests, which packed weights need; save it again with digests"
            raise UnsupportedError(what, path=work.path)
        record.verify()
        before = base.content_digest()
        target, models = this_target(ort), work.models()
        with files.scratch_folder(work.dest) as folder:
            others = [t for t in work.part.targets if t.target != target] if work.part is not None else []
            graphs = [_TunedGraph.stored(record.archive, t) for t in others]
            graphs += [_TunedGraph.made(base, module, target, folder, threads) for module in modules]
            verified = verify and work.same_answers(graphs, modules, folder)
            lapsed = work.write(graphs, models, progress)
        written = rewrite_models(models, work.dest, target.encode())
        report = work.report(started, before, written, graphs[len(others) :])
        return replace(report, lapsed=lapsed, verified=verified)


def untune(
    archive: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Take the tuned part out of an archive; gives back the very bytes from before, whole or not at all.

    `dest`, `force`, `durable`, `progress` and `storage_options` are those of `tune`.

    Example:
        >>> from zcrecord.onnx import convert
        >>> _, before = convert("model.onnx", "model.zcr"), Path("model.zcr").read_bytes()
        >>> _ = tune("model.zcr")
        >>> untune("model.zcr").targets, Path("model.zcr").read_bytes() == before
        ((), True)

    Raises:
        UnsupportedError: the archive is not tuned, or is packed, remote or attached to a program, or a model beside it
            needs its tensors at places that would change. IntegrityError: it is damaged. DestinationExistsError,
            SourceError: as `tune`.
    """
    if files.is_url(dest):
        return _sent(untune, archive, dest, force, storage_options, {"progress": progress})
    started = time.perf_counter()
    with _opened(archive, dest, force, durable) as work:
        if work.part is None:
            raise UnsupportedError("is not tuned; there is nothing to remove", path=work.path)
        work.record.verify()
        before = Record(work.base).content_digest()
        pieces = list(tuned.bytes_before(work.record.archive, work.part))
        total = pieces[-1][0] + HEADER_SIZE
        models = work.models()
        check_places(models, work.path, work.places(work.part.originals), tuned.places_before(work.part))
        with work.sink() as sink:
            sink.reserve(total)
            for offset, data in pieces:
                _tell(progress, sink.position, total)
                sink.write(bytes(offset - sink.position))
                sink.write(data)
        return work.report(started, before, rewrite_models(models, work.dest, None))


def _sent(
    work: Callable[..., TuneReport],
    archive: Any,
    url: str,
    force: bool,
    options: Mapping[str, Any] | None,
    arguments: dict[str, Any],
) -> TuneReport:
    started = time.perf_counter()
    place = files.place_for(url, files.check_destination(files.path_of(archive), url, force, options), options)
    with files.scratch_folder(url) as folder:
        path = os.path.join(folder, folders.MODEL)
        report = work(archive, path, durable=False, **arguments)
        folders.copy_file(path, place, durable=True, options=options)
    return replace(report, dest=url, seconds=time.perf_counter() - started)


@contextlib.contextmanager
def _opened(archive: Any, dest: Any, force: bool, durable: bool) -> Iterator[_Work]:
    path = files.path_of(archive)
    if os.path.isdir(path):
        path = folders.archive_in(path)
    out = path if dest is None else files.path_of(dest)
    new = files.check_destination(path, dest if dest is None else out, force)
    if dest is not None and os.path.exists(out) and not os.path.isfile(out):
        raise UnsupportedError("a tuned archive is a regular file in a folder; name one", path=out)
    target, _ = files.target_of(out)
    with load_record(path) as record:
        opened = record.archive
        takes_one_file(opened, "tuning")
        if opened.embedded is not None:
            raise UnsupportedError("is attached to a program; detach it, tune it, and attach it again", path=path)
        if opened.source.file is None:
            raise UnsupportedError("is packed, or remote; unpack or download it, and tune that", path=path)
        with located(path=path):
            part = tuned.read_tuned(opened)
            base = opened if part is None else tuned.untuned(opened, part)
        yield _Work(path, target, record, part, base, durable, new, [])


class _Work(NamedTuple):
    """One archive that is tuned: opened, with its tuned part, and as it was before."""

    path: str
    dest: str
    record: Record
    part: TunedPart | None
    base: Archive
    durable: bool
    replaces: files.Identity | str | None  # at another destination than the archive itself
    written: list[files.Identity]  # of the files that were written, the archive last

    @contextlib.contextmanager
    def sink(self) -> Iterator[Sink]:
        """Yield a sink that replaces the destination at the end."""
        assert self.record.archive.source.file is not None, "it is mapped"
        path, identity = self.record.archive.source.file
        replaces = identity if self.in_place() else self.replaces
        with files.open_sink(self.dest, durable=self.durable, replaces=replaces) as sink:
            yield sink
            if files.identity_of(path) != identity:
                raise SourceError("was replaced while it was tuned; tune it again", path=self.path)
            assert isinstance(sink, FileSink), "a regular file"
            self.written.append(sink.identity())

    def models(self) -> list[LinkedModel]:
        """Return the models beside the archive that have to be written again."""
        return linked_models(self.record, Record(self.base)) if self.in_place() else []

    def in_place(self) -> bool:
        return os.path.realpath(self.path) == self.dest

    def places(self, numbers: list[PayloadId]) -> Any:
        archive = self.record.archive
        return archive.index.payloads["offset"][numbers] + np.uint64(archive.header.payload_offset)

    def write(self, graphs: list[_TunedGraph], models: list[LinkedModel], progress: Progress | None) -> tuple[str, ...]:
        """Write the archive with a tuned part; return the ids of the keys whose signatures were left out."""
        pool = _PayloadPool(self.base)
        numbers = list(map(pool.take, graphs))
        header, data = self.base.header, self.base.buffer
        index = data[header.index_offset : header.index_offset + header.index_size]
        head = b"".join([data[:HEADER_SIZE], index, data[-HEADER_SIZE:]]) if self.part is None else self.part.before
        before = pool.number(np.frombuffer(head, np.uint8))
        entries = stored_entries(self.base)
        signatures = [a for a in entries.metadata if a.key.startswith(SIGNATURE_PREFIX)]
        entries.metadata = [a for a in entries.metadata if not a.key.startswith(SIGNATURE_PREFIX)]
        targets = list(map(pool.attributes, graphs, numbers))
        _add_part(entries, before, pool.originals, targets)
        total = tuned.size_before(self.record.archive) + pool.room() + _room(pool.originals, *targets)
        with self.sink() as sink:
            out = StreamWriter(sink, alignment=self.base.header.alignment)
            for number, source in enumerate(pool.sources):
                _tell(progress, sink.position, total)
                out.store(source, alignment=_PAGE if number in pool.on_pages else 0)
                if number + 1 == len(pool.originals):
                    old = pool.originals if self.part is None else self.part.originals
                    check_places(models, self.path, self.places(old), out.places())
            out.finish(entries)
            _tell(progress, total, total)
        return tuple(a.key.removeprefix(SIGNATURE_PREFIX) for a in signatures)

    def same_answers(self, graphs: list[_TunedGraph], modules: list[str], folder: str) -> bool:
        """Write the tuned archive into a folder, and compare its sessions' answers with those of the models."""
        from .answers import same_answers  # here, because few compare them

        path, cpu = os.path.join(folder, folders.MODEL), ["CPUExecutionProvider"]
        self._replace(dest=path, durable=False).write(graphs, [], None)
        same = []
        for module in modules:
            made = session(path, module=module, providers=cpu)
            if (reason := tuning(made).reason) is not None:
                raise UnsupportedError(f"cannot be tuned: {reason}", path=self.path)
            model = session(Record(self.base), module=module, memory="speed", providers=cpu)
            same.append(same_answers(model, made, self.path, exact=compares_packed(onnxruntime_module())))
        return all(same)

    def report(
        self, started: float, digest: str, models: tuple[str, ...], made: Sequence[_TunedGraph] = ()
    ) -> TuneReport:
        """Check that the untuned part is unchanged, and return the report; `made` are the new graphs."""
        with load_record(self.dest) as written:
            if written.archive.source.file is None or written.archive.source.file[1][:3] != self.written[-1][:3]:
                what = "was replaced by another saver as soon as it was written"
                raise SourceError(f"{what}; look at the file there, and tune it again", path=self.dest)
            part = tuned.read_tuned(written.archive)
            base = written if part is None else Record(tuned.untuned(written.archive, part))
            if (now := base.content_digest()) != digest:
                what = f"its content digest was {digest}, that of its untuned part is {now}"
                raise IntegrityError(f"{what}; the disk or the memory is failing", path=self.dest)
            after = digest if part is None else written.content_digest()
            targets = tuned.targets_of(written.archive)
        return TuneReport(
            source=self.path,
            dest=self.dest,
            targets=targets,
            modules=tuple(g.module for g in made),
            weights=sum(g.weights for g in made),
            packed=sum(g.packed for g in made),
            packed_bytes=sum(g.packed_bytes for g in made),
            input_bytes=self.record.archive_nbytes,
            archive_bytes=self.written[-1][2],
            content_digest_before=digest,
            content_digest=after,
            lapsed=(),
            models=models,
            verified=False,
            seconds=time.perf_counter() - started,
        )


@dataclass(slots=True)
class _TunedGraph:
    """A tuned graph on its way into an archive, and the payloads that it names by number."""

    target: str
    module: str
    graph: Any
    initializers: Any
    sources: list[tuple[Any, bool]]  # each with whether it is packed
    weights: int = 0
    packed: int = 0
    packed_bytes: int = 0

    @classmethod
    def stored(cls, archive: Archive, target: TunedTarget) -> _TunedGraph:
        graph, initializers, *sources = map(archive.payload, (target.graph, target.initializers, *target.payloads))
        packed = target.model(archive, "", 0, packed=True).packed
        pairs = [(np.frombuffer(s, np.uint8), n in packed) for s, n in zip(sources, target.payloads, strict=True)]
        return cls(target.target.encode(), target.module, graph, initializers, pairs)

    @classmethod
    def made(cls, base: Record, module: str, target: TuningTarget, folder: str, threads: int | None) -> _TunedGraph:
        """Have ONNX Runtime write the graph of a module's model into a scratch folder; its weights stay mapped."""
        folder, part = tempfile.mkdtemp(dir=folder), base.module(module)
        optimise(part, os.path.join(folder, _MODEL), _WEIGHTS, threads)
        model = memoryview(Path(folder, _MODEL).read_bytes())
        what = difference(interface_of(graph.skeleton_of(part)), interface_of(model))
        if what is not None:
            what = f"cannot be tuned: ONNX Runtime's optimised graph {what}, unlike the model"
            raise UnsupportedError(what, path=part.archive.path)
        weights = Path(folder, _WEIGHTS)
        mapped = np.memmap(weights, np.uint8, "r") if weights.exists() else np.empty(0, np.uint8)
        out = cls(target.encode(), module, b"", b"", [])
        initializers: list[bytes] = []

        def refer(t: ExternalTensor, place: str) -> bytes | None:
            new = t.encode(out._entries(t.entries, mapped))
            if place != "main":
                return new
            initializers.append(encode_field(_INITIALIZER, new))
            return None

        out.graph, out.initializers = rewrite(model, refer), b"".join(initializers)
        return out

    def _entries(self, entries: dict[str, str], mapped: Any) -> dict[str, str]:
        """Return external_data with numbers of payloads instead of offsets."""

        def add(offset: str, nbytes: str, packed: bool) -> int:
            start, size = int(offset), int(nbytes)
            self.sources.append((mapped[start : start + size], packed))
            return len(self.sources) - 1

        out = {STUB_KEY.decode(): str(add(entries.get("offset", "0"), entries["length"], False))}
        self.weights += 1
        for key, value in entries.items():
            if tuned.PACKED.fullmatch(key):
                name, *buffers = value.split("|")
                for offset, nbytes, padded in (buffer.split(";") for buffer in buffers):
                    name += f"|{add(offset, nbytes, True) if int(nbytes) else ''};{padded}"
                    self.packed_bytes += int(nbytes)
                out[key] = name
        self.packed += len(out) > 1
        return out


class _PayloadPool:
    """Payloads of the archive to be written: those from before, then new ones, equal bytes once."""

    def __init__(self, base: Archive) -> None:
        self._rows: list[tuple[int, int, int]] = base.index.payloads.tolist()
        self.originals = list(map(PayloadId, range(len(self._rows))))
        self.sources = [np.frombuffer(base.payload(p), np.uint8) for p in self.originals]
        self.on_pages: set[int] = set()
        self._base = base
        self._known = {(digest, nbytes): p for p, (_, nbytes, digest) in enumerate(self._rows)}

    def number(self, source: Any, *, page: bool = False) -> PayloadId:
        """Return the number of a payload with these bytes, on a page if asked for; NONE for no bytes."""
        if not source.nbytes:
            return PayloadId(NONE)
        key = digest_of(source), source.nbytes
        earlier = self._known.get(key)
        placed = not page or earlier in self.on_pages or source.nbytes >= LARGE_PAYLOAD
        if earlier is not None and placed and np.array_equal(self.sources[earlier], source):
            return PayloadId(earlier)
        self._known[key] = number = len(self.sources)
        self.sources.append(source)
        self._rows.append((0, key[1], key[0]))
        if page:
            self.on_pages.add(number)
        return PayloadId(number)

    def room(self) -> int:
        """Return an upper bound of the bytes of new payloads, rows in the index included."""
        new = self.sources[len(self.originals) :]
        align = max(self._base.header.alignment, ALIGNMENT)
        return sum(s.nbytes + align + PAYLOAD.itemsize for s in new) + _PAGE * len(self.on_pages)

    def take(self, graph: _TunedGraph) -> list[PayloadId]:
        """Add a graph's payloads: itself, its initializers, and those that it names; return their numbers."""
        own = [np.frombuffer(data, np.uint8) for data in (graph.graph, graph.initializers)]
        return [*map(self.number, own), *(self.number(source, page=packed) for source, packed in graph.sources)]

    def attributes(self, graph: _TunedGraph, numbers: list[PayloadId]) -> dict[str, Any]:
        """Return the attributes of a target whose graph has these payloads."""
        rows = np.array([(0, 0, 0) if n == NONE else self._rows[n] for n in numbers], PAYLOAD)
        return {
            tuned.TARGET: graph.target,
            **({tuned.MODULE: graph.module} if graph.module else {}),
            tuned.GRAPH: numbers[0],
            tuned.INITIALIZERS: numbers[1],
            tuned.PAYLOADS: numbers[2:],
            tuned.SEAL: tuned.seal_of(self._base.index, graph.target, graph.module, rows),
        }


def _add_part(entries: Entries, before: PayloadId, originals: list[PayloadId], targets: list[dict[str, Any]]) -> None:
    """Add the modules and attributes of a tuned part."""
    modules = entries.modules
    used = {m.name for m in modules} | {n for n, p in zip(entries.names, entries.parents, strict=True) if p == 0}
    used |= {a.key for a in entries.attributes if a.parent == 0}
    names = itertools.chain([_KEY], (f"{_KEY}~{i}" for i in itertools.count(2)))
    name = next(n for n in names if n not in used)
    top = len(modules)
    place = sum(
        p == 0 for p in (*entries.parents, *(m.parent for m in modules), *(a.parent for a in entries.attributes))
    )
    kind = int(ModuleKind.MAPPING)
    modules.append(ModuleEntry(name, len(name), 0, place, kind, TUNED_TYPE))
    own = {tuned.BEFORE: before, tuned.PAYLOADS: originals}
    entries.attributes += [AttributeEntry(key, top, i, value) for i, (key, value) in enumerate(own.items())]
    for i, attributes in enumerate(targets):
        number = len(modules)
        modules.append(ModuleEntry(f"{name}.{i}", len(str(i)), top, len(own) + i, kind, tuned.TARGET_TYPE))
        entries.attributes += [AttributeEntry(key, number, p, v) for p, (key, v) in enumerate(attributes.items())]


def _room(*values: Any) -> int:
    lists = [v for value in values for v in (value.values() if isinstance(value, dict) else [value])]
    return _PAGE + sum(_PER_ITEM * len(v) if isinstance(v, list) else len(str(v)) for v in lists)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(min(done, total), total)
