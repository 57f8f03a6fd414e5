"""ONNX Runtime sessions that compute straight off an archive.

ONNX Runtime takes the archive's own memory as a file of external data, of which each weight of the main graph is a
slice: nothing is copied, even if the archive is a bytes object, or is renamed or replaced meanwhile. It takes weights
of subgraphs only from real files: it maps them from the archive's, by its resolved path, or from a temporary file. All
weights are mapped from files for ONNX Runtime before 1.31, which copies memory that it is given, and for providers
other than the CPU's: OpenVINO takes 168 MiB for a model of 128, and 688 from memory, and CUDA reads a file into pinned
buffers.

Small tensors, strings, complex numbers, empty tensors and those in attributes go into the model, as ONNX Runtime
expects it. `SessionOptions.add_initializer` is not used: if an optimizer transposes or reshapes an initializer under
the same name, the view of that name stays unchanged, and results would be silently wrong.

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.by_file import parts_by_file
from zcrecord.archive.info import child_of_type
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.codec.layout import ALIGNMENT, align_up
from zcrecord.errors import OnnxError, SourceError, UnsupportedError, missing_package, printable
from zcrecord.onnx.protobuf.interfaces import without_constant_inputs
from zcrecord.record.record import Record
from zcrecord.storage.files import Identity, identity_of
from zcrecord.tensors.strides import address

from . import graph
from .external_data import COPYING, NO_PREPACKING, Bytes
from .graph import INLINE, Initializer

_DIRECT_SINCE = (1, 31)  # buffers used in place; earlier versions do not know the key and copy
_CPU = "CPUExecutionProvider"
_FOLDER = "session.model_external_initializers_file_folder_path"
_FORMAT = "session.load_model_format"
_READS_INNER_SINCE = (1, 31)  # the weights of subgraphs that it wrote
_OLDEST = (1, 24)  # as in pyproject.toml; earlier versions run some archives, and refuse others
_COMPARES_SINCE = (1, 32)  # compares packed weights of a file with those that its kernel makes; else trusts them
_DIRECT = "session.use_external_initializer_file_buffers_directly"
_LAST = 1 << 64  # more than any size
_COPY = "weights"  # the file with copies of weights, in a temporary folder
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
    trusted_keys: Sequence[Any] | None = None,
) -> Any:
    """Return a plain `onnxruntime.InferenceSession` whose weights are the archive's own bytes, uncopied.

    `source` is a path, that of a folder with one archive, a bytes-like or a Record made from an ONNX model; the session
    keeps it alive. `module` names the model of an archive of several: sessions of one Record share its pages. With
    `memory="shared"` processes that serve the same archive share one copy of the weights. If `tune` made a graph for
    this machine, the session answers from it, as fast as from the .onnx; `tuning` returns whether. Otherwise nothing is
    packed, folded or laid out anew, and answers take longer: the first such session of a process logs a warning to
    "zcrecord". `"speed"` leaves all that to ONNX Runtime, which copies most weights once per process.

    `sess_options` gets entries: the archive as a file in memory, and for "shared" no prepacking. Do not use it again
    for a model with external data of its own. A failing provider is an error; there is no silent retry on the CPU.
    One that this onnxruntime was built without is left out, with a warning. `trusted_keys` are as in `load_record`,
    for a Record, too.

    Example:
        >>> from zcrecord.onnx import convert
        >>> report = convert("model.onnx", "model.zcr")
        >>> session("model.zcr").get_providers()[-1]
        'CPUExecutionProvider'

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: the record holds no ONNX model, or several and
            `module` names none; the error lists them. TensorNotFoundError: there is no such module. FormatError: its
            graph and its tensors disagree. LimitError: copies of values that are strided, strings or of a subgraph
            would take far more than the bytes that they share. SourceError: the archive was replaced meanwhile.
            IntegrityError: no owner of a trusted key signed it. OnnxError: ONNX Runtime refuses the model, the options
            or the providers.
    """
    if memory not in ("shared", "speed"):
        raise UnsupportedError(f"memory={memory!r} is not known; 'shared' or 'speed'")
    ort = onnxruntime_module()
    model = graph.opened_model(source, module, trusted_keys)
    options = ort.SessionOptions() if sess_options is None else sess_options
    ort_session: Any = None
    reason: str | None = 'memory="speed" takes a private copy'
    if memory == "shared":
        ort_session, reason = _tuned(ort, model, options, providers, provider_options)
    if ort_session is None:
        ort_session = make_session(model.part, options, providers, provider_options, shared=memory == "shared")
    ort_session._zcrecord_tuning = model.record, reason
    return ort_session


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
            raise UnsupportedError("this session has no archive; make it by zcrecord.onnx.session")
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
    """Return the TunedPlan of a model on this machine; NoTuning without one."""
    from . import target, tuned

    return tuned.plan(model.record.archive, model.module, target.this_target(ort, _CPU), packed=compares_packed(ort))


def _tuned(
    ort: Any, model: graph.OpenedModel, options: Any, providers: Sequence[Any] | None, provider_options: Any
) -> tuple[Any, str | None]:
    """Return a session over the model's tuned graph, or None and the reason; the first such reason is logged."""
    archive = model.record.archive
    reason = "it is not tuned"
    if archive.part_of is not None:
        reason = "a part of an archive is not: give the archive, and module="
    if child_of_type(archive, TUNED_TYPE) is not None:
        from . import tuned

        try:
            return _tuned_session(ort, _plan(ort, model), model.part, options, providers, provider_options), None
        except tuned.NoTuning as error:
            reason = str(error)
    _warn_untuned(model.record, reason)
    return None, reason


def _tuned_session(
    ort: Any, plan: Any, record: Record, options: Any, providers: Sequence[Any] | None, provider_options: Any
) -> Any:
    """Return a session over a tuned graph: optimised already, its weights and their packed forms mapped from the file.

    ONNX Runtime packs each weight when a session is made, looks for the hash of the result among the packed forms, and
    on a match frees its own bytes for those of the file. From 1.32 on it compares all of them first, and refuses the
    session if they differ. Earlier versions trust them, and a form that is too short ends the process: there the plan
    has none, and nothing is packed. Another thread compares the digests of weights that tuning added meanwhile. Packing
    stays in this thread, without `session.prepack.enable_parallel`: glibc keeps the last part of memory that other
    threads have freed, up to a weight in each.

    Source: ONNX Runtime 1.32, `session_state.cc` (PrepackConstantInitializedTensors, ValidatePrePackedWeights) and
    `prepacked_weights.cc`; tried with 1.21, 1.31 and 1.32.
    """
    from .tuned import NoTuning

    if not _is_cpu_alone(providers):
        raise NoTuning(f"tuned parts are for {_CPU} alone")
    levels = ort.GraphOptimizationLevel
    if options.graph_optimization_level != levels.ORT_ENABLE_ALL:
        raise NoTuning("sess_options ask for another level of graph optimization")
    configure(options, NO_PREPACKING, "0" if plan.packed else "1")
    options.graph_optimization_level = levels.ORT_DISABLE_ALL
    errors: list[Exception] = []

    def check() -> None:
        try:
            plan.check()
        except Exception as error:
            errors.append(error)

    checking = threading.Thread(target=check)
    checking.start()
    try:
        ort_session = _create(ort, plan.model, options, providers, provider_options, os.path.dirname(plan.path), None)
    except Exception as error:
        raise NoTuning(f"ONNX Runtime refuses the tuned graph: {printable(str(error), 1000)}") from error
    finally:
        options.graph_optimization_level = levels.ORT_ENABLE_ALL
        checking.join()
    if errors:
        raise NoTuning(str(errors[0])) from errors[0]
    trim_memory()
    _check_unchanged({plan.path: plan.identity})
    ort_session._zcrecord = record, whole_file(record)  # must outlive the session
    return ort_session


def _warn_untuned(record: Record, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        where = "the archive in memory" if record.path is None else record.path
        logging.getLogger("zcrecord").warning(
            "%s: the original graph answers (%s), in 1.1 to 2.9 times the time of the .onnx; full speed comes from a "
            "tuned archive in a local file (`zcrecord tune`), or from a private copy (memory='speed')", where, reason
        )  # fmt: skip


def onnxruntime_module() -> Any:
    """Return onnxruntime, imported here alone; DependencyError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise missing_package("onnxruntime", extra="ort") from error
    return onnxruntime


def tuning_module() -> Any:
    """Return onnxruntime as `onnxruntime_module` does; UnsupportedError if it is too old to tune a model."""
    ort = onnxruntime_module()
    if _version(ort) < _OLDEST:
        raise UnsupportedError(f"onnxruntime {ort.__version__} cannot tune a model; 1.24 and later can")
    return ort


@contextlib.contextmanager
def model_errors(record: Record) -> Iterator[None]:
    """Raise OnnxError for any error of ONNX Runtime in the block: its errors have no common class."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        fault = f"ONNX Runtime {onnxruntime_module().__version__} makes no session of the model"
        advice = "the .onnx itself has to run there: mend the model, or install an onnxruntime that runs it"
        if _version(onnxruntime_module()) < _OLDEST:
            advice = "zcrecord needs onnxruntime 1.24 or later; upgrade it"
        raise OnnxError(f"{fault}: {printable(str(error), 1000)}; {advice}", path=record.archive.path) from error


def compares_packed(ort: Any) -> bool:
    """Return True if ONNX Runtime compares packed weights of a file with its own before it uses them."""
    return _version(ort) >= _COMPARES_SINCE


def _version(ort: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", ort.__version__)[:2])


def optimise(record: Record, dest: str, weights: str | None, threads: int | None, packed: bool) -> None:
    """Have ONNX Runtime write the graph optimised for this CPU.

    All weights are in one file beside the graph, of the name `weights`; with `packed` also their packed forms, for
    which private memory must suffice, unless this version would not compare them. Without `weights` the graph refers to
    the archive's weights in its file, and contains new ones. Constants are removed from the model's inputs first, since
    ONNX Runtime keeps an input when it removes its constant, or merges that with an equal one.

    Raises:
        OnnxError: ONNX Runtime refuses the model, or new weights are more than a graph may hold. UnsupportedError: ONNX
        Runtime does not read its own result: 1.21 repeats the weights of subgraphs.
    """
    ort = onnxruntime_module()
    options = _saving_options(ort, dest, weights, packed and compares_packed(ort))
    options.log_severity_level = 3  # or it warns that the graph is for this CPU alone
    options.intra_op_num_threads = threads or 0
    configure(options, "session.intra_op.allow_spinning", "0")  # the archive is read and hashed meanwhile
    skeleton = without_constant_inputs(graph.skeleton_of(record))
    try:
        make_session(record, options, [_CPU], None, shared=False, skeleton=skeleton, from_files=weights is None)
        if weights is not None:
            _check_readable(ort, record, dest)
    finally:
        trim_memory()


def _check_readable(ort: Any, record: Record, path: str) -> None:
    """Raise UnsupportedError if ONNX Runtime makes no session of the graph that it wrote to a path."""
    try:
        session_of_nodes(record, path)
    except OnnxError as error:
        later = "; tune with a later one" if _version(ort) < _READS_INNER_SINCE else ""
        fault = f"onnxruntime {ort.__version__} does not read the graph that it optimised{later}"
        raise UnsupportedError(f"{fault}: {printable(str(error.__cause__), 1000)}", path=error.path) from error


def _saving_options(ort: Any, dest: str, weights: str | None, packed: bool) -> Any:
    """Return options with which a session writes its graph, and with `weights` its weights to a file of that name."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = dest
    if weights is not None:
        configure(options, "session.optimized_model_external_initializers_file_name", weights)
        configure(options, "session.optimized_model_external_initializers_min_size_in_bytes", str(INLINE + 1))
    configure(options, "session.save_external_prepacked_constant_initializers" if packed else NO_PREPACKING, "1")
    return options


def session_of_nodes(
    record: Record, model: str | bytes, weights: Mapping[str, Any] | None = None, dest: Path | None = None
) -> Any:
    """Return a session of a part of a record's optimised graph; with `dest` its weights are packed, and written there.

    `weights` are arrays, by the names that stand for them in the model. Errors are those of `model_errors`.
    """
    ort = onnxruntime_module()
    if dest is None:
        options = ort.SessionOptions()
        configure(options, NO_PREPACKING, "1")
    else:
        options = _saving_options(ort, str(dest), dest.with_suffix(".data").name, packed=True)
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    _add_files_in_memory(options, weights or {})
    with model_errors(record):
        return ort.InferenceSession(model, options, providers=[_CPU], enable_fallback=0)


def _add_files_in_memory(options: Any, memory: Mapping[str, Any]) -> None:
    """Give ONNX Runtime arrays of bytes as files of these names."""
    if memory:
        configure(options, _DIRECT, "1")
        sizes = list(map(len, memory.values()))
        options.add_external_initializers_from_files_in_memory(list(memory), list(memory.values()), sizes)


def _is_cpu_alone(providers: Sequence[Any] | None) -> bool:
    return providers is None or [p if isinstance(p, str) else p[0] for p in providers] == [_CPU]


def whole_file(record: Record) -> Bytes:
    """Return a view of the memory that the record's tensors lie in, from its file's first byte on."""
    owner: Any = graph.skeleton_of(record).obj
    return np.frombuffer(owner, np.uint8)


class _WeightMemory(NamedTuple):
    """Memory in which weights lie; the resolved path and identity of the file that is mapped there, if there is one."""

    memory: Bytes
    file: tuple[str, Identity] | None = None


def _memories(record: Record) -> list[_WeightMemory]:
    """Return the memory of a record, and of each shard of a catalogue."""
    whole = whole_file(record)
    if not record.archive.source.file_names:
        return [_WeightMemory(whole, _file_of(record.archive))]
    shards = [shard for shard in parts_by_file(record.archive) if shard.source.mapping is not None]
    arrays = [np.frombuffer(shard.source.mapping, np.uint8) for shard in shards]
    return [_WeightMemory(whole), *map(_WeightMemory, arrays, map(_file_of, shards))]


def _places(record: Record, memories: Sequence[_WeightMemory]) -> dict[int, tuple[int, int]]:
    """Return the number of the memory, and the offset there, of each tensor that ONNX Runtime can use where it lies.

    The keys are the tensors' numbers. The memory's number is -1 for a tensor with memory of its own.
    """
    ranges = sorted((address(m.memory), len(m.memory), n) for n, m in enumerate(memories))
    places: dict[int, tuple[int, int]] = {}
    for number, value in enumerate(record.values()):
        if value.nbytes and graph.in_c_order(value):
            start = address(graph.raw_bytes(value))
            memory_start, size, n = ranges[max(bisect.bisect_right(ranges, (start, _LAST)) - 1, 0)]
            is_inside = memory_start <= start and start + value.nbytes <= memory_start + size
            places[number] = (n, start - memory_start) if is_inside else (-1, 0)
    return places


def _file_of(archive: Archive) -> tuple[str, Identity] | None:
    """Return the resolved path and identity of the mapped file; None if there is none, or not any more."""
    path, identity = archive.source.file or ("", ())
    with contextlib.suppress(OSError, ValueError):  # it is missing, or its name is not UTF-8
        path = os.path.realpath(path)
        path.encode()  # ONNX Runtime takes no other names
        return (path, identity) if identity_of(path) == identity else None
    return None


class _WeightPlaces:
    """Decides where ONNX Runtime finds each weight: in memory that it is given, in the archive's file, or in a copy.

    Attributes:
        memories: those of the record.
        files: the archive's files, by resolved paths.
        on_disk: True if all weights lie in these files, and in one folder.
        in_memory: memory by the names that stand for it in the model.
        from_files: weights that are mapped from files, by number, with the offset of each in the copy.
    """

    def __init__(self, ort: Any, record: Record, providers: Sequence[Any] | None, from_files: bool) -> None:
        self.memories = memories = _memories(record)
        self._places = _places(record, memories)
        used = {n for n, _ in self._places.values()}
        self.files = dict(file for n in used if n >= 0 and (file := memories[n].file) is not None)
        self.on_disk = len(self.files) == len(used) and len(set(map(os.path.dirname, self.files))) == 1
        from_memory = not self.on_disk or (_is_cpu_alone(providers) and not from_files)
        self._is_direct = _version(ort) >= _DIRECT_SINCE and from_memory
        self._min_nbytes = INLINE + 1 if self._is_direct else _least_mapped(record)
        self._call = next(_calls)  # options may be given to several calls
        self.in_memory: dict[str, Bytes] = {}
        self.from_files: dict[int, tuple[Initializer, int]] = {}
        self._copy_end = 0

    @property
    def copied_bytes(self) -> int:
        """Bytes of weights that have to be copied into a file."""
        return 0 if self.on_disk else sum(weight.value.nbytes for weight, _ in self.from_files.values())

    def refer(self, weight: Initializer) -> bytes | None:
        """Return a reference to a weight; None if its values go into the model. The last answer for a weight counts."""
        place = self._places.get(weight.number)
        _, copy_offset = self.from_files.pop(weight.number, (None, self._copy_end))
        if place is None or weight.inside or weight.value.nbytes < self._min_nbytes:
            return None
        n, offset = place
        if self._is_direct and weight.graph == "main":
            location = f"zcrecord-{self._call}-{n}" if n >= 0 else f"zcrecord-{self._call}+{weight.number}"
            self.in_memory[location] = self.memories[n].memory if n >= 0 else graph.raw_bytes(weight.value)
        else:
            self.from_files[weight.number] = weight, copy_offset
            self._copy_end = max(self._copy_end, copy_offset + align_up(weight.value.nbytes, ALIGNMENT))
            path, _ = self.memories[n].file or ("", ())
            location, offset = (os.path.basename(path), offset) if self.on_disk else (_COPY, copy_offset)
        return graph.encode_reference(location, offset, weight.value.nbytes)

    @contextlib.contextmanager
    def folder(self) -> Iterator[str | None]:
        """Yield the folder of the files that weights are mapped from; a temporary one, if they have to be copied."""
        if not self.from_files or self.on_disk:
            yield os.path.dirname(next(iter(self.files))) if self.from_files else None
            return
        with tempfile.TemporaryDirectory(prefix="zcrecord-", ignore_cleanup_errors=True) as folder:
            with Path(folder, _COPY).open("wb") as file:
                for weight, offset in self.from_files.values():
                    file.seek(offset)
                    file.write(graph.raw_bytes(weight.value).data)
            yield folder


def _least_mapped(record: Record) -> int:
    """Return the smallest size of a tensor that is mapped from a file: larger ones if there are very many."""
    sizes: list[int] = sorted((v.nbytes for v in record.values()), reverse=True)
    return max([INLINE, *sizes[graph.MOST_MAPPED : graph.MOST_MAPPED + 1]]) + 1


def make_session(
    record: Record,
    options: Any,
    providers: Sequence[Any] | None,
    provider_options: Sequence[Any] | None,
    *,
    shared: bool = True,
    skeleton: bytes | None = None,
    from_files: bool = False,
) -> Any:
    """Return a session of the original graph, or of another skeleton; `shared` as memory="shared" of `session`.

    With `from_files` all weights are mapped from the archive's file, if it has one.
    """
    ort, path = onnxruntime_module(), record.archive.path
    places = _WeightPlaces(ort, record, providers, from_files)
    parts = graph.restore(record, places.refer, skeleton=skeleton).parts
    size = graph.size_of(parts, graph.STAY_OUT, path)
    for nbytes in (size, places.copied_bytes):
        check_apart(nbytes, record.archive.stored_nbytes(), path)
    _add_files_in_memory(options, places.in_memory)
    if shared:
        configure(options, NO_PREPACKING, "1")
    disabled_optimizers = set(COPYING) if shared else None
    with places.folder() as folder, model_errors(record):
        model = b"".join(parts)
        ort_session = _create(ort, model, options, providers, provider_options, folder, disabled_optimizers)
    if places.on_disk and places.from_files:
        _check_unchanged(places.files)
    ort_session._zcrecord = record, places.memories, places.in_memory  # must outlive the session
    return ort_session


def _check_unchanged(files: Mapping[str, Identity]) -> None:
    for path, identity in files.items():
        if identity_of(path) != identity:
            raise SourceError("replaced while the session was made; make it again", path=path)


def _create(
    ort: Any, model: bytes, options: Any, providers: Any, provider_options: Any, folder: str | None, disabled: Any
) -> Any:
    """Create a session, without `disabled` optimizers, of a model whose weights are mapped from files in a folder."""
    if folder is not None:
        configure(options, _FOLDER, folder)
    configure(options, _FORMAT, "ONNX")  # or bytes that look like ONNX Runtime's own format are read as that
    arguments = {"providers": providers, "provider_options": provider_options, "disabled_optimizers": disabled}
    return ort.InferenceSession(model, options, **arguments, enable_fallback=0)  # it would leave out the options


def configure(options: Any, key: str, value: str) -> None:
    """Set an entry of SessionOptions unless it has that value: ONNX Runtime prints a warning if it is set again."""
    with contextlib.suppress(RuntimeError):  # it is not set
        if options.get_session_config_entry(key) == value:
            return
    options.add_session_config_entry(key, value)


def trim_memory() -> None:
    """Return the memory in which ONNX Runtime packed weights to the system, which glibc would keep."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
