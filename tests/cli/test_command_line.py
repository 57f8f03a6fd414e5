"""The commands' arguments, exit status and failures: one line for whatever is wrong, and never a traceback."""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord.cli import inspect
from zcrecord.cli.convert import onnx2zc_arguments
from zcrecord.cli.dispatch import main, onnx2zc_main
from zcrecord.cli.endings import option_advice
from zcrecord.cli.parsers import Parser, size
from zcrecord.cli.registry import COMMANDS
from zcrecord.errors import Advice

pytestmark = pytest.mark.usefixtures("model_folder")

# What is wrong with the input: one line each.

FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "given.zcr: no such file"),
    "onnx": (lambda path: shutil.copy(c.DIGITS, path), "given.zcr: .*ONNX model.*onnx2zc makes an archive of it"),
    "truncated": (c.truncated, "given.zcr: .*truncated, copy it again"),
}


@pytest.mark.parametrize(
    ("command", "fault"), [*(("info", fault) for fault in FAULTS), *((name, "truncated") for name in c.COMMANDS[1:])]
)
def test_a_file_that_is_no_archive_is_told_in_one_line(command: str, fault: str, run: c.Commands) -> None:
    make, pattern = FAULTS[fault]
    make(Path("given.zcr"))
    run.fails(f"{command} given.zcr", pattern)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_one_archive_in_a_folder_is_opened(command: str, run: c.Commands) -> None:
    folder = Path("folder")
    folder.mkdir()
    run.fails(f"{command} folder", "folder: is a folder without a model; name a file")
    zcrecord.save_record({"first": np.ones(3), "second": np.zeros(9)}, folder / "any.zcr", max_shard_size=50)
    assert {"ls": '"second"', "verify": '"tensors": 2'}[command] in run(f"{command} folder --json")
    shutil.copy(folder / "any.zcr", folder / "other.zcr")
    run.fails(f"{command} folder", r"folder: is a folder with several archives: any\.zcr, other\.zcr; name")


def test_a_path_cannot_smuggle_a_line_or_an_escape_into_an_error(run: c.Commands) -> None:
    run.fails(["ls", "no\n\x1b[31mfile"], r"no\\n\\x1b\[31mfile: no such file")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (MemoryError(), "zcrecord: error: out of memory"),
        (zcrecord.DependencyError("x is not installed; pip install x"), "zcrecord: error: x is not installed; pip"),
        (OSError(28, "No space left on device"), "zcrecord: error: standard output: No space left on device"),
        (PermissionError(13, "Permission denied", "a/b"), "zcrecord: error: a/b: Permission denied"),
        (KeyError("x"), "zcrecord: error: a fault of zcrecord itself, KeyError: 'x'; please report it"),
    ],
)
def test_whatever_is_raised_becomes_one_line(
    raised: Exception, told: str, archive: Path, run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(inspect, "_facts", fail)
    run.fails("info model.zcr", f"^{re.escape(told)}")


def test_terminal_without_rich_says_how_to_install_it(
    archive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setattr(sys, "stdout", c.Terminal())
    assert main(["ls", str(archive)]) == 1
    assert capsys.readouterr().err == "zcrecord: error: rich is not installed; pip install rich\n"


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_an_archive_may_come_from_standard_input(
    command: str, archive: Path, run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    c.pipe_in(monkeypatch, archive.read_bytes())
    assert run(f"{command} -")
    c.pipe_in(monkeypatch, b"no archive at all" * 20)
    run.fails(f"{command} -", "standard input: this is a text file")
    monkeypatch.setattr(sys, "stdin", None)
    run.fails(f"{command} -", "standard input: is closed")


@pytest.mark.slow
def test_development_mode_shows_where_a_fault_is(archive: Path) -> None:
    code = """
import sys
from zcrecord.cli import dispatch, inspect
def fail(*a, **k): raise KeyError("x")
inspect._facts = fail
sys.exit(dispatch.main(["info", "model.zcr"]))
"""
    assert b"Traceback" in c.python("-X", "dev", "-c", code).stderr
    assert b"Traceback" not in c.python("-c", code).stderr


# Usage.


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("ls", "usage: zcrecord ls .* zcrecord ls: error: .*required: FILE"),
        ("nonsense x", "invalid choice"),
        ("ls x --nonsense", "zcrecord ls: error: unrecognized arguments: --nonsense"),
        ("info x y", "unrecognized arguments: y"),
        ("tree x --depth -1", "--depth"),
        ("diff - -", "only one of the two can be standard input"),
        ("convert a", "required: OUT"),
        ("convert a b --alignment 48", "alignment 48 is not a power"),
        ("convert a b --from pickle", "format 'pickle' is not known; zcr, safetensors, gguf, onnx, torch, npz"),
        ("convert a b --to x\x1b", r"format 'x\\x1b' is not known"),
        ("convert a b --max-shard-size 0", "is not a size, such as 5GB"),
        ("convert a b --jobs -1", "--jobs: '-1' is not a whole number, 0 or more"),
        ("convert - b --jobs 2", "--jobs is for folders and URLs, not for standard streams"),
        ("convert a b --jobs 2 --to npz", "--jobs makes archives; --to is for a single file or folder"),
        ("onnx2zc model.onnx x.zcr --verify --dry-run", "--verify reads IN and OUT a second time"),
        ("onnx2zc model.onnx - --tune", "--tune needs two files: neither IN nor OUT can be -"),
        ("onnx2zc a.onnx --tune --exclude b", "--tune needs the graph, which --select and --exclude leave out"),
        ("onnx2zc a.onnx --tune --dry-run", "--tune takes the archive that is written, and --dry-run writes none"),
        ("to-onnx m.zcr - --external", "--external needs two files: neither ARCHIVE nor OUT can be -"),
        ("to-onnx m.zcr --external --key pub", "--key is not for --external: the small model reads the"),
        ("verify m.onnx --key pub", "--key is about archives, not .onnx files"),
        ("to-onnx m.zcr --tuned", "--tuned and --no-tuned need --external"),
        ("to-onnx m.onnx x --external --module a", "--tuned and --module are for archives; an .onnx file has neither"),
        ("tune -", "ARCHIVE and OUT have to be files: neither can be -"),
        ("tune m.zcr --remove --threads 1", "--threads is for tuning, and --remove tunes nothing"),
        ("unpack m.zcr", "OUT is required if IN does not end in .zst"),
        ("pack https://host/m.zcr", "OUT is required if the source is a URL"),
        ("pack m.zcr --level 23", "level 23 is not from 1 to 22"),
        ("edit m.zcr", "no change is given"),
        ("edit m.zcr --rename a", "--rename a: give a name, =, and what it gets"),
        ("edit m.zcr --drop x -o -", "neither can be -"),
        ("embed m.zcr --lang python --blob incbin", "--blob means nothing to python; it is for c, cpp, asm"),
        ("embed m.zcr --lang c --alignment 24", "24 is not a power of two"),
        ("detach p --discard --keep", "--discard writes no archive"),
        ("serve https://example.org/m.zcr", "serve needs a file, not standard input or a URL"),
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2(line: str, told: str, run: c.Commands) -> None:
    run.misused(line, told)


@pytest.mark.parametrize("text", ["", "GB", "0", "-1", "5 apples", "5GBB", "1e400", "nan", "5Bi", "1.2.3MB"])
def test_text_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size, such as 5GB"):
        size(text)


def test_sizes_are_understood() -> None:
    gigabytes = [size(text) for text in ("5GB", "5gb", "5G")]
    assert [*gigabytes, size("7"), size("7B"), size("1.5KiB"), size("2MiB")] == [5 * 10**9] * 3 + [7, 7, 1536, 1 << 21]


@pytest.mark.parametrize("command", [main, onnx2zc_main])
def test_version_names_package_and_format(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        command(["--version"])
    version = re.escape(zcrecord.__version__)
    assert re.fullmatch(rf"(zcrecord|onnx2zc) {version}, archive format \d+\n", capsys.readouterr().out)


# Advice is in the words of options.


ARGUMENT = re.compile(r"\b(?!charset)[a-z_]+=")
# What no command ends with: loading to devices, filling, typed records, other frameworks, writing a record in Python.
IN_PYTHON_ALONE = (
    "archive/archive", "archive/digest", "archive/name_patterns", "archive/subset", "compat/", "distributed/",
    "frameworks/", "hollow/",
    "loaders/", "onnx/runtime", "onnx/session_fill", "record/", "remote/open_url",
    "storage/threads", "storage/urls", "tensors/", "transformers", "transport/packer", "typed/", "writing/sharing",
)  # fmt: skip


def sentences() -> dict[str, str]:
    """Every text with a space in it, by file and line; docstrings and generated code are none."""
    found = {}
    package = c.ROOT / "zcrecord"
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.startswith(("_schema/", "embed/")) and name not in ("embed/attachment.py", "embed/write_files.py"):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        docs = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in ast.walk(tree):
            text = ""
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docs:
                text = node.value
            if " " in text and isinstance(node, ast.expr):
                found[f"{name}:{node.lineno}:{node.col_offset}"] = text
    return found


@pytest.mark.slow
def test_no_message_that_a_command_can_print_names_an_argument() -> None:
    named = {
        where: text
        for where, text in sentences().items()
        if ARGUMENT.search(text)
        and not where.startswith((*IN_PYTHON_ALONE, "cli/"))
        and not re.match(r"(limit|cache)=", text)  # of zcrecord.remote.Cache
        and "--" not in text  # it names the option, too
    }
    assert not named, "make an `Advice` of these, or take their module into IN_PYTHON_ALONE"


def test_every_argument_that_an_advice_names_has_an_option() -> None:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (c.ROOT / "zcrecord").rglob("*.py"))
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "Advice"]
    named = {
        ast.literal_eval(call.args[1]) for call in calls if call.args[1:] and not isinstance(call.args[1], ast.Name)
    }
    helps = ""
    for declare in (*(command.declare for command in COMMANDS.values()), onnx2zc_arguments):
        declare(parser := Parser())
        helps += parser.format_help()
    assert {"force", "embedded", "external"} <= named
    for argument in named - {"cache", "mmap", "storage_options"}:
        option = option_advice(Advice("{}", argument, True)).removeprefix("zcrecord to-onnx ").split()[0]
        assert option.startswith("--") and option in helps


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("convert there.abc y.zcr", "name its format by --from: "),
        ("ls model.zcr nothing_like_it_at_all_0123456789", "7 names, such as '"),
        ("ls more.zcr", "followed by other bytes; --embedded prefix of ls, verify and check ignores them$"),
    ],
)
def test_advice_is_an_option(command: str, told: str, archive: Path, run: c.Commands) -> None:
    Path("there.abc").write_bytes(b"\0something")
    Path("more.zcr").write_bytes(archive.read_bytes() + bytes(64))
    run.fails(command, told)


def test_advice_in_json_is_an_option_too(archive: Path, run: c.Commands) -> None:
    Path("more.zcr").write_bytes(archive.read_bytes() + bytes(64))
    assert run.json("verify more.zcr", status=1)["error"]["message"].endswith(
        "; --embedded prefix of ls, verify and check ignores them"
    )


def test_names_of_strangers_are_left_as_they_are(run: c.Commands) -> None:
    zcrecord.save_record({"force=True": np.zeros(9)}, "force=True")
    r.damage(Path("force=True"), zcrecord.load_record("force=True").info("force=True").offset)
    run.fails("verify force=True", "error: force=True: tensor 'force=True': ")


# A pipe in the place of a file, as <(...) gives one.

INSTEAD = r"zcrecord: error: /(dev|proc/self)/fd/\d+: not a regular file; {}\n"


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: bash")
@pytest.mark.parametrize(
    ("command", "status", "told"),
    [
        ("ls PIPE", 1, INSTEAD.format("pipe it in, and give - in its place")),
        ("diff model.zcr PIPE", 2, INSTEAD.format("pipe it in, and give - in its place")),
        ("sign --key k PIPE", 1, INSTEAD.format("copy it to one, and give that")),
        ("pack PIPE", 2, "(.*\n)+.*error: OUT is required if the source is a pipe; - is standard output\n"),
    ],
)  # fmt: skip
def test_pipe_in_the_place_of_a_file_is_told_to_be_given_otherwise(
    command: str, status: int, told: str, archive: Path
) -> None:
    shutil.copy(sys.executable, "program")
    shell = c.SHELL + f"zcrecord {command.replace('PIPE', f'<(cat {archive})')}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "")
    assert re.fullmatch(told, done.stderr), done.stderr


# Standard streams.


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
