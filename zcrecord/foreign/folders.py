"""The one model in a folder, as hubs have it."""

from __future__ import annotations

import errno
import glob
import os
import re

from zcrecord.codec.file_types import FORMATS
from zcrecord.errors import SourceError, printable
from zcrecord.storage.files import real_path, refusals
from zcrecord.storage.folders import archive_in, belongs_to

from .safetensors_index import INDEX
from .torch_folders import METADATA

__all__ = ["format_by_suffix", "model_in"]

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")


def longest_suffix(name: str) -> tuple[str, str | None]:
    """Return the longest suffix in FORMATS of a name in lower case, and its format; "" and None if it has none."""
    matches = [(suffix, row.name) for row in FORMATS.values() for suffix in row.suffixes if name.endswith(suffix)]
    return max(matches, key=lambda match: len(match[0]), default=("", None))


def format_by_suffix(path: str, outer: tuple[str, ...] = ()) -> str | None:
    """Return the name in FORMATS of a file's longest suffix, after suffixes in `outer` were taken off."""
    name = os.path.basename(path).lower()
    for suffix in outer:
        name = name.removesuffix(suffix)
    return longest_suffix(name)[1]


def model_in(folder: str, named: str | None = None, *, archive_first: bool = False) -> str:
    """Return the path of the one model in a folder; the folder itself, if it has several of ONNX and nothing before.

    With models of several formats the first format in FORMATS is chosen, an archive last or first. Shards count as
    their index or catalogue; of .bin files pytorch_model.bin is chosen. `named` restricts it to one format. Without any
    it is the metadata of the one tree that orbax saved there, or in a folder of it, as in one of a step.

    Raises:
        SourceError: the folder has no model, or more than one.
    """
    with refusals(folder):
        names = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    by_kind: dict[str | None, list[str]] = {}
    for name in names:
        by_kind.setdefault(format_by_suffix(name), []).append(name)
    if any(name.endswith(INDEX) for name in by_kind.get("safetensors", ())):
        by_kind["safetensors"] = [name for name in by_kind["safetensors"] if not _SHARD.search(name)]
    if "pytorch_model.bin" in by_kind.get("torch", ()):
        by_kind["torch"] = ["pytorch_model.bin"]
    elif METADATA in names:
        by_kind.setdefault("torch", [METADATA])
    others = [name for name in FORMATS if name != "zcr"]
    order = [named] if named is not None else ["zcr", *others] if archive_first else [*others, "zcr"]
    kind = next((kind for kind in order if kind in by_kind), None)
    if kind == "zcr":
        return archive_in(folder)
    trees = glob.glob("_METADATA", root_dir=folder) + sorted(glob.glob("*/_METADATA", root_dir=folder))
    root = real_path(folder)
    real = {tree: real_path(os.path.join(root, tree)) for tree in trees if os.path.isfile(os.path.join(root, tree))}
    trees = [tree for tree in real if belongs_to(root, real[tree])]
    candidates = by_kind[kind] if kind is not None else trees if named in (None, "orbax") else []
    if len(candidates) == 1:
        return os.path.join(folder, candidates[0])
    if candidates and kind == "onnx":
        return folder
    fault = (
        f"is a folder with several models: {', '.join(map(printable, candidates))}"
        if candidates
        else "is a folder without a model"
    )
    advice = (
        f"name a file, or copy their index, *{INDEX}, too" if any(map(_SHARD.search, candidates)) else "name a file"
    )
    raise SourceError(f"{fault}; {advice}", path=folder, errno=errno.EISDIR)
