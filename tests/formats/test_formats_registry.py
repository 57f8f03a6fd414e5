"""A format is one row of FORMATS and one module: help, extras, conversions and attacks follow from the row."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
from guides import ROOT

import zcrecord
from zcrecord import formats
from zcrecord.codec.file_types import FORMATS, Format, sniff_file_type
from zcrecord.errors import RecordError
from zcrecord.foreign.folders import format_by_suffix

ROWS = [row for row in FORMATS.values() if row.name not in ("zcr", "onnx")]  # those have packages of their own


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_has_a_module_of_its_name_with_the_functions_it_claims(row: Format) -> None:
    for room, function, has in (("foreign", "read", row.reads), ("formats", "write", row.writes)):
        name = f"zcrecord.{room}.{row.name}"
        found = importlib.util.find_spec(name) is not None and hasattr(importlib.import_module(name), function)
        assert found == has


@pytest.mark.parametrize("row", [row for row in ROWS if row.extra], ids=lambda row: row.name)
def test_the_extra_of_a_row_is_declared(row: Format) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert row.extra in project["optional-dependencies"]
    assert row.extra in project["optional-dependencies"]["all"][0]


@pytest.mark.parametrize("row", FORMATS.values(), ids=lambda row: row.name)
def test_first_bytes_and_suffixes_belong_to_one_format(row: Format) -> None:
    for start in row.starts:
        found = sniff_file_type(start + bytes(200))
        assert found is not None and found.format == row.name
    others = {suffix for other in FORMATS.values() if other is not row for suffix in other.suffixes}
    assert not others & set(row.suffixes)


def test_the_longest_suffix_gives_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "new", Format("new", "a new file", (".weights.bin",)))
    assert [format_by_suffix(name) for name in ("m.weights.bin", "m.bin", "m.zcr.txt")] == ["new", "torch", None]


@pytest.mark.parametrize("name", ["garbage", "empty", "its start and zeros", "its start and garbage"])
@pytest.mark.parametrize("row", FORMATS.values(), ids=lambda row: row.name)
def test_what_is_no_such_file_is_refused_and_the_old_archive_stays(row: Format, name: str, tmp_path: Path) -> None:
    garbage = np.random.default_rng(5).bytes(4096)
    start = row.starts[0] if row.starts else b""
    data = {"garbage": garbage, "empty": b"", "its start and zeros": start + bytes(4096)}
    suffix = [*row.suffixes, ""][0]
    path, old = tmp_path / f"m{suffix}", tmp_path / "old.zcr"
    path.write_bytes(data.get(name, start + garbage))
    zcrecord.save_record({"w": np.ones(3)}, old)
    before = old.read_bytes()
    with pytest.raises(RecordError, match=rf"m{re.escape(suffix)}: "):
        formats.convert(path, old, source_format=row.name, force=True)
    assert old.read_bytes() == before and sorted(os.listdir(tmp_path)) == sorted([path.name, "old.zcr"])
