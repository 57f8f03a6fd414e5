"""Any box of a tensor is loaded equal to numpy's, by every loader, and as a view where it can be one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from exhaustive import rounds
from hypothesis import given, settings
from hypothesis import strategies as st
from split_catalogues import boxes_along, save_split

import zcrecord
from zcrecord.errors import SourceError, UnsupportedError
from zcrecord.loaders import load, load_into, plan_load, shard
from zcrecord.loaders.torch import TorchLoader

OWN = [name for name in load._OWN if name != "cpu"]  # as in test_loaders
LOADERS = [*OWN, "torch"]
own = pytest.mark.parametrize("how", OWN)
every = pytest.mark.parametrize("how", LOADERS)
BASE = np.arange(6 * 7 * 8, dtype=np.int32).reshape(6, 7, 8)
TENSORS: dict[str, Any] = {
    "plain": BASE + 1,
    "turned": np.asfortranarray(BASE + 2),
    "middle": (BASE + 3).transpose(1, 2, 0),
    "every other": np.ascontiguousarray(BASE + 4)[:, ::2],
    "backwards": np.ascontiguousarray(BASE + 5)[::-1],
    "half": (BASE % 100).astype(ml_dtypes.bfloat16),
    "bytes": BASE.astype(np.int8),
    "line": np.arange(77.0),
}
MIB = 1 << 20


def loaded(record: Any, how: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    """Return arrays, over the memory of torch's tensors; tied tensors are one array."""
    found = load_into(record, TorchLoader("cpu", readers=2) if how == "torch" else how, *arguments, **options)
    arrays = {id(value): _array(value) for value in found.values()}
    return {name: arrays[id(value)] for name, value in found.items()}


def _array(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.view(torch.int16).numpy().view("bfloat16") if value.dtype == torch.bfloat16 else value.numpy()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> zcrecord.Record:
    return saved(tmp_path_factory.mktemp("boxes"), TENSORS)


def saved(folder: Path, tree: Any) -> zcrecord.Record:
    zcrecord.save_record(tree, folder / "m.zcr", durable=False)
    return zcrecord.load_record(folder / "m.zcr")


@st.composite
def boxes(draw: st.DrawFn) -> tuple[str, tuple[Any, ...]]:
    name = draw(st.sampled_from(list(TENSORS)))
    shape = TENSORS[name].shape
    box: list[Any] = [slice(*draw(st.tuples(*[st.none() | st.integers(-n - 1, n + 1)] * 2))) for n in shape]
    dots = draw(st.integers(-1, len(box)))
    return name, tuple(box[: draw(st.integers(0, len(box)))] if dots < 0 else [*box[:dots], ..., *box[dots + 1 :]])


@every
def test_any_box_is_the_one_that_numpy_has(how: str, record: zcrecord.Record) -> None:
    @settings(max_examples=rounds(100))
    @given(boxes(), st.sampled_from([100, 1 << 20]))
    def check(chosen: tuple[str, tuple[Any, ...]], most: int) -> None:
        name, box = chosen
        found = loaded(record, how, name, slices={name: box}, max_in_flight=most)[name]
        want = TENSORS[name][box]
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        assert found.tobytes() == want.tobytes()

    check()


@pytest.mark.exhaustive(keep=2)
@every
def test_long_runs_far_apart_and_large_blocks_are_cut_and_put_together(how: str, tmp_path: Path) -> None:
    value = np.random.default_rng(3).integers(0, 255, (24, 8, 100_000), np.uint8)
    record = saved(tmp_path, {"w": value, "v": value[:, :, :50_000].copy()})
    for box in (np.s_[3:20, 2:5, 10:90_000], np.s_[:, :, 7:20], np.s_[:, 1:7], np.s_[2:3, 3:5, :]):
        found = loaded(record, how, slices={"*": box}, max_in_flight=3 * MIB)
        assert np.array_equal(found["w"], value[box])
        assert np.array_equal(found["v"], value[:, :, :50_000][box])


def test_boxes_of_a_mapped_file_are_views_and_leave_no_copy(record: zcrecord.Record) -> None:
    for name in ("plain", "turned", "middle", "half"):
        found = load_into(record, "cpu", name, slices={name: np.s_[1:4, 2:, -3:-1]})[name]
        assert np.shares_memory(found, record[name])
        assert found.strides == record[name].strides
        assert not found.flags.writeable


def test_a_box_is_transferred_without_the_bytes_between(record: zcrecord.Record) -> None:
    plan = plan_load(record, "plain", slices={"plain": np.s_[:, :, 2:4]})
    assert plan.nbytes == 6 * 7 * 2 * 4
    (ref,) = plan.refs
    assert (ref.path, ref.buffer, ref.shape, ref.strides) == (None, None, (6, 7, 2), None)
    turned = plan_load(record, "turned", slices={"turned": np.s_[:, :, 2:4]}).refs[0]
    assert (turned.source, turned.nbytes) == (None, 6 * 7 * 2 * 4), "one range, in the order that it has in the file"


@every
def test_tied_tensors_with_one_box_are_one_and_with_several_are_each_their_own(how: str, tmp_path: Path) -> None:
    base = BASE.copy()
    record = saved(tmp_path, {"a": base, "b": base, "c": base, "part": base[2:]})
    columns, others = np.s_[:, :, 1:3], np.s_[:, 1:2]
    found = loaded(record, how, slices={"[ab]": columns, "c": others})
    assert found["a"] is found["b"]
    for name, want in {"a": base[columns], "c": base[others], "part": base[2:]}.items():
        assert np.array_equal(found[name], want)


@pytest.mark.parametrize("how", [name for name in OWN if name != "mapped"])
def test_a_box_goes_into_the_memory_that_is_given(how: str, record: zcrecord.Record) -> None:
    room = np.zeros((6, 7, 2), np.int32)
    found = load_into(record, how, "plain", slices={"plain": (..., slice(2, 4))}, dst={"plain": room})["plain"]
    assert np.shares_memory(found, room)
    assert np.array_equal(room, TENSORS["plain"][..., 2:4])


@own
@pytest.mark.parametrize("kind", ["int4", "uint2"])
def test_packed_boxes_start_and_end_on_whole_bytes_or_are_refused(kind: str, how: str, tmp_path: Path) -> None:
    values = (np.arange(6 * 8 * 5) % 3).reshape(6, 5, 8).astype(kind)
    odd = (np.arange(12) % 3).reshape(4, 3).astype("int4")
    packed = zcrecord.PackedTensor.pack(values)
    record = saved(tmp_path, {"w": packed, "tied": packed, "odd": zcrecord.PackedTensor.pack(odd)})
    for box in (np.s_[2:4], np.s_[:, 1:3], np.s_[1:, 2:, 4:], np.s_[:, :, :4], np.s_[0:0], np.s_[..., 4:]):
        found = load_into(record, how, "w", slices={"w": box})["w"]
        assert found.shape == values[box].shape
        assert np.array_equal(found.unpack(), values[box])
    tied = load_into(record, how, slices={"w": np.s_[1:3], "tied": np.s_[..., 4:], "odd": np.s_[2:]})
    for name, want in {"w": values[1:3], "tied": values[..., 4:], "odd": odd[2:]}.items():
        assert np.array_equal(tied[name].unpack(), want)
    with pytest.raises(UnsupportedError, match=r"'w': a box of \d bits .* along axis 2 be multiples of [24]"):
        load_into(record, how, "w", slices={"w": np.s_[:, :, 1:5]})
    with pytest.raises(UnsupportedError, match=r"'odd': a box of 4 bits .* in every row; load the tensor whole"):
        load_into(record, how, "odd", slices={"odd": np.s_[:, :2]})


def test_shards_of_an_axis_are_equal_parts_or_those_of_torch_chunk(record: zcrecord.Record) -> None:
    whole = TENSORS["plain"]
    for axis, world, uneven in ((2, 4, False), (-1, 2, False), (0, 3, False), (1, 3, True), (-2, 6, True)):
        slices = [{"plain": shard(rank, world, axis, uneven=uneven)} for rank in range(world)]
        parts = [load_into(record, "host", "plain", slices=box)["plain"] for box in slices]
        want = torch.from_numpy(whole.copy()).chunk(world, axis)
        assert [part.shape for part in parts[: len(want)]] == [tuple(chunk.shape) for chunk in want]
        assert all(part.shape[axis] == 0 for part in parts[len(want) :])
        assert np.array_equal(np.concatenate(parts, axis), whole)
    found = load_into(record, "host", "plain", slices={"plain": (slice(1, 3), ..., shard(1, 4))})["plain"]
    assert np.array_equal(found, whole[1:3, :, 2:4]), "a function for an axis"


def test_boxes_in_mode_c_are_of_the_edited_bytes(record: zcrecord.Record) -> None:
    private = zcrecord.load_record(record.path, mode="c")
    private["plain"][0, 0, 1] = -5
    for how in LOADERS:
        assert loaded(private, how, "plain", slices={"plain": np.s_[:, :, 1:3]})["plain"][0, 0, 0] == -5, how
    assert private["plain"][0, 0, 1] == -5, "the private page stays mapped"


def test_a_file_that_was_replaced_or_changes_is_refused_where_its_boxes_are_read(tmp_path: Path) -> None:
    def touched(*_: Any) -> None:
        os.utime(tmp_path / "m.zcr", ns=(time := times.pop(), time))

    record, boxes, times = saved(tmp_path, {"w": BASE}), {"w": np.s_[:, :, 1:3]}, [*range(50)]
    touched()
    with pytest.raises(SourceError, match=r"m\.zcr: was replaced or changed since it was opened"):
        load_into(record, "read", slices=boxes)
    record = zcrecord.load_record(tmp_path / "m.zcr")
    with pytest.raises(SourceError, match=r"m\.zcr: was changed while it was read"):
        load_into(record, "read", slices=boxes, max_in_flight=400, progress=touched)


# Tensors that are split over shards.

SPLIT = np.arange(12 * 10 * 6, dtype=np.float32).reshape(12, 10, 6)
SPLITS: dict[str, Sequence[Any]] = {
    "rows": boxes_along(0, 3, SPLIT.shape),
    "columns": boxes_along(1, 4, SPLIT.shape),
    "grid": [np.s_[:5, :4], np.s_[:5, 4:], np.s_[5:, :7], np.s_[5:, 7:]],
}


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> zcrecord.Record:
    path = tmp_path_factory.mktemp("split") / "m.zcr"
    tree = {name: SPLIT + i for i, name in enumerate(SPLITS)} | {"tied": (base := SPLIT * 2), "tied2": base}
    save_split(path, tree | {"other": np.arange(9)}, SPLITS | {"tied": SPLITS["rows"]})
    return zcrecord.load_record(path)


@every
def test_any_box_of_a_split_tensor_is_the_one_that_numpy_has(how: str, split: zcrecord.Record) -> None:
    wanted = {name: np.array(split[name]) for name in [*SPLITS, "tied2", "other"]}
    assert np.array_equal(wanted["grid"], SPLIT + 2)
    axis = st.tuples(*[st.none() | st.integers(-13, 13)] * 2)

    @settings(max_examples=rounds(40))
    @given(st.lists(axis, max_size=3), st.sampled_from([1000, 1 << 20]))
    def check(ends: list[tuple[Any, Any]], most: int) -> None:
        box = tuple(slice(*each) for each in ends)
        slices = {"other": box[:1], "*": box}
        found = loaded(split, how, list(wanted), slices=slices, max_in_flight=most)
        for name, value in wanted.items():
            want = value[slices.get(name, box)]
            assert found[name].shape == want.shape
            assert found[name].tobytes() == want.tobytes(), name

    check()
    assert all(np.array_equal(loaded(split, how)[name], value) for name, value in wanted.items())


def test_a_box_in_one_piece_is_a_view_of_its_shard_and_tied_ones_are_one(split: zcrecord.Record) -> None:
    shards = [np.frombuffer(split.archive.source.file_archive(n).buffer, np.uint8) for n in range(5)]
    found = load_into(split, "cpu", slices={"rows": np.s_[4:8], "grid": np.s_[:5, 5:8], "tied*": np.s_[3:9, 2:]})
    lies_in = {name: [np.shares_memory(value, shard) for shard in shards] for name, value in found.items()}
    assert lies_in["rows"] == lies_in["grid"] == [False, True, False, False, False]
    assert not any(lies_in["tied"]), "in two pieces: a copy"
    assert found["tied"] is found["tied2"]
    assert not found["tied"].flags.writeable


def test_only_the_shards_of_a_box_are_opened(split: zcrecord.Record, tmp_path: Path) -> None:
    folder = Path(str(split.path)).parent
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for number in (1, 3):
        (tmp_path / f"m-0000{number}-of-00005.zcr").unlink()
    for how in LOADERS:
        record = zcrecord.load_record(tmp_path / "m.zcr")
        found = loaded(record, how, ["rows", "columns"], slices={"rows": np.s_[4:8], "columns": np.s_[:, 3:5, 1:]})
        assert np.array_equal(found["rows"], SPLIT[4:8])
        assert np.array_equal(found["columns"], (SPLIT + 1)[:, 3:5, 1:])
        with pytest.raises(SourceError, match=r"m-00001-of-00005\.zcr: .*it is shard 1 of 5 of .*copy the catalogue"):
            loaded(record, how, ["rows"], slices={"rows": np.s_[3:8]})


def test_edits_of_a_split_tensor_are_in_its_boxes_and_parts(split: zcrecord.Record, tmp_path: Path) -> None:
    private = zcrecord.load_record(str(split.path), mode="c")
    private["columns"][2, 2, 2] = 77
    for how in LOADERS:
        assert loaded(private, how, "columns", slices={"columns": np.s_[2:, 2:]})["columns"][0, 0, 2] == 77, how
    assert saved(tmp_path, private.select("columns"))["columns"][2, 2, 2] == 77
