"""`plan`: the models below a folder or a URL, each with its format and the place of its archive.

Decides by names alone, and opens no model. `conversion` reads and converts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from posixpath import dirname
from typing import Any

from zcrecord.codec.file_types import FORMATS
from zcrecord.codec.layout import ALIGNMENT, check_alignment
from zcrecord.errors import Advice, NameCollisionError, SourceError, UnsupportedError, printable
from zcrecord.foreign.folders import longest_suffix
from zcrecord.foreign.safetensors_index import INDEX
from zcrecord.storage.compressed import SUFFIXES
from zcrecord.storage.files import absolute_path, is_url, path_of
from zcrecord.storage.folders import catalogue_of_shard
from zcrecord.storage.urls import cut_in_url, is_http

from .sources import file_behind, folder_among, label, list_files

_ARCHIVE, _ONNX, _TORCH = "zcr", "onnx", "torch"
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors")
_EXTERNAL = ".bin"  # a suffix of torch's files that ONNX's external data have, too


@dataclass(frozen=True, slots=True)
class Job:
    """One conversion: a model, and the archive it becomes. Plain values, to be pickled or written by hand.

    Attributes:
        source, dest: absolute paths or URLs of the model and of its archive.
        source_format: a name of `zcrecord.formats.FORMATS`.
        nbytes: the size of the source's own file, as it was listed.
        alignment, max_shard_size, durable: as in `zcrecord.formats.convert`.
        force: convert in any case, and replace any file at `dest`.
        storage_options, dest_storage_options: for fsspec, if source and dest are URLs; `repr` hides them, since they
            may contain credentials.
    """

    source: str
    dest: str
    source_format: str
    nbytes: int = 0
    alignment: int = ALIGNMENT
    max_shard_size: int | None = None
    durable: bool = True
    force: bool = False
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    dest_storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)


def plan(
    source_prefix: str | os.PathLike[str],
    dest_prefix: str | os.PathLike[str],
    *,
    source_format: str | None = None,
    alignment: int = ALIGNMENT,
    max_shard_size: int | None = None,
    durable: bool = True,
    force: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    dest_storage_options: Mapping[str, Any] | None = None,
) -> list[Job]:
    """List the models below a folder or a URL, each with its archive at the same path below another; reads none.

    A model is a file with a suffix of a format that `zcrecord convert` reads, compressed ones included. Some files are
    left out: shards beside their index or catalogue, and .bin files beside an .onnx; archives, unless `source_format`
    is "zcr"; and names that begin with a dot. The jobs are sorted by path, so that equal prefixes give equal plans.

    Args:
        source_prefix, dest_prefix: folders, or URLs that fsspec knows; HTTP servers cannot list files, so their URLs
            are refused. `dest_prefix` need not exist.
        source_format: list files of this format only.
        alignment, max_shard_size, durable: as in `zcrecord.formats.convert`.
        force: convert everything anew, and replace archives that are not from a fleet.
        storage_options: for fsspec: credentials, the endpoint of an S3 server.
        dest_storage_options: the same for `dest_prefix`, if they differ.

    Raises:
        NameCollisionError: two models would become one archive, or an archive would have the name of a folder.
        SourceError: there is no model, or the prefix cannot be listed. UnsupportedError, LimitError: a prefix or an
        option is wrong. DependencyError: fsspec is not installed.

    Example:
        >>> [(os.path.basename(job.source), os.path.basename(job.dest)) for job in plan(".", "archives")]
        [('model.onnx', 'model.zcr')]
    """
    check_alignment(alignment)
    formats = [name for name, row in FORMATS.items() if row.reads]
    if source_format is not None and source_format not in formats:
        raise UnsupportedError(f"format {printable(str(source_format))} is not known; {', '.join(formats)}")
    if max_shard_size is not None and max_shard_size < 1:
        raise UnsupportedError("a shard size is in bytes, from 1 on")
    options = dict(storage_options or {})
    dest_options = options if dest_storage_options is None else dict(dest_storage_options)
    source, dest = _prefix(source_prefix, options), _prefix(dest_prefix, dest_options, is_dest=True)
    sizes = list_files(source, options)
    models = _models(sizes, source_format)
    if max_shard_size is not None and is_url(dest):
        raise UnsupportedError("a shard size is for paths: shards lie beside their catalogue", path=label(dest))
    if max_shard_size is not None and _ONNX in models.values():
        raise UnsupportedError("a shard size is not for ONNX; convert the archives that are made of it")
    if not models:
        fault = "has no model below it" if source_format is None else f"has no model of {source_format} below it"
        raise SourceError(f"{fault}; models are recognised by their suffixes", path=label(source))
    shared: dict[str, Any] = {"alignment": alignment, "durable": durable, "force": force}
    shared |= {"max_shard_size": max_shard_size, "storage_options": options, "dest_storage_options": dest_options}
    return [
        Job(_path_below(source, path), _path_below(dest, target), models[path], sizes[path], **shared)
        for target, path in _targets(models, source, dest).items()
    ]


def _prefix(folder: str | os.PathLike[str], options: Mapping[str, Any], *, is_dest: bool = False) -> str:
    """Return a prefix as a URL, or an absolute path, the same on every worker; UnsupportedError for an HTTP source."""
    if isinstance(folder, str) and is_url(folder):
        if is_http(folder) and not is_dest:
            fault = "HTTP servers list no files; name the bucket behind it (s3://, gs://), a copy on a disk"
            raise UnsupportedError(f"{fault}, or make a zcrecord.fleet.Job of each model's URL", path=label(folder))
        from zcrecord.storage import uploads  # here, because many fleets stay on disks

        place = uploads.local_path(folder, options) if is_dest else file_behind(folder, options)
        return place if isinstance(place, str) else folder  # a str is the path of a file:// URL
    return absolute_path(path_of(folder))


def _path_below(prefix: str, path: str) -> str:
    return f"{prefix.rstrip('/')}/{path}" if is_url(prefix) else os.path.join(prefix, *path.split("/"))


def _models(files: Mapping[str, int], source_format: str | None) -> dict[str, str]:
    """Return the format of each model among files, by path: of this format, or of any that `plan` lists."""
    formats = {path: name for path in files if (name := _split(path)[1]) and "/." not in f"/{path}"}  # none hidden
    with_index = {dirname(path) for path in formats if path.endswith(INDEX)}
    with_onnx = {dirname(path) for path, name in formats.items() if name == _ONNX}
    out = {}
    for path, name in formats.items():
        is_shard = catalogue_of_shard(path) in files or (dirname(path) in with_index and _SHARD.search(path))
        is_external = name == _TORCH and path.endswith(_EXTERNAL) and dirname(path) in with_onnx
        is_selected = name == source_format if source_format is not None else name != _ARCHIVE and not is_external
        if is_selected and not is_shard:
            out[path] = name
    return out


def _targets(models: Mapping[str, str], source: str, dest: str) -> dict[str, str]:
    """Return each model's path by that of its archive, both relative; NameCollisionError for names that collide."""
    out: dict[str, str] = {}
    for path in models:
        target = _split(path)[0] + ".zcr"
        # An object's key, such as a//b: a folder would have one name for a//b and a/b.
        if "" in path.split("/") or "\0" in path:
            fault = f"the name {printable(repr(path))} has an empty part, or NUL; rename it"
            raise NameCollisionError(fault, path=label(source))
        if (is_url(source) or is_url(dest)) and (cut := cut_in_url(path)):  # such a URL would name another file
            fault = f"the name {printable(repr(path))} has '{cut}' in it, which means something else in a URL"
            raise NameCollisionError(f"{fault}; rename it", path=label(source))
        if (other := out.setdefault(target, path)) != path:
            fault = f"{printable(other)} and {printable(path)} would both become {printable(target)}"
            advice = Advice("rename one, or choose one format by {}", "source_format")
            raise NameCollisionError(fault, path=label(source), advice=advice)
        if _path_below(source, path) == _path_below(dest, target):
            raise UnsupportedError("archives are converted to another folder, not over themselves", path=label(source))
    if folder := folder_among(out):
        fault = f"{printable(out[folder])} would become {printable(folder)}, a folder of models, too; rename one"
        raise NameCollisionError(fault, path=label(source))
    return out


def _split(path: str) -> tuple[str, str | None]:
    """Return a path without the suffixes of its format and its compression, and the format, None if it is unknown."""
    compression = next((suffix for suffix in SUFFIXES if path.lower().endswith(suffix)), "")
    suffix, source_format = longest_suffix(path.lower().removesuffix(compression))
    return path[: len(path) - len(compression) - len(suffix)], source_format
