"""The golden archives of references: an index of a safetensors file, and a record saved with that as its base.

The JSON comes from the values that went in, as that of the other golden archives does.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import zcrecord
from zcrecord.formats import convert

from .golden import f32, text_of
from .golden_contents import Content, describe

FOLDER = Path("tests/data/references")
FOLDERS: tuple[Path, ...] = (FOLDER,)

LARGE = f32(20, 30)
CONTENTS = {
    "index": Content({"layers": [{"w": LARGE}, {"w": LARGE * 2}], "bias": f32(5), "step": 5, "blob": b"in the index"}),
    "tuned": Content(
        {"layers": [{"w": LARGE}, {"w": LARGE * 3}], "bias": f32(5), "step": 6, "note": b"in the archive"}
    ),
}


def files() -> dict[Path, str | bytes]:
    """Return the safetensors file, the two archives, and what they must load as."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        zcrecord.save_record(CONTENTS["index"].record, folder / "made.zcr")
        convert(folder / "made.zcr", folder / "model.safetensors")
        zcrecord.index(folder / "model.safetensors", folder / "index.zcr")
        zcrecord.save_record(CONTENTS["tuned"].record, folder / "tuned.zcr", base=folder / "index.zcr")
        names = ("model.safetensors", "index.zcr", "tuned.zcr")
        out: dict[Path, str | bytes] = {FOLDER / name: (folder / name).read_bytes() for name in names}
    about = {"index": "an index of a safetensors file, bytes in the archive itself", "tuned": "a record with a base"}
    return out | {
        FOLDER / f"{name}.json": text_of({"about": about[name]} | describe(c)) for name, c in CONTENTS.items()
    }
