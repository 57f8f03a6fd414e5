"""The structure of a record (modules, attributes, ties), for formats that have no place for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zcrecord.archive.info import ModuleInfo, TensorInfo
from zcrecord.foreign.structure import KEY, Structure
from zcrecord.record.record import Record
from zcrecord.writing.module_tree import state_path


def structure_of(record: Record, infos: Sequence[TensorInfo], *, texts: bool) -> Structure:
    """Return a record's structure; `texts` leaves out metadata that is text, if the format stores that itself."""
    out = Structure()
    number = {info.name: i for i, info in enumerate(infos)}
    frames: list[tuple[tuple[str, ...], list[int]]] = []  # of the open modules: path, and current position
    for depth, key, child in record.walk():
        while len(frames) > max(depth, 0):
            _, (done,) = frames.pop()
            if frames:
                frames[-1][1][0] = max(frames[-1][1][0], done)
        path = (*frames[-1][0], key) if frames else ()
        position = frames[-1][1][0] if frames else 0
        if isinstance(child, ModuleInfo):
            if child.kind != "mapping" or child.type_name or (path and not child.tensors and not child.attributes):
                out.items.append((position, path, child.kind, child.type_name))
            frames.append((path, [position]))
        elif isinstance(child, TensorInfo):
            frames[-1][1][0] = max(position, number[child.name] + 1)
            if path != state_path(child.name, number):
                out.paths[child.name] = path
        else:
            out.items.append((position, path, child))
    out.items.sort(key=lambda item: item[0])
    out.ties = _ties(infos)
    plain = {name for name, value in record.metadata.items() if texts and isinstance(value, str) and name != KEY}
    out.metadata = {name: value for name, value in record.metadata.items() if name not in plain}
    return out


def _ties(infos: Iterable[TensorInfo]) -> list[list[str]]:
    """Return groups of names of tied tensors with the same offset, dtype, shape and strides."""
    groups: dict[Any, list[str]] = {}
    for info in infos:
        if len(info.tied) > 1 and info.payload is not None:
            key = info.payload, info.offset, info.dtype.code, info.shape, info.strides
            groups.setdefault(key, []).append(info.name)
    return [names for names in groups.values() if len(names) > 1]
