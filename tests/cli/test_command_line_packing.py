"""zcrecord pack and unpack: what they take, write, replace and report."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest

pytestmark = pytest.mark.usefixtures("archive")


def test_an_archive_is_packed_and_unpacked(run: c.Commands) -> None:
    before = Path("model.zcr").read_bytes()
    out = run("pack model.zcr")
    size = Path("model.zcr.zst").stat().st_size
    assert re.match(rf"model\.zcr\.zst: {len(before)} bytes unpacked, {size} bytes packed, [\d.]+%, \d+ frames, ", out)
    Path("model.zcr").unlink()
    assert run.json("unpack model.zcr.zst")["archive_bytes"] == len(before)
    assert Path("model.zcr").read_bytes() == before


def test_what_is_there_is_replaced_only_with_force(run: c.Commands) -> None:
    run.quietly("pack model.zcr")
    run.fails("pack model.zcr", "model.zcr.zst: exists already; --force")
    run.fails("unpack model.zcr.zst", "model.zcr: exists already; --force")
    run.quietly("pack model.zcr -f --level 9 --threads 1 --no-sync")
    run.quietly("unpack model.zcr.zst -f --threads 0")


def test_a_packed_archive_is_an_archive_to_the_other_commands(run: c.Commands) -> None:
    run.quietly("pack model.zcr")
    for command in c.COMMANDS:
        plain = run(f"{command} model.zcr").replace("model.zcr", "FILE")
        assert run(f"{command} model.zcr.zst").replace("model.zcr.zst", "FILE") == plain


@pytest.mark.slow
def test_both_go_through_pipes() -> None:
    script = f'"{sys.executable}" -m zcrecord pack - - -q < model.zcr | "{sys.executable}" -m zcrecord unpack - - -q'
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (Path("model.zcr").read_bytes(), b"")


def test_what_is_no_archive_is_one_line(run: c.Commands) -> None:
    shutil.copy("model.onnx", "x.zcr")
    run.fails("pack x.zcr", "x.zcr: ")
    run.quietly("pack model.zcr")
    Path("cut.zcr.zst").write_bytes(Path("model.zcr.zst").read_bytes()[:-40])
    run.fails("unpack cut.zcr.zst", "cut.zcr.zst: ")
    assert not Path("cut.zcr").exists()
