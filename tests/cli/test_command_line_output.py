"""Output of zcrecord info, ls, tree and verify, on a terminal, into a pipe and as JSON.

Strangers' names are in `tests/attacks/test_attacks_names.py`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli import render

pytestmark = pytest.mark.usefixtures("model_folder")


# info


def test_info_tells_everything_as_json(archive: Path, run: c.Commands) -> None:
    told, record = run.json("info model.zcr"), zcrecord.load_record(archive)
    expected = {
        "file": "model.zcr", "archive_nbytes": archive.stat().st_size, "version": archive.read_bytes()[8],
        "tensors": 7, "modules": len(record.modules), "payload_nbytes": record.nbytes, "tied_nbytes": 48,
        "deduplicated_nbytes": 40, "alignment": 64, "base_alignment": 64, "sealed": True, "digest": "xxh3",
        "metadata": {"author": "me", "tags": ["x", "y"]}, "onnx_graph_nbytes": None,
        "attributes": {"encoder.heads": 2, "rate": "nan", "note": "a text", "blob": {"nbytes": 5}},
    }  # fmt: skip
    assert {key: told[key] for key in expected} == expected
    assert told["dtypes"]["float32"] == {"tensors": 3, "nbytes": 144}
    assert told["dtypes"]["int4"] == {"tensors": 1, "nbytes": 2}
    assert (told["index"]["place"], told["index"]["offset"]) == ("front", 64)


def test_info_into_a_pipe_is_lines_of_label_and_value(archive: Path, run: c.Commands) -> None:
    lines = dict(line.split(": ", 1) for line in run("info model.zcr").splitlines())
    expected = {
        "file": "model.zcr", "dtype float32": "3 tensors, 144 bytes", "tied": "48 bytes saved",
        "archive": f"{archive.stat().st_size} bytes, format version {archive.read_bytes()[8]}",
        "metadata author": "'me'", "attribute encoder.heads": "2", "attribute blob": "5 bytes",
    }  # fmt: skip
    assert {label: lines[label] for label in expected} == expected


def test_info_of_a_converted_model_says_that_it_is_one(run: c.Commands) -> None:
    zcrecord.save_record({"w": np.zeros(3)}, "none.zcr")
    run.quietly("onnx2zc model.onnx")
    out = run("info model.zcr")
    size = len(zcrecord.load_record("model.zcr").attributes["onnx.graph"])
    assert f"\nONNX model: graph of {size} bytes beside its tensors\n" in out
    assert "at the back" in out
    assert "ONNX" not in run("info none.zcr")


# ls


def test_ls_into_a_pipe_is_a_line_of_tabbed_cells_for_each_tensor(archive: Path, run: c.Commands) -> None:
    rows = [line.split("\t") for line in run("ls model.zcr").splitlines()]
    record = zcrecord.load_record(archive)
    assert [row[0] for row in rows] == list(record)
    for name, dtype, shape, *numbers, _ in rows:
        info = record.info(name)
        assert (dtype, json.loads(shape)) == (info.dtype.name, list(info.shape))
        assert [*map(int, numbers)] == [info.nbytes, info.offset, info.alignment]
    tied = {row[0]: row[6] for row in rows}
    assert (tied["encoder.weight"], tied["encoder.tied"]) == ("= encoder.tied", "= encoder.weight")
    assert tied["decoder.0.bias"] == ""


def test_ls_as_json_has_everything_the_index_says(archive: Path, run: c.Commands) -> None:
    told = {row["name"]: row for row in run.json("ls model.zcr")}
    record = zcrecord.load_record(archive)
    assert list(told) == list(record)
    for name, row in told.items():
        info = record.info(name)
        assert (row["digest"], row["dtype"]) == (f"{info.digest:016x}", info.dtype.name)
        for field in ("bits", "module", "offset", "nbytes", "payload", "decoding"):
            assert row[field] == getattr(info, field)
    assert told["encoder.turned"]["strides"] == [1, 3]
    assert (told["encoder.weight"]["tied"], told["scalar"]["tied"]) == (1, 0)


@pytest.mark.parametrize(("options", "names"), [
    ("--sort name *.bias packed", ["decoder.0.bias", "decoder.1.bias", "packed"]),
    ("*.tied --sort saved scalar", ["encoder.tied", "scalar"]),
    ("--sort size scalar packed encoder.weight", ["encoder.weight", "scalar", "packed"]),
])  # fmt: skip
def test_ls_picks_by_pattern_and_sorts(options: str, names: list[str], archive: Path, run: c.Commands) -> None:
    assert [line.split("\t")[0] for line in run(f"ls model.zcr {options}").splitlines()] == names


def test_ls_of_the_start_of_names_in_a_flat_state_dict_says_how_they_are_matched(run: c.Commands) -> None:
    zcrecord.save_record({"0.weight": np.zeros(3), "0.bias": np.zeros(3)}, "flat.zcr")
    run.fails("ls flat.zcr 0", r"'0': is no module, only how names of tensors start; '0\.\*' matches those")
    run("ls flat.zcr 0.*")


def test_ls_pages_a_long_list_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_PAGE", 4)
    zcrecord.save_record({f"t{i}": np.zeros(1) for i in range(10)}, "ten.zcr")
    text = c.seen(monkeypatch, "ls", "ten.zcr")
    assert text.count("dtype") == 3
    assert re.findall(r"^ *(t\d) ", text, re.MULTILINE) == [f"t{i}" for i in range(10)]


def test_an_empty_archive_lists_as_nothing(run: c.Commands) -> None:
    zcrecord.save_record({}, "nothing.zcr")
    assert run("ls nothing.zcr") == ""
    assert run.json("ls nothing.zcr") == []
    for command in ("info", "tree", "verify"):
        run(f"{command} nothing.zcr")


# tree


def test_tree_shows_children_of_every_kind_in_saved_order(archive: Path, run: c.Commands) -> None:
    assert run("tree model.zcr").splitlines() == [
        f"model.zcr\tmapping\t{48 * 3 + 40 * 2 + 2 + 8}\t7 tensors",
        "  encoder\tmapping\t144\t3 tensors",
        "    weight\tfloat32\t48\t[3, 4]",
        "    tied\tfloat32\t48\t[3, 4]",
        "    turned\tfloat32\t48\t[3, 4]",
        "    heads\tattribute\t\t2",
        "  decoder\tlist\t80\t2 tensors",
        "    0\tmapping\t40\t1 tensor",
        "      bias\tint64\t40\t[5]",
        "    1\tmapping\t40\t1 tensor",
        "      bias\tint64\t40\t[5]",
        "  packed\tint4\t2\t[3]",
        "  scalar\tfloat64\t8\t[]",
        "  rate\tattribute\t\tnan",
        "  note\tattribute\t\t'a text'",
        "  blob\tattribute\t\t5 bytes",
    ]
    keys = [line.split("\t")[0] for line in run("tree --depth 1 model.zcr").splitlines()]
    assert keys == ["model.zcr", "  encoder", "  decoder", "  packed", "  scalar", "  rate", "  note", "  blob"]


def test_tree_as_json_is_in_the_same_order_with_depths(archive: Path, run: c.Commands) -> None:
    told = run.json("tree model.zcr")
    first = [(0, "", "module"), (1, "encoder", "module"), (2, "weight", "tensor"), (2, "tied", "tensor")]
    assert [(t["depth"], t["key"], t["what"]) for t in told[:4]] == first
    assert (told[6]["kind"], told[6]["tensors"], told[6]["nbytes"]) == ("list", 2, 80)
    assert told[-1] == {"depth": 1, "key": "blob", "what": "attribute", "value": {"nbytes": 5}}


# verify


@pytest.mark.parametrize("level", ["touch", "index", "full"])
def test_verify_says_what_it_checked(level: str, archive: Path, run: c.Commands) -> None:
    size = archive.stat().st_size
    told = f"model.zcr: OK, 7 tensors, {size} bytes, checked: {level}\n"
    assert (run(f"verify model.zcr --level {level}"), run.err) == (told, "")


def test_verify_says_where_there_are_no_checksums(archive: Path, run: c.Commands) -> None:
    zcrecord.save_record({"w": np.ones(3)}, "w.zcr")
    run.quietly("convert w.zcr m.safetensors")
    assert run("verify m.safetensors").endswith("checked: full, but there are no checksums of payloads\n")
    assert run.json("verify m.safetensors")["checksums"] is False
    assert run.json(f"verify {archive}")["checksums"] is True


def test_verify_tells_the_content_digest_on_request(archive: Path, run: c.Commands) -> None:
    digest = zcrecord.load_record(archive).content_digest()
    assert run("verify model.zcr --digest").splitlines()[1] == f"model.zcr: {digest}"
    told = run.json("verify model.zcr --digest")
    assert (told["ok"], told["level"], told["content_digest"]) == (True, "full", digest)


def test_verify_shows_a_bar_on_a_terminal_alone(
    archive: Path, run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", errors := c.Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert run("verify model.zcr").startswith("model.zcr: OK")
    assert "verifying" in errors.getvalue()
