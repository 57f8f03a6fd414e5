"""The structure of a record (modules, attributes, ties), for formats that have no place for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from zcrecord.archive.info import ModuleInfo, TensorInfo
from zcrecord.foreign.structure import KEY, Structure
from zcrecord.record.record import Record
from zcrecord.writing.module_tree import state_path


def structure_of(record: Record, infos: Sequence[TensorInfo], *, texts: bool) -> Structure:
    """Return a record's structure; with `texts` without metadata that is text, which the format stores itself."""
    out = Structure()
    number = {info.name: i for i, info in enumerate(infos)}
    paths: list[tuple[str, ...]] = []  # of the modules around a child, by depth
    position = 0  # how many tensors come before it
    for depth, key, child in record.walk():
        del paths[depth:]
        path = (*paths[-1], key) if paths else ()
        if isinstance(child, ModuleInfo):
            if child.kind != "mapping" or child.type_name or (path and not child.tensors and not child.attributes):
                out.items.append((position, path, child.kind, child.type_name))
            paths.append(path)
        elif isinstance(child, TensorInfo):
            position = max(position, number[child.name] + 1)
            if path != state_path(child.name, number):
                out.paths[child.name] = path
        else:
            out.items.append((position, path, child))
    out.ties = _ties(infos)
    left_out = {name for name, value in record.metadata.items() if texts and isinstance(value, str) and name != KEY}
    out.metadata = {name: value for name, value in record.metadata.items() if name not in left_out}
    return out


def _ties(infos: Iterable[TensorInfo]) -> list[list[str]]:
    """Return groups of names of tied tensors with the same offset, dtype, shape and strides."""
    groups: dict[Any, list[str]] = {}
    for info in infos:
        if len(info.tied) > 1 and info.payload is not None:
            key = info.payload, info.offset, info.dtype.code, info.shape, info.strides
            groups.setdefault(key, []).append(info.name)
    return [names for names in groups.values() if len(names) > 1]
