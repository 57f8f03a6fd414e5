"""Tuned parts of archives: beside a model, its graph as ONNX Runtime optimised it for one CPU, and its packed weights.

They are bytes attributes of a module of type "zcr:onnx_tuned", and no tensors of the record. This module reads and
checks a tuned part, returns the archive without it, and the model for ONNX Runtime. `tuner` makes one.
schema/CONVENTIONS.md specifies it.

Source: ONNX Runtime 1.20 to 1.32, `tensor_external_data_info.cc` and `graph.cc` for `prepacked_N`, the entries of
external_data that name packed weights.
"""

from __future__ import annotations

import hashlib
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.info import child_of_type
from zcrecord.archive.payload_source import Place
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import Entries, PayloadId, change_values
from zcrecord.codec.index import Index, decode
from zcrecord.codec.layout import ALIGNMENT, DIGEST_ALLOWANCE, HEADER_SIZE, NONE, Header, decode_header, encode_unsealed
from zcrecord.codec.verify import check_index
from zcrecord.errors import FormatError, IntegrityError, LimitError, RecordError, printable
from zcrecord.onnx.protobuf.interfaces import ModelInterface, difference, graph_interface_of, interface_of
from zcrecord.onnx.protobuf.reader import MAX_LENGTH, encode_field
from zcrecord.onnx.protobuf.rewriting import ExternalTensor, rewrite_tensors, tensors_of
from zcrecord.onnx.protobuf.scanner import STUB_KEY
from zcrecord.record.record import Record
from zcrecord.record.save import stored_entries
from zcrecord.storage.files import identity_of
from zcrecord.storage.threads import WORTH_A_THREAD, Going, cores, run_threads

from .graph import MOST_MAPPED
from .names import GRAPH_ATTRIBUTE
from .target import CONVENTION, TuningTarget

TARGET_TYPE = "zcr:onnx_target"  # of the modules in that of TUNED_TYPE
# Attributes of the tuned part: the archive's header, index and trailer before tuning, and its payloads, in their order.
BEFORE, PAYLOADS = "before", "payloads"
# Attributes of a target, besides PAYLOADS, which its graph names by number. Without MODULE the record itself is the
# model.
TARGET, MODULE, GRAPH, INITIALIZERS, SEAL = "target", "module", "graph", "initializers", "seal"
PACKED = re.compile(r"prepacked_[0-9]+")  # a key of external_data
_STUB = STUB_KEY.decode()
_INNER_STUB = b"\x0a\x08" + STUB_KEY  # an entry's key as `tuner` writes it, of a tensor that stays in the graph
_SEAL = b"zcrecord tuned part 1\n"
_NUMBER = re.compile(r"[0-9]{1,10}")
_PACKED_VALUE = re.compile(r"[!-{}~]{1,200}(\|[0-9]{0,10};[0-9]{1,19})+")  # ONNX Runtime's key; payload, padded size
_LOCATION = b"location"  # ONNX Runtime takes no external data of a message without these bytes
_MOST_REASONS = 8  # in a message about targets that do not fit
_AGAIN = "convert and tune the model again"
_GRAPH_FIELD, _INITIALIZER = 7, 5  # of ModelProto, of GraphProto


class NoTuning(Exception):  # noqa: N818  # no error: the original graph answers
    """The reason why the tuned part of an archive cannot be used."""


class TunedPlan(NamedTuple):
    """A session over a tuned part."""

    model: bytes
    packed: bool  # the model has packed weights
    path: str  # of the file that is mapped
    identity: tuple[int, ...]
    check: Callable[[], None]  # before the first answer: NoTuning if the digest of an added weight does not match


class TunedModel(NamedTuple):
    """A model over an archive, with the payloads of its initializers and those of packed weights."""

    data: bytes
    weights: list[PayloadId]
    packed: set[PayloadId]


class TunedTarget(NamedTuple):
    """One target of a tuned part: a graph for it, and the payloads that the graph names by their place in a list."""

    target: TuningTarget
    module: str  # that the model is in
    graph: PayloadId  # a ModelProto without the main graph's initializers that are payloads
    initializers: PayloadId  # a GraphProto of these
    payloads: list[PayloadId]
    seal: str

    def check(self, archive: Archive) -> None:
        """Raise IntegrityError unless the graph is intact, and is for the archive's very weights; reads no weight."""
        self.check_payloads(archive, {self.graph, self.initializers} - {NONE})
        ix = archive.index
        rows = _rows(ix, np.array([self.graph, self.initializers, *self.payloads]))
        if seal_of(ix, self.target.encode(), self.module, rows) != self.seal:
            raise IntegrityError("its tuned part is for other weights or another graph; tune it again")

    def model(self, archive: Archive, location: str, start: int, *, packed: bool) -> TunedModel:
        """Return the model for ONNX Runtime; its external data lie in a file in which the archive begins at `start`.

        `packed` adds the packed weights. All its external data are payloads of the target: ONNX Runtime would open any
        file that another location names, and reads one location as an address in the process.

        Raises:
            FormatError: a tensor that is not an initializer has external data, external data are not a payload or not
                aligned, or packed weights break a rule of CONVENTIONS.md. LimitError: the model is too large, or has
                too many mappings.
        """
        rows = archive.index.payloads
        base = start + archive.header.payload_offset
        weights: list[PayloadId] = []
        packed_forms: list[PayloadId] = []

        def refer(t: ExternalTensor, place: str = "main") -> bytes:
            if not place:
                raise FormatError(f"a tensor of the tuned graph has external data, but is no initializer; {_AGAIN}")
            weight = self._payload(t.entries.get(_STUB, ""))
            weights.append(weight)
            offset, nbytes, _ = rows[weight].item()
            entries = {"location": location, "offset": str(base + offset), "length": str(nbytes)}
            for key, value in t.entries.items() if packed else ():
                if PACKED.fullmatch(key):
                    entries[key] = self._packed_entry(value, rows, base, packed_forms)
            if len(weights) + len(packed_forms) > MOST_MAPPED:
                raise LimitError(f"more than {MOST_MAPPED} weights and packed forms, each a mapping, are too many")
            return t.encode(entries)

        size = sum(int(rows["nbytes"][n]) for n in (self.graph, self.initializers) if n != NONE)
        if size > MAX_LENGTH:
            raise LimitError(f"its tuned graph has {size} bytes; ONNX Runtime takes 2 GiB")
        graph = bytes(archive.payload(self.graph))
        if _INNER_STUB in graph or _LOCATION in graph:
            graph = rewrite_tensors(memoryview(graph), refer)
        initializers = (encode_field(_INITIALIZER, refer(t)) for t in tensors_of(archive.payload(self.initializers)))
        graph += encode_field(_GRAPH_FIELD, b"".join(initializers))  # protobuf joins the two graphs
        return TunedModel(graph, weights, set(self.payloads) - set(weights))

    def _payload(self, place: str) -> PayloadId:
        """Return the payload at a place in the target's list, as text; FormatError if it has no such place."""
        if not _NUMBER.fullmatch(place) or int(place) >= len(self.payloads):
            fault = f"a tensor of the tuned graph names payload '{printable(place, 40)}' of {len(self.payloads)}"
            raise FormatError(f"{fault}; {_AGAIN}")
        return self.payloads[int(place)]

    def _packed_entry(self, value: str, rows: Any, base: int, packed_forms: list[PayloadId]) -> str:
        """Return a `prepacked_N` for ONNX Runtime, with offsets from `base` on; adds its payloads to `packed_forms`."""
        if not _PACKED_VALUE.fullmatch(value):
            raise FormatError(f"packed weights '{printable(value, 40)}' are not 'key|payload;size|...'; {_AGAIN}")
        key, *buffers = value.split("|")
        parts = [key]
        for buffer in buffers:
            place, _, padded = buffer.partition(";")
            offset = nbytes = 0
            if place:
                number = self._payload(place)
                packed_forms.append(number)
                payload_offset, nbytes, _ = rows[number].item()
                offset = base + payload_offset
                if offset % ALIGNMENT:
                    raise FormatError(f"packed weights are not aligned to {ALIGNMENT} bytes; {_AGAIN}")
            parts.append(f"{offset};{nbytes};{padded}")
        return "|".join(parts)

    def check_payloads(self, archive: Archive, numbers: Set[int], *, spare: int = 0) -> None:
        """Raise IntegrityError if a digest of these payloads does not match; reads on all cores but `spare` ones."""
        rows = archive.index.payloads

        def check(number: int, _: Going) -> None:
            if digest_of(archive.payload(number)) != int(rows["digest"][number]):
                raise IntegrityError("a payload of its tuned part does not match its digest; tune it again")

        largest_first = sorted(numbers, key=lambda n: -int(rows["nbytes"][n]))
        is_small = int(rows["nbytes"][largest_first].sum()) < WORTH_A_THREAD
        run_threads(check, largest_first, 1 if is_small else max(1, min(cores() - spare, len(numbers))))


class TunedPart(NamedTuple):
    """The tuned part of an archive: the archive's header, index and trailer before tuning, and its targets."""

    module: int
    before: memoryview
    originals: list[PayloadId]  # payloads, in the order that they had before
    targets: list[TunedTarget]


class Interfaces:
    """The inputs and outputs of an archive's models and tuned graphs, each read once."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._skeletons = _skeleton_payloads(archive.index)
        self._interfaces: dict[tuple[Place, Callable[[Any], ModelInterface]], ModelInterface] = {}
        self._checked: set[Any] = set()
        self._read_budget = DIGEST_ALLOWANCE * archive.stored_nbytes()  # in bytes; targets may share graphs

    def check_target(self, target: TunedTarget) -> None:
        """Check that a target's graph has the model's inputs and outputs.

        Raises:
            FormatError: it has others. Old releases wrote such graphs, so this is no sign of damage. LimitError: the
            targets share graphs, so that a comparison of all would read far more than the archive.
        """
        graphs = target.graph, target.initializers
        skeletons = self._skeletons.get(target.module, [])
        key = *map(self._archive.place, graphs), target.module
        if key in self._checked:
            return
        self._charge((*graphs, *skeletons))
        initializers = self._interface(target.initializers, graph_interface_of)
        joined = self._interface(target.graph, interface_of).joined(initializers)
        for skeleton in skeletons:
            change = difference(self._interface(skeleton, interface_of), joined)
            if change is not None:
                where = f" of module '{printable(target.module)}'" if target.module else ""
                raise FormatError(f"its tuned graph{where} {change}, unlike the model; tune it again")
        self._checked.add(key)

    def _charge(self, numbers: Iterable[int]) -> None:
        """Subtract the bytes of payloads from those that may be read; LimitError if none are left."""
        self._read_budget -= sum(len(self._archive.payload(n)) for n in numbers)
        if self._read_budget < 0:
            fault = f"its tuned targets share graphs of more than {DIGEST_ALLOWANCE} times the archive's bytes in all"
            raise LimitError(f"{fault}; {_AGAIN}")

    def _interface(self, number: int, read: Callable[[Any], ModelInterface]) -> ModelInterface:
        key = self._archive.place(number), read
        if key not in self._interfaces:
            self._interfaces[key] = read(self._archive.payload(number))
        return self._interfaces[key]


def read_tuned(archive: Archive) -> TunedPart | None:
    """Return the tuned part of an archive, None if it has none; reads no payload."""
    top = child_of_type(archive, TUNED_TYPE)
    if top is None:
        return None
    ix = archive.index
    target_modules = [
        module for module in range(top + 1, int(ix.modules["end"][top]))
        if int(ix.modules["parent"][module]) == top and ix.text_of(ix.modules[module], "type_name") == TARGET_TYPE
    ]  # fmt: skip
    attributes: dict[int, dict[str, Any]] = {}  # of modules, by key
    _, rows_below = unflatten.below(ix, top)
    for entry in unflatten.attribute_entries(ix, ix.attributes[rows_below], PayloadId):
        attributes.setdefault(entry.parent, {})[entry.key] = entry.value
    targets = [_read_target(attributes.get(module, {})) for module in target_modules]
    own = attributes.get(top, {})
    return TunedPart(top, archive.payload(_checked_value(own, BEFORE, PayloadId)), _payloads(own), targets)


def _read_target(attributes: dict[str, Any]) -> TunedTarget:
    """Return the target that a module's attributes describe; FormatError if one is missing or malformed."""
    graph, initializers = (_checked_value(attributes, key, PayloadId) for key in (GRAPH, INITIALIZERS))
    target = TuningTarget.decode(_checked_value(attributes, TARGET, str))
    seal = _checked_value(attributes, SEAL, str)
    module = _checked_value(attributes, MODULE, str) if MODULE in attributes else ""
    return TunedTarget(target, module, graph, initializers, _payloads(attributes), seal)


def check_interfaces(archive: Archive) -> None:
    """Check that all tuned graphs of an archive have the inputs and outputs of their models.

    Graphs of other conventions are skipped.

    Raises:
        FormatError: a graph has others, or the tuned part breaks a rule of CONVENTIONS.md. LimitError: targets share
        graphs, so that a comparison of all would read far more than the archive.
    """
    part = read_tuned(archive)
    interfaces = Interfaces(archive)
    for target in part.targets if part is not None else ():
        if target.target.convention == CONVENTION:
            interfaces.check_target(target)


def targets_of(archive: Archive) -> tuple[str, ...]:
    """Return the targets of a tuned part as text, each once; empty without one, or with a malformed one."""
    try:
        part = read_tuned(archive)
    except FormatError:
        part = None
    return () if part is None else tuple(dict.fromkeys(target.target.encode() for target in part.targets))


def describe(archive: Archive, here: TuningTarget | None) -> dict[str, Any] | None:
    """Return the sizes and targets of a tuned part for JSON, None without one; reads the index alone.

    Each target has the bytes that it adds to the archive, those that it shares with another included, and `misfit`, the
    reason why it does not fit `here`. `fits` is None if `here` is not known.
    """
    part = read_tuned(archive)
    if part is None:
        return None
    before, sizes = _header_before(part).archive_size, archive.index.payloads["nbytes"]
    targets = []
    for target in part.targets:
        added = {target.graph, target.initializers, *target.payloads} - {NONE, *part.originals}
        facts = {"words": target.target.words(), **asdict(target.target), "module": target.module}
        facts["nbytes"] = int(sizes[sorted(added)].sum())
        misfit = None if here is None else target.target.misfit(here)
        targets.append({**facts, "fits": None if here is None else misfit is None, "misfit": misfit})
    return {"nbytes": archive.header.archive_size - before, "untuned_nbytes": before, "targets": targets}


def plan(archive: Archive, module: str, here: TuningTarget, *, packed: bool) -> TunedPlan:
    """Return the plan of a session over the tuned part of a model; checks all but the added weights.

    Raises:
        NoTuning: the tuned part is for other machines, or damaged, or the archive is no mapped file.
    """
    file = archive.source.file if archive.whole else None
    if file is None:
        raise NoTuning("only the unedited archive in a local file, mapped, can use its tuned part")
    try:
        opened_path, identity = file
        path = os.path.realpath(opened_path)
        if not path.isascii() and path != path.encode("utf-8", "replace").decode():
            raise NoTuning("the path of its file is not UTF-8, as ONNX Runtime wants it")
        if archive.source.gone or identity_of(path) != identity:
            raise NoTuning("its file was replaced or removed since it was opened")
        target = fitting(archive, module, here)
        target.check(archive)
        model = target.model(archive, os.path.basename(path), archive.offset, packed=packed)
        Interfaces(archive).check_target(target)
    except RecordError as error:
        raise NoTuning(error.message) from error

    def check() -> None:
        added = set(model.weights) - set(archive.index.tensors["payload"].tolist())
        try:
            target.check_payloads(archive, added, spare=1)
        except RecordError as error:
            raise NoTuning(error.message) from error

    return TunedPlan(model.data, packed, path, identity, check)


def fitting(archive: Archive, module: str, here: TuningTarget) -> TunedTarget:
    """Return the target of a tuned part that is this machine, for the model in a module; NoTuning without one."""
    part = read_tuned(archive)
    reasons: dict[str, None] = {}  # each once, in order
    for target in part.targets if part is not None else ():
        if target.module == module:
            reason = target.target.misfit(here)
            if reason is None:
                return target
            reasons[reason] = None
    texts = list(reasons)
    if len(texts) > _MOST_REASONS:
        texts[_MOST_REASONS:] = [f"and {len(texts) - _MOST_REASONS} more"]
    raise NoTuning("; ".join(texts) or "it is not tuned")


def _checked_value(attributes: dict[str, Any], key: str, kind: type) -> Any:
    value = attributes.get(key)
    if not isinstance(value, kind):
        raise FormatError(f"its tuned part has no attribute '{key}' of the right type; {_AGAIN}")
    return value


def _payloads(attributes: dict[str, Any]) -> list[PayloadId]:
    payloads: list[PayloadId] = _checked_value(attributes, PAYLOADS, list)
    if not all(isinstance(n, PayloadId) and n != NONE for n in payloads):
        raise FormatError(f"attribute '{PAYLOADS}' of its tuned part is no list of payloads; {_AGAIN}")
    return payloads


def untuned(archive: Archive, part: TunedPart) -> Archive:
    """Return an archive as it was before tuning, over the same bytes.

    Raises:
        FormatError: the stored index and the archive disagree, or the archive was edited since. LimitError: it would be
            far larger.
    """
    header = _header_before(part)
    if header.archive_size > DIGEST_ALLOWANCE * archive.header.archive_size:
        raise LimitError(f"'{BEFORE}' of its tuned part says that it had {header.archive_size} bytes; {_AGAIN}")
    index = decode(part.before[HEADER_SIZE:], header.index_size)
    check_index(index, header)
    rows, stored = index.payloads.copy(), archive.index.payloads[part.originals]
    if len(rows) != len(stored) or (rows[["nbytes", "digest"]] != stored[["nbytes", "digest"]]).any():
        raise FormatError(f"'{BEFORE}' of its tuned part names other payloads than the archive has")
    rows["offset"] = stored["offset"]
    before = archive.part(index._replace(payloads=rows), list(map(int, part.originals)))
    tuned_modules = range(part.module, int(archive.index.modules["end"][part.module]))
    if _content(stored_entries(before), part.originals) != _content(stored_entries(archive), None, tuned_modules):
        fault = f"'{BEFORE}' of its tuned part is of another model: it was edited after it was tuned"
        raise FormatError(f"{fault}; {_AGAIN}")
    return before


def _content(entries: Entries, numbers: Sequence[int] | None, hidden: range = range(0)) -> tuple[Any, ...]:
    """Return tensors, attributes, and modules but `hidden` ones, to compare; `numbers` renumbers payloads."""

    def number(n: Any) -> Any:
        return n if numbers is None or n == NONE else int(numbers[n])

    names = [m.name for m in entries.modules]
    tensors = zip(entries.names, entries.key_sizes, entries.payloads, entries.layout_ids, strict=True)
    change_values(entries.attributes, lambda v: f"payload {number(v)}" if isinstance(v, PayloadId) else v)
    return (
        {(name, key): (number(payload), entries.layouts[layout]) for name, key, payload, layout in tensors},
        {(names[a.parent], a.key): repr(a.value) for a in entries.attributes if a.parent not in hidden},
        {(m.name, m.key_size, m.kind, m.type_name) for i, m in enumerate(entries.modules) if i not in hidden},
    )


def untuned_record(record: Record) -> Record:
    """Return a record as it was before tuning; itself without a tuned part."""
    part = read_tuned(record.archive)
    return record if part is None else Record(untuned(record.archive, part))


def places_before(part: TunedPart) -> Any:
    """Return the offsets in the file that an archive's payloads had before tuning."""
    header = _header_before(part)
    return decode(part.before[HEADER_SIZE:], header.index_size).payloads["offset"] + np.uint64(header.payload_offset)


def size_before(archive: Archive) -> int:
    """Return the size of an archive without its tuned part, in bytes."""
    part = read_tuned(archive)
    return archive.header.archive_size if part is None else _header_before(part).archive_size


def _header_before(part: TunedPart) -> Header:
    """Return the header from before tuning; FormatError or IntegrityError if index or trailer do not match it."""
    head, trailer = bytes(part.before[:HEADER_SIZE]), bytes(part.before[-HEADER_SIZE:])
    try:
        header = decode_header(trailer, "trailer") if len(part.before) > 2 * HEADER_SIZE else None
    except RecordError as error:
        raise FormatError(f"'{BEFORE}' of its tuned part: {error.message}") from None
    if (
        header is None
        or len(part.before) != header.index_size + 2 * HEADER_SIZE
        or head not in (trailer, encode_unsealed(header.alignment))
    ):
        raise FormatError(f"'{BEFORE}' of its tuned part is no header, index and trailer")
    if zlib.crc32(part.before[HEADER_SIZE:-HEADER_SIZE]) != header.index_crc:
        raise IntegrityError(f"'{BEFORE}' of its tuned part: the index does not match its CRC")
    return header


def bytes_before(archive: Archive, part: TunedPart) -> Iterator[tuple[int, Any]]:
    """Yield the bytes that the archive had before tuning: ascending offsets and pieces, with zeros between them."""
    header = _header_before(part)
    payloads = decode(part.before[HEADER_SIZE:], header.index_size).payloads
    index = (header.index_offset, part.before[HEADER_SIZE:-HEADER_SIZE])
    yield 0, part.before[:HEADER_SIZE]
    if header.front:
        yield index
    end = 0
    for number, offset in zip(part.originals, payloads["offset"].tolist(), strict=True):
        if offset >= end:  # not equal to a payload before it
            data = archive.payload(number)
            yield header.payload_offset + offset, data
            end = offset + len(data)
    if not header.front:
        yield index
    yield header.archive_size - HEADER_SIZE, part.before[-HEADER_SIZE:]


def seal_of(ix: Index, target: str, module: str, own: Any) -> str:
    """Return a digest of all that a tuned graph depends on, from an index alone.

    SHA-256, in hexadecimal, over the target; digests and sizes of the target's payloads (`own`); the skeleton's digest;
    of each tensor, by name, its name and layout, and its payload's digest and size; the model's module, if it has one.
    Another weight, or two payloads or models exchanged, give another seal.
    """
    seal = hashlib.sha256(_SEAL)
    tensors = ix.tensors[ix.by_name]
    used = _rows(ix, tensors["payload"])
    strided = tensors[tensors["strides"] != NONE]
    parts = [
        np.frombuffer(target.encode(), np.uint8), own["digest"], own["nbytes"],
        _rows(ix, np.array(_skeleton_payloads(ix).get(module, []), np.int64))["digest"],
        used["digest"], used["nbytes"],
        tensors["dtype"], tensors["bits"], tensors["rank"], tensors["byte_offset"], tensors["name_size"],
        _gather(np.frombuffer(ix.text, np.uint8), tensors["name"], tensors["name_size"]),
        _gather(ix.dims, tensors["dims"], tensors["rank"]),
        np.flatnonzero(tensors["strides"] != NONE), _gather(ix.strides, strided["strides"], strided["rank"]),
    ]  # fmt: skip
    if module:
        parts.append(np.frombuffer(module.encode(), np.uint8))
    for part in parts:
        data = np.ascontiguousarray(part).tobytes()
        seal.update(len(data).to_bytes(8, "little") + data)
    return seal.hexdigest()


def _skeleton_payloads(ix: Index) -> dict[str, list[PayloadId]]:
    """Return the payloads of skeletons by their module's full name; a valid archive has one in a module."""
    skeletons: dict[str, list[PayloadId]] = {}
    for a in unflatten.attribute_entries(ix, ix.attributes, PayloadId):
        if a.key == GRAPH_ATTRIBUTE and isinstance(a.value, PayloadId):
            skeletons.setdefault(ix.text_of(ix.modules[a.parent]), []).append(a.value)
    return skeletons


def _rows(ix: Index, numbers: Any) -> Any:
    """Return rows of payloads by their numbers; zeros for NONE."""
    rows = np.append(ix.payloads, np.zeros(1, ix.payloads.dtype))
    return rows[np.minimum(numbers, len(ix.payloads))]


def _gather(pool: Any, starts: Any, counts: Any) -> Any:
    """Return `counts[i]` elements of an array from `starts[i]` on, for each i, joined."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    places = np.repeat(starts.astype(np.int64) - (ends - counts), counts)
    return pool[places + np.arange(len(places))]
