"""Finds the small models whose weights lie in an archive, and writes them again after it was replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from zcrecord.errors import Advice, RecordError, SourceError, UnsupportedError, printable
from zcrecord.onnx.protobuf.rewriting import read_properties
from zcrecord.record.record import Record
from zcrecord.storage.files import Identity, Place
from zcrecord.storage.new_files import refusals, version_of

from .archive_link import ARCHIVE, CONTENT_DIGEST, INDEX_CRC, MODULE, PROPERTIES, TUNED_FOR, is_link
from .export import to_onnx

_TAIL = 16 << 20  # bytes at the end of a model in which its metadata_props are looked for; to_onnx writes them last


class LinkedModel(NamedTuple):
    """A model whose weights lie in an archive."""

    path: str
    version: Identity  # of its file, as it was read
    module: str | None  # of the model in the archive
    target: str | None  # of the tuned graph, if it is one


def linked_models(record: Record, base: Record) -> list[LinkedModel]:
    """Return the models in an archive's folder that were written for it as it is, or for `base`, its untuned part.

    Of each .onnx file only the end is read, unless that names an archive.
    """
    archive = os.path.abspath(str(record.path))
    folders = dict.fromkeys(os.path.dirname(path) for path in (archive, os.path.realpath(archive)))
    models = []
    digests: set[str] = set()  # computed for the first model that needs them: all of the archive is read
    for path in (path for folder in folders for path in _model_paths(folder)):
        with refusals(path):
            version = version_of(path)  # before it is read: a model replaced since is not replaced again
        props = _link_properties(path)
        if props is None or not _is_same_file(os.path.join(os.path.dirname(path), props[ARCHIVE]), archive):
            continue
        is_current = props[INDEX_CRC] == f"{record.archive.header.index_crc:08x}"
        if not is_current and not digests:
            digests = {base.content_digest(), record.content_digest()}
        if is_current or props[CONTENT_DIGEST] in digests:
            models.append(LinkedModel(path, version, props.get(MODULE), props.get(TUNED_FOR)))
    return models


def _model_paths(folder: str) -> Iterator[str]:
    """Yield the paths of the .onnx files in a folder, by name; none if it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.name.lower().endswith(".onnx") and entry.is_file():
                yield entry.path


def _link_properties(path: str) -> dict[str, str] | None:
    """Return the metadata_props of a model if they name an archive; None for any other file, or an unreadable one."""
    with contextlib.suppress(OSError, RecordError), open(path, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        if ARCHIVE.encode() not in file.read():
            return None
        file.seek(0)
        props = read_properties(file)
        return props if is_link([(k, v) for k, v in props.items() if k in PROPERTIES]) else None
    return None


def _is_same_file(path: str, archive: str) -> bool:
    with contextlib.suppress(OSError, ValueError):  # it is missing, or a path with NUL
        return os.path.samefile(path, archive)
    return False


def check_places(models: Iterable[LinkedModel], archive: str, before: Any, after: Any) -> None:
    """Raise UnsupportedError if there are models, and their payloads' offsets in the file, two arrays, would change.

    Programs may use the models until these are written again.
    """
    model = next(iter(models), None)
    if model is not None and not np.array_equal(before, after):
        fault = f"'{printable(model.path)}' takes weights from this archive, at places that would change"
        advice = "write the result to another path, or remove that model, and export it again with {}"
        raise UnsupportedError(fault, path=archive, advice=Advice(advice, "external", True))


def rewrite_models(models: Iterable[LinkedModel], archive: str, target: str | None) -> tuple[str, ...]:
    """Write models again for an archive that was replaced; return their paths.

    A model of the tuned graph for `target` stays one, convolutions included; `to_onnx` chooses the graph of all others.
    """
    paths = []
    for model in models:
        tuned = True if target is not None and model.target == target else None
        place = Place(model.path, model.version)
        try:
            to_onnx(archive, place, module=model.module, external=True, tuned=tuned, force=True)
        except RecordError as error:
            advice = Advice("export this model again with {}", "external", True)
            raise SourceError(f"{error.message}; the archive is replaced", path=model.path, advice=advice) from error
        paths.append(model.path)
    return tuple(paths)
