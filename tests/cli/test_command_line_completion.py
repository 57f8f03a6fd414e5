"""The scripts of `zcrecord completion` complete commands, options, choices and files, in the shells themselves."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import command_line as c
import pytest

from zcrecord.cli.dispatch import main
from zcrecord.cli.parsers import zcrecord_parser

BASH = """
source <(cat completion.bash)
line=$1
COMP_WORDS=($line); [[ $line == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line}
spec=$(complete -p "${COMP_WORDS[0]}"); spec=${spec#*-F }; ${spec%% *} "${COMP_WORDS[0]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def _in_a_folder_with_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    c.enter(tmp_path, monkeypatch)
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        Path(f"completion.{shell}").write_text(capsys.readouterr().out, encoding="utf-8")


def in_bash(line: str) -> list[str]:
    done = subprocess.run(["bash", "--norc", "-c", BASH, "bash", line], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return [found.strip() for found in done.stdout.splitlines() if found.strip()]


def in_fish(line: str) -> list[str]:
    code = f"source completion.fish; complete -C '{line}'"
    environment = {**os.environ, "HOME": os.getcwd(), "XDG_CONFIG_HOME": os.getcwd()}
    done = subprocess.run(
        ["fish", "--no-config", "-c", code], capture_output=True, text=True, timeout=60, env=environment
    )
    return [found.split("\t")[0] for found in done.stdout.splitlines()]


POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: bash")
SHELLS = [
    pytest.param(in_bash, marks=POSIX, id="bash"),
    pytest.param(in_fish, marks=pytest.mark.needs("fish"), id="fish"),
]


@pytest.mark.parametrize("complete", SHELLS)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zcrecord unp", ["unpack"]),
        ("zcrecord convert --max", ["--max-shard-size"]),
        ("zcrecord ls --sort s", ["saved", "size"]),
        ("zcrecord completion f", ["fish"]),
        ("zcrecord ls mod", ["model.onnx"]),
        ("zcrecord sign --key mod", ["model.onnx"]),
        ("zcrecord edit mod", ["model.onnx"]),
        ("zcrecord edit --drop-", ["--drop-metadata"]),
        ("onnx2zc mod", ["model.onnx"]),
        ("onnx2zc --allow", ["--allow-links"]),
    ],
)
def test_shell_completes(complete: object, line: str, expected: list[str]) -> None:
    assert callable(complete)
    assert sorted(complete(line)) == expected


@POSIX
def test_every_command_is_among_what_completes_the_first_word() -> None:
    usage = zcrecord_parser().format_usage()
    found = in_bash("zcrecord ")
    assert {"info", "ls", "tree", "verify", "convert", "serve", "completion"} <= set(found), usage


@pytest.mark.needs("zsh")
@pytest.mark.skipif(os.name != "posix", reason="platform: terminals of POSIX")
def test_zsh_completes_on_a_terminal() -> None:
    import pty

    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "PS1": "", "HOME": os.getcwd()}
    with subprocess.Popen(["zsh", "-f", "-i"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as shell:
        os.close(theirs)
        try:
            os.write(ours, b"autoload -U compinit; compinit -u -D; eval \"$(cat completion.zsh)\"; echo rea''dy\n")
            until(ours, "ready")
            os.write(ours, b"\x15zcrecord unp\t")
            until(ours, "unpack")
            os.write(ours, b"\x15onnx2zc --allow\t")
            until(ours, "--allow-links")
        finally:
            shell.kill()
            os.close(ours)


def until(terminal: int, text: str) -> None:
    """Read from a terminal until it shows a text."""
    seen, deadline = b"", time.monotonic() + 30
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen.decode(errors="replace")
        if select.select([terminal], [], [], 0.2)[0]:
            with contextlib.suppress(OSError):
                seen += os.read(terminal, 65536)


def test_without_shtab_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    told = r"shtab is not installed; pip install shtab, or in a checkout of zcrecord pip install '\.\[completion\]'"
    c.fails(capsys, main(["completion", "bash"]), told)
