"""Names, texts and paths as strangers may write them, and files of every format that hold them.

What must not come of them is left to `test_attacks_names`. The texts are legal: nothing here has to be refused.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from exchange import described, file_of, npy, tensor
from onnx_models import field, wire_model

import zcrecord

ESCAPES = [
    "\x1b[31mred", "\x1b[2J\x1b[H", "\x1b]0;title\x07", "\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;cm0gLXJm\x07",
    "\x1bP1;2|17/ab\x1b\\", "\x1bc", "\x9b31m", "\x9d0;c1\x9c", "\x07\x08\x08\x7f",
]  # fmt: skip
INVISIBLE = ["\u202egnp.exe", "\u2066x\u2069", "a\u200bb", "a\u00adb", "\ufeffbom", "\U000e0041tag",
             "e" + "\u0301" * 200]  # fmt: skip
LINES = ["two\nlines", "back\rhere", "tab\tbed", "\x0b\x0c", "\x85next", "\u2028line", "\u2029paragraph"]
MARKUP = ["[red]x[/red]", "[/]", "[link=http://x]y[/link]", ":smile:", "\\[", "%s%n", "{0}", "\\x1b[31m", "\\u202e"]
CODE = [
    "*/ int evil; /*", "??/", "??'", "c\\", "d\\\n#error e", 'e"; int f; "', "'", "//", "#define int", "$(touch evil)",
    "`touch evil`", "'''", '"""', "\\N{DASH}", "{{", "]]>", "<!--", "%>", "\\", "@", ".incbin", "; .globl main", "r#\"",
]  # fmt: skip
WORDS = ["class", "int", "fn", "self", "def", "main", "printf", "NULL", "__proto__", "constructor", "0", "007", "9x",
         "a.b", "a_b", "A.B", "a-b", "w", "w_shape", "w.shape", "é", "e\u0301", "ﬁ", "重み", "___", "-", "--help",
         "x" * 10_000]  # fmt: skip
NAMES = [*ESCAPES, *INVISIBLE, *LINES, *MARKUP, *CODE, *WORDS]

# As parts of paths: no slash, at most 255 bytes.
PATHS = [name for name in [*ESCAPES[:3], *INVISIBLE[:3], *LINES[:3], *MARKUP[:3], *CODE[:6]] if "/" not in name]


def archive(folder: Path) -> Path:
    """Save what has every name everywhere: tensors, modules, classes, attributes, their values, metadata."""
    record: dict[str, Any] = {name: np.full(3, i, np.float32) for i, name in enumerate(NAMES)}
    record["modules"] = {f"of {name}": {"w": np.ones(1), f"says {name}": name} for name in NAMES}
    record["lists"] = {f"list {i}": [name, name] for i, name in enumerate(NAMES)}
    path = folder / "hostile.zcr"
    metadata: dict[str, Any] = {name: name for name in NAMES} | {"list": NAMES}
    zcrecord.save_record(record, path, metadata=metadata, durable=False)
    return path


def foreign(folder: Path) -> list[Path]:
    """Write the names in every other format that is read here without its own package, one tensor a name."""
    stored = dict.fromkeys(NAMES)
    safe = {name: tensor(i, i + 1) for i, name in enumerate(stored)}
    texts = {"__metadata__": {name: name for name in stored}}
    members = [(f"{name}.npy", npy(described("'|u1'", "(1,)"), b"a")) for name in stored]
    one = [field(1, 1) + field(2, 2) + field(8, name.encode()) + field(9, b"a") for name in stored]
    nodes = [
        field(1, field(3, name.encode()) + field(5, field(1, name.encode()) + field(5, field(1, 0) + field(2, 2))))
        for name in stored
    ]
    made = {
        "in.safetensors": file_of({**texts, **safe}, bytes(len(safe))),
        "in.npz": zipped(members),
        "in.onnx": wire_model(*one, graph=b"".join(nodes)),
        "in.gguf": gguf(list(stored)),
    }
    for name, data in made.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in made]


def zipped(members: list[tuple[str, bytes]]) -> bytes:
    """A zip file with these members, their names as they are."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for name, data in members:
            info = zipfile.ZipInfo("x")
            info.filename = name  # which the constructor would change
            opened.writestr(info, data)
    return file.getvalue()


def gguf(names: list[str], kinds: int = 24) -> bytes:
    """A GGUF file of int8 tensors of one element, and texts as metadata, named so."""

    def text(value: str) -> bytes:
        return number(len(value.encode())) + value.encode()

    def number(value: int, nbytes: int = 8) -> bytes:
        return value.to_bytes(nbytes, "little")

    fields = b"".join(text(name) + number(8, 4) + text(name) for name in names)
    tensors = b"".join(
        text(name) + number(1, 4) + number(1) + number(kinds, 4) + number(32 * i) for i, name in enumerate(names)
    )
    head = b"GGUF" + number(3, 4) + number(len(names)) + number(len(names)) + fields + tensors
    return head + bytes(-len(head) % 32) + bytes(32 * len(names))
