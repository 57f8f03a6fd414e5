"""Every element type comes back with every bit, in every shape; views and byte orders are drawn in test_round_trip."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import LimitError, PackedTensor, StringTensor
from zcrecord.dtypes import DType

SHAPES = [(), (1,), (3,), (2, 3), (3, 1, 5), (0,), (3, 0, 2), (0, 2**40), (1,) * 64, (2, 1) * 5 + (3,)]
EVERY = pytest.mark.parametrize("kind", r.NUMERIC, ids=lambda d: d.name)


@pytest.mark.exhaustive
@EVERY
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"rank{len(s)}x{math.prod(s)}")
def test_every_dtype_and_shape_comes_back(kind: DType, shape: tuple[int, ...]) -> None:
    array = r.filled(kind, shape)
    rec = r.round_trip({"x": array, "m": {"x": array}})
    r.assert_same(rec.tree(), {"x": array, "m": {"x": array}})
    info = rec.info("m.x")
    assert (info.dtype, info.bits, info.shape, info.strides) == (kind, kind.bits, shape, None)
    assert info.nbytes == math.ceil(math.prod(shape) * kind.bits / 8)


NARROW = [d for d in r.WHOLE if d.bits <= 16 and d.name != "bool"]


@pytest.mark.parametrize("kind", NARROW, ids=lambda d: d.name)
def test_every_bit_pattern_survives(kind: DType) -> None:
    assert kind.numpy is not None
    array = np.arange(1 << kind.bits, dtype=np.uint32).astype(f"<u{kind.bits // 8}").view(kind.numpy)
    assert r.round_trip({"x": array})["x"].tobytes() == array.tobytes()


@pytest.mark.parametrize("kind", r.PACKED, ids=lambda d: d.name)
@pytest.mark.parametrize("shape", [(), (7,), (4, 2, 3), (0, 4)], ids=str)
def test_narrow_elements_saved_again_are_the_same(kind: DType, shape: tuple[int, ...]) -> None:
    data = r.saved({"x": r.filled(kind, shape), "m": {"y": r.filled(kind, (9, 5), 1)}})
    rec, private = zcrecord.load_record(data), zcrecord.load_record(data, mode="c")
    unpacked = {"x": rec["x"].unpack(), "m": {**rec.module("m")}}
    for again in (rec, rec.tree(), unpacked, private, private.tree()):
        assert r.saved(again) == data


@pytest.mark.parametrize("rank", [65, 256])
def test_rank_above_64_is_refused_for_the_classes_that_could_have_it(rank: int) -> None:
    shape = (1,) * rank
    for tensor in (PackedTensor(np.ones(1, np.uint8), "int4", shape), StringTensor.from_strings(["a"], shape)):
        with pytest.raises(LimitError, match=rf"tensor 'm\.x': rank {rank} is more than 64"):
            r.saved({"m": {"x": tensor}})


TEXTS = [[], ["a"], ["", "x", ""], ["ä", "名前", "\U0001f600"], ["x" * 1000, "y"], ["12345678"], ["a b", "\n"]]


@pytest.mark.parametrize("texts", TEXTS, ids=lambda t: ascii(t)[:15])
def test_arrays_of_text_come_back_as_string_tensors(texts: list[str]) -> None:
    array = np.array(texts, np.str_)
    big, wide = array.astype(array.dtype.newbyteorder(">")), array.astype(np.dtypes.StringDType())
    rec = r.round_trip({"x": array, "big": big, "wide": wide, "step": array[::-1], "flat": array.reshape(1, -1).T})
    assert rec["x"].unpack().tolist() == rec["big"].unpack().tolist() == rec["wide"].unpack().tolist() == texts
    assert rec["step"].unpack().tolist() == texts[::-1]
    assert rec["flat"].shape == (len(texts), 1)
    assert rec["flat"].unpack().tolist() == [[text] for text in texts]
    assert rec.info("x").dtype.name == "string"


@pytest.mark.parametrize("digest", ["xxh3", "none", None])
@pytest.mark.parametrize("alignment", r.ALIGNMENTS)
def test_every_alignment_and_digest_gives_the_same_record(digest: str | None, alignment: int) -> None:
    tree = {d.name: r.filled(d, (3, 5)) for d in r.NUMERIC} | {"large": np.arange(1 << 17), "s": np.array(["a"])}
    rec = r.round_trip(tree, alignment=alignment, digest=digest)
    r.assert_same(rec.tree(), tree)
    for name in rec:
        info = rec.info(name)
        assert info.offset % alignment == 0
        assert info.alignment >= (max(alignment, 16384) if name == "large" else alignment)
        assert (info.digest is None) == (digest != "xxh3")


def test_arrays_over_any_memory_are_saved(tmp_path: Path) -> None:
    want = np.arange(12, dtype=np.float32)
    want.tofile(tmp_path / "raw")
    readonly = want.copy()
    readonly.flags.writeable = False
    tree = {
        "memmap": np.memmap(tmp_path / "raw", np.float32, "r"),
        "bytes": np.frombuffer(want.tobytes(), np.float32),
        "unaligned": np.frombuffer(b"x" + want.tobytes(), np.uint8)[1:].view(np.float32),
        "ctypes": np.ctypeslib.as_array((ctypes.c_float * 12)(*want)),
        "readonly": readonly,
        "subclass": want.view(np.recarray),
    }
    rec = r.round_trip(tree)
    assert {name: view.tolist() for name, view in rec.items()} == dict.fromkeys(tree, want.tolist())
    assert {type(view) for view in rec.values()} == {np.ndarray}
