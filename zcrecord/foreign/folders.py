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
    """Return the name in FORMATS of a file's longest suffix, without suffixes in `outer`; None if it has none."""
    name = os.path.basename(path).lower()
    for suffix in outer:
        name = name.removesuffix(suffix)
    return longest_suffix(name)[1]


def model_in(folder: str, named: str | None = None, *, archive_first: bool = False) -> str:
    """Return the path of the one model in a folder; the folder itself, if it has several of ONNX.

    With models of several formats the first format in FORMATS is chosen, and an archive last, or first with
    `archive_first`; `named` is the only format that counts. Shards count as their index or catalogue; of .bin files
    pytorch_model.bin is chosen. In a folder without models a tree that orbax saved there, or in a folder of it (such as
    that of a step), is found by its `_METADATA`.

    Raises:
        SourceError: the folder has no model, or more than one.
    """
    by_format = _models_by_format(folder)
    others = [name for name in FORMATS if name != "zcr"]
    order = [named] if named is not None else ["zcr", *others] if archive_first else [*others, "zcr"]
    kind = next((kind for kind in order if kind in by_format), None)
    if kind == "zcr":
        return archive_in(folder)
    candidates = by_format[kind] if kind is not None else _orbax_trees(folder) if named in (None, "orbax") else []
    if len(candidates) == 1:
        return os.path.join(folder, candidates[0])
    if candidates and kind == "onnx":
        return folder
    fault, advice = "is a folder without a model", "name a file"
    if candidates:
        fault = f"is a folder with several models: {', '.join(map(printable, candidates))}"
    if any(map(_SHARD.search, candidates)):
        advice = f"name a file, or copy their index, *{INDEX}, too"
    raise SourceError(f"{fault}; {advice}", path=folder, errno=errno.EISDIR)


def _models_by_format(folder: str) -> dict[str | None, list[str]]:
    """Return the names of a folder's files that stand for models, by their formats in FORMATS; others under None."""
    with refusals(folder):
        names = sorted(name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name)))
    by_format: dict[str | None, list[str]] = {}
    for name in names:
        by_format.setdefault(format_by_suffix(name), []).append(name)
    if any(name.endswith(INDEX) for name in by_format.get("safetensors", ())):
        by_format["safetensors"] = [name for name in by_format["safetensors"] if not _SHARD.search(name)]
    if "pytorch_model.bin" in by_format.get("torch", ()):
        by_format["torch"] = ["pytorch_model.bin"]
    elif METADATA in names:
        by_format.setdefault("torch", [METADATA])
    return by_format


def _orbax_trees(folder: str) -> list[str]:
    """Return `_METADATA` of the trees that orbax saved in a folder, or in a folder of it; no link leads out of it."""
    root = real_path(folder)
    trees = glob.glob("_METADATA", root_dir=root) + sorted(glob.glob("*/_METADATA", root_dir=root))
    files = [tree for tree in trees if os.path.isfile(os.path.join(root, tree))]
    return [tree for tree in files if belongs_to(root, real_path(os.path.join(root, tree)))]
