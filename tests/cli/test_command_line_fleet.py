"""`zcrecord convert --jobs`: a line for each model that is refused, totals, and no process or scratch file left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import command_line as c
import numpy as np
import pytest

import zcrecord
from zcrecord import formats

pytestmark = pytest.mark.usefixtures("model_folder")

# Acts in a worker, which alone imports the module of a format, when it is given a model of that.
SITE = """
import os, signal, sys, time

class Act:
    def find_spec(self, name, path=None, target=None):
        if name == "zcrecord.foreign.npz" and os.environ["ACT"] != "once" or self.first(name):
            if os.environ["ACT"] in ("once", "always"):
                os.kill(os.getpid(), signal.SIGKILL)
            for process in (os.getppid(), os.getpid()) if os.environ["ACT"] == "SIGINT" else (os.getppid(),):
                os.kill(process, getattr(signal, os.environ["ACT"]))
            time.sleep(60)

    def first(self, name):
        try:
            return name == "zcrecord.foreign.npz" and os.mkdir("killed") is None
        except FileExistsError:
            return False

if "ACT" in os.environ:
    sys.meta_path.insert(0, Act())
"""
TRUNCATED = "zcrecord: error: {}: tensor 'features.2.weight': .* early; the model is truncated or damaged, .*\n"


def make_models() -> None:
    """Make two models, and one that is truncated."""
    data = Path("model.onnx").read_bytes()
    for path, end in (("models/a.onnx", None), ("models/sub/b.onnx", None), ("models/cut.onnx", -9000)):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data[:end])


def acting(act: str) -> subprocess.CompletedProcess[bytes]:
    """Convert two models and one whose worker does something, in a process of its own."""
    make_models()
    os.unlink("models/cut.onnx")
    zcrecord.save_record({"w": np.arange(3)}, "m.zcr")
    formats.convert("m.zcr", "models/m.npz")
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(SITE, encoding="utf-8")
    environment = {**os.environ, "ACT": act, "PYTHONPATH": f"site{os.pathsep}{c.ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    return c.python("-m", "zcrecord", "convert", "models", "out", "--jobs", "2", "--no-sync", env=environment)


def files(folder: str) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


@pytest.mark.exhaustive(keep=0)
def test_report_has_a_line_for_each_refused_model_and_totals(run: c.Commands) -> None:
    make_models()
    status, out = run.ended("convert models out --jobs 2")
    assert status == 1
    assert re.fullmatch(r"out: 2 of 3 models converted, 0 kept, 1 refused, \d+ bytes out, \d+\.\d\d s\n", out)
    assert re.fullmatch(TRUNCATED.format(re.escape(os.path.abspath("models/cut.onnx"))), run.err)
    assert files("out") == ["a.zcr", "cut.zcr.refused", "sub/b.zcr"]
    told = run.json("convert models out --jobs 1", status=1)
    assert [told[name] for name in ("models", "converted", "kept", "failed")] == [3, 0, 2, []]
    assert [os.path.basename(refused["dest"]) for refused in told["refused"]] == ["cut.zcr"]
    shutil.copy("models/a.onnx", "models/cut.onnx")
    run.quietly("convert models out --jobs 0")
    assert files("out") == ["a.zcr", "cut.zcr", "sub/b.zcr"]


@pytest.mark.skipif(os.name != "posix", reason="platform: signals of POSIX")
@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("act", ["once", "always", "SIGINT", "SIGTERM", "SIGKILL"])
def test_worker_that_is_killed_is_replaced_and_an_end_of_the_command_is_one_of_all(act: str) -> None:
    done = acting(act)  # which returns when the last process that has its pipes is gone
    if act == "once":
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.startswith(b"out: 3 of 3 models converted, 0 kept, ")
        assert files("out") == ["a.zcr", "m.zcr", "sub/b.zcr"]
    elif act == "always":
        assert done.stdout.startswith(b"out: 2 of 3 models converted, 0 kept, 1 failed, ")
        told = "models/m.npz: its worker was killed 3 times; is there enough memory for so many --jobs?\n"
        assert (done.returncode, done.stderr) == (1, f"zcrecord: error: {Path.cwd()}/{told}".encode())
        [left, *whole] = files("out")
        assert left.endswith(".zcr-scratch")  # of the last try; the next save of m.zcr removes it
        assert whole == ["a.zcr", "sub/b.zcr"]
    else:
        assert done.returncode == {"SIGINT": 130, "SIGTERM": 128 + signal.SIGTERM, "SIGKILL": -signal.SIGKILL}[act]
        told = "zcrecord: interrupted\n" if act == "SIGINT" else ""
        assert done.stdout == b""
        assert done.stderr == told.encode() or act == "SIGKILL"  # of which multiprocessing may warn
        others = set(files("out")) - {"a.zcr", "sub/b.zcr"}
        assert all(act == "SIGKILL" and name.endswith(".zcr-scratch") for name in others)


TOLD = """
import contextlib, os, signal, sys
from zcrecord.cli import fleet

def convert(_):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        print("removed", flush=True)

fleet.convert_one = convert
signal.signal(signal.SIGTERM, fleet._end_worker)
with contextlib.suppress(BaseException):  # as the pool does
    if sys.argv[1] == "in a job":
        fleet._run_job(None)
    os.kill(os.getpid(), signal.SIGTERM)
os._exit(99)
"""


@pytest.mark.skipif(os.name != "posix", reason="platform: signals of POSIX")
@pytest.mark.parametrize(("state", "out"), [("in a job", b"removed\n"), ("between jobs", b"")])
def test_a_worker_that_is_told_to_end_asks_for_no_other_job(state: str, out: bytes) -> None:
    """A pool catches what a job raises, SystemExit too, and a worker then waits for ever where others were killed."""
    done = c.python("-c", TOLD, state)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, out), done.stderr
