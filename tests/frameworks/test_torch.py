"""`Record.torch`: tensors over the archive's memory, that can be trained while the file stays as it is."""

from __future__ import annotations

import copy
import gc
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from forked import run_torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

import zcrecord
from zcrecord.dtypes import DTYPES, DType, by_name

KINDS = [d for d in DTYPES if d.torch and hasattr(torch, d.torch)]
MIB = 1 << 20


def file_of(folder: Path, record: Any) -> Path:
    zcrecord.save_record(record, folder / "model.zcr", durable=False)
    return folder / "model.zcr"


def opened(folder: Path, record: Any, **options: Any) -> zcrecord.Record:
    rec: zcrecord.Record = zcrecord.load_record(file_of(folder, record), **options)
    return rec


@pytest.mark.parametrize("writable", [True, False])
@pytest.mark.parametrize("kind", KINDS, ids=lambda d: d.name)
def test_every_element_type_comes_back_bit_for_bit(kind: DType, writable: bool, tmp_path: Path) -> None:
    shapes = [(), (0, 3), (7,), (3, 1, 5)]
    arrays = {str(shape): r.filled(kind, shape) for shape in shapes}
    found = opened(tmp_path, arrays).torch(writable=writable)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert str(found[name].dtype) == f"torch.{kind.torch}"
        assert tuple(found[name].shape) == array.shape and found[name].is_contiguous()
        assert found[name].reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()


def test_what_torch_saved_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = {
        "half": torch.randn(5).bfloat16(),
        "small": torch.randn(5).to(torch.float8_e4m3fn),
        "turned": torch.randn(4, 6).t(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "pairs": torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2),
    }
    found = opened(tmp_path, tensors).torch()
    for name, tensor in tensors.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].stride() == tensor.stride()
        assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("writable", [True, False])
def test_tensors_lie_in_the_archives_own_memory(mode: Any, writable: bool, tmp_path: Path) -> None:
    rec = opened(tmp_path, {"a": np.ones(3, np.float32), "b": r.filled(KINDS[10], (5, 2))}, mode=mode)
    found = rec.torch(writable=writable)
    own = [found[name].data_ptr() == r.address(rec[name]) for name in rec]
    assert own == ([False, False] if mode == "r" and writable else [True, True])
    found["a"].requires_grad_()
    if mode == "c":
        with torch.no_grad():
            found["a"].add_(1)
        assert rec["a"].tolist() == [2, 2, 2]


def equal_and_tied() -> dict[str, Any]:
    tied = np.arange(6, dtype=np.float32)
    return {
        "one": np.ones(6, np.float32), "other": np.ones(6, np.float32),
        "tied": tied, "too": tied, "turned": tied.reshape(2, 3).T, "rows": tied.reshape(2, 3)[1],
        "large": np.zeros(MIB, np.uint8), "equal": np.zeros(MIB, np.uint8),
    }  # fmt: skip


@pytest.mark.parametrize("source", ["file", "bytes", "mode c", "part", "part of mode c"])
def test_editing_one_of_two_equal_tensors_leaves_the_other_and_of_two_tied_ones_edits_both(
    source: str, tmp_path: Path
) -> None:
    path = file_of(tmp_path, equal_and_tied())
    mode: Any = "c" if source.endswith("mode c") else "r"
    rec = zcrecord.load_record(path.read_bytes() if source == "bytes" else path, mode=mode)
    found = rec.torch(names="*" if source.startswith("part") else None)
    assert rec.info("one").payload != rec.info("other").payload
    assert rec.info("one").offset == rec.info("other").offset
    for name in ("one", "large", "too"):
        found[name].fill_(7)
    assert found["other"].tolist() == [1] * 6
    assert not found["equal"].any()
    assert found["one"].tolist() == found["tied"].tolist() == [7] * 6
    assert found["turned"].tolist() == [[7, 7], [7, 7], [7, 7]]
    assert found["rows"].tolist() == [7, 7, 7]
    assert found["turned"].stride() == (1, 3)


def test_tied_tensors_have_one_storage_and_all_others_one_of_their_own_size(tmp_path: Path) -> None:
    found = opened(tmp_path, equal_and_tied()).torch()
    storages = {name: tensor.untyped_storage() for name, tensor in found.items()}
    assert len({storages[name]._cdata for name in ("tied", "too", "turned", "rows")}) == 1
    assert len({storage._cdata for storage in storages.values()}) == 5
    small = {name: storage.nbytes() for name, storage in storages.items() if storage.nbytes() != MIB}
    assert small == dict.fromkeys(["one", "other", "tied", "too", "turned", "rows"], 24)


def test_torch_save_and_deepcopy_take_one_tensor_and_keep_ties(tmp_path: Path) -> None:
    found = opened(tmp_path, equal_and_tied()).torch()
    file = io.BytesIO()
    torch.save(found["one"], file)
    assert len(file.getvalue()) < 10_000
    again = copy.deepcopy(found)
    again["tied"].zero_()
    assert not again["too"].any()
    assert found["too"].any()


def test_writing_to_one_tensor_does_not_spoil_the_gradient_of_another(tmp_path: Path) -> None:
    found = opened(tmp_path, equal_and_tied()).torch()
    weight, other = found["one"].requires_grad_(), found["other"]
    loss = (weight * found["tied"]).sum()
    other.add_(1)  # as the running mean of a normalisation is, between forward and backward
    loss.backward()
    loss = (weight * found["tied"]).sum()
    found["too"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_negative_stride_is_copied_since_torch_has_none(tmp_path: Path) -> None:
    base = np.arange(6, dtype=np.float32)
    found = opened(tmp_path, {"base": base, "back": base[::-1], "bits": r.filled(KINDS[10], (4,))[::-1]}).torch()
    assert found["back"].tolist() == base[::-1].tolist()
    found["base"].zero_()
    assert found["back"].tolist() == base[::-1].tolist()


@pytest.mark.slow
@given(st.data())
def test_any_views_of_any_tensors_come_back_equal(data: st.DataObject) -> None:
    kinds = [d for d in KINDS if d.numpy is not None and d.numpy.isbuiltin != 2]
    pool = data.draw(st.lists(r.arrays(kinds), min_size=1, max_size=3))
    native = [a.astype(a.dtype.newbyteorder("=")) for a in pool]
    views = [data.draw(r.views(data.draw(st.sampled_from(native)))) for _ in range(data.draw(st.integers(1, 5)))]
    views = [v for v in views if v.dtype.isnative and min(v.strides, default=0) >= 0]
    tensors = {str(i): torch.from_numpy(v if v.flags.writeable else v.copy()) for i, v in enumerate(views)}
    rec = r.round_trip(tensors)
    for found in (rec.torch(), rec.torch(writable=False)):
        for name, tensor in tensors.items():
            assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
            assert r.patterns(found[name].numpy()) == r.patterns(tensor.numpy())


WITHOUT_TYPE: dict[str, Any] = {
    "strings": np.array(["a", "bb"]),
    "int4": zcrecord.PackedTensor(np.arange(2, dtype=np.uint8), "int4", (4,)),
    "int4 unpacked": r.filled(by_name["int4"], (3,)),
    "float6": zcrecord.PackedTensor(np.arange(3, dtype=np.uint8), "float6_e2m3fn", (4,)),
    "odd": zcrecord.PackedTensor(np.array([1, 2], np.uint8), "float4_e2m1fn", (3,)),
    "alone": zcrecord.PackedTensor(np.ones(1, np.uint8), "float4_e2m1fn", ()),
}


@pytest.mark.parametrize("options", [{}, {"mode": "c"}, {"verify": "touch"}], ids=str)
def test_tensors_that_torch_has_no_type_for_come_as_the_records_views(options: dict[str, Any], tmp_path: Path) -> None:
    weight = np.arange(4.0)
    tree = {"m": {**WITHOUT_TYPE, "tied": WITHOUT_TYPE["odd"], "w": weight}, "part": weight[:2]}
    rec = opened(tmp_path, tree, **options)
    for found in (rec.torch(), rec.torch(writable=False), rec.torch("meta"), rec.torch(names=["m", "part"])):
        assert list(found) == list(rec)
        for name, value in WITHOUT_TYPE.items():
            r.assert_same(found[f"m.{name}"], value)
        r.assert_same(found["m.tied"], WITHOUT_TYPE["odd"])
        assert isinstance(found["m.w"], torch.Tensor) and isinstance(found["part"], torch.Tensor)
    r.assert_same(r.round_trip(rec.tree("torch")).tree(), rec.tree())
    assert list(rec.torch(names="m.w")) == ["m.w"]
    found = rec.torch()
    found["m.w"].zero_()  # those beside views are private, too, and stay tied
    assert found["part"].tolist() == [0, 0]
    assert options.get("mode") == "c" or rec["part"].tolist() == [0, 1]


def test_tied_pairs_of_float4_stay_tied(tmp_path: Path) -> None:
    packed = zcrecord.PackedTensor(np.arange(6, dtype=np.uint8), "float4_e2m1fn", (3, 4))
    found = opened(tmp_path, {"a": packed, "b": packed}).torch()
    found["a"].view(torch.uint8).zero_()
    assert found["b"].view(torch.uint8).tolist() == [[0, 0], [0, 0], [0, 0]]


@pytest.mark.parametrize("writable", [True, False])
def test_warns_of_nothing_and_leaves_the_filters_of_warnings_alone(writable: bool, tmp_path: Path) -> None:
    rec = opened(tmp_path, equal_and_tied() | {"empty": np.ones((0, 2)), "scalar": np.ones(())})
    filters = list(warnings.filters)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        rec.torch(writable=writable)
    assert not told
    assert warnings.filters == filters


def mappings(path: Path) -> int:
    """How often a file is mapped, as the kernel tells."""
    return sum(str(path) in line for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells what is mapped")


@LINUX
@pytest.mark.parametrize("writable", [True, False])
def test_the_mapping_lives_as_long_as_any_tensor(writable: bool, tmp_path: Path) -> None:
    path = file_of(tmp_path, equal_and_tied())
    with zcrecord.load_record(path) as rec:
        found = rec.torch(writable=writable)
    kept = found["rows"]
    del rec, found
    gc.collect()
    assert kept.tolist() == [3, 4, 5]
    assert mappings(path) == 1
    del kept
    gc.collect()
    assert mappings(path) == 0


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_other_devices_get_tensors_of_the_same_form_tied_ones_in_one_storage(device: Any, tmp_path: Path) -> None:
    rec = opened(tmp_path, equal_and_tied() | {"half": torch.ones(3, 4).bfloat16().t()})
    here, there = rec.torch(), rec.torch(device)
    for name, tensor in here.items():
        assert there[name].device.type == "meta"
        form = tensor.dtype, tensor.shape, tensor.stride()
        assert (there[name].dtype, there[name].shape, there[name].stride()) == form
    assert there["tied"].untyped_storage()._cdata == there["rows"].untyped_storage()._cdata
    assert there["one"].untyped_storage()._cdata != there["other"].untyped_storage()._cdata


def test_without_torch_the_error_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = opened(tmp_path, {"a": np.ones(2)})
    monkeypatch.setitem(sys.modules, "torch", None)
    message = re.escape("pip install torch, or in a checkout of zcrecord pip install '.[torch]'")
    with pytest.raises(zcrecord.DependencyError, match=message):
        rec.torch()


class Net(torch.nn.Module):  # type: ignore[misc]
    """A model with tied weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(20, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(tokens)))
        return out


def train(model: torch.nn.Module, steps: int = 3) -> list[float]:
    """Train a model, always in the same way; return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    tokens, losses = torch.arange(12), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(tokens), tokens.flip(0))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_model_on_meta_is_ready_with_assign_and_trains_as_the_original_does(tmp_path: Path) -> None:
    original = Net()
    path = file_of(tmp_path, original)
    before = path.read_bytes()
    with torch.device("meta"):
        model = Net()
    model.load_state_dict(zcrecord.load_record(path).torch(), assign=True)
    assert not any(p.is_meta for p in [*model.parameters(), *model.buffers()])
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    model.head.weight = model.embed.weight  # torch assigns a parameter each; they share memory, not their gradient
    assert torch.equal(original(torch.arange(5)), model(torch.arange(5)))
    assert train(model) == train(original)
    assert path.read_bytes() == before


MEMORY = """
import gc, sys
import torch, zcrecord
from tools.measure import memory
zcrecord.load_record(sys.argv[2]).torch()
gc.collect()
before = memory()
found = zcrecord.load_record(sys.argv[1]).torch(writable=sys.argv[3] == "writable")
{then}
after = memory()
print(after.private - before.private, after.rss - before.rss)
"""
USES = {  # each with the limits of private and of resident MiB
    "writable": ("", (-9, 4), (-9, 4)),
    "read-only": ("", (-9, 4), (-9, 4)),
    "read": ("[t.view(torch.uint8).sum() for t in found.values()]", (-9, 4), (90, 999)),
    "written": ("found['w3'].view(torch.uint8).zero_()", (16, 20), (-9, 999)),
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large archive and a small one of the same names."""
    folder = tmp_path_factory.mktemp("memory")
    for name, each in (("large", 16 * MIB), ("small", 160)):
        record: dict[str, Any] = {f"w{i}": torch.full((each // 2,), i, dtype=torch.bfloat16) for i in range(6)}
        record |= {"tied": record["w0"], "part": record["w0"][5:], "equal": record["w1"].clone()}
        zcrecord.save_record(record, folder / name, durable=False)
    return folder / "large", folder / "small"


@pytest.mark.measured
@LINUX
@pytest.mark.parametrize("use", USES)
def test_tensors_take_private_memory_only_for_what_is_written(use: str, archives: tuple[Path, Path]) -> None:
    then, *limits = USES[use]
    writable = "read-only" if use == "read-only" else "writable"
    grown = run_torch(MEMORY.format(then=then), *archives, writable).stdout.split()
    for nbytes, (low, high) in zip(map(int, grown), limits, strict=True):
        assert low * MIB <= nbytes < high * MIB
