"""Build the firmware images, run them in QEMU, and print what they take as JSON: `python -m tools.firmware [FOLDER]`.

The folder keeps what is built; without one it is a temporary folder. The exit status is 0 if every class equals ONNX
Runtime's, 1 if one does not or a tool is missing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.firmware.figures import measure
from tools.firmware.images import FirmwareError


def main(arguments: list[str]) -> int:
    """Build, run and show; return the exit status."""
    try:
        with TemporaryDirectory() as temporary:
            figures = measure(Path(arguments[0] if arguments else temporary))
    except FirmwareError as error:
        print(f"tools/firmware: {error}", file=sys.stderr)
        return 1
    print(json.dumps(figures, indent=2))
    return 0 if all(row["equal_classes"] == row["images"] for row in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
