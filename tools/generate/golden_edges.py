"""Valid archives at the edges of what FORMAT.md allows, which no writer of ours writes, or only for such a record.

They are in the folder `edges` of tests/conformance, beside each what it must load as, like the golden archives.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import malformed
import numpy as np
import windows
from attacks import tricks
from forge import Forge, build_index

from zcrecord import StringTensor, dtypes

from .golden import LATER, Case, expected, f32, saved, text_of
from .golden_contents import Content
from .invalid import chain, lists_used_up
from .invalid_alone import table_to_the_end, vtable_behind

FOLDER = Path("tests/conformance/edges")
FOLDERS: tuple[Path, ...] = (FOLDER,)

SIZES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 64, 127, 128, 129, 239, 240, 241, 255, 1023, 1024, 1025, 1088, 2048, 2049)
# Characters of one byte more than those before them, the neighbours of the surrogates, and what is awkward in JSON.
CHARACTERS = ("\x01", "\x7f", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\ufeff", "\uffff", "\U00010000",
              "\U0010ffff", '"', "\\", "/", "\u2028", " ")  # fmt: skip
PLAIN = {"w": f32(2, 3), "m": {"n": 7, "b": np.ones(3, np.uint8)}}


def case(about: str, data: bytes, record: Any, **more: Any) -> Case:
    """Return a case of an archive that is made already."""
    embedded, archive = more.pop("embedded", None), more.pop("archive", None)
    return Case(about, lambda: data, Content(record, **more), embedded, archive)


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


def layouts() -> Iterator[tuple[str, Case]]:
    """Yield archives laid out in other ways than a writer does."""
    data = saved(PLAIN)
    yield "front_unsealed", case("index in front, header not sealed (R8)", Forge(data, sealed=False).seal(), PLAIN)
    yield (
        "back_empty",
        case("index at the back, no payloads (R13)", Forge(saved({"n": 1}), front=False).seal(), {"n": 1}),
    )
    for embedded in ("prefix", "suffix"):
        about = f"opened as {embedded}, with no bytes beside the archive (R15, R16)"
        yield f"{embedded}_alone", case(about, data, PLAIN, embedded=embedded)
    for name, change in {"vtable": vtable_behind(), "table": table_to_the_end()}.items():
        f = Forge(saved({"n": 1}))
        change(f)
        yield f"{name}_last", case(f"a {name} that ends where the index does (R20)", f.seal(), {"n": 1})
    f = Forge(saved(PLAIN, alignment=16))
    f.base_log2 = 12
    f.payload[32:] = bytes(4080 - 32) + f.payload[32:48]
    f.set("payloads", 1, offset=4080)
    yield "hole", case("a hole just smaller than the base alignment (R59)", f.seal(), PLAIN)
    f = Forge(data)
    f.add("by_module", range(2))
    yield "by_module", case("a by_module that could be left out (R42)", f.seal(), PLAIN)
    f = Forge(saved({}))
    for vector in ("dims", "strides", "words", "payloads", "tensors", "by_name", "by_module", "attributes", "metadata"):
        f.columns.pop(vector, None)
        f.add(vector, [])
    yield "empty_vectors", case("vectors that are there without items (R22, R23)", f.seal(), {})
    f = Forge(saved({f"t{i}": f32(1) + i for i in range(4)}))
    f.columns["tensors"]["place"] = (3, 2, 1, 0)
    turned = {f"t{i}": f32(1) + i for i in (3, 2, 1, 0)}
    yield "places", case(
        "children in another order than their tensors were saved in (R44)", f.seal(), turned,
        order=["t0", "t1", "t2", "t3"],
    )  # fmt: skip
    deep: dict[str, Any] = {}
    for _ in range(99):
        deep = {"a": deep}
    yield "deep", case("modules nested 100 deep, all names ends of one text (R40)", chain(100), deep)
    f = tricks.attributes(40, {"n": "a"}).use_up("attributes", "value")
    texts = {f"{i:06}": "x" * (int(row["value"]) >> 32) for i, row in enumerate(f.columns["attributes"])}
    yield "budget", case("texts that take all that R30 allows", f.seal(), texts)
    f = lists_used_up()
    lists = {f"{i:06}": [0] * (int(row["value"]) >> 32) for i, row in enumerate(f.columns["attributes"])}
    yield "budget_lists", case("lists that take all that R30 allows", f.seal(), lists)
    for name, program, archive in windows.found():
        if name in ("64 bits", "32 bits", "4 zeros of padding", "no more than five directories"):
            yield f"signed_{name.replace(' ', '_')}", case(
                "before the signature of a Windows program (R16)", program, malformed.PLAIN, embedded="suffix",
                archive=archive, ties=[["w", "same"]],
            )  # fmt: skip
        if name == "four directories, an archive in the table":
            yield "unsigned", case(
                "behind a Windows program without a table of certificates (R16)", program, {"other": 1},
                embedded="suffix", archive=archive,
            )  # fmt: skip


def one_to_a_byte(kinds: list[dtypes.DType]) -> Case:
    """Return elements of packed types, each in a byte of its own."""
    record = {kind.name: np.arange(5, dtype=np.uint8) % (1 << kind.bits) for kind in kinds}
    f = Forge(saved(record))
    f.columns["tensors"]["dtype"], f.columns["tensors"]["bits"] = [kind.code for kind in kinds], 8
    codes = {kind.name: (kind.code, 8) for kind in kinds}
    return case("types below 8 bits, one to a byte (R46)", f.seal(), record, codes=codes)


def forged() -> Iterator[tuple[str, Case]]:
    """Yield archives with entries that no writer of ours makes."""
    narrow = [kind for kind in dtypes.DTYPES if kind.packed]
    yield "one_to_a_byte", one_to_a_byte([kind for kind in narrow if kind not in LATER])
    for kind in narrow:
        if kind in LATER:
            yield f"one_to_a_byte_{kind.name}", one_to_a_byte([kind])
    yield "strides", strided()
    far = {"a": 2**53, "b": -(2**53) - 1, "c": 2**56, "d": -(2**56)}
    rows: dict[str, Any] = {name: np.arange(3.0)[None] + i for i, name in enumerate(far)}
    f = Forge(saved(rows))
    for name, stride in far.items():
        f.set("tensors", name, strides=f.add("strides", [stride, 1]))
    yield "far_strides", case(
        "strides of an axis of one item, which lead nowhere (R53)", f.seal(), rows,
        strides={name: (stride, 1) for name, stride in far.items()},
    )  # fmt: skip
    yield "views_at_the_limit", many_views(over=False)
    yield "views_over_the_limit", many_views(over=True)
    huge = {"a": (0, 2**56), "b": (2**53, 0), "c": (0, 2**28, 2**28)}
    f = Forge(saved({name: np.zeros((0,) * len(dims), np.uint8) for name, dims in huge.items()}))
    for name, dims in huge.items():
        f.set("tensors", name, dims=f.add("dims", dims))
    f.set("tensors", "b", dtype=dtypes.by_name["float64"].code, bits=64)
    empty = {name: Huge(dims, np.uint8 if name != "b" else np.float64) for name, dims in huge.items()}
    yield "claims", case("shapes of no elements that claim 2^59 bits (R49)", f.seal(), empty)
    words = StringTensor(
        np.frombuffer(b"\xffa\0\xc3\0\0\0\0" + np.array([0, 1, 3, 4], "<u8").tobytes(), np.uint8), (3,)
    )
    f = Forge(saved({"s": StringTensor.from_strings(["a", "bc", "d"])}))
    f.payload[: len(words.data)] = words.data.tobytes()
    yield "octets", case("strings that are not UTF-8, and one with NUL (R71)", f.digest().seal(), {"s": words})
    unknown = {99: 1, 100: 7, 101: 12, 102: 24, 103: 128, 255: 100}
    raw = {f"of{bits}": counted(-(-3 * bits // 8)) for bits in unknown.values()}
    f = Forge(saved(raw))
    f.columns["tensors"]["dtype"], f.columns["tensors"]["bits"] = list(unknown), list(unknown.values())
    f.columns["tensors"]["dims"] = f.add("dims", [3])
    shaped = {name: Huge((3,), np.uint8, data) for name, data in raw.items()}
    codes = {f"of{bits}": (code, bits) for code, bits in unknown.items()}
    yield "later_dtypes", case("element types of a later version (R46, R77)", f.seal(), shaped, codes=codes)
    raw = {"w": counted(9)}
    f = Forge(saved(raw)).set("tensors", "w", dtype=102, bits=24, byte_offset=6)
    f.set("tensors", "w", dims=f.add("dims", [3]), strides=f.add("strides", [-1]))
    backwards = {"w": Huge((3,), np.uint8, counted(9).reshape(3, 3)[::-1])}
    yield "later_strides", case(
        "strides of an element type of a later version (R77)", f.seal(), backwards, codes={"w": (102, 24)},
        strides={"w": (-1,)},
    )  # fmt: skip
    f = Forge(saved(PLAIN))
    f.index = longer_vtable(build_index(f.columns, f.digest_kind))
    yield "later_fields", case("forty fields of a later version (R78)", f.seal(), PLAIN)


def longer_vtable(index: bytearray) -> bytearray:
    """Put another vtable, of forty fields more, behind an index: each is the vector that `metadata` is."""
    vtable, table = 8, 40  # where `build_index` lays them
    places = np.frombuffer(index, "<u2", 14, vtable).tolist()
    places = [2 * (len(places) + 40), *places[1:], *[48] * 40]
    index[table : table + 4] = np.int32(table - len(index)).tobytes()
    index += np.array(places, "<u2").tobytes()
    return index + bytes(-len(index) % 8)


def strided() -> Case:
    """Return views of one payload of six floats, whose strides reach its ends and no further."""
    base = f32(6)
    views: dict[str, tuple[Any, tuple[int, ...], int]] = {
        "again": (np.broadcast_to(base[:2], (3, 2)), (0, 1), 0),
        "backwards": (base[::-1], (-1,), 20),
        "ends": (base[[[5, 5], [0, 0]]], (-5, 0), 20),
        "one": (base[5], (), 20),
        "far": (base[[[0, 5]]], (2**56, 5), 0),
        "far_back": (base[[[0, 5]]], (-(2**56), 5), 0),
        "few": (base[[2, 5]], (3,), 8),
        "mixed": (base[[[3, 2], [4, 3], [5, 4]]], (1, -1), 12),
    }
    f = Forge(saved({"base": base} | dict.fromkeys(views, base)))
    for name, (value, strides, byte_offset) in views.items():
        shape = np.shape(value)
        f.set("tensors", name, rank=len(shape), byte_offset=byte_offset)
        f.set("tensors", name, dims=f.add("dims", shape), strides=f.add("strides", strides))
    record = {"base": base} | {name: np.asarray(value) for name, (value, _, _) in views.items()}
    kept = {name: strides for name, (_, strides, _) in views.items()}
    return case(str(strided.__doc__), f.seal(), record, ties=[list(record)], strides=kept)


def many_views(*, over: bool) -> Case:
    """Return views of 16 bytes again and again that take as many bytes as R76 allows, or an element more.

    There are 127 of a whole payload, a shorter one, and two that count once: the same view, and one of a payload of
    the very same range.
    """
    count, item = 130, 16
    f = tricks.tensors(count, bytes(item), rank=1, strides=0, dtype=dtypes.by_name["complex128"].code, bits=128)
    f.add("strides", [0])
    f.add("payloads", f.columns["payloads"])
    f.columns["dims"] = np.zeros(2, "<u8")
    index = len(build_index(f.columns, f.digest_kind))
    nbytes = (index // item + 1) * item
    whole, shorter = nbytes // item, (64 * index - 63 * nbytes) // item + over
    base = counted(nbytes).view(np.complex128)
    rows = f.columns["tensors"]
    f.columns["dims"][:] = whole, shorter
    rows["dims"], rows["payload"] = np.arange(count) == 127, np.arange(count) == 129
    rows["byte_offset"] = item * np.array([*range(128), 0, 0])
    f.columns["payloads"]["nbytes"] = nbytes
    f.payload = bytearray(base.tobytes() + bytes(-nbytes % 64))
    sizes = {f.name(row): (int(row["byte_offset"]) // item, whole if row["dims"] == 0 else shorter) for row in rows}
    record = {name: np.broadcast_to(base[at], size) for name, (at, size) in sizes.items()}
    names = list(record)
    about = "more strided bytes than a content digest may cover" if over else "as many strided bytes as are allowed"
    return case(
        f"{about} (R76)", f.digest().seal(), record, ties=[names[:-1]], stored_once=[[names[0], names[-1]]],
        strides=dict.fromkeys(names, (0,)),
    )  # fmt: skip


class Huge:
    """A tensor as golden_contents takes one, whose shape no array has, or whose type none."""

    def __init__(self, shape: tuple[int, ...], kind: Any, data: Any = None) -> None:
        self.shape, self.dtype, self.data = shape, np.dtype(kind), np.zeros(0, kind) if data is None else data

    def tobytes(self) -> bytes:
        """Return its bytes."""
        return bytes(self.data.tobytes())


def cases() -> dict[str, Case]:
    """Return every case by the name of its files."""
    return dict((*contents(), *layouts(), *forged()))


@cache
def files() -> dict[Path, str | bytes]:
    """Return every archive, and what it must load as."""
    out: dict[Path, str | bytes] = {}
    for name, made in cases().items():
        data = made.build()
        out[FOLDER / f"{name}.zcr"] = data
        told = expected(made, data)
        if name.startswith("views_"):
            for tensor in told["tensors"]:  # a megabyte, and 16,000 names
                del tensor["elements"], tensor["tied"]
        if name == "views_over_the_limit":
            told["content_digest"] = None
        out[FOLDER / f"{name}.json"] = text_of(told)
    return out
