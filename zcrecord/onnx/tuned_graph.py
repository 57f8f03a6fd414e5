"""A tuned graph on its way into an archive: made by ONNX Runtime in a scratch folder, or read from the archive before.

Its payloads are written as they come: weights that are not in the archive yet, packed forms, then the graph that names
them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive
from zcrecord.archive.payload_source import Place
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE, payload_alignment
from zcrecord.errors import OnnxError, UnsupportedError
from zcrecord.onnx.protobuf.interfaces import difference, interface_of
from zcrecord.onnx.protobuf.reader import HEADER, ProtobufReader, encode_field
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, rewrite_tensors
from zcrecord.onnx.protobuf.scanner import STUB_KEY
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress
from zcrecord.storage.sink import Sink
from zcrecord.writing.writers import StreamWriter

from . import graph, tuned
from .packing import PackedForm, WeightPacker, forms_of
from .runtime import compares_packed, onnxruntime_module, optimise, whole_file
from .target import TuningTarget
from .tuned import TunedTarget

PER_ITEM = 16  # bytes of an item of a list in the index, at most
PAGE = 4096  # ONNX Runtime 1.32 takes packed weights at multiples of 256 alone, and packs others privately
_INITIALIZER = 5  # of GraphProto
_KEY_SIZE = 128  # bytes of the name of a packed form, at most
_ATTRIBUTES = 1024  # bytes of a target's attributes in the index, but for those in proportion to its content
_STUB = STUB_KEY.decode()
_FEW = 128 << 20  # bytes that may be in memory twice


@dataclass(slots=True)
class TunedGraph:
    """A tuned graph on its way into an archive, and the payloads that it names by their place in a list.

    A new graph still contains its initializers, and names no packed forms yet; `write` changes both.
    """

    target: str
    module: str
    graph: Any
    initializers: Any  # None for a new graph
    sources: list[tuple[Any, bool]]  # an array or the number of an original payload; True if it is a packed form
    numbers: list[PayloadId] = field(default_factory=list)  # of written payloads: the sources, then new packed forms
    packer: Callable[[], WeightPacker] | None = None
    forms: Any = ()  # a generator of PackedForms
    form_sizes: list[int] = field(default_factory=list)  # bytes of their buffers, at most
    scratch_bytes: int = 0  # bytes in the scratch folder while forms are packed, at most
    weights: int = 0
    packed: int = 0
    packed_bytes: int = 0

    @classmethod
    def from_archive(cls, archive: Archive, target: TunedTarget) -> TunedGraph:
        """Return a tuned graph that an archive has already; its sources are views of the archive."""
        graph, initializers, *payloads = map(archive.payload, (target.graph, target.initializers, *target.payloads))
        packed = target.model(archive, "", 0, packed=True).packed
        arrays = [np.frombuffer(payload, np.uint8) for payload in payloads]
        are_packed = [number in packed for number in target.payloads]
        sources = list(zip(arrays, are_packed, strict=True))
        return cls(target.target.encode(), target.module, graph, initializers, sources)

    @classmethod
    def from_model(
        cls, base: Record, module: str, target: TuningTarget, folder: str, threads: int | None, packs_all: bool
    ) -> TunedGraph:
        """Have ONNX Runtime optimise the model in a module of `base`; its files in the scratch folder stay mapped.

        With `packs_all` it packs all weights now, in private memory; otherwise `pack` and `write` do, a few at a time.
        """
        folder, part = tempfile.mkdtemp(dir=folder), base.module(module) if module else base
        compares = compares_packed(onnxruntime_module())
        optimised = _optimised_model(part, folder, threads, packs_all, compares and not packs_all)
        find_original = _original_finder(base.archive, optimised.uses_archive)
        tuned_graph = cls(target.encode(), module, b"", None, [])
        arrays: list[Any] = []
        forms: list[PackedForm] = []

        def add_weight(t: ExternalTensor, _: str) -> bytes:
            is_outside, offset = "location" in t.entries, int(t.entries.get("offset", "0"))
            memory = optimised.external if is_outside else optimised.model
            array = memory[offset : offset + int(t.entries["length"])]
            original = find_original(array, offset) if is_outside else None
            forms.extend(forms_of(len(arrays), t.entries, optimised.external))
            tuned_graph.sources.append((array if original is None else original, False))
            arrays.append(array)
            return t.encode({_STUB: str(len(arrays) - 1)})

        tuned_graph.graph = rewrite_tensors(ProtobufReader.over(optimised.model.data), add_weight, inline=graph.INLINE)
        change = difference(interface_of(graph.skeleton_of(part)), interface_of(tuned_graph.graph))
        if change is not None:
            fault = f"cannot be tuned: ONNX Runtime's optimised graph {change}, unlike the model"
            raise UnsupportedError(fault, path=part.archive.path)
        tuned_graph.weights = len(arrays)
        tuned_graph.form_sizes = [data.nbytes for form in forms for data, _ in form.buffers]
        tuned_graph.forms = (form for form in forms)  # a generator, as `write` closes it
        if compares and not packs_all:
            tuned_graph.packer = partial(WeightPacker, part, tuned_graph.graph, arrays, folder, threads)
        return tuned_graph

    def pack(self) -> None:
        """Pack a weight of each kind, so that the size of all packed forms is known."""
        if self.packer is not None:
            packer = self.packer()
            self.forms, self.form_sizes, self.scratch_bytes = packer.forms(), packer.sizes, packer.scratch_bytes

    def max_added_bytes(self, alignment: int) -> int:
        """Return the bytes that the graph adds to an archive of this alignment, at most."""
        sizes = [len(self.graph), len(self.initializers or b""), *self.form_sizes]
        sizes += [source.nbytes for source, _ in self.sources if not isinstance(source, PayloadId)]
        pages = len(self.form_sizes) + sum(is_packed for _, is_packed in self.sources)
        nbytes = sum(n + payload_alignment(n, alignment) + PAYLOAD.itemsize + PER_ITEM for n in sizes)
        return nbytes + len(self.target) + PER_ITEM * len(self.sources) + (PAGE + _KEY_SIZE) * pages + _ATTRIBUTES

    def write_sources(self, pool: PayloadPool) -> None:
        """Write weights that the archive does not have yet; `write` adds packed forms and the graph."""
        self.numbers = [s if isinstance(s, PayloadId) else pool.put(s, page=is_packed) for s, is_packed in self.sources]

    def write(self, pool: PayloadPool) -> dict[str, Any]:
        """Write packed forms, initializers and graph after `write_sources`; return the attributes of their target."""
        model, initializers = self.graph, self.initializers
        if initializers is None:
            model, initializers = self._split_graph(self._write_forms(pool))
        own = [pool.put(np.frombuffer(data, np.uint8)) for data in (model, initializers)]
        rows = pool.rows([*own, *self.numbers])
        return {
            tuned.TARGET: self.target,
            **({tuned.MODULE: self.module} if self.module else {}),
            tuned.GRAPH: own[0],
            tuned.INITIALIZERS: own[1],
            tuned.PAYLOADS: self.numbers,
            tuned.SEAL: tuned.seal_of(pool.base.index, self.target, self.module, rows),
        }

    def _write_forms(self, pool: PayloadPool) -> dict[str, dict[str, str]]:
        """Write packed forms; return the external_data entries that name them, by the number of their weight."""
        entries: dict[str, dict[str, str]] = {}
        with contextlib.closing(self.forms) as forms:  # or threads write on while an error removes their folder
            for form in forms:
                value = form.key
                for data, padded in form.buffers:
                    value += f"|{len(self.numbers) if data.nbytes else ''};{padded}"
                    if data.nbytes:
                        self.numbers.append(pool.put(data, page=True))
                    self.packed_bytes += data.nbytes
                of_weight = entries.setdefault(str(form.weight), {})
                of_weight[f"prepacked_{len(of_weight)}"] = value
        self.packed = len(entries)
        return entries

    def _split_graph(self, form_entries: dict[str, dict[str, str]]) -> tuple[bytes, bytes]:
        """Return the graph without the main graph's initializers, and these; both name packed forms."""
        initializers: list[bytes] = []

        def name_forms(t: ExternalTensor, place: str) -> bytes | None:
            tensor = t.encode(t.entries | form_entries.get(t.entries[_STUB], {}))
            if place != "main":
                return tensor
            initializers.append(encode_field(_INITIALIZER, tensor))
            return None

        return rewrite_tensors(memoryview(self.graph), name_forms), b"".join(initializers)


class _OptimisedModel(NamedTuple):
    """A model that ONNX Runtime optimised, with HEADER slack, and the file of its external data, as arrays of bytes."""

    model: Any
    external: Any
    uses_archive: bool  # that file is the archive, else one beside the model


def _optimised_model(
    part: Record, folder: str, threads: int | None, packs_all: bool, may_use_archive: bool
) -> _OptimisedModel:
    """Have ONNX Runtime write the optimised model of a record into a folder, and map what it wrote."""
    path, weights = Path(folder, "model.onnx"), Path(folder, "weights")
    uses_archive = may_use_archive and not _are_weights_remade(part)  # weights stay where they are
    try:
        optimise(part, str(path), None if uses_archive else weights.name, threads, packs_all)
    except OnnxError:  # a graph holds 2 GiB of new weights at most
        if not uses_archive:
            raise
        uses_archive = False
        optimise(part, str(path), weights.name, threads, packs_all)
    with path.open("ab") as file:
        file.write(bytes(2 * HEADER))  # which `ProtobufReader.over` wants behind the model
    external = np.empty(0, np.uint8)  # before 1.32, ONNX Runtime writes no file for a model without weights
    if uses_archive:
        external = whole_file(part)
    elif weights.exists():
        external = np.memmap(weights, np.uint8, "r")
    return _OptimisedModel(np.asarray(np.memmap(path, np.uint8, "r")), external, uses_archive)


def _are_weights_remade(model: Record) -> bool:
    """Return True if most weights, and over 64 MiB, have 16 bits or over two axes: optimizers make most of these anew.

    That means float16 and kernels of convolutions; other 16-bit types are rare enough to be counted with them. Weights
    made anew take memory once in a file beside the graph, and twice in the graph; but that file gets all others, too.
    The result decides where they go, not what the graph computes.
    """
    infos = list(model.infos())
    remade = sum(info.nbytes for info in infos if info.bits == 16 or len(info.shape) > 2)
    return 2 * remade > max(_FEW, sum(info.nbytes for info in infos))


def _original_finder(archive: Archive, by_offset: bool) -> Callable[[Any, int], PayloadId | None]:
    """Return a function that finds the payload of an array's bytes, by offset in the file or by digest, or None."""
    start = archive.header.payload_offset
    rows = enumerate(archive.index.payloads.tolist())
    numbers = {(start + at if by_offset else digest, nbytes): PayloadId(n) for n, (at, nbytes, digest) in rows}

    def find(array: Any, offset: int) -> PayloadId | None:
        number = numbers.get((offset if by_offset else digest_of(array), array.nbytes))
        if number is None or by_offset:
            return number
        return number if np.array_equal(array, np.frombuffer(archive.payload(number), np.uint8)) else None

    return find


class PayloadPool:
    """Writes the payloads of an archive: those of `base` at once, then new ones by `put`; equal bytes once.

    Attributes:
        originals: the numbers of the payloads of `base`.
        sha256: digests of new payloads by place, computed by another thread.
        tell: called with the bytes written, and `total`, before each new payload.
    """

    def __init__(self, sink: Sink, base: Archive, hashing: Executor) -> None:
        self.base, self.sink, self._hashing = base, sink, hashing
        self.tell: Progress = lambda *_: None
        self.total = 0
        self.out = StreamWriter(sink, alignment=base.header.alignment)
        self.originals = list(map(PayloadId, range(len(base.index.payloads))))
        self.sha256: dict[Place, Future[bytes]] = {}
        self._numbers: dict[Place, PayloadId] = {}
        for number in self.originals:
            self.out.store(np.frombuffer(base.payload(number), np.uint8))
            self._numbers.setdefault(self.place(number), number)

    def put(self, source: Any, *, page: bool = False) -> PayloadId:
        """Write bytes, with `page` at a multiple of PAGE; return their number, or that of equal ones; NONE if none."""
        if not source.nbytes:
            return PayloadId(NONE)
        self.tell(self.sink.position, self.total)
        sha256 = self._hashing.submit(lambda: hashlib.sha256(source).digest())
        new_number = PayloadId(self.out.store(source, alignment=PAGE if page else 0))
        place = self.place(new_number)
        number = self._numbers.setdefault(place, new_number)
        if number == new_number:
            self.sha256[place] = sha256
        else:  # the writer found equal bytes, and gave the new payload their place
            self.out.forget(new_number)
        return number

    def place(self, number: PayloadId) -> Place:
        """Return the file number (0, as there is one file), offset and size of a payload in the written archive."""
        offset, nbytes, _ = self.out.row(number)
        return 0, offset, nbytes

    def rows(self, numbers: list[PayloadId]) -> Any:
        """Return an array of the payloads' rows in the index (offset, nbytes, digest); zeros for NONE."""
        return np.array([(0, 0, 0) if n == NONE else self.out.row(n) for n in numbers], PAYLOAD)
