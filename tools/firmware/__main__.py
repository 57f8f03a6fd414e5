"""Build the firmware images, run them in QEMU, and show what they take.

    python -m tools.firmware [--json] [FOLDER]

The folder keeps what is built; without one it is a temporary folder. The exit status is 0 if every class equals ONNX
Runtime's, 1 if one does not or a tool is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tools.firmware.figures import BAD, measure
from tools.firmware.images import FirmwareError

__all__ = ["main"]

ROWS = {
    "flash": "flash, bytes",
    "code": "of it code",
    "ram": ".data and .bss",
    "stack": "stack",
    "instructions_per_inference": "instructions",
}
COLUMNS = {"float": "float32, symbols", "runtime": "float32, zcrecord.h", "int8": "int8, symbols"}
READING = {
    "open": "open digits.zcr, 7 tensors",
    "find": "find one of 7 tensors",
    "verify": "verify the index of 7 tensors",
    "find_1000": "find one of 1,000 tensors, mean",
    "find_1000_slowest": "find one of 1,000 tensors, slowest",
    "verify_1000": "verify the index of 1,000 tensors",
}


def show(console: Console, figures: dict[str, dict[str, Any]]) -> None:
    """Print the figures as tables."""
    table = Table("", *COLUMNS.values(), box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for key, title in ROWS.items():
        table.add_row(title, *(f"{figures[name][key]:,}" for name in COLUMNS))
    equal = (f"{figures[name]['equal_classes']} of {figures[name]['images']}" for name in COLUMNS)
    table.add_row("classes as ORT's", *equal)
    console.print(table)
    runtime = figures["runtime"]
    reading = Table("zcrecord.h", "instructions", box=SIMPLE_HEAD)
    reading.columns[1].justify = "right"
    for key, title in READING.items():
        reading.add_row(title, f"{runtime[key]:,}")
    console.print(reading)
    for name in BAD:
        console.print(f"{name}.zcr: {runtime[name]}", highlight=False)
    console.print(f"int8 logits that differ from ONNX Runtime's: {figures['int8']['logits_that_differ']}")
    console.print("Cortex-M3 (QEMU mps2-an385); gcc -Os, inference -O2; without the held-out images")


def main(arguments: list[str] | None = None) -> int:
    """Build, run and show; return the exit status."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m tools.firmware", description=summary)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="where it is built (default: temporary)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    chosen = parser.parse_args(arguments)
    try:
        with TemporaryDirectory() as temporary:
            figures = measure(chosen.folder or Path(temporary))
    except FirmwareError as error:
        print(f"tools/firmware: {error}", file=sys.stderr)
        return 1
    if chosen.json:
        print(json.dumps(figures, indent=2))
    else:
        show(Console(), figures)
    return 0 if all(row["equal_classes"] == row["images"] for row in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
