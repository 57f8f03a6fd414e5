"""The scripts of `zcrecord completion` complete commands, options, choices and files, in the shells themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import command_line as c
import pytest

from zcrecord.cli.registry import COMMANDS

BASH = """
source <(cat completion.bash)
line=$1
COMP_WORDS=($line); [[ $line == *' ' ]] && COMP_WORDS+=('')
COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line}
spec=$(complete -p "${COMP_WORDS[0]}"); spec=${spec#*-F }; ${spec%% *} "${COMP_WORDS[0]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(autouse=True)
def scripts(model_folder: Path, run: c.Commands) -> None:
    for shell in ("bash", "zsh", "fish"):
        Path(f"completion.{shell}").write_text(run(f"completion {shell}"), encoding="utf-8")


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
        ("zcrecord ls --sort s", ["saved", "size"]),
        ("zcrecord ls mod", ["model.onnx"]),
        ("zcrecord consolidate mod", ["model.onnx"]),
        ("zcrecord edit --drop-", ["--drop-metadata"]),
        ("onnx2zc mod", ["model.onnx"]),
    ],
)
def test_shell_completes(complete: object, line: str, expected: list[str]) -> None:
    assert callable(complete)
    assert sorted(complete(line)) == expected


@POSIX
def test_every_command_is_among_what_completes_the_first_word() -> None:
    assert set(COMMANDS) <= set(in_bash("zcrecord "))


@pytest.mark.needs("zsh")
def test_zsh_takes_the_script() -> None:
    code = 'autoload -U compinit; compinit -u -D; eval "$(cat completion.zsh)"; echo $_comps[zcrecord] $_comps[onnx2zc]'
    done = subprocess.run(["zsh", "-f", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr, len(done.stdout.split())) == (0, "", 2)


def test_without_shtab_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, run: c.Commands) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    told = r"shtab is not installed; pip install shtab, or in a checkout of zcrecord pip install '\.\[completion\]'"
    run.fails("completion bash", told)
