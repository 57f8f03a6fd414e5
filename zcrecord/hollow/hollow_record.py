"""Hollow records: every name, shape, dtype and module of a record, and its graph, without the weights; filled later.

Fills constants from values, streams, archives and loaders, and makes the result. The state of each constant is left to
`state`, the bytes of one to `writer`, the archive's index and file to `skeleton`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.archive.by_file import parts_by_file
from zcrecord.archive.damage import check_digest
from zcrecord.archive.info import ModuleInfo, TensorInfo
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.layout import NONE
from zcrecord.errors import FillError, LoadCancelledError, ProducerError, UnsupportedError, located
from zcrecord.loaders import Loader, load_into, plan_load
from zcrecord.loaders.host import MappedLoader
from zcrecord.loaders.load import cancel_test, loader_of
from zcrecord.loaders.plan import MAX_IN_FLIGHT
from zcrecord.record.load import load_record, record_of
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress
from zcrecord.tensors import interop
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import as_bytes

from .skeleton import RecordSkeleton, check_filled
from .state import FillState, HollowConstant, State
from .writer import ConstantWriter, MemoryTarget, SinkTarget, sink_target

Sink = Callable[[str, TensorInfo], Any]


def hollow_of(source: Any, *, sink: Sink | None = None) -> HollowRecord:
    """Return a record without its weights; reads the index, attributes and metadata of an archive, no tensor's bytes.

    Constants are filled by `set`, `open`, `stream` and `fill_by`, each once, in any order, from any number of threads;
    then `seal` returns the record. Memory holds the tensors filled so far, and the tensor or chunk that is handed over;
    for a strided tensor that goes to a sink also its payload and its elements in C order.

    Args:
        source: a Record, or any source that `load_record` takes: of a URL only the index is fetched.
        sink: None for memory of this process, aligned as payloads are, of which `seal` makes a Record. Or a function of
            a tensor's name and TensorInfo that is called when its constant is begun, once for tied ones; it returns a
            writable buffer of `info.nbytes` bytes, or an object with `write(chunk)`, and maybe `close()` and `abort()`:
            a device's upload. Chunks come in C order, valid until `write` returns; it may return how many it took.

    Raises:
        RecordError: as `load_record`. LimitError: copies of equal tensors or bytes that are not tied, or with a sink
        of different views of the same bytes, would take far more than the archive.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(3), "b": np.zeros(2)}, "model.zcr")
        >>> hollow = hollow_of("model.zcr")
        >>> hollow.set("w", np.arange(3.0))
        >>> hollow.missing()
        ['b']
    """
    if sink is not None and not callable(sink):
        raise UnsupportedError(f"sink= is a function of a name and a TensorInfo, not a {type(sink).__name__}")
    if not isinstance(source, Record):
        with load_record(source) as record:
            return hollow_of(record, sink=sink)
    hollow = HollowRecord(RecordSkeleton.from_archive(source.archive), sink)
    if sink is not None:
        check_filled(source.archive, hollow.nbytes)  # different views of a payload are handed over one by one
    return hollow


class HollowRecord:
    """A record's names, shapes, dtypes, modules and attributes, whose constants are filled one by one.

    Tied tensors are one constant: filling one fills all. Different views of one payload are filled each by itself,
    unless one of them covers the payload. Empty tensors need no filling. Threads may fill different constants at a
    time. As a context manager it aborts on leaving, unless it is sealed.
    """

    def __init__(self, skeleton: RecordSkeleton, sink: Sink | None) -> None:
        """Start with every constant missing; users call `hollow_of`."""
        self._skeleton, self._sink, self._path = skeleton, sink, skeleton.path
        memory, archive = skeleton.allocate(tensors=sink is None)
        self._memory: memoryview | None = memory  # of all payloads; None once the record is sealed or aborted
        self._declared = Record(archive)
        self._state = FillState(archive, skeleton.path, in_memory=sink is None)
        self._writers: weakref.WeakSet[ConstantWriter] = weakref.WeakSet()  # all open ones, and some closed ones
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's full name, in saved order."""
        return self._declared.names

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, the record itself as ''; in pre-order."""
        return self._declared.modules

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name; an ONNX model's graph is `onnx.graph`."""
        return self._declared.attributes

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata, by name."""
        return self._declared.metadata

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and ties of one tensor; `offset` is its place in the memory to be filled."""
        return self._declared.info(name)

    def infos(self) -> Iterator[TensorInfo]:
        """Yield the TensorInfo of every tensor in saved order."""
        return self._declared.infos()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._state.constants

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._state.constants)

    @property
    def state(self) -> State:
        """'declared', 'filling' once a constant was begun, 'filled' when none is missing; 'sealed' or 'aborted'."""
        return self._state.state

    def missing(self) -> list[str]:
        """Return the names of tensors that are not filled yet, in saved order."""
        return self._state.missing()

    @property
    def nbytes(self) -> int:
        """The number of bytes to fill in all, those of tied tensors once."""
        return self._state.nbytes(filled=False)

    @property
    def nbytes_filled(self) -> int:
        """The number of bytes that are filled."""
        return self._state.nbytes(filled=True)

    def set(self, name: str, data: Any) -> None:
        """Fill one constant at once; copies `data`.

        Args:
            name: of one of its tensors.
            data: an array of numpy, torch, jax or any library with DLPack, a PackedTensor, a StringTensor or an array
                of texts, or bytes in C order (strings: as in StringTensor.data).

        Raises:
            TensorNotFoundError: no tensor has that name; lists close ones. ProducerError: another shape or element
            type, too few or too many bytes, malformed strings, or no tensor at all; the constant can be filled again.
            FillError: it is filled already, or the record is sealed or aborted. The sink's errors come as they are.
        """
        with self.open(name) as writer:
            writer.take(data)

    def open(self, name: str) -> ConstantWriter:
        """Begin to fill one constant chunk by chunk; see `writer.ConstantWriter`. Raises the errors of `set`."""
        return self._open(name)

    def _open(self, name: str, together: Collection[HollowConstant] = ()) -> ConstantWriter:
        """Begin to fill one constant; those of `together` may overlap it, because the caller fills them all at once."""
        constant = self._state.begin(name, together)
        try:
            target = self._target(constant)
        except BaseException:
            self._state.release(constant)
            raise
        writer = ConstantWriter(self._state, constant, name, target)
        with self._lock:
            self._writers.add(writer)
        return writer

    def _target(self, constant: HollowConstant) -> MemoryTarget | SinkTarget:
        """Return a new target for a constant's bytes: the sink's buffer or object, or memory of this record."""
        number, is_strided = constant.info.payload, constant.info.strides is not None
        if number is not None and self._sink is not None:
            return sink_target(constant, self._sink(constant.name, constant.info))
        payload = memoryview(b"") if number is None else self._payload_memory(number)
        return MemoryTarget(constant.view(payload) if is_strided else np.frombuffer(payload, np.uint8))

    def _payload_memory(self, number: int) -> memoryview:
        """Return the memory of a payload, given by number; FillError if the record is sealed or aborted."""
        memory = self._memory  # read before the check: another thread may end the record between the two
        self._state.check_open()
        assert memory is not None, "it is freed only after the end"
        start = int(self._declared.archive.index.payloads["offset"][number])
        return memory[start : start + self._skeleton.nbytes(number)]

    def stream(self, source: Any) -> None:
        """Fill the missing constants from `source`, one tensor or chunk at a time.

        Args:
            source: a mapping from names to tensors, such as a Record or `zcrecord.onnx.scan` of a model, of which the
                missing ones are read. Or a binary file object at the first byte of the same archive, read forward in
                chunks, each payload verified by its digest. Or an iterable of (name, data), `data` being a tensor as
                `set` takes it or an iterable of chunks; tensors tied to a filled one are passed over.

        Raises:
            RecordError: as `set`. UnsupportedError: `source` is none of these. IntegrityError: the file is another
            archive. SourceError: it ends early.
        """
        if isinstance(source, str | os.PathLike):
            raise UnsupportedError("stream() does not open paths; stream(open(path, 'rb')), or fill_by('read', path)")
        if isinstance(source, Record):
            check_apart(self.nbytes, source.archive.stored_nbytes(), source.path)
        if isinstance(source, Record | Mapping):
            for name in self.missing():
                if name in source and not self._state.is_tied(name):
                    self.set(name, source[name])
        elif hasattr(source, "read"):
            missing = self._missing_by_payload()
            for numbers, chunks in self._skeleton.read(source, missing):
                self._fill_payloads(numbers, missing, chunks)
        else:
            for pair in source if isinstance(source, Iterable) else [source]:  # a lone object is refused as a pair
                name, data = _name_and_data(pair)
                if not self._state.is_tied(name):
                    self._fill(name, data)
                del pair, data  # or two tensors would be in memory while the next is made

    def _fill(self, name: str, data: Any) -> None:
        """Fill one constant by a tensor, as `set` takes it, or by an iterable of chunks."""
        if hasattr(data, "shape") or isinstance(data, bytes | bytearray | memoryview) or hasattr(data, "__dlpack__"):
            self.set(name, data)
            return
        if not isinstance(data, Iterable):
            raise ProducerError(f"a {type(data).__name__} is neither a tensor nor chunks of one", tensor=name)
        with self.open(name) as writer:
            for chunk in data:
                writer.write(chunk)

    def _missing_by_payload(self) -> dict[int, list[HollowConstant]]:
        """Return the missing constants of each payload that has any, by the payload's number."""
        missing = {}
        for number, constants in self._state.by_payload.items():
            if unfilled := [constant for constant in constants if not self._state.is_filled(constant)]:
                missing[number] = unfilled
        return missing

    def _fill_payloads(
        self, numbers: list[int], missing: dict[int, list[HollowConstant]], chunks: Iterable[memoryview]
    ) -> None:
        """Fill the missing constants of payloads of the same bytes; if `chunks` ends in an error, they stay missing."""
        with contextlib.ExitStack() as stack:
            constants = [constant for number in numbers for constant in missing[number]]
            writers = [stack.enter_context(self._open(constant.name, constants)) for constant in constants]
            all_missing = all(len(missing[number]) == len(self._state.by_payload[number]) for number in numbers)
            if self._sink is None and all_missing:
                _copy_chunks(chunks, [self._payload_memory(number) for number in numbers])
            else:
                _fan_out(writers, chunks, self._skeleton.nbytes(numbers[0]))
            for writer in writers:
                writer.mark_complete()

    def fill_by(
        self,
        loader: Loader | str,
        source: Any = None,
        *,
        progress: Progress | None = None,
        cancel: Any = None,
        verify_digests: bool = True,
    ) -> None:
        """Have a loader fill the missing constants, straight into their memory; see `zcrecord.loaders`.

        Args:
            loader: its `load(ref, dst)` gets the memory to fill as `dst`; with a `sink` None, and the sink gets the
                tensors that it returns, 64 MiB of them, or one larger one, at a time.
            source: the same archive or, of a part, the whole one, as `load_record` takes it; None for the path that
                the record was loaded from.
            progress, cancel: as in `load_into`.
            verify_digests: compare each payload with its digest, or its SHA-256 if that is known after `expect=`. For
                a tensor that is a part of its payload the whole payload is then read, without the loader. A record of
                mode "c" is not compared: it may have edits.

        Raises:
            FillError: another archive, or no path is known. IntegrityError: a digest does not match. RecordError: as
            `load_into`. In each case the constants that came before are filled.
        """
        archive, loader, is_cancelled = self._open_archive(source), loader_of(loader), cancel_test(cancel)
        if self._sink is None and isinstance(loader, MappedLoader):
            reason = "views of the archive fill no memory of their own; fill by 'host' or 'read', or use the record"
            raise UnsupportedError(reason, path=archive.path)
        done, before = 0, self.nbytes_filled
        total = self.nbytes - before

        def advance(arrived: int, _: int | None) -> None:
            if progress is not None:
                progress(min(done + arrived, total), total)

        watch: Any = advance if progress is None or callable(progress) else progress  # load_into refuses others
        verify = verify_digests and archive.mode == "r"  # the edits of a private copy are meant to differ
        partial = self._partial_payloads() if verify else {}
        for batch in self._batches(without=partial):
            if verify and not self._skeleton.has_digests:
                _check_shard_digests(archive, batch)
            self._load(_part_of(archive, batch), loader, batch, verify=verify, progress=watch, cancel=cancel)
            done += sum(constant.nbytes for constant in batch)
            if done < self.nbytes_filled - before:  # other constants in the same payloads were filled, too
                done = self.nbytes_filled - before
                watch(0, None)
        for number, constants in partial.items():  # a loader would load the part alone, which has no digest
            if is_cancelled():
                raise LoadCancelledError(f"cancelled after {done} of {total} bytes", path=archive.path)
            stored_number = archive.row(archive.find(constants[0].name)).payload
            with located(tensor=constants[0].name):
                chunks = self._skeleton.verify_payload(number, archive.payload(stored_number))
                self._fill_payloads([number], partial, chunks)
            done += sum(constant.nbytes for constant in constants)
            watch(0, None)

    def _open_archive(self, source: Any) -> Archive:
        """Return the archive to fill from, or the part of it that this hollow record was made of."""
        if source is None and self._path is None:
            raise FillError("no path is known to load from; name the source")
        record = record_of(self._path if source is None else source)
        archive = self._skeleton.find_in(record.archive)
        # Without digests only the file's identity tells it from another archive of the same names and sizes.
        if archive is None or (not self._skeleton.has_digests and self._skeleton.is_replaced(record.archive)):
            raise FillError("is not the archive that the hollow record is of", path=record.archive.path)
        check_apart(self.nbytes, archive.stored_nbytes(), archive.path)
        archive.source.pin(self._skeleton.pins)  # a loader's tensors on a device are not verified afterwards
        return archive

    def _partial_payloads(self) -> dict[int, list[HollowConstant]]:
        """Return the missing constants of payloads that no loader loads whole, by payload; empty without digests.

        In memory one constant that covers the payload fills the others; a sink gets every constant by itself.
        """
        missing = self._missing_by_payload() if self._skeleton.has_digests else {}
        suffices = all if self._sink is not None else any
        return {n: constants for n, constants in missing.items() if not suffices(c.covers_payload for c in constants)}

    def _batches(self, *, without: Collection[int]) -> Iterator[list[HollowConstant]]:
        """Yield the missing constants to load together, except those of the payloads `without`; for a sink 64 MiB.

        Constants that share a payload come one by one, first those that cover it: in memory these fill the others.
        """
        state = self._state
        missing = dict.fromkeys(state.constants[name] for name in state.missing())  # tied tensors are one constant
        chosen = [constant for constant in missing if constant.info.payload not in without]
        chosen.sort(key=lambda constant: not constant.covers_payload)
        batch: list[HollowConstant] = []
        nbytes = 0
        for constant in chosen:
            if len(state.sharing(constant)) == 1:
                nbytes += constant.nbytes
                if batch and nbytes > MAX_IN_FLIGHT and self._sink is not None:
                    yield batch
                    batch, nbytes = [], constant.nbytes
                batch.append(constant)
        if batch:
            yield batch
        yield from ([c] for c in chosen if len(state.sharing(c)) > 1 and not state.is_filled(c))

    def _load(
        self, archive: Archive, loader: Loader, constants: list[HollowConstant], *, verify: bool, **options: Any
    ) -> None:
        """Load all constants of an archive, into their memory or for the sink; `options` are those of `load_into`."""
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(self.open(constant.name)) for constant in constants]
            memory = self._memory_by_name(archive) if self._sink is None else {}
            loaded = load_into(archive, loader, dst=memory, raw=True, **options)
            for writer in writers:
                constant = writer.constant
                tensor = loaded.pop(constant.name)
                if verify and self._sink is not None:  # before the sink gets it
                    if constant.is_typed and not isinstance(tensor, PackedTensor):
                        tensor = interop.as_array(tensor)  # copied off a device once: the writer would do the same
                    self._verify(constant, tensor)
                if constant.name in memory and _lies_in(tensor, memory[constant.name]):
                    writer.mark_complete()
                else:
                    writer.take(tensor if constant.is_typed else memoryview(tensor))
                if verify and self._sink is None:
                    self._verify(constant, None)
                writer.close()  # now, so that it stays filled if a later one fails

    def _memory_by_name(self, archive: Archive) -> dict[str, Any]:
        """Return the memory that a loader may fill, by the tensors' names; each as the tensor lies in its payload."""
        memory: dict[str, Any] = {}
        for part in parts_by_file(archive):
            for name, (ref, _) in plan_load(part, raw=True).targets.items():
                constant = self._state.constants[name]
                number = constant.info.payload
                # A strided tensor is read with the bytes between its elements, which may be filled already.
                shared = constant.info.strides is not None and len(self._state.sharing(constant)) > 1
                if number is not None and not shared:
                    start = constant.byte_offset - ref.byte_offset
                    memory[name] = np.frombuffer(self._payload_memory(number)[start : start + ref.nbytes], np.uint8)
        return memory

    def _verify(self, constant: HollowConstant, tensor: Any) -> None:
        """Raise IntegrityError if a constant is a whole payload with another digest; `tensor` is what a sink gets."""
        number = constant.info.payload
        if number is not None and constant.covers_payload:
            octets = self._payload_memory(number) if self._sink is None else _stored_bytes(constant, tensor)
            with located(tensor=constant.name):
                for _ in self._skeleton.verify_payload(number, octets):
                    pass

    def seal(self) -> Any:
        """Return the filled record: a Record over the filled memory, or with a `sink` a dict by name.

        The dict has, in saved order, the sink's object for each tensor, or the result of its `close()` unless that is
        None; the same object for tied tensors, None for empty ones.

        Raises:
            FillError: a tensor is missing; lists them. Or the record is sealed or aborted.
        """
        results = self._state.seal()
        if self._sink is not None:
            return results
        sealed = Record(self._declared.archive.shared())
        self._free()
        return sealed

    def _free(self) -> None:
        """Free the memory, and keep the declarations; a sealed record keeps its memory."""
        self._memory = None
        self._declared = Record(self._skeleton.allocate(tensors=False)[1])

    def abort(self) -> None:
        """Free all that was filled, and abort open writers; other threads' fills raise FillError.

        May be called again, and never raises. Does nothing after `seal`.
        """
        if self._state.abort():
            with self._lock:
                writers = list(self._writers)
            for writer in writers:
                writer.abandon()
            self._free()

    def __enter__(self) -> HollowRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __repr__(self) -> str:
        source = self._path or "bytes"
        return f"<HollowRecord {source}: {self.state}, {len(self.missing())} of {len(self)} tensors missing>"

    def __reduce__(self) -> Any:
        if self.state != "declared" or self._sink is not None:
            message = "a hollow record is pickled before it is filled, and without a sink"
            raise UnsupportedError(message, path=self._path)
        return HollowRecord, (self._skeleton, None)


def _name_and_data(pair: Any) -> tuple[str, Any]:
    """Return an item of a stream as (name, data); UnsupportedError if it is no such pair."""
    with contextlib.suppress(TypeError, ValueError):
        name, data = pair
        if isinstance(name, str):
            return name, data
    kind = type(pair).__name__
    raise UnsupportedError(f"stream() takes a mapping, a binary file, or pairs (name, data), and one is a {kind}")


def _copy_chunks(chunks: Iterable[memoryview], payloads: list[memoryview]) -> None:
    """Copy chunks, one after the other, into the memory of each payload; together they fill it."""
    position = 0
    for chunk in chunks:
        for memory in payloads:
            memory[position : position + len(chunk)] = chunk
        position += len(chunk)


def _fan_out(writers: list[ConstantWriter], chunks: Iterable[memoryview], nbytes: int) -> None:
    """Write a payload of `nbytes` bytes to each constant in it; strided ones need all of its bytes first."""
    strided = [writer for writer in writers if writer.constant.info.strides is not None]
    contiguous = [writer for writer in writers if writer.constant.info.strides is None]
    payload, position = np.empty(nbytes if strided else 0, np.uint8).data, 0  # pages become resident as chunks come
    for chunk in chunks:
        for writer in contiguous:
            writer.write(chunk)
        if strided:
            payload[position : position + len(chunk)] = chunk
        position += len(chunk)
    for writer in strided:
        writer.take(writer.constant.view(payload))


def _check_shard_digests(archive: Archive, constants: list[HollowConstant]) -> None:
    """Check constants by the digests in the shards of a local catalogue; does nothing for any other archive."""
    if not archive.source.file_names or archive.source.is_remote:
        return
    for constant in constants:
        number = archive.row(archive.find(constant.name)).payload
        if number != NONE:
            check_digest(archive.source.pieces(number), constant.name)


def _part_of(archive: Archive, constants: list[HollowConstant]) -> Archive:
    """Return the part of an archive that has only these constants, each under its first name; copies no payload."""
    if len(constants) == len(archive.index.tensors):
        return archive
    if len(constants) == 1:
        return subset.single_tensor(archive, archive.find(constants[0].name))
    names = {constant.name for constant in constants}
    return subset.select(archive, lambda info: info.name in names, None)  # names may look like patterns


def _stored_bytes(constant: HollowConstant, tensor: Any) -> memoryview:
    """Return the bytes of a tensor that covers its payload, in the payload's order."""
    if constant.info.strides is None or not constant.is_typed:
        return memoryview(as_bytes(np.asarray(getattr(tensor, "packed", tensor))).data)
    octets = bytearray(constant.nbytes)
    constant.view(octets)[...] = tensor
    return memoryview(octets)


def _lies_in(tensor: Any, memory: Any) -> bool:
    """Return True if a loader has put a tensor into the memory that it was given."""
    array = getattr(tensor, "packed", tensor)
    return isinstance(array, np.ndarray) and np.may_share_memory(array, memory)
