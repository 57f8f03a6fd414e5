"""Runs the tests on other machines than this one, as far as this one can make them.

    python -m tools.machines                                # those that CI runs, in turn, a line for each step
    python -m tools.machines sid                            # one of them
    python -m tools.machines aarch64 tests/typed -k named   # these tests there; arguments are pytest's

=========  ===========================================  =====================================  ====================
machine    what it is                                   what runs there                        needs
=========  ===========================================  =====================================  ====================
resolve *  Python's pip, the newest, and, by uv, what   the choice of versions for `dev`       a network
           Linux, macOS and Windows would be given
trixie *   Debian 13: Python 3.13, its own pip, a user  that choice, `tools/quickstart         root, debootstrap, a
           who is not root, a path with a space, no git  --small` and `tools/test`             network, 10 GB of disk
nehalem *  this one, with a processor of 2008: no AVX   the tests of `onnx` that compute       qemu-user
sid        Debian's next: Python 3.14                   as on trixie                           as trixie
aarch64    Debian 12 for aarch64, emulated: gcc, rustc  core tests, readers in C and Rust      as trixie, and
           1.63, Python 3.11                                                                   qemu-user-static
=========  ===========================================  =====================================  ====================

CI runs those with a star. A userland is made in /var/cache/zcrecord/MACHINE, or in --folder, and stays there for the
next time with what was installed in it; remove it by `rm -r`. A machine that cannot be made here is named, with the
reason, and does not fail CI; if it was asked for by name, the exit status is 2. The choice of versions depends on what
PyPI has that day, and takes minutes: so it is here and not in `tools/test`.

Left out on aarch64, and named at the end: tests that want a package or a tool that is not there (torch and ONNX
Runtime, which take half a minute to be imported there), tests of memory that qemu-user counts as its own, and those of
rustc that take minutes. C is built without sanitizers. Not run anywhere: macOS, Windows, and musl, for which PyPI has
no ONNX Runtime and no torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.lower_bounds import PROJECT
from tools.userlands import CHECKOUT, Userland, apart, entered, inside, missing, run
from tools.worker import ROOT

EMULATED = "ZCRECORD_EMULATED"  # set for the tests; `tests/support/absent_packages.py` reads it
INSIDE = "ZCRECORD_MACHINES_INSIDE"  # set in the namespaces of a userland
KEPT = Path("/var/cache/zcrecord")

SYSTEMS = {  # in uv's words; the newest Python that ONNX Runtime is built for
    "x86_64-manylinux_2_28": "3.14",
    "aarch64-manylinux_2_28": "3.14",
    "aarch64-apple-darwin": "3.14",
    "x86_64-apple-darwin": "3.13",
    "x86_64-pc-windows-msvc": "3.14",
}

PYTHON = ("ca-certificates", "python3", "python3-venv")
STRANGER = 4711
HOME = "/home/stranger"
CLONE = f"{HOME}/my zcrecord"

COMPUTING = tuple(
    f"tests/onnx/test_onnx_{name}.py"
    for name in (
        "export",
        "filling",
        "session",
        "target",
        "tuned_attacks",
        "tuned_export",
        "tuned_parts",
        "tuning",
    )
)

EXTRAS = ("zstd", "onnx")
TESTERS = re.compile(r"(attrs|hypothesis|pytest)>=.*")
CORE = (
    "tests/archive",
    "tests/codec",
    "tests/record",
    "tests/specification",
    "tests/tensors",
    "tests/transport",
    "tests/typed",
    "tests/writing",
    "tests/storage",
    "tests/onnx/test_onnx_wire.py",
    "tests/embed/test_readers.py",
    "tests/embed/test_c_reader_calls.py",
    "tests/embed/test_rust_reader.py",
)
MINUTES = tuple(
    f"tests/embed/test_rust_reader.py::test_{name}"
    for name in (
        "agrees_on_archives_made_to_cost_much",
        "compiles_as_a_crate_and_as_a_module",
    )
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one machine, or those of CI, and run the tests; return 0, 2 if it cannot be made here, or another status."""
    parser = argparse.ArgumentParser(prog="python -m tools.machines", description="The tests on other machines.")
    parser.allow_abbrev = False  # what is not known is pytest's
    parser.add_argument("machine", nargs="?", choices=MACHINES, help="without it, those of CI")
    parser.add_argument("--folder", type=Path, help=f"where a userland lies, and stays (default: {KEPT}/MACHINE)")
    args, given = parser.parse_known_args(arguments)
    if args.machine is None:
        return _all_of_ci()
    machine, folder = MACHINES[args.machine], (args.folder or KEPT / args.machine).resolve()
    lacking = machine.lacking() + (missing(machine.userland, folder) if machine.userland else [])
    if lacking:
        print(*(f"tools.machines: {args.machine}: {what}" for what in lacking), sep="\n", file=sys.stderr)
        return 2
    if machine.userland is None:
        return machine.run(folder, given)
    if os.environ.get(INSIDE):
        with entered(machine.userland, folder):
            return machine.run(folder, given)
    again = [sys.executable, "-m", "tools.machines", args.machine, "--folder", str(folder), *given]
    return subprocess.run(apart(again), cwd=ROOT, env={**os.environ, INSIDE: "1"}).returncode


def _all_of_ci() -> int:
    ended: dict[str, int] = {}
    for name in (name for name, machine in MACHINES.items() if machine.in_ci):
        start = time.monotonic()
        ended[name] = subprocess.run([sys.executable, "-m", "tools.machines", name], cwd=ROOT).returncode
        how = {0: "ok", 2: "LEFT OUT, see above"}.get(ended[name], "FAILED")
        print(f"machine {name}: {how}, {time.monotonic() - start:.0f} s", flush=True)
    return int(any(status not in (0, 2) for status in ended.values()))


def _step(what: str, command: Sequence[str], *, minutes: float) -> None:
    """Run a command, and print pytest's line if there is one; ends the program if it fails."""
    start = time.monotonic()
    lines = run(command, timeout=60 * minutes).splitlines()
    counted = [f"; {line}" for line in lines if " passed" in line]
    print(f"{what}: ok, {time.monotonic() - start:.0f} s{''.join(counted[-1:])}", flush=True)


# The choice of versions.

_CHOOSE = ("install", "--dry-run", "--ignore-installed", "--quiet", "--quiet")


def _resolve(_folder: Path, _given: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        run([sys.executable, "-m", "venv", scratch])
        python, uv = f"{scratch}/bin/python", f"{scratch}/bin/uv"
        for _ in ("as this Python brings it", "the newest"):
            pip = " ".join(run([python, "-m", "pip", "--version"]).split()[:2])
            _step(f"{pip} chooses versions", [python, "-m", "pip", *_CHOOSE, f"{ROOT}[dev]"], minutes=10)
            run([python, "-m", "pip", "install", "--quiet", "--upgrade", "pip", "uv"])
        for system, newest in SYSTEMS.items():
            for version in ("3.11", newest):
                target = [f"--python-platform={system}", f"--python-version={version}", "--only-binary=:all:"]
                command = [uv, "pip", "compile", "--quiet", f"--cache-dir={scratch}/uv", *target, "--extra=dev"]
                macos = ["env", "MACOSX_DEPLOYMENT_TARGET=14.0"]  # torch's
                _step(f"uv, {system}, Python {version}", [*macos, *command, "-o/dev/null", str(PROJECT)], minutes=5)
    return 0


# Debian as a stranger has it.


def _as_a_stranger(folder: Path, given: Sequence[str]) -> int:
    clone = folder / CLONE[1:]
    if not (folder / HOME[1:]).exists():
        run(inside(folder, "/", {}, ["useradd", "--create-home", f"--uid={STRANGER}", "stranger"]))
    copy_files(clone)
    run(inside(folder, "/", {}, ["chown", "--recursive", "stranger:stranger", HOME]))
    stranger = partial(inside, folder, CLONE, {"HOME": HOME}, user=STRANGER)
    run(stranger(["python3", "-m", "venv", "--clear", f"{HOME}/pip"]))
    _step("its pip chooses versions", stranger([f"{HOME}/pip/bin/pip", *_CHOOSE, ".[dev]"]), minutes=10)
    _step("tools/quickstart --small", stranger(["./tools/quickstart", "--small"]), minutes=10)
    _step("tools/test", stranger(["./tools/test", *given]), minutes=40)
    return 0


def copy_files(folder: Path) -> None:
    """Have a folder hold the files that git lists here, and its environments: as from a tarball, and made once."""
    folder.mkdir(parents=True, exist_ok=True)
    for item in folder.iterdir():
        if item.name.startswith(".venv-"):
            continue
        shutil.rmtree(item) if item.is_dir() else item.unlink()
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in set(run(listed).split("\0")[:-1]):
        if (ROOT / name).is_file():  # removed ones are listed until they are committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


# A processor of 2008.


def _without_avx(_folder: Path, given: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        emulated = Path(scratch, "python")
        starts = f'exec qemu-x86_64 -cpu Nehalem {shlex.quote(sys.executable)} "$@"'
        emulated.write_text(f"#!/bin/sh\n{starts}\n", encoding="utf-8")
        emulated.chmod(0o755)
        also = f"import sys\nsys.executable = {str(emulated)!r}\n"  # what tests start has that processor, too
        Path(scratch, "sitecustomize.py").write_text(also, encoding="utf-8")
        # More threads would wait for each other in loops, which qemu makes long.
        variables = ["env", f"{EMULATED}=qemu-user", "OMP_NUM_THREADS=1", f"PYTHONPATH={scratch}:{ROOT}"]
        pytest = [str(emulated), "-m", "pytest", "-m", "not needs", "-p", "no:cacheprovider", *(given or COMPUTING)]
        _step("tests that compute", [*variables, *pytest], minutes=30)
    return 0


def _lacks_emulation() -> list[str]:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return [f"needs Linux on x86_64, this is {platform.system()} on {platform.machine()}"]
    return [] if shutil.which("qemu-x86_64") else ["needs another program: apt-get install qemu-user"]


# Another processor.


def _core(processor: str, folder: Path, given: Sequence[str]) -> int:
    variables = {"HOME": "/root", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    variables |= {EMULATED: "qemu-user", "HYPOTHESIS_STORAGE_DIRECTORY": "/tmp/hypothesis", "PYTHONPATH": CHECKOUT}
    there = partial(inside, folder, CHECKOUT, variables)
    run(there(["python3", "-m", "venv", "/venv"]))
    _step("packages from PyPI", there(["/venv/bin/pip", "install", "--quiet", *core_packages()]), minutes=60)
    found = run(there(["/venv/bin/python", "-c", "import platform; print(platform.machine())"])).strip()
    if found != processor:
        raise SystemExit(f"tools.machines: {folder} runs programs of {found}, not of {processor}")
    pytest = ["/venv/bin/python", "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
    pytest += [*(f"--deselect={test}" for test in MINUTES if not given), *(given or CORE)]
    status = subprocess.run(there(pytest)).returncode
    for test in () if given else MINUTES:
        print(f"left out, since it takes minutes: {test}")
    return status


def core_packages() -> list[str]:
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]
    return sorted({*wanted, *filter(TESTERS.fullmatch, extras["dev"])})


@dataclass(frozen=True, slots=True)
class Machine:
    """One row of the table above: `run` takes the userland's folder, and pytest's arguments or none."""

    run: Callable[[Path, Sequence[str]], int]
    userland: Userland | None = None
    in_ci: bool = False
    lacking: Callable[[], list[str]] = list


_AARCH64 = Userland("bookworm", (*PYTHON, "gcc", "libc6-dev", "rustc"), "arm64", "qemu-aarch64.conf")
MACHINES = {
    "resolve": Machine(_resolve, in_ci=True),
    "trixie": Machine(_as_a_stranger, Userland("trixie", PYTHON), in_ci=True),
    "nehalem": Machine(_without_avx, in_ci=True, lacking=_lacks_emulation),
    "sid": Machine(_as_a_stranger, Userland("sid", PYTHON)),
    # Little-endian, and PyPI has wheels for it of all that is needed; others would have to build numpy and ml_dtypes.
    "aarch64": Machine(partial(_core, "aarch64"), _AARCH64),
}


if __name__ == "__main__":
    sys.exit(main())
