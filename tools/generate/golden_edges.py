"""Valid archives at the edges of what FORMAT.md allows, which few writers write.

They are in the folder `edges` of tests/conformance, beside each what it must load as, like the golden archives. An
archive that no writer of ours writes needs a case until it is committed: from then on it stays as it is, and has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from forge import Forge

from zcrecord import dtypes

from . import committed
from .golden import LATER, Case, expected, f32, saved, text_of
from .golden_contents import Content

FOLDER = Path("tests/conformance/edges")
FOLDERS: tuple[Path, ...] = (FOLDER,)

SIZES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 64, 127, 128, 129, 239, 240, 241, 255, 1023, 1024, 1025, 1088, 2048, 2049)
# Characters of one byte more than those before them, the neighbours of the surrogates, and what is awkward in JSON.
CHARACTERS = ("\x01", "\x7f", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\ufeff", "\uffff", "\U00010000",
              "\U0010ffff", '"', "\\", "/", "\u2028", " ")  # fmt: skip


def case(about: str, data: bytes, record: Any, **more: Any) -> Case:
    return Case(about, lambda: data, Content(record, **more))


def counted(size: int) -> Any:
    """Return the bytes 0, 1, ..., 250, 0, 1, ..., of which FORMAT.md has the digests."""
    return (np.arange(size) % 251).astype(np.uint8)


def contents() -> Iterator[tuple[str, Case]]:
    """Yield records that a writer writes as they are."""
    sizes = {f"n{size:04}": counted(size) for size in SIZES} | {"n0000": counted(0)}
    yield "digests", case("payloads for each way in which XXH3 works (R73)", saved(sizes, alignment=16), sizes)
    values: dict[str, Any] = {
        "least": -(2**63), "most": 2**63 - 1, "more": 2**63, "all": 2**64 - 1, "one": [-1], "ints": [-(2**63), 0],
        "uints": (0, 2**64 - 1),
        "floats": [0.0, -0.0, 5e-324, 1.7976931348623157e308, float("-inf"), float("nan")],
        "no": [False], "nils": (None,), "list": [], "tuple": (), "texts": ["", "\0", "a\0", "\0a"],
        "blobs": (b"", b"\0"),
    }  # fmt: skip
    yield "values", case(
        "ends of the types of values, in every form (R66 to R69)", saved(values, metadata=values), values,
        metadata=values,
    )  # fmt: skip
    names: dict[str, Any] = {
        f"{c}x{c}": np.array([i], np.uint8) for i, c in enumerate(CHARACTERS)
    } | {f"m{c}": {c: c} for c in CHARACTERS} | {"long" * 250: 1}  # fmt: skip
    yield "names", case("characters in names, keys and texts (R28)", saved(names), names)
    returns: dict[str, Any] = {f"a{c}": np.array([i], np.uint8) for i, c in enumerate(("", "\r", "\r\r", "\r\u2028"))}
    yield "returns", case("names that end in carriage returns", saved(returns, alignment=16), returns)
    keys = {0: 1, "00": 2, 2**63: 3, "18446744073709551616": 4, "-9223372036854775809": 5, -1: 6,
            "+1": 7, "1.0": 8, " 1": 9, "\u0661": 10}  # fmt: skip
    yield "numbers", case("keys of a NUMBERED module that are integers, or nearly", saved(keys), keys)
    empty = {"a": np.zeros((0, 2**31), np.int8), "b": np.zeros((3, 0), np.float64), "c": np.zeros(0, str)}
    yield "empty_tensors", case("tensors without elements (R50)", saved(empty), empty)
    ranks = {"none": np.array(1, np.int8), "most": f32(6).reshape((1,) * 62 + (2, 3))}
    yield "ranks", case("ranks 0 and 64 (R47)", saved(ranks), ranks)
    yield "alignment_65536", case("the strongest alignment (R4)", saved({"n": 1}, alignment=65536), {"n": 1})
    tuples: dict[str, Any] = {"t": ({}, ({}, [])), "l": [[[]], {"a": [None, {}]}]}
    yield "modules", case("lists and tuples of modules and of nothing", saved(tuples), tuples)
    texts: dict[str, Any] = {"empty": np.array(["", ""]), "one": np.array(""), "whole": np.array(["12345678", ""])}
    yield "strings", case("strings that are all empty, or end where their table begins (R71)", saved(texts), texts)
    nans = np.array([0x7F800001, 0xFF800001, 0x7FBFFFFF, 0x7FC00001, 0xFFFFFFFF, 0x7FA00000, 1, 0x80000000], np.uint32)
    pairs = nans[::-1].copy().view(np.complex64)
    turned = {"float": nans.view(np.float32).reshape(4, 2).T, "complex": pairs.reshape(2, 2).T}
    yield "nans", case(
        "strided elements with signalling NaNs, which keep their bits", saved(turned), turned,
        strides={"float": (1, 2), "complex": (1, 2)},
    )  # fmt: skip


def one_to_a_byte(kinds: list[dtypes.DType]) -> Case:
    """Return elements of packed types, each in a byte of its own."""
    record = {kind.name: np.arange(5, dtype=np.uint8) % (1 << kind.bits) for kind in kinds}
    f = Forge(saved(record))
    f.columns["tensors"]["dtype"], f.columns["tensors"]["bits"] = [kind.code for kind in kinds], 8
    codes = {kind.name: (kind.code, 8) for kind in kinds}
    return case("types below 8 bits, one to a byte (R46)", f.seal(), record, codes=codes)


def cases() -> dict[str, Case]:
    narrow = [kind for kind in dtypes.DTYPES if kind.packed]
    packed = {"one_to_a_byte": one_to_a_byte([kind for kind in narrow if kind not in LATER])}
    packed |= {f"one_to_a_byte_{kind.name}": one_to_a_byte([kind]) for kind in narrow if kind in LATER}
    return dict(contents()) | packed


@cache
def files() -> dict[Path, str | bytes]:
    """Return every archive, and what it must load as."""
    out = committed(FOLDER)
    for name, made in cases().items():
        data = made.build()
        out[FOLDER / f"{name}.zcr"], out[FOLDER / f"{name}.json"] = data, text_of(expected(made, data))
    return out
