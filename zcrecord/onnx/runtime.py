"""ONNX Runtime sessions that compute straight off an archive.

ONNX Runtime takes the archive's own memory as a file of external data, of which each weight of the main graph is a
slice: nothing is copied, even if the archive is a bytes object, or is renamed or replaced meanwhile. The weights of
subgraphs it takes only from real files: it maps them from the archive's, by its resolved path, or from a temporary file
if there is none. Before 1.31 it copied memory it was given, and so all weights go that way there; and for providers
other than the CPU's, which load better from files: OpenVINO takes 168 MiB for a model of 128, and 688 from memory, and
CUDA reads a file into pinned buffers.

Small tensors, strings, complex numbers, empty tensors and those in attributes go into the model, as ONNX Runtime
expects it. `SessionOptions.add_initializer` is not used: if an optimizer transposes or reshapes an initializer under
the same name, a view handed over by name stays unchanged, and results would be silently wrong.

Source: ONNX Runtime 1.31, its pull request 32437 (CUDA), and `onnxruntime_session_options_config_keys.h`;
`ort_optimizer_api_impl.cc` (TransposeInitializer, ReshapeInitializer) for the last.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import itertools
import logging
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.by_file import parts_by_file
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.layout import ALIGNMENT, align_up
from zcrecord.errors import LimitError, OnnxError, SourceError, UnsupportedError, missing_package, printable
from zcrecord.onnx.protobuf.interfaces import without_constant_inputs
from zcrecord.record.record import Record
from zcrecord.storage.files import Identity, identity_of
from zcrecord.tensors.strides import address

from . import graph
from .external_data import COPYING, NO_PREPACKING
from .graph import INLINE, Initializer

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_DIRECT_SINCE = (1, 31)  # buffers used in place; earlier versions do not know the key and copy
_CPU = "CPUExecutionProvider"
_FOLDER = "session.model_external_initializers_file_folder_path"
_FORMAT = "session.load_model_format"
_READS_INNER_SINCE = (1, 31)  # the weights of subgraphs that it wrote
_COMPARES_SINCE = (1, 32)  # packed weights of a file with those that its kernel makes; earlier versions trust them
_MODEL_LIMIT = (1 << 31) - 1
_DIRECT = "session.use_external_initializer_file_buffers_directly"
_LAST = 1 << 64  # more than any size
_calls = itertools.count()
_warned = False


def session(
    source: Any,
    *,
    module: str | None = None,
    memory: Literal["shared", "speed"] = "shared",
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    provider_options: Sequence[Any] | None = None,
) -> Any:
    """Return a plain `onnxruntime.InferenceSession` whose weights are the archive's own bytes, uncopied.

    `source` is a path, that of a folder with one archive, a bytes-like or a Record made from an ONNX model; the session
    keeps it alive. `module` names the model of an archive of several: sessions of one Record share its pages. With
    `memory="shared"` processes that serve the same archive share one copy of the weights. If `tune` made a graph for
    this machine, the session answers from it, as fast as from the .onnx; `tuning` tells. Otherwise nothing is packed,
    folded or laid out anew, so that answers take longer, which the first such session of a process tells the logger
    "zcrecord". `"speed"` leaves all that to ONNX Runtime, which copies most weights once per process.

    `sess_options` is added to: the archive as a file in memory, and for "shared" no prepacking. Use it for no model
    that has external data of its own afterwards. A failing provider is an error; there is no silent retry on the CPU.

    Example:
        >>> from zcrecord.onnx import convert
        >>> report = convert("model.onnx", "model.zcr")
        >>> session("model.zcr").get_providers()[-1]
        'CPUExecutionProvider'

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: the record holds no ONNX model, or several and
            `module` names none; the error lists them. TensorNotFoundError: there is no such module. FormatError: its
            graph and its tensors disagree. LimitError: values that have to be copied, since they are strided, strings
            or of a subgraph, take out of all proportion to the bytes that they share; before any is. SourceError: the
            archive was replaced meanwhile. OnnxError: ONNX Runtime refuses the model, the options or the providers.
    """
    if memory not in ("shared", "speed"):
        raise UnsupportedError(f"memory={memory!r} is not known; 'shared' or 'speed'")
    ort = onnxruntime_module()
    model = graph.opened_model(source, module)
    options = ort.SessionOptions() if sess_options is None else sess_options
    made: Any = None
    reason: str | None = 'memory="speed" takes a private copy'
    if memory == "shared":
        made, reason = _tuned(ort, model, options, providers, provider_options)
    if made is None:
        made = _SessionBuilder(ort, model.part, memory == "shared", options, providers, provider_options).make()
    made._zcrecord_tuning = model.record, reason
    return made


@dataclass(frozen=True, slots=True)
class Tuning:
    """The tuned part of an archive, and whether a session uses it.

    Attributes:
        used: True if a session uses it, or would here.
        reason: why not; None if it is used.
        targets: the machines that the archive is tuned for, each as one line of JSON.
    """

    used: bool
    reason: str | None
    targets: tuple[str, ...]


def tuning(source: Any, *, module: str | None = None) -> Tuning:
    """Return the targets of an archive's tuned part, and the reason where a session does not use it.

    `source` is a session that `session` made, or an archive (a path, bytes-like or Record), for which the answer is
    that of a session made now, of the model that `module` names. Reads the tuned graph, and of an archive the weights
    that tuning added.

    Example:
        >>> from zcrecord.onnx import convert, tune
        >>> _ = convert("model.onnx", "model.zcr")
        >>> tuning(session("model.zcr")).reason
        'it is not tuned'
        >>> _ = tune("model.zcr")
        >>> tuning("model.zcr").used
        True

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: another session, or no archive of a model, or
            one of several without `module`. TensorNotFoundError: there is no such module.
    """
    from . import tuned  # here, as below, because most archives are not tuned

    if hasattr(source, "get_session_options"):
        if not hasattr(source, "_zcrecord_tuning"):
            raise UnsupportedError("a session that zcrecord.onnx.session did not make has no archive")
        record, reason = source._zcrecord_tuning
    else:
        model, reason = graph.opened_model(source, module), None
        record = model.record
        try:
            _plan(onnxruntime_module(), model).check()
        except tuned.NoTuning as error:
            reason = str(error)
    return Tuning(reason is None, reason, tuned.targets_of(record.archive))


def _plan(ort: Any, model: graph.OpenedModel) -> Any:
    from . import target, tuned

    return tuned.plan(model.record.archive, model.module, target.this_target(ort, _CPU), packed=compares_packed(ort))


def _tuned(
    ort: Any, model: graph.OpenedModel, options: Any, providers: Sequence[Any] | None, more: Any
) -> tuple[Any, str | None]:
    part = model.record.archive.part_of is not None
    reason = "a part of an archive is not: give the archive, and module=" if part else "it is not tuned"
    if graph.tuned_module(model.record.archive) is not None:
        from . import tuned

        try:
            return _tuned_session(ort, _plan(ort, model), model.part, options, providers, more), None
        except tuned.NoTuning as error:
            reason = str(error)
    _tell_untuned(model.record, reason)
    return None, reason


def _tuned_session(
    ort: Any, plan: Any, record: Record, options: Any, providers: Sequence[Any] | None, more: Any
) -> Any:
    """Return a session over a tuned graph: optimised already, its weights and their packed forms mapped from the file.

    ONNX Runtime packs each weight when a session is made, looks for the hash of the result among the packed forms, and
    on a match drops its own bytes for those of the file. From 1.32 on it compares all of them first, and refuses the
    session if they differ. Earlier versions trust them, and a form that is too short ends the process: there the plan
    has none, and nothing is packed. The digests of weights that tuning added are compared meanwhile, by another thread:
    packing stays in this one, and `session.prepack.enable_parallel` is not set, since of what other threads have freed
    glibc keeps the last part, up to a weight in each.

    Source: ONNX Runtime 1.32, `session_state.cc` (PrepackConstantInitializedTensors, ValidatePrePackedWeights) and
    `prepacked_weights.cc`; tried with 1.21, 1.31 and 1.32.
    """
    from .tuned import NoTuning

    if not _cpu_alone(providers):
        raise NoTuning(f"tuned parts are for {_CPU} alone")
    levels = ort.GraphOptimizationLevel
    if options.graph_optimization_level != levels.ORT_ENABLE_ALL:
        raise NoTuning("sess_options ask for another level of graph optimization")
    _configure(options, _FORMAT, "ONNX")  # or bytes that look like ONNX Runtime's own format are read as that
    _configure(options, _FOLDER, os.path.dirname(plan.path))
    _configure(options, NO_PREPACKING, "0" if plan.packed else "1")
    options.graph_optimization_level = levels.ORT_DISABLE_ALL
    failed: list[Exception] = []

    def check() -> None:
        try:
            plan.check()
        except Exception as error:
            failed.append(error)

    checking = threading.Thread(target=check)
    checking.start()
    try:
        made = ort.InferenceSession(plan.model, options, providers=providers, provider_options=more, enable_fallback=0)
    except Exception as error:
        raise NoTuning(f"ONNX Runtime refuses the tuned graph: {printable(str(error), 1000)}") from error
    finally:
        options.graph_optimization_level = levels.ORT_ENABLE_ALL
        checking.join()
    if failed:
        raise NoTuning(str(failed[0])) from failed[0]
    _trim_memory()
    if identity_of(plan.path) != plan.identity:
        raise SourceError("replaced while the session was made; make it again", path=plan.path)
    made._zcrecord = record, _whole(record)  # must outlive the session
    return made


def _tell_untuned(record: Record, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        where = "the archive in memory" if record.path is None else record.path
        logging.getLogger("zcrecord").warning(
            "%s: not tuned for this machine (%s): answers take 1.1 to 2.9 times as long as from the .onnx; "
            "`zcrecord tune` gives full speed from one shared copy, memory='speed' from a private one", where, reason
        )  # fmt: skip


def onnxruntime_module() -> Any:
    """Return onnxruntime, imported here alone; DependencyError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise missing_package("onnxruntime", extra="ort") from error
    return onnxruntime


@contextlib.contextmanager
def model_errors(record: Record) -> Iterator[None]:
    """Raise OnnxError for any error of ONNX Runtime in the block, which have no common class."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        what = f"ONNX Runtime {onnxruntime_module().__version__} makes no session of the model"
        do = "the .onnx itself has to run there: mend the model, or install an onnxruntime that runs it"
        raise OnnxError(f"{what}: {printable(str(error), 1000)}; {do}", path=record.archive.path) from error


def compares_packed(ort: Any) -> bool:
    """Return True if ONNX Runtime compares packed weights of a file with its own before it uses them."""
    return _version(ort) >= _COMPARES_SINCE


def _version(ort: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2])


def make_session(record: Record, options: Any, *providers: Any, skeleton: bytes) -> Any:
    """Return a session as `session` does, with memory "shared", of the model with another skeleton.

    `providers` are the names and their options.
    """
    return _SessionBuilder(onnxruntime_module(), record, True, options, *providers, skeleton=skeleton).make()


def optimise(record: Record, dest: str, weights: str, threads: int | None) -> None:
    """Have ONNX Runtime write the graph optimised for this CPU, and its weights with their packed forms in one file.

    `weights` is that file's name, beside the graph; it is not written where no weight is large enough. Before 1.32,
    which would not compare them, no packed forms are written. Constants are taken off the model's inputs first: ONNX
    Runtime leaves an input there whose constant it removes, or joins with an equal one.

    Raises:
        UnsupportedError: ONNX Runtime does not read what it wrote: 1.21 repeats the weights of subgraphs.
    """
    ort = onnxruntime_module()
    options = ort.SessionOptions()
    options.optimized_model_filepath = dest
    options.log_severity_level = 3  # or it warns that the graph is for this CPU alone
    options.intra_op_num_threads = threads or 0
    _configure(options, "session.optimized_model_external_initializers_file_name", weights)
    _configure(options, "session.optimized_model_external_initializers_min_size_in_bytes", str(INLINE + 1))
    if compares_packed(ort):
        _configure(options, "session.save_external_prepacked_constant_initializers", "1")
    skeleton = without_constant_inputs(graph.skeleton_of(record))
    _SessionBuilder(ort, record, False, options, [_CPU], None, skeleton=skeleton).make()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    _configure(options, NO_PREPACKING, "1")
    try:
        ort.InferenceSession(dest, options, providers=[_CPU])
    except Exception as error:
        later = "; tune with a later one" if _version(ort) < _READS_INNER_SINCE else ""
        what = f"onnxruntime {ort.__version__} does not read the graph that it optimised{later}"
        raise UnsupportedError(f"{what}: {printable(str(error), 1000)}", path=record.archive.path) from error
    finally:
        _trim_memory()


def _cpu_alone(providers: Sequence[Any] | None) -> bool:
    return providers is None or [p if isinstance(p, str) else p[0] for p in providers] == [_CPU]


def _whole(record: Record) -> Bytes:
    """Return the memory that all of the record's tensors lie in, its file's first byte being its own; a view."""
    owner: Any = graph.skeleton_of(record).obj
    return np.frombuffer(owner, np.uint8)


class _WeightMemory(NamedTuple):
    """Memory in which weights lie; the resolved path and identity of the file that is mapped there, if there is one."""

    memory: Bytes
    path: str | None = None
    identity: Identity = ()


def _memories(record: Record) -> list[_WeightMemory]:
    """Return the memory of a record: of a catalogue that of each shard, of any other archive its whole file's."""
    whole = _whole(record)
    if not record.archive.source.file_names:
        return [_WeightMemory(whole, *_file_of(record.archive))]
    parts = [part for part in parts_by_file(record.archive) if part.source.file is not None]
    shards = (_WeightMemory(np.frombuffer(part.source.mapping, np.uint8), *_file_of(part)) for part in parts)
    return [_WeightMemory(whole), *shards]


def _places(record: Record, memories: Sequence[_WeightMemory]) -> dict[int, tuple[int, int]]:
    """Return, for each tensor that ONNX Runtime can use as it lies, the number of its memory and the offset there.

    The number is -1 for a tensor with memory of its own.
    """
    starts = sorted((address(m.memory), len(m.memory), n) for n, m in enumerate(memories))
    out: dict[int, tuple[int, int]] = {}
    for number, value in enumerate(record.values()):
        if _mappable(value):
            start = address(graph.raw_bytes(value))
            first, size, n = starts[max(bisect.bisect_right(starts, (start, _LAST)) - 1, 0)]
            inside = first <= start and start + value.nbytes <= first + size
            out[number] = (n, start - first) if inside else (-1, 0)
    return out


def _file_of(archive: Archive) -> tuple[str | None, Identity]:
    """Return the resolved path of the file that is mapped, and its identity; None if another is there, or none."""
    file = archive.source.file
    if file is None:
        return None, ()
    path, identity = os.path.realpath(file[0]), file[1]
    with contextlib.suppress(OSError, ValueError):
        path.encode()  # ONNX Runtime takes no other names
        return (path if identity_of(path) == identity else None), identity
    return None, ()


class _SessionBuilder:
    """One call of `session`."""

    def __init__(
        self, ort: Any, record: Record, shared: bool, options: Any, *providers: Any, skeleton: bytes | None = None
    ) -> None:
        self._ort = ort
        self._skeleton = skeleton
        self._record = record
        self._shared = shared
        self._options = ort.SessionOptions() if options is None else options
        self._providers = providers

    def make(self) -> Any:
        """Return the session: the main graph's weights from memory if possible, all others from files."""
        memories = _memories(self._record)
        places = _places(self._record, memories)
        used = [memories[n] if n >= 0 else None for n in {n for n, _ in places.values()}]
        files = {m.path: m.identity for m in used if m is not None and m.path is not None}
        on_disk = len(files) == len(used) and len(set(map(os.path.dirname, files))) == 1
        direct = _version(self._ort) >= _DIRECT_SINCE and (not on_disk or _cpu_alone(self._providers[0]))
        least = INLINE + 1 if direct else self._least()
        tensors = graph.restore(self._record, lambda _: b"", skeleton=self._skeleton).tensors
        weights = [w for w in tensors if w.number in places and not w.inside and w.value.nbytes >= least]
        from_memory = [w for w in weights if direct and w.graph == "main"]
        from_files = [w for w in weights if not direct or w.graph != "main"]
        locations, given = _in_memory(from_memory, places, memories)
        locations |= _in_archive(from_files, places, memories) if on_disk else _in_weights_file(from_files)

        def reference(tensor: Initializer) -> bytes | None:
            place = locations.get(tensor.number)
            return None if place is None else graph.encode_reference(*place, tensor.value.nbytes)

        model = self._joined(graph.model_parts(self._record, reference, skeleton=self._skeleton))
        if given:
            _configure(self._options, _DIRECT, "1")
            sizes = list(map(len, given.values()))
            self._options.add_external_initializers_from_files_in_memory(list(given), list(given.values()), sizes)
        with contextlib.ExitStack() as stack:
            folder = None
            if from_files and on_disk:
                folder = os.path.dirname(next(iter(files)))
            elif from_files:
                self._check_apart(sum(w.value.nbytes for w in from_files))
                folder = stack.enter_context(_weights_file(from_files, locations))
            with model_errors(self._record):
                made = self._create(model, folder)
        for path, identity in files.items():
            if on_disk and from_files and identity_of(path) != identity:
                raise SourceError("replaced while the session was made; make it again", path=path)
        made._zcrecord = self._record, memories, given  # must outlive the session
        return made

    def _least(self) -> int:
        """Return the smallest size of a tensor that is mapped: more than INLINE if there are very many."""
        sizes = sorted((v.nbytes for v in self._record.values()), reverse=True)[: graph.MOST_MAPPED + 1]
        return max(INLINE, sizes[-1] if len(sizes) > graph.MOST_MAPPED else 0) + 1

    def _joined(self, parts: list[Any]) -> bytes:
        size = sum(map(len, parts))
        if size > _MODEL_LIMIT:
            what = f"{size} bytes of model without what can be external data; ONNX Runtime takes 2 GiB"
            raise LimitError(what, path=self._record.archive.path)
        self._check_apart(size)
        return b"".join(parts)

    def _check_apart(self, nbytes: int) -> None:
        """Raise LimitError if so many bytes of values, which tensors may share, are out of all proportion."""
        check_apart(nbytes, self._record.archive.stored_nbytes(), self._record.archive.path)

    def _create(self, model: bytes, folder: str | None) -> Any:
        if folder is not None:
            _configure(self._options, _FOLDER, folder)
        _configure(self._options, _FORMAT, "ONNX")  # or bytes that look like ONNX Runtime's own format are read as that
        if self._shared:
            _configure(self._options, NO_PREPACKING, "1")
        providers, provider_options = self._providers
        return self._ort.InferenceSession(
            model,
            self._options,
            providers=providers,
            provider_options=provider_options,
            disabled_optimizers=set(COPYING) if self._shared else None,
            enable_fallback=0,  # it would leave out the options set here
        )


Locations = dict[int, tuple[str, int]]  # by the numbers of weights: the file of each, and its offset there


def _in_memory(
    weights: Sequence[Initializer], places: dict[int, tuple[int, int]], memories: Sequence[_WeightMemory]
) -> tuple[Locations, dict[str, Bytes]]:
    call = next(_calls)  # options may be given to several calls
    locations: Locations = {}
    given: dict[str, Bytes] = {}
    for w in weights:
        n, offset = places[w.number]
        name = f"zcrecord-{call}-{n}" if n >= 0 else f"zcrecord-{call}+{w.number}"
        given[name] = memories[n].memory if n >= 0 else graph.raw_bytes(w.value)
        locations[w.number] = name, offset
    return locations, given


def _in_archive(
    weights: Sequence[Initializer], places: dict[int, tuple[int, int]], memories: Sequence[_WeightMemory]
) -> Locations:
    placed = ((w.number, places[w.number]) for w in weights)
    return {number: (os.path.basename(memories[n].path or ""), offset) for number, (n, offset) in placed}


def _in_weights_file(weights: Sequence[Initializer]) -> Locations:
    sizes = (align_up(w.value.nbytes, ALIGNMENT) for w in weights)
    offsets = itertools.accumulate(sizes, initial=0)
    return {w.number: ("weights", offset) for w, offset in zip(weights, offsets, strict=False)}


@contextlib.contextmanager
def _weights_file(weights: Sequence[Initializer], locations: Locations) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="zcrecord-", ignore_cleanup_errors=True) as folder:
        with Path(folder, "weights").open("wb") as file:
            for w in weights:
                file.seek(locations[w.number][1])
                file.write(graph.raw_bytes(w.value).data)
        yield folder


def _mappable(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.flags.c_contiguous and value.size)
    return hasattr(value, "packed") and bool(value.nbytes)


def _configure(options: Any, key: str, value: str) -> None:
    """Set an entry unless it is so already: setting it again makes ONNX Runtime print a warning."""
    try:
        if options.get_session_config_entry(key) == value:
            return
    except RuntimeError:  # not set
        pass
    options.add_session_config_entry(key, value)


def _trim_memory() -> None:
    """Give the memory in which ONNX Runtime packed weights back to the system, which glibc would keep."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
