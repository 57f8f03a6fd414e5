"""Ctrl-C: one line and status 130 from every command, and every file as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest

import zcrecord
from zcrecord.cli.registry import COMMANDS

pytestmark = pytest.mark.skipif(os.name != "posix", reason="platform: signals of POSIX")

# Sends itself Ctrl-C as soon as a module is looked for: at the same place each time, without a clock.
SITE = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"]:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGINT)

if "STOP_AT" in os.environ:
    sys.meta_path.insert(0, Stop())
"""


@pytest.fixture(autouse=True)
def _site(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(SITE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", "site", prepend=os.pathsep)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")


def files() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path().rglob("*") if path.is_file()}


# What each command imports once it is at work.
AT_WORK = {
    "info FILE": "zcrecord.cli.inspect",
    "ls FILE": "zcrecord.cli.inspect",
    "tree FILE": "zcrecord.cli.inspect",
    "verify FILE": "zcrecord.cli.verify",
    "check FILE --key KEY": "cryptography",
    "sign FILE --key KEY": "cryptography",
    "edit FILE --metadata a=b": "zcrecord.record.edit",
    "diff FILE FILE": "zcrecord.cli.diff",
    "convert FILE out.npz": "zcrecord.formats",
    "consolidate FILE out.zcr": "zcrecord.distributed",
    "index FILE out.zcr": "zcrecord.record.indexing",
    "to-onnx FILE out.onnx": "zcrecord.onnx",
    "tune FILE": "onnxruntime",
    "pack FILE": "zstandard",
    "unpack packed.zcr.zst": "zstandard",
    "report FILE": "zcrecord.report",
    "embed FILE --lang python": "zcrecord.embed",
    "attach program FILE": "zcrecord.embed",
    "detach program": "zcrecord.embed",
    "serve FILE --port 0": "aiohttp",
    "completion bash": "shtab",
    "onnx2zc model.onnx --force": "zcrecord.onnx",
}


def test_every_command_is_stopped_here() -> None:
    named = {command.split()[0] for command in AT_WORK}
    assert named == {*COMMANDS, "onnx2zc"}, "say in AT_WORK what it imports at work"


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("command", AT_WORK)
def test_ctrl_c_ends_every_command_alike_and_leaves_every_file(command: str) -> None:
    for name in ("program", "packed.zcr.zst", "key.pem"):
        Path(name).write_bytes(b"\x7fELF" + bytes(200))
    before = files()
    program, *arguments = command.replace("FILE", "model.zcr").replace("KEY", "key.pem").split()
    start = c.ONNX2ZC if program == "onnx2zc" else ("-m", "zcrecord", program)
    done = c.python(*start, *arguments, env={**os.environ, "STOP_AT": AT_WORK[command]})
    told = b"onnx2zc: interrupted\n" if program == "onnx2zc" else b"zcrecord: interrupted\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", told)
    assert files() == before


@pytest.mark.slow
def test_what_was_printed_before_ctrl_c_is_there() -> None:
    code = """
import os, signal, sys
from zcrecord.cli import dispatch, inspect
def stop(*_):
    print("printed before")
    os.kill(os.getpid(), signal.SIGINT)
inspect._matching_tensors = stop
sys.exit(dispatch.main(["ls", "model.zcr"]))
"""
    done = c.python("-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"printed before\n", b"zcrecord: interrupted\n")


@pytest.mark.slow
def test_programs_that_import_zcrecord_keep_their_own_handling_of_ctrl_c() -> None:
    code = """
import signal, zcrecord.cli.dispatch
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
assert zcrecord.cli.dispatch.main(["ls", "model.zcr"]) == 0
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.signal(signal.SIGINT, own := lambda *_: None)
assert zcrecord.cli.dispatch.main(["ls", "model.zcr"]) == 0
assert signal.getsignal(signal.SIGINT) is own
"""
    done = c.python("-c", code)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_ctrl_c_that_a_shell_ignores_for_a_background_job_stays_ignored() -> None:
    environment = {**os.environ, "STOP_AT": "zcrecord.cli.inspect"}
    command = ["sh", "-c", 'trap "" INT; exec "$0" -m zcrecord ls model.zcr', sys.executable]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.count(b"\n") == len(zcrecord.load_record("model.zcr"))
