"""Records in several safetensors files, and the index beside them that says which tensor is in which.

An index names plain files in its own folder, never a path: a stranger's index reads nothing else. What is in the
files is left to `safetensors`.

Source: https://huggingface.co/docs/transformers/big_models for `weight_map` and the names of the files.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zcrecord.codec.entries import is_attribute
from zcrecord.errors import FormatError, RecordError, printable
from zcrecord.storage.folders import is_plain_name

INDEX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_TOTAL = "total_size"


class ShardIndex(NamedTuple):
    """Index of shards: the file of each tensor, how many each file holds, in the order of their names, and metadata."""

    weight_map: dict[str, str]
    files: dict[str, int]
    metadata: dict[str, Any]


def decode_index(data: bytes | memoryview) -> ShardIndex:
    """Decode an index of shards.

    Raises:
        FormatError: it is no index, names a tensor twice, or a file that is not a plain name.
    """
    try:
        index = json.loads(text := str(data, "utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not an index of shards, no JSON that can be read ({printable(str(error))})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError("not an index of safetensors shards: it has no 'weight_map'")
    try:
        files = Counter(weight_map.values())
    except TypeError:  # one of them is a list, or an object
        files = Counter()
    if not files or not all(isinstance(file, str) and is_plain_name(file, _SUFFIX) for file in files):
        for name, file in weight_map.items():
            if not isinstance(file, str) or not is_plain_name(file, _SUFFIX):
                what = f"its shard {printable(repr(file))} is not the plain name of a {_SUFFIX} file"
                raise FormatError(f"{what}; shards lie beside their index", tensor=_encodable(name))
    strings = 2 * len(weight_map) + _strings({**index, "weight_map": {}})
    if "\\" in text or text.count('"') != 2 * strings:
        try:
            json.loads(text, object_pairs_hook=_once)  # which takes half as long again
        except RecursionError as error:  # the function called takes a level more
            raise FormatError(f"not an index of shards, no JSON that can be read ({error})") from None
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError("the index's metadata is not an object")
    named = {_name(key): _typed(key, value) for key, value in metadata.items() if key != _TOTAL}
    return ShardIndex(weight_map, dict(sorted(files.items())), named)


def _strings(index: dict[str, Any]) -> int:
    """Return how many strings an index has, but for those in lists, or nested deeper, and those of keys given twice."""
    parts = [index, *(part for part in index.values() if isinstance(part, dict))]
    return sum(len(part) + list(map(type, part.values())).count(str) for part in parts)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise FormatError(f"the index has '{printable(twice)}' twice")
    return out


def _encodable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _name(key: str) -> str:
    if not key or "\0" in key or key != _encodable(key):
        raise FormatError(f"the index's metadata has the name '{printable(key)}'; no archive can hold that")
    return key


def _typed(key: str, value: Any) -> Any:
    """Return a value as metadata can hold it: as text where JSON nests it."""
    try:
        if is_attribute(value, key):
            return value
    except RecordError:
        pass
    return json.dumps(value, separators=(",", ":"))


def check_shard(index: ShardIndex, file: str, names: Sequence[str]) -> None:
    """Raise FormatError unless a shard holds exactly the tensors that the index has in it."""
    if len(names) == index.files[file] == list(map(index.weight_map.get, names)).count(file):
        return
    due, present = {name for name, where in index.weight_map.items() if where == file}, set(names)
    if missing := due - present:
        raise FormatError("the index has it in this file, which does not hold it", tensor=_encodable(min(missing)))
    if extra := present - due:
        raise FormatError("the index does not have it in this file, which holds it", tensor=min(extra))


def merge(into: dict[str, Any], metadata: Mapping[str, Any], label: str) -> None:
    """Add a file's metadata; a value that differs from another file's goes under a name with the file's label."""
    for name, value in metadata.items():
        known = into.setdefault(name, value)
        if known != value or type(known) is not type(value):
            into[f"{label}: {name}"] = value


def fill(sizes: Sequence[int], most: int | None) -> list[list[int]]:
    """Distribute tensors over shards: in their order, each shard as full as it may be, none empty."""
    shards: list[list[int]] = [[]]
    filled = 0
    for i, size in enumerate(sizes):
        if shards[-1] and most is not None and filled + size > most:
            shards.append([])
            filled = 0
        shards[-1].append(i)
        filled += size
    return shards


def shard_paths(dest: str, count: int) -> tuple[str, list[str]]:
    """Return the paths of the index and of `count` shards, for a name of either kind."""
    stem = dest.removesuffix(INDEX).removesuffix(_SUFFIX)
    return stem + INDEX, [f"{stem}-{i:05}-of-{count:05}{_SUFFIX}" for i in range(1, count + 1)]


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], nbytes: int) -> bytes:
    """Return an index as transformers writes it, but in saved order."""
    index = {"metadata": {_TOTAL: nbytes, **metadata}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
