"""Limits of what small files of other formats cost: nested tuples, strings without data, files that change."""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zcrecord
from zcrecord import LimitError
from zcrecord.foreign.npy import encode_npy_header
from zcrecord.foreign.pickled import unpickle
from zcrecord.foreign.torch_types import TorchNames


def given(*_: Any) -> Any:
    """Nothing, for every name in a pickle."""


DOUBLED = b")q\0" + b"h\0h\0\x86q\0" * 40
SLOW = {"doubled": DOUBLED, "deep": b")" + b"\x85" * 100_000, "long": b"(" + b"K\1" * 17 + b"t"}


def test_items_of_a_set_of_one_hash_are_few() -> None:
    prime = (1 << 61) - 1
    names = TorchNames(10_000, lambda *_: None)
    wide = [b"\x8a\x14" + (prime * (1 << 80 | i)).to_bytes(20, "little", signed=True) for i in range(101)]
    made = b"c__builtin__\nset\n](" + b"%s" + b"e\x85R."
    assert len(unpickle(made % b"".join(wide[:100]), 0, names.named, given)[0]) == 100
    with pytest.raises(LimitError, match="a hundred keys have the same hash; the file is malicious"):
        unpickle(made % b"".join(wide), 0, names.named, given)


@pytest.mark.parametrize("key", SLOW)
def test_a_tuple_that_takes_long_to_hash_is_no_key(key: str) -> None:
    with pytest.raises(ValueError, match="a key made of tuples"):
        unpickle(b"\x80\x02}" + SLOW[key] + b"K\x01s.", 0, given, given)


def test_keys_of_one_hash_are_few() -> None:
    prime = (1 << 61) - 1
    wide = [b"\x8a\x14" + (prime * (1 << 80 | i)).to_bytes(20, "little", signed=True) + b"N" for i in range(101)]
    found, _ = unpickle(b"}(" + b"".join(wide[:100]) + b"u.", 0, given, given)
    assert len(found) == 100 and len(set(map(hash, found))) == 1
    with pytest.raises(LimitError, match="a hundred keys have the same hash; the file is malicious"):
        unpickle(b"}(" + b"".join(wide) + b"u.", 0, given, given)


def test_strings_of_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for i in range(2):
            file.writestr(f"{i}.npy", encode_npy_header("|S0", (5_000_000,)))
    (tmp_path / "m.npz").write_bytes(out.getvalue())
    with pytest.raises(LimitError, match="strings take much more memory than the file"):
        zcrecord.load_record(tmp_path / "m.npz")


def lines_of(function: Callable[[], object]) -> int:
    """Return how many lines of Python run, the one of a loop each time around."""
    lines = 0

    def count(_frame: object, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


def test_each_decoded_tensor_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    lines = []
    for count in (100, 800):
        arrays: dict[str, Any] = {f"w{i}": np.arange(9) for i in range(count)}
        np.savez_compressed(tmp_path / "m.npz", **arrays)
        record = zcrecord.load_record(tmp_path / "m.npz")
        lines.append(lines_of(lambda record=record: [record[name].sum() for name in record.names]))  # type: ignore[misc]
    assert lines[1] < 10 * lines[0]


def test_a_checkpoint_that_is_read_into_memory_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(5000)}, path)
    record = zcrecord.load_record(path, mmap=False)
    octets = bytearray(path.read_bytes())
    with open(path, "r+b") as file:  # changed in place
        file.write(octets.replace(np.float32(1).tobytes(), np.float32(7).tobytes()))
    assert record["w"].sum() == 5000
