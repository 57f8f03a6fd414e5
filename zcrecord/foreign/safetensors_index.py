"""Records in several safetensors files, and the index beside them that says which tensor is in which.

An index names plain files in its own folder, never a path: a stranger's index reads nothing else. What is in the
files is left to `safetensors`.

Source: https://huggingface.co/docs/transformers/big_models for `weight_map` and the names of the files.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.entries import is_attribute
from zcrecord.codec.layout import align_up
from zcrecord.dtypes import Array
from zcrecord.errors import FormatError, RecordError, printable
from zcrecord.storage.folders import is_plain_name

INDEX = ".safetensors.index.json"
_SUFFIX = ".safetensors"
_TOTAL = "total_size"
_SPACE = b" \t\n\r"
_SLACK = b" " * 512  # behind an index: names up to this size are compared by columns
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio
_CHUNK, _LONG = 2048, 64  # names that are compared together; bytes between the strings of an unusual index
_MAP = b'"weight_map"'
_MAP_START = re.compile(_MAP + rb"[ \t\n\r]*:[ \t\n\r]*\{")


class ShardIndex(NamedTuple):
    """Index of shards: `text` has the tensors' names, each between two quotes, from `starts` to `ends`.

    `file_ids` has the file of each tensor, by its number in `files`, which are sorted.
    """

    files: list[str]
    metadata: dict[str, Any]
    text: bytes
    starts: Array
    ends: Array
    file_ids: Array
    order: Array  # of tensors by their files

    def names_in(self, file: str) -> list[str]:
        """Return the names of the tensors in a file."""
        number = bisect_left(self.files, file)
        numbers = self.order[slice(*np.searchsorted(self.file_ids, (number, number + 1), sorter=self.order))]
        spans = zip(self.starts[numbers].tolist(), self.ends[numbers].tolist(), strict=True)
        return [self.text[start:end].decode(errors="surrogatepass") for start, end in spans]

    def find(self, name: str) -> str | None:
        """Return the file of a tensor; None if the text has no such name, or has it first in another place."""
        quoted = f'"{name}"'.encode(errors="surrogatepass")
        start = self.text.find(quoted) + 1
        i = int(np.searchsorted(self.starts, start))
        if not start or i == len(self.starts) or self.ends[i] != start + len(quoted) - 2 or self.starts[i] != start:
            return None
        return self.files[int(self.file_ids[i])]


def decode_index(octets: bytes | memoryview) -> ShardIndex:
    """Decode an index of shards; FormatError if it is none, or has a tensor twice or a file that is no plain name."""
    data = b"".join((octets, _SLACK))
    if usual := _decode_usual(data):
        return usual
    try:
        index = json.loads(data.decode(), object_pairs_hook=_unique_keys)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not an index of shards, no JSON that can be read ({printable(str(error))})") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError("not an index of safetensors shards: it has no 'weight_map'")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not is_plain_name(file, _SUFFIX):
            fault = f"its shard {printable(repr(file))} is not the plain name of a {_SUFFIX} file"
            raise FormatError(f"{fault}; shards lie beside their index", tensor=_escape_surrogates(name))
    names = [f'"{name}"'.encode(errors="surrogatepass") for name in weight_map]
    ends = np.array(list(accumulate(map(len, names))), np.int64)
    starts = np.append(0, ends)[:-1]
    return _make_index(index, b"".join(names), starts + 1, ends - 1, list(weight_map.values()), 1)


def _make_index(
    index: dict[str, Any], text: bytes, starts: Array, ends: Array, files: Sequence[str], counts: Any
) -> ShardIndex:
    """Return an index of tensors in runs, which lie in `files` and have these lengths; FormatError for its metadata."""
    metadata = index.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError("the index's metadata is not an object")
    named = {_legal_name(key): _as_metadata(key, value) for key, value in metadata.items() if key != _TOTAL}
    numbers = {file: i for i, file in enumerate(sorted(set(files)))}
    file_ids = np.repeat(np.array([numbers[file] for file in files], np.intp), counts)
    return ShardIndex(list(numbers), named, text, starts, ends, file_ids, np.argsort(file_ids, kind="stable"))


def _decode_usual(data: bytes) -> ShardIndex | None:
    """Decode an index in the form that writers use, by columns; return None for any other, legal or not."""
    match = _MAP_START.search(data)
    if match is None or b"\\" in data:
        return None
    start = match.end()
    end = data.find(b"}", start)
    quotes = start + np.flatnonzero(np.frombuffer(data, np.uint8)[start:end] == ord('"'))
    if not len(quotes) or len(quotes) % 4 or _MAP in data[: match.start()] or _MAP in data[end:]:
        return None
    before, ends, middle, after = quotes.reshape(-1, 4).T  # around a name, and around its file
    starts, files = before + 1, middle + 1
    widest = int(max((ends - starts).max(), (after - files).max()))
    if not 0 < widest <= len(_SLACK) or not _is_regular(data, start, end, quotes):
        return None
    mix = np.cumprod(np.full(len(_SLACK) // 8, _MIX))
    hashes = np.sort(_by_rows(data, starts, ends, widest, lambda words: (words @ mix[: words.shape[1]])[:_CHUNK]))
    if (hashes[1:] == hashes[:-1]).any():  # perhaps a name twice
        return None
    differs = _by_rows(data, files, after, widest, lambda words: (words[1:] != words[:-1]).any(axis=1))
    is_new = np.append(True, differs)  # True for tensors whose file is not that of the tensor before
    try:
        data.decode()
        index = json.loads((data[:start] + data[end:]).decode(), object_pairs_hook=_unique_keys)
        runs = [data[a:b].decode() for a, b in zip(files[is_new].tolist(), after[is_new].tolist(), strict=True)]
    except (ValueError, RecursionError):
        return None
    legal = isinstance(index, dict) and all(is_plain_name(file, _SUFFIX) for file in set(runs))
    if not legal or index.get("weight_map") != {}:
        return None
    return _make_index(index, data, starts, ends, runs, np.diff(np.append(np.flatnonzero(is_new), len(is_new))))


def _is_regular(data: bytes, start: int, end: int, quotes: Array) -> bool:
    """Return True if strings between these quotes alternate with colons and commas, each in the same white space."""
    before, ends, middle, after = quotes.reshape(-1, 4).T
    colon, comma = data[ends[0] + 1 : middle[0]], data[after[0] + 1 : before[1]] if len(before) > 1 else b","
    outside = [data[start : before[0]], colon, comma, data[after[-1] + 1 : end]]
    if len(colon + comma) > _LONG or [part.translate(None, _SPACE) for part in outside] != [b"", b":", b",", b""]:
        return False
    octets = np.frombuffer(data, np.uint8)
    for part, left, right in ((colon, ends, middle), (comma, after[:-1], before[1:])):
        if (right - left - 1 != len(part)).any() or any((octets[left + i] != c).any() for i, c in enumerate(part, 1)):
            return False
    # JSON has no control characters in strings: all are in the white space between.
    expected = len(before) * _count_controls(colon) + (len(before) - 1) * _count_controls(comma)
    return _count_controls(octets[before[0] : after[-1]]) == expected


def _by_rows(data: bytes, starts: Array, ends: Array, widest: int, work: Callable[[Array], Array]) -> Array:
    """Return the results of `work` for ranges of bytes, which it takes as rows of words with zeros behind.

    It is called with _CHUNK rows at a time, and the one after them; its results are concatenated.
    """
    row = np.dtype(f"V{align_up(widest, 8)}")
    masks = (np.tri(widest + 1, row.itemsize, -1, np.uint8) * np.uint8(255)).view(row).reshape(-1)
    rows, sizes, out = np.ndarray(len(data) - len(_SLACK), row, data, 0, (1,)), ends - starts, []
    for first in range(0, len(starts), _CHUNK):
        chunk = slice(first, first + _CHUNK + 1)
        words = rows[starts[chunk]].view(np.uint64)
        words &= masks[sizes[chunk]].view(np.uint64)
        out.append(work(words.reshape(-1, row.itemsize // 8)))
    return np.concatenate(out)


def _count_controls(data: Any) -> int:
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) < ord(" ")))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON as a dict; FormatError if a key is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError(f"the index has '{printable(twice)}' twice")
    return out


def _escape_surrogates(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


def _legal_name(key: str) -> str:
    if not key or "\0" in key or key != _escape_surrogates(key):
        raise FormatError(f"the index's metadata has the name '{printable(key)}'; no archive can hold that")
    return key


def _as_metadata(key: str, value: Any) -> Any:
    """Return a value as metadata can hold it: as text where JSON nests it."""
    try:
        if is_attribute(value, key):
            return value
    except RecordError:
        pass
    return json.dumps(value, separators=(",", ":"))


def check_shard(index: ShardIndex, file: str, names: Sequence[str]) -> None:
    """Raise FormatError unless a shard holds exactly the tensors that the index has in it."""
    expected, present = set(index.names_in(file)), set(names)
    if missing := expected - present:
        raise FormatError(
            "the index has it in this file, which does not hold it", tensor=_escape_surrogates(min(missing))
        )
    if extra := present - expected:
        raise FormatError("the index does not have it in this file, which holds it", tensor=min(extra))


def merge_metadata(into: dict[str, Any], metadata: Mapping[str, Any], label: str) -> None:
    """Add a file's metadata; a value that differs from another file's goes under a name with the file's label."""
    for name, value in metadata.items():
        present = into.setdefault(name, value)
        if present != value or type(present) is not type(value):
            into[f"{label}: {name}"] = value


def group_by_size(sizes: Sequence[int], max_nbytes: int | None) -> list[list[int]]:
    """Return the numbers of tensors in each shard, in order: as many as fit into `max_nbytes`, but at least one."""
    shards: list[list[int]] = [[]]
    nbytes = 0  # of the last one
    for i, size in enumerate(sizes):
        if shards[-1] and max_nbytes is not None and nbytes + size > max_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(i)
        nbytes += size
    return shards


def shard_paths(dest: str, count: int) -> tuple[str, list[str]]:
    """Return the paths of the index and of `count` shards; `dest` is named as the index, or as a single file."""
    stem = dest.removesuffix(INDEX).removesuffix(_SUFFIX)
    return stem + INDEX, [f"{stem}-{i:05}-of-{count:05}{_SUFFIX}" for i in range(1, count + 1)]


def encode_index(weight_map: Mapping[str, str], metadata: Mapping[str, Any], nbytes: int) -> bytes:
    """Return an index as transformers writes it, but in saved order."""
    index = {"metadata": {_TOTAL: nbytes, **metadata}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
