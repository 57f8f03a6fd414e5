"""Tuning: ONNX Runtime's optimised graph and packed weights for this machine, written into the archive of a model.

ONNX Runtime makes them in a scratch folder beside the archive; they are stored as `tuned` says.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive, require_one_file
from zcrecord.archive.digest import content_digest
from zcrecord.codec.conventions import SIGNATURE_PREFIX, TUNED_TYPE
from zcrecord.codec.entries import AttributeEntry, Entries, ModuleEntry, ModuleKind, PayloadId
from zcrecord.codec.layout import HEADER_SIZE, payload_alignment
from zcrecord.errors import IntegrityError, OnnxError, SourceError, UnsupportedError, located
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.record.save import stored_entries
from zcrecord.storage import files, folders, urls
from zcrecord.storage.files import Progress
from zcrecord.storage.new_files import FileSink
from zcrecord.storage.sink import Sink

from . import graph, tuned
from .linked_models import LinkedModel, check_places, linked_models, rewrite_models
from .runtime import compares_packed, onnxruntime_module, session, tuning, tuning_module
from .target import TuningTarget, this_target
from .tuned import TunedPart
from .tuned_graph import PAGE, PER_ITEM, PayloadPool, TunedGraph

_KEY = "onnx.tuned"  # of the module; "~2", "~3", ... is appended where it is taken
_PIECE = 8 << 20  # bytes of a copy at a time


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
    planned: Callable[[int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Add a tuned part to an archive: `session` then answers as fast here as from the .onnx, from one shared copy.

    ONNX Runtime optimises the graph and packs the weights once; both are stored beside the original graph and weights,
    which stay as they are. `session` uses the tuned part if CPU, ONNX Runtime and provider are those that it was made
    for, else the original graph. All models of an archive are tuned, and equal payloads are stored once. An archive may
    be tuned for several machines, one after the other; tuning for the same one again replaces its part. The archive is
    replaced whole, or stays as it was. Weights are packed a few at a time, by two threads, which takes private memory
    of twice the largest weight and some 100 MiB, and up to twice the weights that ONNX Runtime's optimizers make. Space
    on the disk is checked before each part is written.

    The tuned graph has the model's inputs and outputs. An initializer that is an input, too, is a constant in models of
    IR version 3; from version 4 on it is a default, which a caller may override as before, and is not packed.

    The content digest covers the tuned part, so signatures lapse: they are left out, and `untune` restores them. If the
    archive is replaced, models in its folder that `to_onnx(external=True)` wrote for it are written again.

    Args:
        archive: the path of an archive that `convert` made, or of a folder with one.
        dest: a path for the tuned archive, or a URL, to which it is sent once it is whole; None replaces the archive.
        threads: those that ONNX Runtime may use meanwhile; None for one for each core.
        verify: run the model and the tuned graph once, on inputs generated for the model's shapes, and compare their
            answers, before anything is at `dest`. Takes the memory of both, and disk space for the archive once more.
            If the model runs on no such inputs, a warning goes to the logger "zcrecord".
        force, durable, storage_options: as in `convert`.
        progress: called with the bytes written and read back, and all of them; with 0 first. Until that, the archive is
            checked, hashed and copied, weights that ONNX Runtime made anew are added, and one of each size is packed.
        planned: called once with the size of the tuned archive, at most, just before that.

    Example:
        >>> from zcrecord.onnx import convert, session
        >>> _ = convert("model.onnx", "model.zcr")
        >>> report = tune("model.zcr")
        >>> len(report.targets), report.content_digest == report.content_digest_before
        (1, False)

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: it holds no ONNX model, has no digests, is
            packed, remote or attached to a program; a model beside it refers to offsets that would change; ONNX Runtime
            is older than 1.24, or its graph has other inputs, outputs or answers. IntegrityError: it is damaged.
            DestinationExistsError: something is at `dest`. SourceError: the disk has no room, the file system refused,
            or the archive was replaced meanwhile. OnnxError: ONNX Runtime refuses the model.
    """
    if files.is_url(dest):
        local_call = partial(tune, threads=threads, verify=verify, progress=progress, planned=planned)
        return _tune_remote(local_call, archive, url=dest, force=force, options=storage_options)
    started, target = time.perf_counter(), this_target(tuning_module())
    with _open_work(archive, dest, force=force, durable=durable) as work:
        modules = _modules_of(Record(work.base), work.path)
        work.check_room(work.record.archive_nbytes)
        models = work.linked_models()
        with files.scratch_folder(work.dest) as folder:
            return _Tuning(work, modules, models, target, folder, threads, verify, progress, planned, started).run()


def _modules_of(base: Record, path: str) -> list[str]:
    """Return the names of the modules with models, "" for the record; UnsupportedError without models or digests."""
    modules = graph.models_of(base.archive) or [graph.opened_model(base, None).module]
    if not base.archive.index.digest_kind:
        raise UnsupportedError("has no digests, which packed weights need; save it again with digests", path=path)
    return modules


class _Tuning(NamedTuple):
    """One call of `tune`: an opened archive, the models in it and beside it, a scratch folder, and the arguments."""

    work: _Work
    modules: list[str]
    models: list[LinkedModel]  # beside the archive
    target: TuningTarget
    folder: str
    threads: int | None
    verify: bool
    progress: Progress | None
    planned: Callable[[int], None] | None
    started: float

    def run(self) -> TuneReport:
        """Optimise and pack in another thread, while this one verifies, hashes and copies the archive."""
        jobs: list[Future[Any]] = []  # emptied at the end: together with an error they would keep files open
        with ThreadPoolExecutor(1) as worker:
            jobs.append(worker.submit(self._optimise, packs_all=False))
            jobs.append(worker.submit(self._pack, jobs))  # right after, while new weights are written
            try:
                self.work.record.verify()  # first: a damaged archive gets this error, not one of ONNX Runtime's
                digest = content_digest(self.work.base, known=self.work.sha256)
                try:
                    return self._write(digest, lambda: jobs[0].result(), lambda: jobs[1].result())
                except OnnxError:  # perhaps of a model of some nodes alone, of which this way has none
                    return self._write(digest, lambda: self._optimise(packs_all=True), lambda: None)
            finally:
                jobs.clear()

    def _optimise(self, *, packs_all: bool) -> list[TunedGraph]:
        base, arguments = Record(self.work.base), (self.target, self.folder, self.threads, packs_all)
        with files.refusals(self.work.dest):
            return [TunedGraph.from_model(base, module, *arguments) for module in self.modules]

    def _pack(self, jobs: list[Future[Any]]) -> None:
        with files.refusals(self.work.dest):
            for tuned_graph in jobs[0].result():
                tuned_graph.pack()

    def _write(self, digest: str, new: Callable[[], list[TunedGraph]], pack: Callable[[], object]) -> TuneReport:
        """Write the archive with the graphs of other machines and the new ones, and the models beside it.

        `digest` is the untuned content digest; `new` waits for the new graphs, `pack` for the sizes of packed forms.
        """
        work = self.work
        others = [t for t in work.part.targets if t.target != self.target] if work.part is not None else []
        with work.sink() as sink, ThreadPoolExecutor(1) as hashing:
            pool = PayloadPool(sink, work.base, hashing)
            graphs = [*(TunedGraph.from_archive(work.record.archive, t) for t in others), *new()]
            work.check_room(work.max_archive_size(graphs) - sink.position)
            for tuned_graph in graphs:
                tuned_graph.write_sources(pool)
            pack()
            total = work.max_archive_size(graphs)
            work.check_room((1 + self.verify) * total - sink.position + max(g.scratch_bytes for g in graphs))
            if self.planned is not None:
                self.planned(total)
            shares = _progress_by_step(self.progress, total, 2 + self.verify)
            pool.tell, pool.total = next(shares), total
            lapsed = self._write_part(pool, graphs)
            pool.out.verify_written(next(shares))
            verified = self.verify and self._same_answers(sink, next(shares))
            work.replace_sha256(pool)
        written = rewrite_models(self.models, work.dest, self.target.encode())
        report = work.report(self.started, digest, written, graphs[len(others) :])
        next(shares, None)
        return replace(report, lapsed=lapsed, verified=verified)

    def _write_part(self, pool: PayloadPool, graphs: list[TunedGraph]) -> tuple[str, ...]:
        """Write packed forms, graphs and the index; return the ids of the keys whose signatures are left out."""
        base, part = self.work.base, self.work.part
        header, data = base.header, base.buffer
        index = data[header.index_offset : header.index_offset + header.index_size]
        before = b"".join([data[:HEADER_SIZE], index, data[-HEADER_SIZE:]]) if part is None else part.before
        entries = stored_entries(base)
        signatures = [a for a in entries.metadata if a.key.startswith(SIGNATURE_PREFIX)]
        entries.metadata = [a for a in entries.metadata if not a.key.startswith(SIGNATURE_PREFIX)]
        old_offsets = self.work.file_offsets(pool.originals if part is None else part.originals)
        check_places(self.models, self.work.path, old_offsets, pool.out.places()[: len(pool.originals)])
        targets = [tuned_graph.write(pool) for tuned_graph in graphs]
        _add_part(entries, pool.put(np.frombuffer(before, np.uint8)), pool.originals, targets)
        pool.out.finish(entries)
        return tuple(a.key.removeprefix(SIGNATURE_PREFIX) for a in signatures)

    def _same_answers(self, sink: Sink, tell: Progress) -> bool:
        """Return True if a copy of the archive was tried and answers as the models; UnsupportedError if it does not."""
        from .answers import same_answers  # here, because few compare them

        path, cpu = os.path.join(self.folder, folders.MODEL), ["CPUExecutionProvider"]
        with files.refusals(self.work.dest), open(path, "wb") as copy:
            for start in range(0, sink.position, _PIECE):
                tell(start, sink.position)
                copy.write(sink.read_back(start, _PIECE))
        are_same = []
        for module in self.modules:
            tuned_session = session(path, module=module, providers=cpu)
            if (reason := tuning(tuned_session).reason) is not None:
                raise UnsupportedError(f"cannot be tuned: {reason}", path=self.work.path)
            model = session(Record(self.work.base), module=module, memory="speed", providers=cpu)
            exact = compares_packed(onnxruntime_module())
            are_same.append(same_answers(model, tuned_session, self.work.path, exact=exact))
        return all(are_same)


def untune(
    archive: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    planned: Callable[[int], None] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> TuneReport:
    """Remove the tuned part of an archive, which becomes byte for byte the one before `tune`, or stays as it was.

    `dest`, `force`, `durable`, `planned` and `storage_options` are those of `tune`; `progress` counts bytes written.

    Example:
        >>> from pathlib import Path
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
        local_call = partial(untune, progress=progress, planned=planned)
        return _tune_remote(local_call, archive, url=dest, force=force, options=storage_options)
    started = time.perf_counter()
    with _open_work(archive, dest, force=force, durable=durable) as work:
        if work.part is None:
            raise UnsupportedError("is not tuned; there is nothing to remove", path=work.path)
        work.record.verify()
        digest = Record(work.base).content_digest()
        pieces = list(tuned.bytes_before(work.record.archive, work.part))
        trailer_offset, _ = pieces[-1]
        total = trailer_offset + HEADER_SIZE
        models = work.linked_models()
        check_places(models, work.path, work.file_offsets(work.part.originals), tuned.places_before(work.part))
        work.check_room(total)
        if planned is not None:
            planned(total)
        with work.sink() as sink:
            sink.reserve(total)
            for offset, data in pieces:
                if progress is not None:
                    progress(sink.position, total)
                sink.write(bytes(offset - sink.position))
                sink.write(data)
        if progress is not None:
            progress(total, total)
        return work.report(started, digest, rewrite_models(models, work.dest, None))


def _tune_remote(
    local_call: Callable[..., TuneReport], archive: Any, *, url: str, force: bool, options: Mapping[str, Any] | None
) -> TuneReport:
    """Tune or untune into a scratch file, and upload that; errors of the scratch file's disk name the URL."""
    started = time.perf_counter()
    place = files.place_for(url, files.check_destination(files.path_of(archive), url, force, options), options)
    with files.scratch_folder(url) as folder:
        path = os.path.join(folder, folders.MODEL)
        try:
            report = local_call(archive, path, durable=False)
        except SourceError as error:
            if error.errno is None or os.path.basename(folder) not in (error.path or ""):
                raise
            fault = error.message.partition("; ")[0].replace(folder, os.path.dirname(folder))
            fault += ", among temporary files; set TMPDIR to a folder on another disk"
            raise SourceError(fault, path=urls.redacted(url), errno=error.errno) from error
        folders.copy_file(path, place, durable=True, options=options)
    return replace(report, dest=url, seconds=time.perf_counter() - started)


@contextlib.contextmanager
def _open_work(archive: Any, dest: Any, *, force: bool, durable: bool) -> Iterator[_Work]:
    """Check the destination, then open an archive to tune or untune, closed at the end; writes nothing.

    Raises:
        UnsupportedError: it is sharded, packed, remote or attached to a program, or `dest` is not a regular file.
        DestinationExistsError, SourceError: as `tune`.
    """
    path = files.path_of(archive)
    if os.path.isdir(path):
        path = folders.archive_in(path)
    path_out = path if dest is None else files.path_of(dest)
    replaces = files.check_destination(path, None if dest is None else path_out, force)
    if dest is not None and os.path.exists(path_out) and not os.path.isfile(path_out):
        raise UnsupportedError("a tuned archive is a regular file in a folder; name one", path=path_out)
    final_path, _ = files.target_of(path_out)
    with load_record(path) as record:
        archive_read = record.archive
        require_one_file(archive_read, "tuning")
        if archive_read.embedded is not None:
            raise UnsupportedError("is attached to a program; detach it, tune it, and attach it again", path=path)
        if archive_read.source.file is None:
            raise UnsupportedError("is packed, or remote; unpack or download it, and tune that", path=path)
        with located(path=path):
            part = tuned.read_tuned(archive_read)
            base = archive_read if part is None else tuned.untuned(archive_read, part)
        yield _Work(
            path=path, dest=final_path, record=record, part=part, base=base,
            durable=durable, replaces=replaces, written=[], sha256={},
        )  # fmt: skip


class _Work(NamedTuple):
    """The work on one archive: the record, its tuned part, and `base`, the archive without that part."""

    path: str
    dest: str  # with links followed
    record: Record
    part: TunedPart | None
    base: Archive
    durable: bool
    replaces: files.Identity | str | None  # the file at `dest`, if that is not the archive itself
    written: list[files.Identity]  # the files that were written, the archive last
    sha256: dict[Any, bytes]  # of payloads by place, as `content_digest` fills it in; `replace_sha256` exchanges them

    @contextlib.contextmanager
    def sink(self) -> Iterator[Sink]:
        """Yield a sink that replaces the destination at the end; SourceError if the archive was replaced meanwhile."""
        assert self.record.archive.source.file is not None, "it is mapped"
        path, identity = self.record.archive.source.file
        replaces = identity if self.is_in_place() else self.replaces
        with files.open_sink(self.dest, durable=self.durable, replaces=replaces) as sink:
            try:
                yield sink
            except OnnxError:
                self.check_room(self.record.archive_nbytes)  # ONNX Runtime reports a full disk as a fault of the model
                raise
            if files.identity_of(path) != identity:
                raise SourceError("was replaced while it was tuned; tune it again", path=self.path)
            assert isinstance(sink, FileSink), "a regular file"
            self.written.append(sink.identity())

    def linked_models(self) -> list[LinkedModel]:
        """Return the models beside the archive that have to be written again."""
        return linked_models(self.record, Record(self.base)) if self.is_in_place() else []

    def is_in_place(self) -> bool:
        return os.path.realpath(self.path) == self.dest

    def file_offsets(self, numbers: list[PayloadId]) -> Any:
        """Return an array of the offsets in the archive's file of payloads by number."""
        archive = self.record.archive
        return archive.index.payloads["offset"][numbers] + np.uint64(archive.header.payload_offset)

    def check_room(self, nbytes: int) -> None:
        """Raise SourceError unless the disk has room for so many bytes beside the destination."""
        folder = os.path.dirname(self.dest)
        with files.refusals(self.dest):
            size, _, free = shutil.disk_usage(folder)
        if size and nbytes > free:  # some file systems report 0 for both
            fault = f"needs up to {nbytes} bytes on the disk, {free} are free in '{folder}'; make room there"
            raise SourceError(f"{fault}, or name an output on another disk", path=self.dest, errno=errno.ENOSPC)

    def max_archive_size(self, graphs: list[TunedGraph]) -> int:
        """Return the bytes of the archive with a tuned part of these graphs, at most."""
        header = self.base.header
        before = header.index_size + 2 * HEADER_SIZE  # of the attribute BEFORE: header, index and trailer
        added = sum(g.max_added_bytes(header.alignment) for g in graphs) + PER_ITEM * len(self.base.index.payloads)
        added += before + payload_alignment(before, header.alignment) + PAGE
        return tuned.size_before(self.record.archive) + added

    def replace_sha256(self, pool: PayloadPool) -> None:
        """Replace the digests of the payloads that were read by those of the payloads that were written."""
        places = {self.base.place(number): pool.place(number) for number in pool.originals}
        digests = {places[place]: sha256 for place, sha256 in self.sha256.items() if place in places}
        self.sha256.clear()
        self.sha256.update(digests | {place: sha256.result() for place, sha256 in pool.sha256.items()})

    def report(
        self, started: float, digest: str, models: tuple[str, ...], graphs: Sequence[TunedGraph] = ()
    ) -> TuneReport:
        """Check that the untuned part has this content digest, and return the report; `graphs` are the new graphs."""
        with load_record(self.dest) as written:
            if written.archive.source.file is None or written.archive.source.file[1][:3] != self.written[-1][:3]:
                fault = "was replaced by another saver as soon as it was written"
                raise SourceError(f"{fault}; look at the file there, and tune it again", path=self.dest)
            part = tuned.read_tuned(written.archive)
            base = written if part is None else Record(tuned.untuned(written.archive, part))
            if (now := content_digest(base.archive, known=self.sha256)) != digest:
                fault = f"its content digest was {digest}, that of its untuned part is {now}"
                raise IntegrityError(f"{fault}; the disk or the memory is failing", path=self.dest)
            after = digest if part is None else content_digest(written.archive, known=self.sha256)
            targets = tuned.targets_of(written.archive)
        return TuneReport(
            source=self.path,
            dest=self.dest,
            targets=targets,
            modules=tuple(g.module for g in graphs),
            weights=sum(g.weights for g in graphs),
            packed=sum(g.packed for g in graphs),
            packed_bytes=sum(g.packed_bytes for g in graphs),
            input_bytes=self.record.archive_nbytes,
            archive_bytes=self.written[-1][2],
            content_digest_before=digest,
            content_digest=after,
            lapsed=(),
            models=models,
            verified=False,
            seconds=time.perf_counter() - started,
        )


def _add_part(entries: Entries, before: PayloadId, originals: list[PayloadId], targets: list[dict[str, Any]]) -> None:
    """Add a tuned part to an archive's entries: a module of an unused name, in it one for each target's attributes."""
    modules = entries.modules
    used = {m.name for m in modules} | {n for n, p in zip(entries.names, entries.parents, strict=True) if p == 0}
    used |= {a.key for a in entries.attributes if a.parent == 0}
    names = itertools.chain([_KEY], (f"{_KEY}~{i}" for i in itertools.count(2)))
    name = next(n for n in names if n not in used)
    top = len(modules)
    parents = *entries.parents, *(m.parent for m in modules), *(a.parent for a in entries.attributes)
    place = sum(parent == 0 for parent in parents)
    kind = int(ModuleKind.MAPPING)
    modules.append(ModuleEntry(name, len(name), 0, place, kind, TUNED_TYPE))
    own = {tuned.BEFORE: before, tuned.PAYLOADS: originals}
    entries.attributes += [AttributeEntry(key, top, i, value) for i, (key, value) in enumerate(own.items())]
    for i, attributes in enumerate(targets):
        module = len(modules)
        modules.append(ModuleEntry(f"{name}.{i}", len(str(i)), top, len(own) + i, kind, tuned.TARGET_TYPE))
        pairs = enumerate(attributes.items())
        entries.attributes += [AttributeEntry(key, module, place, value) for place, (key, value) in pairs]


def _progress_by_step(progress: Progress | None, size: int, steps: int) -> Iterator[Progress]:
    """Yield a callback for each step, of `size` bytes whatever it writes; reports 0 before, all bytes at the end."""
    tell = progress or (lambda *_: None)

    def tell_step(done: int, total: int | None, start: int) -> None:
        tell(start + size * min(done, total or 1) // (total or 1), steps * size)

    tell(0, steps * size)
    for step in range(steps):
        yield partial(tell_step, start=step * size)
    tell(steps * size, steps * size)
