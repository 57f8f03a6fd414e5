"""Output of zcrecord info, ls, tree and verify, on a terminal, into a pipe and as JSON; strangers' names included."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord.cli import render
from zcrecord.cli.dispatch import main, onnx2zc_main

pytestmark = pytest.mark.usefixtures("model_folder")


# info


def test_info_tells_everything_as_json(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(archive), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    record = zcrecord.load_record(archive)
    assert told["file"] == "model.zcr"
    assert told["archive_nbytes"] == archive.stat().st_size
    assert (told["version"], told["tensors"], told["modules"]) == (archive.read_bytes()[8], 7, len(record.modules))
    assert told["payload_nbytes"] == record.nbytes
    assert told["dtypes"]["float32"] == {"tensors": 3, "nbytes": 144}
    assert told["dtypes"]["int4"] == {"tensors": 1, "nbytes": 2}
    assert (told["tied_nbytes"], told["deduplicated_nbytes"]) == (48, 40)
    assert (told["alignment"], told["base_alignment"], told["sealed"], told["digest"]) == (64, 64, True, "xxh3")
    assert told["index"]["place"] == "front"
    assert told["index"]["offset"] == 64
    assert told["metadata"] == {"author": "me", "tags": ["x", "y"]}
    assert told["attributes"] == {
        "encoder.heads": 2,
        "rate": "nan",
        "note": "a text",
        "blob": {"nbytes": 5},
    }
    assert told["onnx_graph_nbytes"] is None


def test_info_into_a_pipe_is_lines_of_label_and_value(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(archive)]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines["file"] == "model.zcr"
    assert lines["archive"] == f"{archive.stat().st_size} bytes, format version {archive.read_bytes()[8]}"
    assert lines["dtype float32"] == "3 tensors, 144 bytes"
    assert lines["tied"] == "48 bytes saved"
    assert lines["metadata author"] == "'me'"
    assert lines["attribute encoder.heads"] == "2"
    assert lines["attribute blob"] == "5 bytes"


def test_info_of_a_converted_model_says_that_it_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"w": np.zeros(3)}, "none.zcr")
    assert onnx2zc_main(["model.onnx", "--quiet"]) == 0
    assert main(["info", "model.zcr"]) == 0
    out = capsys.readouterr().out
    size = len(zcrecord.load_record("model.zcr").attributes["onnx.graph"])
    assert f"\nONNX model: graph of {size} bytes beside its tensors\n" in out
    assert "at the back" in out
    assert main(["info", "none.zcr"]) == 0
    assert "ONNX" not in capsys.readouterr().out


# ls


def test_ls_into_a_pipe_is_a_line_of_tabbed_cells_for_each_tensor(
    archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(archive)]) == 0
    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    record = zcrecord.load_record(archive)
    assert [row[0] for row in rows] == list(record)
    for name, dtype, shape, nbytes, offset, alignment, _ in rows:
        info = record.info(name)
        assert dtype == info.dtype.name
        assert json.loads(shape) == list(info.shape)
        assert (int(nbytes), int(offset), int(alignment)) == (info.nbytes, info.offset, info.alignment)
    tied = {row[0]: row[6] for row in rows}
    assert tied["encoder.weight"] == "= encoder.tied"
    assert tied["encoder.tied"] == "= encoder.weight"
    assert tied["decoder.0.bias"] == ""


def test_ls_as_json_has_everything_the_index_says(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--json", str(archive)]) == 0
    told = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    record = zcrecord.load_record(archive)
    assert list(told) == list(record)
    for name, row in told.items():
        info = record.info(name)
        assert row["digest"] == f"{info.digest:016x}"
        assert (row["dtype"], row["bits"], row["module"]) == (info.dtype.name, info.bits, info.module)
        assert (row["offset"], row["nbytes"], row["payload"]) == (info.offset, info.nbytes, info.payload)
    assert told["encoder.turned"]["strides"] == [1, 3]
    assert told["encoder.weight"]["payload"] == told["encoder.tied"]["payload"]
    assert (told["encoder.weight"]["tied"], told["scalar"]["tied"]) == (1, 0)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--sort", "name", "*.bias", "packed"], ["decoder.0.bias", "decoder.1.bias", "packed"]),
        (["*.tied", "--sort", "saved", "scalar"], ["encoder.tied", "scalar"]),
        (["--sort", "size", "scalar", "packed", "encoder.weight"], ["encoder.weight", "scalar", "packed"]),
    ],
)
def test_ls_picks_by_pattern_and_sorts(
    options: list[str], names: list[str], archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(archive), *options]) == 0
    assert [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()] == names


def test_ls_of_the_start_of_names_in_a_flat_state_dict_says_how_they_are_matched(
    capsys: pytest.CaptureFixture[str],
) -> None:
    zcrecord.save_record({"0.weight": np.zeros(3), "0.bias": np.zeros(3)}, "flat.zcr")
    told = r"'0': is no module, only how names of tensors start; '0\.\*' matches those"
    c.fails(capsys, main(["ls", "flat.zcr", "0"]), told)
    assert main(["ls", "flat.zcr", "0.*"]) == 0


def test_ls_pages_a_long_list_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_PAGE", 4)
    zcrecord.save_record({f"t{i}": np.zeros(1) for i in range(10)}, "ten.zcr")
    text = c.seen(monkeypatch, "ls", "ten.zcr")
    assert text.count("dtype") == 3
    assert re.findall(r"^ *(t\d) ", text, re.MULTILINE) == [f"t{i}" for i in range(10)]


def test_an_empty_archive_lists_as_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({}, "nothing.zcr")
    assert main(["ls", "nothing.zcr"]) == 0
    assert capsys.readouterr().out == ""
    assert main(["ls", "nothing.zcr", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    for command in ("info", "tree", "verify"):
        assert main([command, "nothing.zcr"]) == 0


# tree


def test_tree_shows_children_of_every_kind_in_saved_order(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(archive)]) == 0
    assert capsys.readouterr().out.splitlines() == [
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


def test_tree_leaves_out_what_is_too_deep(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "--depth", "1", str(archive)]) == 0
    keys = [line.split("\t")[0] for line in capsys.readouterr().out.splitlines()]
    assert keys == [
        "model.zcr",
        *(f"  {k}" for k in ("encoder", "decoder", "packed", "scalar", "rate", "note", "blob")),
    ]


def test_tree_as_json_is_in_the_same_order_with_depths(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", str(archive), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(t["depth"], t["key"], t["what"]) for t in told[:4]] == [
        (0, "", "module"),
        (1, "encoder", "module"),
        (2, "weight", "tensor"),
        (2, "tied", "tensor"),
    ]
    assert (told[6]["kind"], told[6]["tensors"], told[6]["nbytes"]) == ("list", 2, 80)
    assert told[-1] == {"depth": 1, "key": "blob", "what": "attribute", "value": {"nbytes": 5}}


# verify


@pytest.mark.parametrize("level", ["touch", "index", "full"])
def test_verify_says_what_it_checked(level: str, archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(archive), "--level", level]) == 0
    size = archive.stat().st_size
    assert capsys.readouterr() == (f"model.zcr: OK, 7 tensors, {size} bytes, checked: {level}\n", "")


def test_verify_tells_the_content_digest_on_request(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(archive), "--digest"]) == 0
    digest = zcrecord.load_record(archive).content_digest()
    assert capsys.readouterr().out.splitlines()[1] == f"model.zcr: {digest}"
    assert main(["verify", str(archive), "--digest", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["level"], told["content_digest"]) == (True, "full", digest)


def test_verify_names_the_damaged_tensor(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c.damage(archive)
    c.fails(capsys, main(["verify", str(archive)]), "model.zcr: tensor 'encoder.turned': .*digest does not match")
    assert main(["verify", str(archive), "--level", "index"]) == 0


def test_verify_tells_a_fault_as_json_too(archive: Path, capsys: pytest.CaptureFixture[str]) -> None:
    c.damage(archive)
    assert main(["verify", str(archive), "--json"]) == 1
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["ok"], told["error"]["type"], told["error"]["tensor"]) == (False, "IntegrityError", "encoder.turned")
    assert err.count("\n") == 1


def test_verify_shows_a_bar_on_a_terminal_alone(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", errors := c.Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert main(["verify", str(archive)]) == 0
    assert "verifying" in errors.getvalue()
    assert capsys.readouterr().out.startswith("model.zcr: OK")


# Strangers' names

HOSTILE = ["\x1b[31mred\x1b[0m", "[bold]b[/bold]", "two\nlines", "tab\tbed", "\u202egnp.exe", "[/]", ":smile:", "\\x1b"]


@pytest.fixture
def hostile_archive() -> Path:
    record: dict[str, Any] = {name: np.zeros(2) for name in HOSTILE}
    record["module"] = {f"of {name}": {"w": np.ones(1), f"says {name}": name} for name in HOSTILE}
    zcrecord.save_record(record, "hostile.zcr", metadata={name: name for name in HOSTILE})
    return Path("hostile.zcr")


@pytest.mark.parametrize("command", ["info", "ls", "tree"])
def test_hostile_names_are_escaped_into_a_pipe(
    command: str, hostile_archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(hostile_archive)]) == 0
    out = capsys.readouterr().out
    assert all(c.isprintable() or c in "\n\t" for c in out)
    for name in (
        r"\x1b[31mred\x1b[0m",
        "[bold]b[/bold]",
        r"two\nlines",
        r"tab\tbed",
        r"\u202egnp.exe",
        "[/]",
        ":smile:",
    ):
        assert name in out
    if command == "ls":
        assert {line.count("\t") for line in out.splitlines()} == {6}


@pytest.mark.parametrize("command", ["info", "ls", "tree"])
def test_hostile_names_are_escaped_on_a_terminal(
    command: str, hostile_archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = c.seen(monkeypatch, command, str(hostile_archive), term="dumb")
    assert all(c.isprintable() or c == "\n" for c in out)
    for name in (r"\x1b[31mred\x1b[0m", "[bold]b[/bold]", r"two\nlines", "[/]", ":smile:"):
        assert name in out


@pytest.mark.parametrize("command", ["info", "ls", "tree"])
def test_hostile_names_are_whole_in_json(
    command: str, hostile_archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--json", str(hostile_archive)]) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    told = json.loads(out)
    if command == "info":
        assert told["metadata"] == {name: name for name in HOSTILE}
    else:
        assert set(HOSTILE) <= {t["name" if command == "ls" else "key"] for t in told}


def test_a_hostile_name_in_an_error_is_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    zcrecord.save_record({"\x1b]0;owned\x07\nw": np.ones(9)}, "bad.zcr")
    data = bytearray(Path("bad.zcr").read_bytes())
    data[zcrecord.load_record("bad.zcr").info("\x1b]0;owned\x07\nw").offset] ^= 1
    Path("bad.zcr").write_bytes(data)
    c.fails(capsys, main(["verify", "bad.zcr"]), r"tensor '\\x1b\]0;owned\\x07\\nw': ")
