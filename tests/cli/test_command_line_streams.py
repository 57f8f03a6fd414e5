"""The commands in real processes: closed pipes, full disks, terminals, ASCII and Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest

import zcrecord

pytestmark = pytest.mark.usefixtures("model_folder")

posix = pytest.mark.skipif(os.name != "posix", reason="platform: signals, pipes and terminals of POSIX")


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("command", ["info", "ls", "tree"])
@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii:strict"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}],
)
def test_a_stream_that_knows_ascii_alone_gets_every_name(environment: dict[str, str], command: str) -> None:
    zcrecord.save_record({"größe": np.zeros(2), "重み": {"b": np.zeros(1)}}, "names.zcr", metadata={"wer": "Žofie"})
    done = c.python("-m", "zcrecord", command, "names.zcr", env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr.decode()
    assert (rb"\u017dofie" if command == "info" else rb"gr\xf6\xdfe") in done.stdout


# Pipes, terminals and Ctrl-C, in real processes


@pytest.mark.slow
@posix
def test_ls_into_a_pipe_that_closes_ends_silently() -> None:
    zcrecord.save_record({f"tensor.{i}": np.zeros(1) for i in range(20_000)}, "big.zcr", durable=False)
    command = [sys.executable, "-m", "zcrecord", "ls", "big.zcr"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline().startswith(b"tensor.0\tfloat64\t[1]\t8\t")
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.slow
@posix
def test_a_pipe_that_closes_is_told_whatever_is_written_into_it(tmp_path: Path) -> None:
    """A zip file is closed by writing its directory, and that fails in another way: what failed first counts."""
    zcrecord.save_record({"w": np.zeros(1 << 20)}, tmp_path / "m.zcr", durable=False)
    (tmp_path / "pipe").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "pipe")
    convert = f'"{sys.executable}" -m zcrecord convert m.zcr'
    for where, script in (
        ("standard output", f"{convert} - --to npz | head -c 10; exit ${{PIPESTATUS[0]}}"),
        ("pipe", f"head -c 10 < pipe & {convert} pipe --to npz --force; status=$?; wait; exit $status"),
    ):
        environment = {**os.environ, "PYTHONPATH": str(c.ROOT)}
        done = subprocess.run(["bash", "-c", script], capture_output=True, timeout=60, cwd=tmp_path, env=environment)
        assert (done.returncode, len(done.stdout)) == (1, 10)
        message = f"zcrecord: error: {where}: the reader closed the pipe; the output is incomplete\n"
        assert done.stderr.decode() == message


@pytest.mark.slow
@posix
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="platform: /dev/full is Linux's")
def test_a_full_disk_behind_standard_output_is_one_line(archive: Path) -> None:
    for arguments in (("-m", "zcrecord", "ls", str(archive)), (*c.ONNX2ZC, "model.onnx", "-")):
        with open("/dev/full", "wb") as full:
            command = [sys.executable, *arguments]
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=60)
        assert done.returncode == 1
        assert re.fullmatch(rb"\w+: error: standard output: No space left on device\n", done.stderr)


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_conversion_that_is_interrupted_leaves_the_old_file_and_no_scratch(number: int, status: int) -> None:
    out = Path("out.zcr")
    out.write_bytes(b"the old file")
    command = [sys.executable, *c.ONNX2ZC, "-", "out.zcr", "--force"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(c.DIGITS.read_bytes()[:20_000])
        process.stdin.flush()
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in scratches()) and time.monotonic() < deadline:
            time.sleep(0.01)  # until something is written: it waits for the rest of its input then
        assert scratches(), "the conversion never began"
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert stdout == b""
    assert stderr == (b"onnx2zc: interrupted\n" if number == signal.SIGINT else b"")
    assert out.read_bytes() == b"the old file"
    assert not scratches()


def scratches() -> list[Path]:
    return [path for path in Path().iterdir() if "scratch" in path.name]


def on_a_terminal(*arguments: str, stdin: Any = subprocess.DEVNULL, stdout: Any = None) -> tuple[int, str]:
    """Run Python with standard output and error on a terminal of its own; return its status and what that shows."""
    import pty

    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=theirs if stdin == "terminal" else stdin,
            stdout=theirs if stdout is None else stdout,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"},
        )
        os.close(theirs)
        text = b""
        with contextlib.suppress(OSError):  # Linux: EIO when the other side is closed
            while part := shown.read(65536):
                text += part
        return process.wait(60), text.decode()


@pytest.mark.slow
@posix
def test_a_real_terminal_gets_tables_and_progress() -> None:
    status, text = on_a_terminal(*c.ONNX2ZC, "model.onnx", "model.zcr")
    assert status == 0
    assert "onnx2zc" in text
    assert re.search(r"model\.zcr: 7 tensors in \d+ modules, 26\.4 KiB in, ", text)
    status, text = on_a_terminal("-m", "zcrecord", "ls", "model.zcr")
    assert status == 0
    assert re.search(r"tensor.*dtype.*shape.*bytes", text)
    assert "float32" in text


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("arguments", "stdin", "told"), [
    (("model.onnx", "-"), "model.onnx", "standard output is a terminal, and the output is binary"),
    (("-",), "model.onnx", "OUT is required if IN is standard input and standard output is a terminal"),
    (("-", "out.zcr"), "terminal", "standard input is a terminal"),
])  # fmt: skip
def test_bytes_are_neither_written_to_a_terminal_nor_awaited_from_one(
    arguments: tuple[str, ...], stdin: str, told: str
) -> None:
    with open("model.onnx", "rb") as model:
        status, text = on_a_terminal(*c.ONNX2ZC, *arguments, stdin=model if stdin == "model.onnx" else stdin)
    assert status == 2
    assert told in " ".join(text.split())
