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
from typing import Any

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
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, rewrite
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
_MODEL, _WEIGHTS = "model.onnx", "weights"  # in the scratch folder
_INITIALIZER = 5  # of GraphProto
_KEY_SIZE = 128  # bytes of the name of a packed form, at most
_STUB = STUB_KEY.decode()
_FEW = 128 << 20  # bytes that may be in memory twice


@dataclass(slots=True)
class TunedGraph:
    """A tuned graph on its way into an archive, and the payloads that it names by number.

    A new one has its initializers in the graph still, which names payloads alone; packed forms come when it is written.
    """

    target: str
    module: str
    graph: Any
    initializers: Any  # None for a new one
    sources: list[tuple[Any, bool]]  # arrays, or numbers of original payloads; each with whether it is packed
    numbers: list[PayloadId] = field(default_factory=list)  # of sources that are written
    packer: Callable[[], WeightPacker] | None = None
    forms: Any = ()  # a generator of PackedForms
    form_sizes: list[int] = field(default_factory=list)  # bytes of their buffers, at most
    in_work: int = 0  # bytes in the scratch folder while they are made, at most
    weights: int = 0
    packed: int = 0
    packed_bytes: int = 0

    @classmethod
    def stored(cls, archive: Archive, target: TunedTarget) -> TunedGraph:
        """Return a tuned graph as an archive has it."""
        graph, initializers, *sources = map(archive.payload, (target.graph, target.initializers, *target.payloads))
        packed = target.model(archive, "", 0, packed=True).packed
        pairs = [(np.frombuffer(s, np.uint8), n in packed) for s, n in zip(sources, target.payloads, strict=True)]
        return cls(target.target.encode(), target.module, graph, initializers, pairs)

    @classmethod
    def made(
        cls, base: Record, module: str, target: TuningTarget, folder: str, threads: int | None, whole: bool
    ) -> TunedGraph:
        """Have ONNX Runtime optimise the graph of a module's model in a scratch folder; its new weights stay mapped.

        Weights are packed by `pack` and when it is written; all of them now, in private memory, if `whole`.
        """
        folder, part = tempfile.mkdtemp(dir=folder), base.module(module) if module else base
        path, weights = Path(folder, _MODEL), Path(folder, _WEIGHTS)
        compares = compares_packed(onnxruntime_module())
        here = compares and not whole and not _is_made_anew(part)  # weights of the archive stay where they are
        try:
            optimise(part, str(path), None if here else _WEIGHTS, threads, whole)
        except OnnxError:  # a graph holds 2 GiB of new weights at most
            if not here:
                raise
            here = False
            optimise(part, str(path), _WEIGHTS, threads, whole)
        with path.open("ab") as file:
            file.write(bytes(2 * HEADER))
        archive, model = base.archive, np.asarray(np.memmap(path, np.uint8, "r"))
        none = np.empty(0, np.uint8)  # ONNX Runtime before 1.32 writes no file then
        external = whole_file(part) if here else np.memmap(weights, np.uint8, "r") if weights.exists() else none
        start = archive.header.payload_offset
        rows = enumerate(archive.index.payloads.tolist())
        originals = {(start + at if here else digest, nbytes): PayloadId(n) for n, (at, nbytes, digest) in rows}
        out = cls(target.encode(), module, b"", None, [])
        arrays: list[Any] = []
        forms: list[PackedForm] = []

        def original(array: Any, at: int) -> PayloadId | None:
            number = originals.get((at if here else digest_of(array), array.nbytes))
            if number is None or here or np.array_equal(array, np.frombuffer(archive.payload(number), np.uint8)):
                return number
            return None

        def number(t: ExternalTensor, _: str) -> bytes:
            at, nbytes, outside = int(t.entries.get("offset", "0")), int(t.entries["length"]), "location" in t.entries
            arrays.append((external if outside else model)[at : at + nbytes])
            known = original(arrays[-1], at) if outside else None
            out.sources.append((arrays[-1] if known is None else known, False))
            forms.extend(forms_of(out.weights, t.entries, external))
            out.weights += 1
            return t.encode({_STUB: str(out.weights - 1)})

        out.graph = rewrite(ProtobufReader.over(model.data), number, graph.INLINE)
        fault = difference(interface_of(graph.skeleton_of(part)), interface_of(out.graph))
        if fault is not None:
            fault = f"cannot be tuned: ONNX Runtime's optimised graph {fault}, unlike the model"
            raise UnsupportedError(fault, path=part.archive.path)
        out.form_sizes = [data.nbytes for form in forms for data, _ in form.buffers]
        out.forms = (form for form in forms)
        if compares and not whole:
            out.packer = partial(WeightPacker, part, out.graph, arrays, folder, threads)
        return out

    def pack(self) -> None:
        """Pack a weight of each kind, so that the size of all forms is known."""
        if self.packer is not None:
            packer = self.packer()
            self.forms, self.form_sizes, self.in_work = packer.forms(), packer.sizes, packer.in_work

    def room(self, alignment: int) -> int:
        """Return the bytes that it adds to an archive of this alignment, at most."""
        sizes = [len(self.graph), len(self.initializers or b""), *self.form_sizes]
        sizes += [source.nbytes for source, _ in self.sources if not isinstance(source, PayloadId)]
        pages = len(self.form_sizes) + sum(packed for _, packed in self.sources)
        nbytes = sum(n + payload_alignment(n, alignment) + PAYLOAD.itemsize + PER_ITEM for n in sizes)
        return nbytes + len(self.target) + PER_ITEM * len(self.sources) + (PAGE + _KEY_SIZE) * pages + PAGE // 4

    def write_sources(self, pool: PayloadPool) -> None:
        """Write new weights; `write` adds packed forms, which are made meanwhile, and the graph."""
        self.numbers = [s if isinstance(s, PayloadId) else pool.put(s, page=page) for s, page in self.sources]

    def write(self, pool: PayloadPool) -> dict[str, Any]:
        """Write packed forms, initializers and graph; return the attributes of its target."""
        numbers, model, initializers = self.numbers, self.graph, self.initializers
        if initializers is None:
            model, initializers = self._with_forms(pool, numbers)
        own = [pool.put(np.frombuffer(data, np.uint8)) for data in (model, initializers)]
        return {
            tuned.TARGET: self.target,
            **({tuned.MODULE: self.module} if self.module else {}),
            tuned.GRAPH: own[0],
            tuned.INITIALIZERS: own[1],
            tuned.PAYLOADS: numbers,
            tuned.SEAL: tuned.seal_of(pool.base.index, self.target, self.module, pool.rows([*own, *numbers])),
        }

    def _with_forms(self, pool: PayloadPool, numbers: list[PayloadId]) -> tuple[bytes, bytes]:
        """Write packed forms, and add their numbers; return the graph that names them, and its initializers."""
        entries: dict[str, dict[str, str]] = {}
        with contextlib.closing(self.forms) as forms:  # or threads write on while an error removes their folder
            for form in forms:
                value = form.key
                for data, padded in form.buffers:
                    value += f"|{len(numbers) if data.nbytes else ''};{padded}"
                    if data.nbytes:
                        numbers.append(pool.put(data, page=True))
                    self.packed_bytes += data.nbytes
                own = entries.setdefault(str(form.weight), {})
                own[f"prepacked_{len(own)}"] = value
        self.packed = len(entries)
        initializers: list[bytes] = []

        def name_forms(t: ExternalTensor, place: str) -> bytes | None:
            new = t.encode(t.entries | entries.get(t.entries[_STUB], {}))
            if place != "main":
                return new
            initializers.append(encode_field(_INITIALIZER, new))
            return None

        return rewrite(memoryview(self.graph), name_forms), b"".join(initializers)


def _is_made_anew(model: Record) -> bool:
    """Return True if most weights are float16, or kernels of convolutions, which ONNX Runtime's optimizers make anew.

    In a file beside the graph new weights take memory once, in the graph twice; but that file gets the old ones, too.
    """
    infos = list(model.infos())
    anew = sum(info.nbytes for info in infos if info.bits == 16 or len(info.shape) > 2)
    return 2 * anew > max(_FEW, sum(info.nbytes for info in infos))


class PayloadPool:
    """Writes the payloads of an archive: those from before, then new ones, equal bytes once.

    Another thread hashes new ones meanwhile.

    Attributes:
        originals: the numbers of those from before.
        sha256: of new ones, by their places, as futures.
        tell: called with the bytes written, and `total`, before each new one.
    """

    def __init__(self, sink: Sink, base: Archive, hashing: Executor) -> None:
        self.base, self.sink, self._hashing = base, sink, hashing
        self.tell: Progress = lambda *_: None
        self.total = 0
        self.out = StreamWriter(sink, alignment=base.header.alignment)
        self.originals = list(map(PayloadId, range(len(base.index.payloads))))
        self.sha256: dict[Place, Future[bytes]] = {}
        self._first: dict[Place, PayloadId] = {}
        for number in self.originals:
            self.out.store(np.frombuffer(base.payload(number), np.uint8))
            self._first.setdefault(self.place(number), number)

    def put(self, source: Any, *, page: bool = False) -> PayloadId:
        """Write an array of bytes, on a page if asked for; return its number, NONE for no bytes."""
        if not source.nbytes:
            return PayloadId(NONE)
        self.tell(self.sink.position, self.total)
        sha256 = self._hashing.submit(lambda: hashlib.sha256(source).digest())
        number = PayloadId(self.out.store(source, alignment=PAGE if page else 0))
        place = self.place(number)
        first = self._first.setdefault(place, number)
        if first != number:
            self.out.forget(number)
        else:
            self.sha256[place] = sha256
        return first

    def place(self, number: PayloadId) -> Place:
        """Return the range of a payload in the archive that is written."""
        offset, nbytes, _ = self.out.row(number)
        return 0, offset, nbytes

    def rows(self, numbers: list[PayloadId]) -> Any:
        """Return rows of payloads by number, zeros for NONE."""
        return np.array([(0, 0, 0) if n == NONE else self.out.row(n) for n in numbers], PAYLOAD)
