"""System tools that tests need: the Debian packages that bring them, which are missing, and a PATH without any.

    python tools/system_tools.py missing        # a line for each missing tool: its name, a tab, its Debian packages
    python tools/system_tools.py bare FOLDER    # links in FOLDER what a Debian has that was just installed, and Python

`tools/test --all` installs what is missing; `.ci/run` runs the first two commands of README with PATH=FOLDER, as a
stranger's machine would. Needs no package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

# The command, or a compiler and an option with which it has to build a program, and its Debian packages.
PACKAGES = {
    "gcc": "gcc libc6-dev",
    "cc": "gcc libc6-dev",
    "g++": "g++",
    "gcc -m32": "gcc-multilib",
    "g++ -m32": "g++-multilib",
    "clang-19": "clang-19 libclang-rt-19-dev",
    "clang++-19": "clang-19",
    "readelf": "binutils",
    "nm": "binutils",
    "strip": "binutils",
    "objcopy": "binutils",
    "objdump": "binutils",
    "ldd": "libc-bin",
    "mkfs.xfs": "xfsprogs",
    "mkfs.btrfs": "btrfs-progs",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi",
    "arm-none-eabi-gcc --specs=nosys.specs": "libnewlib-arm-none-eabi",
    "arm-none-eabi-nm": "binutils-arm-none-eabi",
    "arm-none-eabi-size": "binutils-arm-none-eabi",
    "qemu-system-arm": "qemu-system-arm",
    "qemu-x86_64": "qemu-user",
    "x86_64-w64-mingw32-gcc": "gcc-mingw-w64-x86-64",
    "osslsigncode": "osslsigncode",
    "wine": "wine wine64",
    "xtensa-lx106-elf-gcc": "gcc-xtensa-lx106",
    "avr-gcc": "gcc-avr avr-libc",
    "simavr": "simavr",
    "rustc": "rustc",
    "cargo": "cargo",
    "/usr/bin/rustc": "rustc libstd-rust-dev",
    "wasm-ld-14": "libstd-rust-dev-wasm32 lld-14",
    "wasm-ld-19": "lld-19",
    "make": "make",
    "cmake": "cmake",
    "ninja": "ninja-build",
    "node": "nodejs",
    "npm": "npm",
    "java": "default-jre-headless",
    "javac": "default-jdk-headless",
    "chromium": "chromium",
    "firefox-esr": "firefox-esr",
    "openssl": "openssl",
    "zsh": "zsh",
    "fish": "fish",
    "zstd": "zstd",
    "file": "file",
    "gzip": "gzip",
    "unshare": "util-linux",
    "mount": "mount",
}
# Half a multilib compiles <stdlib.h> and has neither <asm/errno.h>, which <errno.h> includes, nor the sanitizers. Where
# Debian's compilers for other machines are installed, such as gcc-s390x-linux-gnu, no more than that half is left.
_PROBE = b"#include <errno.h>\n#include <stdlib.h>\nint main(void) { return errno; }\n"
_ALSO = {"-m32": ["-fsanitize=address,undefined"]}


@lru_cache
def has(tool: str) -> bool:
    """Return True if a tool is on PATH and, of a compiler with an option, builds the tests' programs.

    A tool with a folder in its name is there only if that folder is on PATH. Only Linux has any: elsewhere a command
    of that name is another program, such as the clang that macOS calls gcc.
    """
    if sys.platform != "linux":
        return False
    command, *options = tool.split()
    folder = os.path.dirname(command)
    if shutil.which(command) is None or (folder and folder not in os.get_exec_path()):
        return False
    if not options:
        return True
    with tempfile.TemporaryDirectory() as scratch:
        language = "c++" if "++" in command else "c"
        more = [flag for option in options for flag in _ALSO.get(option, ())]
        build = [command, *options, *more, "-x", language, "-", "-o", f"{scratch}/main"]
        return subprocess.run(build, input=_PROBE, capture_output=True).returncode == 0


def link_bare_commands(folder: Path) -> None:
    """Link in a folder the commands of Debian's required packages, but for PACKAGES', and this Python as `python3`."""
    query = ["dpkg-query", "--show", "--showformat", "${Priority} ${Package}\n"]
    listed = subprocess.run(query, check=True, capture_output=True, text=True).stdout.splitlines()
    required = [line.partition(" ")[2] for line in listed if line.startswith("required ")]
    files = subprocess.run(["dpkg", "--listfiles", *required], check=True, capture_output=True, text=True).stdout
    commands = {Path(file) for file in files.splitlines() if os.path.basename(os.path.dirname(file)) in ("bin", "sbin")}
    for command in commands:
        if command.name not in PACKAGES and os.access(command, os.X_OK) and not (folder / command.name).exists():
            (folder / command.name).symlink_to(command)
    (folder / "python3").symlink_to(Path(sys.executable).resolve())


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["missing"]:
            print(*(f"{tool}\t{packages}" for tool, packages in PACKAGES.items() if not has(tool)), sep="\n", end="")
        case ["bare", folder]:
            link_bare_commands(Path(folder))
        case _:
            sys.exit(__doc__)
