"""Differences from safetensors that are on purpose, as zcrecord/compat/README.md lists them, and additions."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from processes import growth
from stand_ins import COMPAT, OURS, package, same_state, tied

import zcrecord
import zcrecord.compat.safetensors as ours

ROOT = Path(__file__).resolve().parents[2]
THEIRS = package("safetensors")
MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")


def test_every_difference_that_the_guide_lists_has_a_test() -> None:
    page = (ROOT / "zcrecord" / "compat" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`test_" in line]
    named = re.findall(r"`(test_[a-z0-9_]+)`", page)
    here = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) > 12
    assert not [name for name in named if f"def {name}(" not in here]


def test_ties_and_overlapping_views_are_kept(tmp_path: Path) -> None:
    w = torch.arange(6.0)
    tensors = {"a": w, "b": w, "half": w[:3], "alike": w.clone()}
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors.torch.save_file(tensors, tmp_path / "m")
    OURS.pt.save_file(tensors, tmp_path / "m")
    loaded = OURS.pt.load_file(tmp_path / "m")
    loaded["a"][0] = 9
    assert [loaded[name][0].item() for name in tensors] == [9, 9, 9, 0]


def test_tensors_of_any_strides_come_back(tmp_path: Path) -> None:
    w = torch.arange(24.0).view(4, 6)
    last = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors = {"t": w.clone().T, "gaps": w.clone()[:, ::2], "last": last}
    with pytest.raises(ValueError, match="non contiguous"):
        safetensors.torch.save_file(tensors, tmp_path / "m")
    OURS.pt.save_file(tensors, tmp_path / "m")
    loaded = OURS.pt.load_file(tmp_path / "m")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded["last"].is_contiguous(memory_format=torch.channels_last)
    arrays = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "big": np.arange(3, dtype=">i4")}
    OURS.np.save_file(arrays, tmp_path / "m")
    for name, array in OURS.np.load_file(tmp_path / "m").items():
        assert np.array_equal(array, arrays[name])


def test_tied_parameters_stay_tied_when_they_are_made_contiguous(tmp_path: Path) -> None:
    model = tied()
    model["head"].weight.data = model["head"].weight.data.T.contiguous().T
    model["wte"].weight = model["head"].weight
    OURS.pt.save_model(model, tmp_path / "m")
    record = zcrecord.load_record(tmp_path / "m")
    assert record.info("head.weight").tied == ("wte.weight", "head.weight")
    assert record.info("head.weight").strides is None
    OURS.pt.save_model(model, tmp_path / "m", force_contiguous=False)
    assert zcrecord.load_record(tmp_path / "m").info("head.weight").strides == (1, 10)


def test_file_that_tears_what_a_module_ties_is_not_loaded_in_silence(tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in tied().state_dict().items()}
    OURS.pt.save_file(state, tmp_path / "m")
    assert OURS.pt.load_model(tied(), tmp_path / "m", strict=False) == ([], ["head.weight"])
    with pytest.raises(RuntimeError, match="Unexpected key"):
        OURS.pt.load_model(tied(), tmp_path / "m")


def test_values_between_those_of_a_loaded_view_are_missing_and_values_in_two_loaded_views_are_not() -> None:
    w = torch.zeros(6)
    views = {"even": w[::2], "even.tied": w[::2], "odd": w[1], "low": w[:2], "high": w[2:], "all": w}
    for loaded, missing in (["even"], ["odd", "low", "high", "all"]), (["low", "high"], []):
        module = torch.nn.Module()
        for name, view in views.items():
            module.register_buffer(name.replace(".", "_"), view)
        data = OURS.pt.save({name: torch.ones_like(views[name]) for name in loaded})
        assert OURS.pt.load_model(module, data, strict=False) == (missing, [])


def test_no_name_is_dropped_and_nothing_is_said_of_it_in_the_metadata(tmp_path: Path) -> None:
    THEIRS.pt.save_model(tied(), str(tmp_path / "theirs"))
    OURS.pt.save_model(tied(), tmp_path / "ours")
    theirs, found = (lib.safe_open(tmp_path / p, "pt") for lib, p in ((THEIRS, "theirs"), (OURS, "ours")))
    assert (theirs.metadata(), found.metadata()) == ({"wte.weight": "head.weight"}, None)
    assert set(found.keys()) - set(theirs.keys()) == {"wte.weight"}


def test_file_of_a_tied_module_loads_into_one_without_ties(tmp_path: Path) -> None:
    apart = tied(2)
    apart["head"].weight = torch.nn.Parameter(torch.zeros(10, 4))
    THEIRS.pt.save_model(tied(1), str(tmp_path / "m"))
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"wte.weight\""):
        THEIRS.pt.load_model(apart, tmp_path / "m")
    OURS.pt.save_model(tied(1), tmp_path / "m")
    assert OURS.pt.load_model(apart, tmp_path / "m") == ([], [])
    assert same_state(apart, tied(1))


def test_order_is_that_of_saving(tmp_path: Path) -> None:
    one, other = {"z": np.ones(1), "a": np.zeros(2)}, {"a": np.zeros(2), "z": np.ones(1)}
    assert THEIRS.np.save(one) == THEIRS.np.save(other)
    assert OURS.np.save(one) != OURS.np.save(other)
    OURS.np.save_file(one, tmp_path / "m")
    assert OURS.safe_open(tmp_path / "m", "np").keys() == ["z", "a"]
    assert list(OURS.np.load_file(tmp_path / "m")) == ["z", "a"]


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_file_is_a_mapping_to_look_into(framework: str, tmp_path: Path) -> None:
    OURS.np.save_file({"z": np.arange(5), "a": np.ones(2)}, tmp_path / "m")
    with OURS.safe_open(tmp_path / "m", framework) as f:
        assert list(f) == f.keys() == ["z", "a"]
        assert (len(f), "a" in f, "b" in f) == (2, True, False)
        assert f["z"].tolist() == [0, 1, 2, 3, 4]
        assert f.get_slice("z")[-3:].tolist() == [2, 3, 4]
        assert f.get_slice("z")[[0, 4]].tolist() == [0, 4]
        assert list(dict(f.get_tensors())) == ["z", "a"]


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_missing_name_is_a_key_error_that_lists_close_ones(framework: str, tmp_path: Path) -> None:
    OURS.np.save_file({"encoder.weight": np.ones(1)}, tmp_path / "m")
    with pytest.raises(KeyError) as caught, OURS.safe_open(tmp_path / "m", framework) as f:
        f["encoder.weigth"]
    assert isinstance(caught.value, ours.SafetensorError)
    assert "close names: 'encoder.weight'" in str(caught.value)


INDICES: dict[str, Any] = {
    "past the end": np.s_[:20], "from the end": np.s_[-2:], "backwards": np.s_[3:1], "an array": np.array([0, 2]),
    "a mask": np.array([True, False, True, False]), "a new axis": np.s_[None, 1],
}  # fmt: skip


@pytest.mark.parametrize("framework", ["np", "pt", "jax"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_parts_are_taken_as_the_framework_takes_them(framework: str, index: Any, tmp_path: Path) -> None:
    whole = np.arange(20, dtype=np.float32).reshape(4, 5)
    OURS.np.save_file({"w": whole}, tmp_path / "m")
    THEIRS.np.save_file({"w": whole}, tmp_path / "theirs")
    taken = OURS.safe_open(tmp_path / "m", framework).get_slice("w")[index]
    assert np.array_equal(np.asarray(taken), whole[index])
    with pytest.raises((THEIRS.error, OverflowError, SystemError)):
        THEIRS.safe_open(tmp_path / "theirs", "np").get_slice("w")[index]


WRONG: dict[str, Any] = {
    "row": 7, "row from the end": -5, "column": np.s_[:, 7], "column of all": np.s_[..., 7],
    "too many": np.s_[0, 0, 0], "text": "a", "float": 1.5,
}  # fmt: skip


@pytest.mark.parametrize("framework", ["np", "pt", "jax"])
@pytest.mark.parametrize("index", WRONG.values(), ids=WRONG)
def test_index_that_a_tensor_does_not_have_is_one_typed_error(framework: str, index: Any, tmp_path: Path) -> None:
    OURS.np.save_file({"w": np.zeros((4, 5), np.float32)}, tmp_path / "m")
    part = OURS.safe_open(tmp_path / "m", framework).get_slice("w")
    message = f"tensor 'w': cannot be indexed with {index!r}, its shape is [4, 5]: "
    with pytest.raises(ours.SafetensorError, match=re.escape(message)) as caught:
        part[index]
    assert isinstance(caught.value, IndexError)


def test_types_that_numpy_lacks_come_in_numpy(tmp_path: Path) -> None:
    tensors = {"bf16": torch.ones(2, dtype=torch.bfloat16), "f8": torch.ones(2, dtype=torch.float8_e4m3fn)}
    OURS.pt.save_file(tensors, tmp_path / "m")
    loaded = OURS.np.load_file(tmp_path / "m")
    assert {name: array.dtype.name for name, array in loaded.items()} == {"bf16": "bfloat16", "f8": "float8_e4m3fn"}
    assert loaded["bf16"].astype(float).tolist() == [1, 1]


@pytest.mark.parametrize("tensors, message", [
    ([1], "a mapping from names to tensors is expected, not a list"), ({"a": 3}, "tensor 'a': a int is no tensor"),
    ({"a": {"b": np.ones(1)}}, "tensor 'a': a dict is no tensor"), ({"a": [1.0]}, "tensor 'a': a list is no tensor"),
    ({3: np.ones(1)}, "key 3 is a int"), ({"": np.ones(1)}, "an empty key"), ({"a\0": np.ones(1)}, "name contains NUL"),
    ({"a": np.array([None])}, "tensor 'a': dtype object"),
    ({"a": torch.eye(2).to_sparse()}, "tensor 'a': a tensor of layout torch.sparse_coo"),
    ({"a": torch.ones(2, device="meta")}, "tensor 'a': a meta tensor has no values"),
])  # fmt: skip
def test_what_cannot_be_saved_is_named_and_the_old_file_stays(tensors: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"old")
    for save_file in (OURS.np.save_file, OURS.pt.save_file, ours.save_file):
        with pytest.raises(zcrecord.UnsupportedError, match=message) as caught:
            save_file(tensors, tmp_path / "m")
        assert isinstance(caught.value, ValueError), "as safetensors has it"
    assert (tmp_path / "m").read_bytes() == b"old"


def test_jax_is_not_given_half_of_the_bits(tmp_path: Path) -> None:
    THEIRS.np.save_file({"w": np.full(2, 0.1)}, tmp_path / "m")
    assert THEIRS.safe_open(tmp_path / "m", "flax").get_tensor("w").dtype == np.float32
    flax = importlib.import_module(f"{COMPAT}.flax")
    OURS.np.save_file({"w": np.arange(3, dtype=np.float32)}, tmp_path / "narrow")
    with OURS.safe_open(tmp_path / "narrow", framework="flax") as f:
        assert isinstance(f.get_tensor("w"), importlib.import_module("jax").Array)
        assert f.get_slice("w")[1:].tolist() == [1, 2]
    for load in (lambda path: OURS.safe_open(path, "flax").get_tensor("w"), flax.load_file):
        with pytest.raises(zcrecord.UnsupportedError, match="tensor 'w': jax would make float32 of float64"):
            load(tmp_path / "m")


WRONG_ARGUMENTS: dict[str, Any] = {
    "framework": lambda path: OURS.safe_open(path, []),
    "backend": lambda path: OURS.safe_open(path, "np", backend=[]),
    "device": lambda path: OURS.safe_open(path, "pt", device="nonsense"),
    "device that is none": lambda path: OURS.pt.load_file(path, device=object()),
    "path": lambda path: OURS.safe_open(None, "np"),
    "folder": lambda path: OURS.np.load_file(path.parent),
    "name": lambda path: OURS.safe_open(path, "np").get_tensor([]),
    "name of a part": lambda path: OURS.safe_open(path, "np").get_slice(3),
    "bytes": lambda path: OURS.np.load("text"),
    "open file": lambda path: OURS.top._safe_open_handle(3, "np"),
    "metadata": lambda path: OURS.np.save({"a": np.ones(1)}, metadata=[1]),
    "text of metadata": lambda path: OURS.np.save({"a": np.ones(1)}, metadata={"a": 1}),
    "destination": lambda path: OURS.np.save_file({"a": np.ones(1)}, path.parent),
}


@pytest.mark.parametrize("call", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_every_error_is_a_safetensor_error(call: Any, tmp_path: Path) -> None:
    OURS.np.save_file({"a": np.ones(2)}, tmp_path / "m")
    with pytest.raises(ours.SafetensorError):
        call(tmp_path / "m")
    with pytest.raises(ours.SafetensorError, match=re.escape(f"{tmp_path / 'none'}: no such file")):
        OURS.pt.load_file(tmp_path / "none")


def test_any_bytes_like_is_loaded() -> None:
    data = OURS.np.save({"a": np.arange(3)})
    for given in (bytearray(data), memoryview(data), np.frombuffer(data, np.uint8)):
        assert OURS.np.load(given)["a"].tolist() == [0, 1, 2]
        with pytest.raises(TypeError):
            THEIRS.np.load(given)


def test_package_itself_saves_and_loads_tensors_of_any_library(tmp_path: Path) -> None:
    tensors = {"n": np.arange(3), "t": torch.ones(2, dtype=torch.bfloat16)}
    ours.save_file(tensors, tmp_path / "m", metadata={"k": "v"})
    assert ours.load_file(tmp_path / "m")["n"].tolist() == [0, 1, 2]
    assert ours.load_file(tmp_path / "m", framework="pt")["t"].dtype == torch.bfloat16
    assert ours.load(ours.save(tensors), "pt")["n"].tolist() == [0, 1, 2]
    assert ours.load(memoryview(ours.save(tensors)))["n"].tolist() == [0, 1, 2]


def test_saving_over_a_file_that_is_mapped_leaves_what_was_loaded(tmp_path: Path) -> None:
    OURS.pt.save_file({"w": torch.zeros(5000)}, tmp_path / "m")
    loaded = OURS.pt.load_file(tmp_path / "m")
    OURS.pt.save_file({name: tensor + 1 for name, tensor in loaded.items()}, tmp_path / "m")
    assert loaded["w"].sum() == 0
    assert OURS.pt.load_file(tmp_path / "m")["w"].sum() == 5000


def test_tensors_go_to_the_device_that_is_named_and_to_the_cpu_whatever_the_default(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16), "e": torch.zeros(0, 2)}
    OURS.pt.save_file(tensors, tmp_path / "m")
    with torch.device("meta"):
        for device, kind in (("meta", "meta"), ("cpu", "cpu"), (None, "cpu")):
            with OURS.safe_open(tmp_path / "m", framework="pt", device=device) as f:
                found = [f.get_tensor("a"), f.get_slice("b")[:, :1], f.get_tensor("e"), *f.get_tensors().values()]
            found += OURS.pt.load_file(tmp_path / "m", device=kind).values()
            assert {tensor.device.type for tensor in found} == {kind}
            assert [tuple(tensor.shape) for tensor in found[:3]] == [(3,), (2, 1), (0, 2)]


@pytest.mark.measured
@LINUX
@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_loading_takes_no_private_memory(module: str, tmp_path: Path) -> None:
    for name, count in (("large", 1 << 23), ("small", 8)):
        tensors = {"a": np.ones(count, np.float32), "b": np.zeros(count, np.float32)}
        OURS.np.save_file(tensors, tmp_path / f"{name}.zcr")
        safetensors.numpy.save_file(tensors, tmp_path / f"{name}.safetensors")

    def taken(library: str, suffix: str) -> int:
        use = "[tensor.sum() for tensor in loaded.values()]"
        setup = (
            f"import {library} as library\nloaded = library.load_file({str(tmp_path / 'small')!r} + {suffix!r})\n{use}"
        )
        return growth(setup, f"loaded = library.load_file({str(tmp_path / 'large')!r} + {suffix!r})\n{use}")[0]

    for suffix in (".zcr", ".safetensors"):
        assert taken(f"{COMPAT}.{module}", suffix) < 4 * MIB
    assert module == "torch" or taken("safetensors.numpy", ".safetensors") > 60 * MIB, "this test would not notice"
