"""Build the firmware images, run them in QEMU, and read what their ELF files say.

Knows make, QEMU and the binutils of arm-none-eabi. What the figures are compared with is left to `__main__` and tests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).resolve().parent
# Commands, and the Debian packages that bring them.
TOOLS = {
    "make": "make",
    "arm-none-eabi-gcc": "gcc-arm-none-eabi",  # which has the headers and libgcc that freestanding programs need
    "qemu-system-arm": "qemu-system-arm",
}
INSTRUCTIONS_PER_TICK = 40  # as in board.h
MODEL_ADDRESS = 0x00200000  # as in board.ld
SECONDS = 60
QEMU = [
    *("qemu-system-arm", "-M", "mps2-an385", "-display", "none", "-monitor", "none", "-serial", "none"),
    *("-chardev", "stdio,id=host", "-semihosting-config", "enable=on,target=native,chardev=host"),
    *("-icount", "shift=0"),
]


class FirmwareError(Exception):
    """A tool that is missing or failed; what it said."""


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an ELF file that is in the device's memory: where, how large, and readelf's flags, such as `WA`."""

    name: str
    kind: str
    address: int
    nbytes: int
    flags: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """A symbol of an ELF file; `kind` is nm's letter."""

    address: int
    nbytes: int
    kind: str


@dataclass(frozen=True, slots=True)
class Image:
    """Symbols and sections of an ELF file, and the bytes of its flash."""

    sections: dict[str, Section]
    symbols: dict[str, Symbol]
    flash: bytes

    @property
    def ram(self) -> int:
        """Bytes of memory that are taken while it runs, without the stack."""
        return sum(s.nbytes for s in self.sections.values() if "W" in s.flags)

    def bytes_of(self, name: str) -> bytes:
        symbol = self.symbols[name]
        return self.flash[symbol.address : symbol.address + symbol.nbytes]


@dataclass(slots=True)
class Run:
    """Report of an image that ran.

    Attributes:
        status: its exit status.
        classes, words: of each image, in order; the logits are 32-bit words.
        sums: ticks, and how many times what took them was done.
        outcomes, statuses: what zcrecord.h returned, by name and as a number: below 128 that of the rule broken.
        addresses: of tensors, where the archive has them.
        text: all of it.
    """

    status: int
    classes: list[int] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)
    sums: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    text: str = ""

    @property
    def logits(self) -> npt.NDArray[Any]:
        """The words as an array, uint32; `.view(np.float32)` of what was computed in floating point."""
        return np.array(self.words, np.uint32)

    def instructions(self, what: str) -> float:
        ticks, count = self.sums[what]
        return ticks * INSTRUCTIONS_PER_TICK / count


def missing_tools() -> str:
    """Return one line that says which tools are missing and how to install them; an empty one if none is."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if not missing:
        return ""
    packages = " ".join(TOOLS[tool] for tool in missing)
    return f"needs {', '.join(missing)}; on Debian and Ubuntu: apt-get install {packages}"


def build(folder: Path) -> None:
    """Have the images and archives lie in a folder, made anew where their sources are newer.

    Raises:
        FirmwareError: A tool is missing, or make failed.
    """
    if missing := missing_tools():
        raise FirmwareError(missing)
    folder.mkdir(parents=True, exist_ok=True)
    _call(["make", "-s", "-C", str(HERE), f"BUILD={folder.resolve()}", f"PYTHON={sys.executable}"])


def run(elf: Path, model: Path | None = None) -> Run:
    """Run an image, with an archive in the partition for models, and return what it reported.

    One instruction takes one nanosecond of the machine's time, whatever the host does.

    Raises:
        FirmwareError: QEMU failed, or the image did not end.
    """
    loader = [] if model is None else ["-device", f"loader,file={model},addr={MODEL_ADDRESS:#x},force-raw=on"]
    command = [*QEMU, *loader, "-kernel", str(elf)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise FirmwareError(f"{elf.name} did not end within {SECONDS} seconds") from None
    if done.stderr and not done.stdout:  # it may warn; but what fails says so before the image says anything
        raise FirmwareError(f"{elf.name}: {done.stderr.strip()}")
    return _parsed(done.returncode, done.stdout)


def _parsed(status: int, text: str) -> Run:
    out = Run(status, text=text)
    for line in text.splitlines():
        match line.split():
            case ["class", number, found, *words]:
                assert int(number) == len(out.classes), f"images are reported in order, got {line!r}"
                out.classes.append(int(found))
                out.words.append([int(word, 16) for word in words])
            case ["ticks", name, ticks, count]:
                out.sums[name] = int(ticks), int(count)
            case ["outcome", name, kind, code]:
                out.outcomes[name] = kind
                out.statuses[name] = int(code)
            case ["address", name, address]:
                out.addresses[name] = int(address, 16)
            case [name, value] if value.isdecimal():
                out.values[name] = int(value)
    return out


def examine(elf: Path) -> Image:
    """Return an image's sections, symbols and flash.

    Raises:
        FirmwareError: The file cannot be read.
    """
    sections = {}
    for line in _call(["arm-none-eabi-readelf", "-SW", str(elf)]).splitlines():
        # [ 1] .text PROGBITS 00000000 001000 000a50 00 AX 0 0 4
        parts = line.partition("]")[2].split()
        if len(parts) == 10 and "A" in parts[6]:
            name, kind, address, _, nbytes, _, flags = parts[:7]
            sections[name] = Section(name, kind, int(address, 16), int(nbytes, 16), flags)
    symbols = {}
    for line in _call(["arm-none-eabi-nm", "-S", str(elf)]).splitlines():
        *numbers, kind, name = line.split()
        size = numbers[1] if len(numbers) == 2 else "0"
        symbols[name] = Symbol(int(numbers[0], 16) if numbers else 0, int(size, 16), kind)
    flash = elf.with_suffix(".bin")
    _call(["arm-none-eabi-objcopy", "-O", "binary", str(elf), str(flash)])
    return Image(sections, symbols, flash.read_bytes())


def _call(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise FirmwareError(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-4000:]}")
    return done.stdout
