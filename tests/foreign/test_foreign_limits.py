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
from zcrecord import LimitError, SourceError
from zcrecord.foreign.npy import encode_npy_header
from zcrecord.foreign.pickled import claimed
from zcrecord.formats import convert


@pytest.mark.parametrize("pickle", [b")q\0" + b"h\0\x86q\0" * 40, b")" + b"\x85" * 200], ids=["doubled", "deep"])
def test_tuples_that_take_too_long_to_hash_are_refused(pickle: bytes) -> None:
    with pytest.raises(LimitError, match="tuples nested over 100 deep, or of millions of items"):
        claimed(b"\x80\x02}" + pickle + b"K\x01s.")


def test_strings_of_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for i in range(2):
            file.writestr(f"{i}.npy", encode_npy_header("|S0", (5_000_000,)))
    (tmp_path / "m.npz").write_bytes(out.getvalue())
    with pytest.raises(LimitError, match="strings take much more memory than the file"):
        zcrecord.load_record(tmp_path / "m.npz")


def test_a_checkpoint_that_is_replaced_before_torch_opens_it_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / "m.pt", tmp_path / "other.pt"
    torch.save({"w": torch.ones(100)}, path)
    with zipfile.ZipFile(path) as found, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in found.namelist():
            packed.writestr(name, found.read(name))
    load = torch.load

    def load_other(*args: Any, **options: Any) -> Any:
        other.replace(path)
        return load(*args, **options)

    monkeypatch.setattr(torch, "load", load_other)
    with pytest.raises(SourceError, match="was replaced while it was opened"):
        convert(path, tmp_path / "m.zcr")
    assert not (tmp_path / "m.zcr").exists()


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
