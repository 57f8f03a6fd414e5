"""Debian userlands: made by debootstrap in a folder, which keeps them, and entered by chroot.

Mounts, and the kernel's rule that starts qemu for another processor's programs, are made in mount and process
namespaces of their own (`apart`), which end with the program, even if it is killed (the rule since Linux 6.7); what it
wrote is in the folder alone. Meanwhile any program of this machine may start the other processor's programs. The
commands that run in a userland are left to `tools.machines`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.worker import ROOT

TOOLS = {"debootstrap": "debootstrap", "unshare": "util-linux", "mount": "mount", "chroot": "coreutils"}
RULES = Path("/usr/lib/binfmt.d")  # of the package qemu-user-static: what to write into the kernel's register
BINFMT = Path("/proc/sys/fs/binfmt_misc")
LENT = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")  # to reach PyPI
CHECKOUT = "/zcrecord"  # where a userland has this checkout, read-only
ROOM = 10 << 30  # of a Debian, and of an environment with PyPI's torch while it is made
STAMP = ".zcrecord-userland"


@dataclass(frozen=True, slots=True)
class Userland:
    """A Debian: its suite and packages; of another processor, Debian's name of it, and the file of qemu's rule."""

    suite: str
    packages: tuple[str, ...]
    processor: str = ""
    rule: str = ""

    def stamp(self) -> str:
        """Return the description of a userland: one of another is made anew."""
        return json.dumps([self.processor, self.suite, self.packages])


def missing(userland: Userland, folder: Path) -> list[str]:
    """Return a line for each thing that this machine lacks to run a userland's programs, with the remedy."""
    if sys.platform != "linux":
        return [f"needs Linux, this is {platform.system()}"]
    if os.geteuid() != 0:
        return ["needs root, to mount file systems and to make device files; run it with sudo, in a machine of its own"]
    packages = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    packages += ["qemu-user-static"] if userland.rule and not (RULES / userland.rule).exists() else []
    lacking = [f"needs other programs: apt-get install {' '.join(packages)}"] if packages else []
    if userland.rule and not BINFMT.exists():
        lacking.append("needs the kernel's binfmt_misc: modprobe binfmt_misc")
    if folder.exists() and any(folder.iterdir()) and not (folder / STAMP).exists():
        lacking.append(f"--folder {folder} has other files in it, and no userland; give an empty one")
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if (free := shutil.disk_usage(there).free) < ROOM and not (folder / STAMP).exists():
        lacking.append(f"needs {ROOM >> 30} GiB of disk for {folder}, there are {free >> 30}; give another --folder")
    return lacking


def apart(command: Sequence[str]) -> list[str]:
    """Return a command line that runs a command in namespaces of its own: nothing stays mounted or running.

    The first process there is a shell, which waits for those that lose their parents.
    """
    shell = ["sh", "-c", '"$@"; exit $?', "sh"]
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *shell, *command]


@contextmanager
def entered(userland: Userland, folder: Path) -> Iterator[None]:
    """Have a folder hold the userland, made if it is not there yet, with all that it needs mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    stamp = folder / STAMP
    with _rule(userland):
        if not stamp.exists() or stamp.read_text(encoding="utf-8") != userland.stamp():
            start = time.monotonic()
            _make(userland, folder)
            stamp.write_text(userland.stamp(), encoding="utf-8")
            print(f"Debian {userland.suite} in {folder}: made, {time.monotonic() - start:.0f} s", flush=True)
        _lend(folder)
        yield


@contextmanager
def _rule(userland: Userland) -> Iterator[None]:
    """Have the kernel start qemu for the processor's programs, from wherever they are, also after a chroot."""
    if not userland.rule:
        yield
        return
    subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", BINFMT], check=True)
    _, _, rule = (RULES / userland.rule).read_text(encoding="utf-8").strip().removeprefix(":").partition(":")
    rule, _, flags = rule.rpartition(":")
    name = f"zcrecord-{time.time_ns()}"
    text = f":{name}:{rule}:{flags if 'F' in flags else flags + 'F'}"
    (BINFMT / "register").write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        (BINFMT / name).write_text("-1", encoding="utf-8")  # before Linux 6.7 it would outlast the mount


def _make(userland: Userland, folder: Path) -> None:
    (folder / STAMP).write_text("", encoding="utf-8")  # until all of it is there, the next run makes it anew
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink():
            shutil.rmtree(item)
        elif item.name != STAMP:
            item.unlink()
    processor = [f"--arch={userland.processor}"] if userland.processor else []
    include = f"--include={','.join(userland.packages)}"
    run(["debootstrap", *processor, "--variant=minbase", include, userland.suite, str(folder)])


def _lend(folder: Path) -> None:
    """Mount what a userland takes from this machine: checkout, read-only, devices, and what reaches the network."""
    subprocess.run(["mount", "-t", "proc", "proc", folder / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/dev", folder / "dev"], check=True)  # its own has no terminals
    (folder / CHECKOUT[1:]).mkdir(exist_ok=True)
    subprocess.run(["mount", "--bind", "--options", "ro", ROOT, folder / CHECKOUT[1:]], check=True)
    for path in filter(os.path.exists, LENT):
        there = folder / path[1:]
        if not there.exists():
            there.parent.mkdir(parents=True, exist_ok=True)
            there.touch()
        subprocess.run(["mount", "--bind", path, there], check=True)


def inside(folder: Path, cwd: str, variables: Mapping[str, str], command: Sequence[str], *, user: int = 0) -> list[str]:
    """Return a command line that runs a command in a userland, with what pip is told here, and with variables."""
    told = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    told |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    told |= {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin:/usr/sbin:/sbin", **variables}
    settings = [f"{name}={value}" for name, value in told.items()]
    return ["chroot", f"--userspec={user}:{user}", str(folder), "env", "-i", f"--chdir={cwd}", *settings, *command]


def run(command: Sequence[str], *, timeout: float | None = None) -> str:
    """Run a command and return its output; ends the program, with that output, if it fails or takes too long."""
    start = time.monotonic()
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except BaseException as error:  # Ctrl-C reaches this program alone
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            output, _ = process.communicate()
    text = output.decode(errors="replace")
    if process.returncode:
        took = f"exit {process.returncode} after {time.monotonic() - start:.0f} s"
        took += f", of {timeout:.0f} that it may take" if timeout else ""
        raise SystemExit(f"{text[-20000:]}\ntools.machines: {' '.join(command)}: {took}")
    return text
