"""Hollow records: every name, shape, dtype and module of a record, and its graph, without the weights; filled later.

Here is what fills them, and what becomes of it. Which are filled is `ledger`'s, how bytes get where they go
`fillers`'s, how loaders bring them `bringing`'s, what is left of the archive `shell`'s.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.archive.info import ModuleInfo, TensorInfo
from zcrecord.errors import FillError, ProducerError, UnsupportedError
from zcrecord.loaders import Loader
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress

from .fill import Bringer
from .skeleton import Shell, put
from .state import Ledger, State
from .targets import Constant, Destination, Given, Place
from .writer import ConstantWriter, Filler

__all__ = ["HollowRecord", "hollow_of"]

Sink = Callable[[str, TensorInfo], Any]


def hollow_of(source: Any, *, sink: Sink | None = None) -> HollowRecord:
    """Return a record without its weights; reads the index, attributes and metadata of an archive, no tensor's bytes.

    Constants are filled by `set`, `open`, `stream` and `fill_by`, each once, in any order, from any number of threads;
    then `seal` gives the record. What takes memory is what was filled so far, and besides the one tensor or chunk that
    is handed over; of a strided one that goes to a sink the payload and its elements in C order.

    Args:
        source: a Record, or what `load_record` takes: of a URL only the index is fetched.
        sink: where constants go. None for memory of this process, aligned as payloads are, of which `seal` makes a
            Record. Or a function of a tensor's name and TensorInfo that is called when its constant is begun, once for
            tied ones; it returns a writable buffer of `info.nbytes` bytes, or an object with `write(chunk)`, and
            maybe `close()` and `abort()`: a device's upload. The bytes come in C order, in as many chunks as were
            handed over, and a chunk is good until `write` returns; that may say, as files do, how many it took.

    Raises:
        Whatever `load_record` raises.

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
    if isinstance(source, Record):
        return HollowRecord(Shell.of(source.archive), sink)
    with load_record(source) as record:
        return HollowRecord(Shell.of(record.archive), sink)


class HollowRecord:
    """A record's names, shapes, dtypes, modules and attributes, whose constants are filled one by one.

    A constant is what tied tensors share: filling one fills all. Where tensors are different views of one payload, each
    is filled by itself, unless one of them is all of it. Empty tensors need no filling. Threads may fill different
    constants at a time. As a context manager it gives up what is not sealed on leaving.
    """

    def __init__(self, shell: Shell, sink: Sink | None) -> None:
        """For this package's own use: `hollow_of` makes them."""
        self._shell, self._sink, self._path = shell, sink, shell.path
        octets, archive = shell.room(sink is None)
        self._octets: memoryview | None = octets
        self._told = Record(archive)
        self._ledger = Ledger(archive, shell.path, whole=sink is None)
        self._writers: weakref.WeakSet[ConstantWriter] = weakref.WeakSet()  # that are open, and maybe others
        self._lock = threading.Lock()

    # What is declared.

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's full name, in saved order."""
        return self._told.names

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, the record itself as ''; in pre-order."""
        return self._told.modules

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name; an ONNX model's graph is `onnx.graph`."""
        return self._told.attributes

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata, by name."""
        return self._told.metadata

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and ties of one tensor; `offset` is where it lies in the memory to be filled."""
        return self._told.info(name)

    def infos(self) -> Iterator[TensorInfo]:
        """Yield the TensorInfo of every tensor in saved order."""
        return self._told.infos()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._ledger.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self._ledger.names)

    # What is filled.

    @property
    def state(self) -> State:
        """'declared', 'filling' once something was begun, 'filled' when nothing is missing; 'sealed' or 'aborted'."""
        return self._ledger.state

    def missing(self) -> list[str]:
        """Return the names of tensors that are not filled yet, in saved order."""
        return self._ledger.missing()

    @property
    def nbytes(self) -> int:
        """How many bytes are due in all, those of tied tensors once."""
        return self._ledger.nbytes(filled=False)

    @property
    def nbytes_filled(self) -> int:
        """How many of them have come."""
        return self._ledger.nbytes(filled=True)

    # Filling.

    def set(self, name: str, data: Any) -> None:
        """Fill one constant at once; `data` is copied to where it goes, and not kept.

        Args:
            name: of one of its tensors.
            data: an array of numpy, torch, jax or anything with DLPack, a PackedTensor, a StringTensor or an array of
                texts, or bytes in C order (strings: as StringTensor.data has them).

        Raises:
            TensorNotFoundError: no tensor has that name; lists close ones. ProducerError: another shape or element
            type, too few or too many bytes, strings that are none, or no tensor at all; the constant can be filled
            again. FillError: it is filled already, or the record is sealed or was given up. What the sink raises comes
            as it is.
        """
        with self.open(name) as writer:
            writer.take(data)

    def open(self, name: str) -> ConstantWriter:
        """Begin to fill one constant chunk by chunk; see `fillers.ConstantWriter`. Raises what `set` raises."""
        return self._open(name)

    def _open(self, name: str, beside: Collection[Constant] = ()) -> ConstantWriter:
        ledger = self._ledger
        constant = ledger.find(name)
        ledger.begin(constant, name, beside)
        try:
            filler = Filler(constant, self._destination(constant))
        except BaseException:
            ledger.give_back(constant)
            raise
        note, gone = partial(ledger.note, constant, name), partial(ledger.give_back, constant)
        writer = ConstantWriter(filler, name, ledger.check_open, note, gone)
        with self._lock:
            self._writers.add(writer)
        return writer

    def _destination(self, constant: Constant) -> Destination:
        number = constant.info.payload
        if number is None:
            return Place(constant, memoryview(b""))
        if self._sink is not None:
            return Given(constant, self._sink(constant.name, constant.info))
        return Place(constant, self._payload(number))

    def _payload(self, number: int) -> memoryview:
        """Return the memory of a payload, to be filled."""
        octets = self._octets
        self._ledger.check_open()
        assert octets is not None, "it is let go of after the end alone"
        start = int(self._told.archive.index.payloads["offset"][number])
        return octets[start : start + self._shell.nbytes(number)]

    def stream(self, source: Any) -> None:
        """Fill what is missing from `source`, one tensor or chunk at a time.

        Args:
            source: a mapping from names to tensors, such as a Record or `zcrecord.onnx.scan` of a model: what it has of
                what is missing is taken. Or a binary file object at the first byte of the very archive that this is of,
                read forward in chunks, each payload checked against its digest. Or an iterable of (name, data), `data`
                being what `set` takes or an iterable of chunks; ties of what was filled are passed over.

        Raises:
            What `set` raises. UnsupportedError: it is none of these. IntegrityError: the file is not that archive.
            SourceError: it ends early.
        """
        if isinstance(source, str | os.PathLike):
            raise UnsupportedError("a path is no source; stream(open(path, 'rb')), or fill_by('read', path)")
        if isinstance(source, Record | Mapping):
            for name in self.missing():
                if name in source and not self._ledger.is_tied(name):
                    self.set(name, source[name])
        elif hasattr(source, "read"):
            self._stream_file(source)
        else:
            for item in source if isinstance(source, Iterable) else [source]:
                name, data = _pair(item)
                del item
                if not self._ledger.is_tied(name):
                    self._take(name, data)
                del data  # or two would be held while the next is made

    def _take(self, name: str, data: Any) -> None:
        if hasattr(data, "shape") or isinstance(data, bytes | bytearray | memoryview) or hasattr(data, "__dlpack__"):
            self.set(name, data)
            return
        if not isinstance(data, Iterable):
            raise ProducerError(f"a {type(data).__name__} is neither a tensor nor chunks of one", tensor=name)
        with self.open(name) as writer:
            for chunk in data:
                writer.write(chunk)

    def _stream_file(self, file: Any) -> None:
        ledger = self._ledger
        left = {n: [c for c in cs if not ledger.is_filled(c)] for n, cs in ledger.by_payload.items()}
        left = {number: constants for number, constants in left.items() if constants}
        for numbers, chunks in self._shell.read(file, left):
            with contextlib.ExitStack() as stack:
                together = [c for number in numbers for c in left[number]]
                writers = [stack.enter_context(self._open(c.name, together)) for c in together]
                untouched = all(len(left[number]) == len(ledger.by_payload[number]) for number in numbers)
                if self._sink is None and untouched:
                    put([self._payload(number) for number in numbers], chunks)
                else:
                    _fan_out(writers, chunks, self._shell.nbytes(numbers[0]))
                for writer in writers:
                    writer.skip()

    def fill_by(
        self,
        loader: Loader | str,
        source: Any = None,
        *,
        progress: Progress | None = None,
        cancel: Any = None,
        verify_digests: bool = True,
    ) -> None:
        """Have a loader fill what is missing, straight into the memory of the constants; see `zcrecord.loaders`.

        Args:
            loader: its `load(ref, dst)` is given the very bytes of memory to fill; with a `sink` none, and the sink
                gets what it returns, of 64 MiB of tensors, or one, at a time.
            source: the archive that this is of or, of a part, the whole one, as `load_record` takes it; None for the
                path it was loaded from.
            progress, cancel: as in `load_into`.
            verify_digests: whether to compare the digest of each payload that a tensor is all of, once it is in the
                host's memory. What a loader has on a device elsewhere, and what was edited in mode "c", is not.

        Raises:
            FillError: another archive, or none is known. IntegrityError: a digest does not match. What `load_into`
            raises. In each case what came before counts.
        """
        place = self._payload if self._sink is None else None
        bringer = Bringer(self._shell, self._ledger, self.open, place)
        options = {"progress": progress, "cancel": cancel, "verify_digests": verify_digests}
        bringer.fill(self._archive(source), loader, **options)

    def _archive(self, source: Any) -> Archive:
        """Return the very archive that this is of, or what this is of as a part of it."""
        if source is None and self._path is None:
            raise FillError("no path is known to load from; name the source")
        record = source if isinstance(source, Record) else load_record(self._path if source is None else source)
        found = self._shell.within(record.archive)
        if found is None:
            raise FillError("is not the archive that the hollow record is of", path=record.archive.path)
        if found.remote is not None:
            found.remote.pin(self._shell.pins)  # what a loader has on a device is not looked at afterwards
        return found

    # The end.

    def seal(self) -> Any:
        """Return what was filled: a Record over the memory that was filled, or with a `sink` a dict by name.

        The dict has, in saved order, what the sink returned for each tensor, or what that object's `close()` returned
        if that was not None; the very same for tied ones, None for empty ones.

        Raises:
            FillError: something is missing; lists it. Or it is sealed or was given up.
        """
        results = self._ledger.seal()
        if self._sink is not None:
            return results
        sealed = Record(self._told.archive.kept())
        self._let_go()
        return sealed

    def _let_go(self) -> None:
        """Keep what is declared alone, and no memory: what was sealed goes with whoever has it."""
        self._octets = None
        self._told = Record(self._shell.room(False)[1])

    def abort(self) -> None:
        """Give it up: let go of what was filled, have open writers abort; what other threads are at fails.

        May be called again, and never raises.

        After `seal` it does nothing: what was sealed stays.
        """
        if self._ledger.abort():
            with self._lock:
                writers = list(self._writers)
            for writer in writers:
                writer.give_up()
            self._let_go()

    def __enter__(self) -> HollowRecord:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()

    def __repr__(self) -> str:
        where = self._path or "bytes"
        return f"<HollowRecord {where}: {self.state}, {len(self.missing())} of {len(self)} tensors missing>"

    def __reduce__(self) -> Any:
        if self.state != "declared" or self._sink is not None:
            raise UnsupportedError(
                "a hollow record is pickled before it is filled, and without a sink", path=self._path
            )
        return HollowRecord, (self._shell, None)


def _pair(item: Any) -> tuple[str, Any]:
    """Return a name and what its tensor is filled with."""
    try:
        name, data = item
    except (TypeError, ValueError):
        name = data = None
    if not isinstance(name, str):
        shown = f"a {type(item).__name__}"
        raise UnsupportedError(f"stream() takes a mapping, a binary file, or pairs (name, data), and one is {shown}")
    return name, data


def _fan_out(writers: list[ConstantWriter], chunks: Iterable[memoryview], nbytes: int) -> None:
    """Pass a payload on to the constants that lie in it; those that strides pick need all of it at once."""
    scattered = [w for w in writers if w.constant.info.strides is not None]
    whole, done = bytearray(nbytes if scattered else 0), 0
    for chunk in chunks:
        for writer in writers:
            if writer not in scattered:
                writer.write(chunk)
        if scattered:
            whole[done : done + len(chunk)] = chunk
        done += len(chunk)
    for writer in scattered:
        writer.take(writer.constant.view(whole))
