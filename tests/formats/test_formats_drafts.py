"""Archives of version 0, the draft, are converted to version 1 and refused by everything else (R2).

Those in tests/data/draft were written by zcrecord 0.1.0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from forge import Forge

import zcrecord
from zcrecord.formats import convert

DRAFTS = Path(__file__).resolve().parents[1] / "data" / "draft"
SINGLE = ["nested", "numbered", "shared_texts", "signed", "tuned"]


def converted(name: str, folder: Path, **options: Any) -> zcrecord.Record:
    convert(DRAFTS / f"{name}.zcr", folder / "new.zcr", **options)
    return zcrecord.load_record(folder / "new.zcr", verify="full")


@pytest.mark.parametrize("name", SINGLE)
def test_a_draft_is_converted_to_version_1(name: str, tmp_path: Path) -> None:
    old = (DRAFTS / f"{name}.zcr").read_bytes()
    record = converted(name, tmp_path)
    assert (old[8], (tmp_path / "new.zcr").read_bytes()[8]) == (0, 1)
    assert record.layout.version == 1
    for tensor, array in record.items():
        assert bytes(np.ascontiguousarray(array)) in old, tensor


@pytest.mark.parametrize("name", ["nested", "checkpoint"])
def test_a_draft_is_loaded_by_nothing_else_and_the_error_says_how_to_convert_it(name: str) -> None:
    with pytest.raises(zcrecord.VersionError, match=r"version 0, a draft; `zcrecord convert OLD NEW` makes version 1"):
        zcrecord.load_record(DRAFTS / f"{name}.zcr")


def test_a_draft_that_shares_more_text_than_version_1_allows_is_converted(tmp_path: Path) -> None:
    """R30."""
    assert converted("shared_texts", tmp_path).tree()["labels"] == ["x" * 255] * 200


def many_lists(over: int) -> bytes:
    """Return a draft of 50 attributes that share a list: as many items as a draft may have, and so many more."""
    f = Forge(r.saved({f"k{i:02}": [1] for i in range(50)}))
    f.columns["words"] = np.arange(1000, dtype="<u8")
    each, rest = divmod(1000 + 32 * 50 + over, 50)
    f.columns["attributes"]["value"] = (each + (np.arange(50) < rest)).astype("<u8") << np.uint64(32)
    f.ends["version"] = 0
    return f.seal()


def names(over: int) -> bytes:
    """Return the same of type names that share a text: its bytes, 256 for each module, and so many more."""
    f = Forge(r.saved({f"k{i:02}": {} for i in range(50)}))
    start, size = f.text(b"x" * 1000)
    each, rest = divmod(len(f.columns["text"]) + 256 * 51 + over, 51)
    sizes = each + (np.arange(51) < rest)
    f.columns["modules"]["type_name"], f.columns["modules"]["type_name_size"] = start + size - sizes, sizes
    f.ends["version"] = 0
    return f.seal()


@pytest.mark.parametrize("make", [many_lists, names])
def test_a_draft_costs_no_more_than_its_own_budget_allows(make: Callable[[int], bytes], tmp_path: Path) -> None:
    """A MiB of one that is bounded by a multiple of its size alone took 1,409 MiB and 23 seconds."""
    (tmp_path / "old.zcr").write_bytes(make(0))
    convert(tmp_path / "old.zcr", tmp_path / "new.zcr")
    assert zcrecord.load_record(tmp_path / "new.zcr", verify="full").modules
    (tmp_path / "old.zcr").write_bytes(make(1))
    with pytest.raises(zcrecord.LimitError, match=r"^.*index: the (lists of attributes|type names) take \d+"):
        convert(tmp_path / "old.zcr", tmp_path / "again.zcr")


def test_a_draft_s_tree_comes_back_with_its_integer_keys(tmp_path: Path) -> None:
    tree = converted("numbered", tmp_path).tree()
    assert any(isinstance(key, int) for value in tree.values() if isinstance(value, dict) for key in value)


def test_a_draft_s_signature_is_left_out_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zcrecord"):
        record = converted("signed", tmp_path)
    assert record.metadata == {"author": "someone"}
    assert "the signatures of a draft of the format (version 0) are left out; sign the new archive" in caplog.text


def test_a_draft_s_tuned_part_is_left_out(tmp_path: Path) -> None:
    record = converted("tuned", tmp_path)
    assert "onnx.graph" in record.attributes and not any("onnx.tuned" in name for name in record.modules)


def test_a_draft_s_catalogue_is_converted_with_its_shards(tmp_path: Path) -> None:
    whole = converted("checkpoint", tmp_path)
    assert len(whole) and not whole.archive.source.file_names
    (tmp_path / "sharded").mkdir()
    sharded = converted("checkpoint", tmp_path / "sharded", max_shard_size=64)
    assert sharded.content_digest() == whole.content_digest() and len(sharded.archive.source.file_names) > 1


def test_an_archive_of_a_later_version_is_no_draft(tmp_path: Path) -> None:
    later = bytearray((DRAFTS / "nested.zcr").read_bytes())
    later[8] = later[-56] = 2
    (tmp_path / "later.zcr").write_bytes(later)
    with pytest.raises(zcrecord.VersionError, match="format version 2, this reader knows 1; upgrade zcrecord"):
        convert(tmp_path / "later.zcr", tmp_path / "new.zcr")
