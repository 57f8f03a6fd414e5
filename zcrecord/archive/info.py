"""Descriptions of an archive's tensors, modules and layout, as the API gives them; reads no payload byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcrecord import dtypes
from zcrecord.codec.entries import DIGEST_NAMES, KIND_NAMES
from zcrecord.codec.index import TensorEntry
from zcrecord.codec.layout import MAX_ALIGNMENT, NONE, SEALED_FIELDS
from zcrecord.dtypes import DType
from zcrecord.errors import UnsupportedError

from . import unflatten
from .archive import Archive
from .payload_source import is_twin


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, dtype, shape, place and ties of one tensor.

    `offset` is that of element [0, ..., 0] in the file or buffer, `nbytes` that of the tensor's own elements, `strides`
    count elements (None: C order), `alignment` is the strongest power of two, up to 65536, that divides the payload's
    offset; of a catalogue both are those in one archive. `payload` numbers the stored bytes, `digest` is theirs (None
    without), and `tied` names all tensors that share them, if there are several. `decoding` says why the bytes of
    another format's tensor are decoded or copied when they are first used; None for views of the file.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    alignment: int
    payload: int | None
    digest: int | None
    tied: tuple[str, ...]
    bits: int
    module: str
    decoding: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """Name, kind, size and attributes of one module; `nbytes` and `tensors` count its whole subtree, ties each time."""

    name: str
    kind: str
    type_name: str
    tensors: int
    nbytes: int
    attributes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """Places and sizes of an archive's parts. Offsets in bytes from its own first byte, sizes in bytes.

    `front` tells whether the index comes before the payloads, `sealed` whether the header repeats the trailer,
    `deduplicated` counts bytes that equal others and were stored once.
    """

    version: int
    alignment: int
    base_alignment: int
    index_offset: int
    index_nbytes: int
    payload_offset: int
    archive_nbytes: int
    front: bool
    sealed: bool
    digest: str
    deduplicated: int


def layout(archive: Archive) -> ArchiveLayout:
    """Return the places and sizes of an archive's parts."""
    header = archive.header
    stored, nominal = payload_bytes(archive)
    return ArchiveLayout(
        version=header.version, alignment=header.alignment, base_alignment=header.base_alignment,
        index_offset=header.index_offset, index_nbytes=header.index_size, payload_offset=header.payload_offset,
        archive_nbytes=header.archive_size, front=header.front, sealed=any(archive.buffer[SEALED_FIELDS]),
        digest=DIGEST_NAMES[archive.index.digest_kind], deduplicated=nominal - stored,
    )  # fmt: skip


def payload_bytes(archive: Archive) -> tuple[int, int]:
    """Return the bytes of payloads, each range once, and those of all, as if none shared a range."""
    archive.ensure_all()
    rows = archive.index.payloads
    return int(rows["nbytes"][~is_twin(rows)].sum()), int(rows["nbytes"].sum())


def info(archive: Archive, i: int) -> TensorInfo:
    """Return the description of tensor i."""
    name, row = archive.index.name(i), archive.row(i)
    return _info(archive, name, row, _module_name(archive, row.parent), _tied_names(archive, row.payload))


def _tied_names(archive: Archive, payload: int) -> tuple[str, ...]:
    """Return the names of all tensors of a payload, one tuple for all of them; empty if there is one tensor alone."""
    names = archive.tied.get(payload, ())
    if names or payload == NONE:
        return names
    users = np.flatnonzero(archive.index.tensors["payload"] == payload)
    if len(users) < 2:
        return ()
    archive.ensure_all()  # other tensors' names are shown too
    names = tuple(map(archive.index.name, users.tolist()))
    return archive.tied.setdefault(payload, names)


def infos(archive: Archive) -> Iterator[TensorInfo]:
    """Yield the description of every tensor, in saved order; tensors of one payload share one `tied`."""
    names = archive.names()
    module_names = [_module_name(archive, m) for m in range(len(archive.index.modules))]
    ties = _ties(archive, names)
    for name, row in zip(names, map(TensorEntry._make, archive.index.tensors.tolist()), strict=True):
        yield _info(archive, name, row, module_names[row.parent], ties.get(row.payload, ()))


def _ties(archive: Archive, names: list[str]) -> dict[int, tuple[str, ...]]:
    """Return the names of tied tensors by their payload; `names` are those of all tensors."""
    payloads = archive.index.tensors["payload"]
    _, inverse, counts = np.unique(payloads, return_inverse=True, return_counts=True)
    out: dict[int, list[str]] = {}
    for i in np.flatnonzero(counts[inverse] > 1).tolist():
        out.setdefault(int(payloads[i]), []).append(names[i])
    return {number: tuple(names) for number, names in out.items() if number != NONE}


def _info(archive: Archive, name: str, row: TensorEntry, module: str, tied: tuple[str, ...]) -> TensorInfo:
    """Return the description of a tensor by its entry; names of it, its module and its ties are given."""
    dtype = dtypes.by_code.get(row.dtype) or DType(row.dtype, f"unknown {row.dtype}", row.bits, *[None] * 5)
    offset, alignment, digest = 0, 0, None
    if row.payload != NONE:
        start, _, digest = archive.index.payloads[row.payload].item()
        start += archive.header.payload_offset + archive.offset
        offset, alignment = start + row.byte_offset, min(start & -start, MAX_ALIGNMENT)  # the lowest bit divides it
    return TensorInfo(
        name=name, dtype=dtype, shape=archive.shape(row), strides=archive.strides(row), offset=offset,
        nbytes=archive.nbytes(row), alignment=alignment, payload=None if row.payload == NONE else row.payload,
        digest=digest if archive.index.digest_kind else None, tied=tied, bits=row.bits, module=module,
        decoding=None if row.payload == NONE else archive.source.decoding(row.payload),
    )  # fmt: skip


def _module_name(archive: Archive, number: int) -> str:
    return archive.index.text_of(archive.index.modules[number])


def modules(archive: Archive) -> dict[str, ModuleInfo]:
    """Return every module by its full name, the record itself as ''; in pre-order."""
    archive.ensure_all()
    ix = archive.index
    names = [_module_name(archive, m) for m in range(len(ix.modules))]
    values: dict[int, dict[str, Any]] = {}
    for entry in unflatten.attribute_entries(ix, ix.attributes, archive.payload):
        values.setdefault(entry.parent, {})[entry.key] = entry.value
    sizes = np.array([archive.nbytes(row) for row in map(TensorEntry._make, ix.tensors.tolist())], np.int64)
    if ix.by_module is not None:
        sizes = sizes[ix.by_module]
    sums = np.concatenate(([0], np.cumsum(sizes)))
    starts = [*ix.modules["first_tensor"].tolist(), len(ix.tensors)]  # of each module's tensors, by module
    out = {}
    for m, (name, row) in enumerate(zip(names, ix.modules, strict=True)):
        start, end = starts[m], starts[int(row["end"])]
        out[name] = ModuleInfo(
            name=name, kind=KIND_NAMES.get(int(row["kind"]), "mapping"), type_name=ix.text_of(row, "type_name"),
            tensors=end - start, nbytes=int(sums[end] - sums[start]), attributes=values.get(m, {}),
        )  # fmt: skip
    return out


def attributes(archive: Archive, payload: Callable[[int], Any] | None = None) -> dict[str, Any]:
    """Return attributes by full name, in saved order; bytes as `payload` returns them. UnsupportedError for twins."""
    archive.ensure_all()
    ix = archive.index
    unflatten.check_full_names(ix, archive.header.index_size)
    out: dict[str, Any] = {}
    for entry in unflatten.attribute_entries(ix, ix.attributes, payload or archive.payload):
        module = _module_name(archive, entry.parent)
        name = f"{module}.{entry.key}" if module else entry.key
        if name in out:
            fault = "two attributes have this full name; a module's `attributes` have them by key"
            raise UnsupportedError(fault, path=archive.path, tensor=name)
        out[name] = entry.value
    return out


def child_of_type(archive: Archive, type_name: str) -> int | None:
    """Return the number of the first child of the record that is a module with this type name; None without one."""
    archive.ensure_all()
    ix = archive.index
    rows = ix.modules
    numbers = np.flatnonzero((rows["parent"] == 0) & (rows["type_name_size"] == len(type_name.encode()))).tolist()
    return next((m for m in numbers if ix.text_of(rows[m], "type_name") == type_name), None)


def walk(archive: Archive) -> Iterator[tuple[int, str, Any]]:
    """Yield depth, key and ModuleInfo, TensorInfo or value of the record and all below it, in saved pre-order."""
    described = list(modules(archive).values())
    names = archive.names()
    ties = _ties(archive, names)
    children: list[list[unflatten.Child]] = [[] for _ in described]
    for child in sorted(unflatten.children(archive.index), key=lambda child: child[3]):
        children[child[2]].append(child)
    yield 0, "", described[0]
    stack = [iter(children[0])]
    while stack:
        kind, number, parent, _, key = next(stack[-1], (-1, 0, 0, 0, ""))
        if kind == unflatten.MODULE:
            yield len(stack), key, described[number]
            stack.append(iter(children[number]))
        elif kind == unflatten.TENSOR:
            row = archive.index.tensor(number)
            tensor = _info(archive, names[number], row, described[parent].name, ties.get(row.payload, ()))
            yield len(stack), key, tensor
        elif kind == unflatten.ATTRIBUTE:
            yield len(stack), key, described[parent].attributes[key]
        else:
            stack.pop()
