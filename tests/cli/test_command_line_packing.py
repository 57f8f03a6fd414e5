"""zcrecord pack and unpack: what they take, write, replace and report."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest
import zstandard

import zcrecord
from zcrecord.cli.dispatch import main

pytestmark = pytest.mark.usefixtures("archive")


def test_an_archive_is_packed_and_unpacked(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("model.zcr").read_bytes()
    assert main(["pack", "model.zcr"]) == 0
    size = Path("model.zcr.zst").stat().st_size
    told = capsys.readouterr().out
    assert re.match(rf"model\.zcr\.zst: {len(before)} bytes unpacked, {size} bytes packed, [\d.]+%, \d+ frames, ", told)
    Path("model.zcr").unlink()
    assert main(["unpack", "model.zcr.zst", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["archive_bytes"] == len(before)
    assert Path("model.zcr").read_bytes() == before


def test_what_is_there_is_replaced_only_with_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "model.zcr", "-q"]) == 0
    c.fails(capsys, main(["pack", "model.zcr"]), "model.zcr.zst: exists already; .*--force")
    c.fails(capsys, main(["unpack", "model.zcr.zst"]), "model.zcr: exists already; .*--force")
    assert main(["pack", "model.zcr", "-f", "-q", "--level", "9", "--threads", "1", "--no-sync"]) == 0
    assert main(["unpack", "model.zcr.zst", "-f", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_packed_archive_is_an_archive_to_the_other_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", "model.zcr", "-q"]) == 0
    for command in c.COMMANDS:
        assert main([command, "model.zcr"]) == 0
        plain = capsys.readouterr().out.replace("model.zcr", "FILE")
        assert main([command, "model.zcr.zst"]) == 0
        assert capsys.readouterr().out.replace("model.zcr.zst", "FILE") == plain


@pytest.mark.slow
def test_both_go_through_pipes() -> None:
    script = f'"{sys.executable}" -m zcrecord pack - - -q < model.zcr | "{sys.executable}" -m zcrecord unpack - - -q'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, timeout=60)
    assert done.stderr == b""
    assert done.stdout == Path("model.zcr").read_bytes()


@pytest.mark.parametrize(("arguments", "told"), [
    (["pack"], "required: ARCHIVE"),
    (["unpack", "model.zcr"], "OUT is required if IN does not end in .zst"),
    (["pack", "model.zcr", "--level", "23"], "level 23 is not from 1 to 22"),
    (["pack", "model.zcr", "--level", "x"], "is not a whole number, 0 or more"),
])  # fmt: skip
def test_wrong_usage_is_status_2(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    c.misused(capsys, lambda: main(arguments), told)


def test_what_is_no_archive_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy("model.onnx", "x.zcr")
    c.fails(capsys, main(["pack", "x.zcr"]), "x.zcr: ")
    Path("x.zcr.zst").write_bytes(zstandard.compress(b"no archive at all" * 20))
    c.fails(capsys, main(["unpack", "x.zcr.zst", "y.zcr"]), "x.zcr.zst: ")
    assert main(["pack", "model.zcr", "-q"]) == 0
    cut = Path("model.zcr.zst").read_bytes()[:-40]
    Path("cut.zcr.zst").write_bytes(cut)
    c.fails(capsys, main(["unpack", "cut.zcr.zst"]), "cut.zcr.zst: ")
    assert not Path("y.zcr").exists() and not Path("cut.zcr").exists()
    with pytest.raises(zcrecord.RecordError):
        zcrecord.load_record("cut.zcr.zst")
