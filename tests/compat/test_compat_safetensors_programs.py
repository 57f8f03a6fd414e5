"""Names that programs import from safetensors, private ones included, are in `zcrecord.compat.safetensors`, and work.

Most tests run on both packages; the last ones put ours in the place of the other and run transformers and torch.
"""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from stand_ins import COMPAT, OURS, PACKAGES, package, tied

import zcrecord


@pytest.fixture(params=PACKAGES)
def lib(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Either package, under the same names."""
    return package(request.param)


def spec(lib: SimpleNamespace, array: Any, **other: Any) -> Any:
    told = {"dtype": array.dtype.name, "shape": array.shape, "data_ptr": array.ctypes.data, "data_len": array.nbytes}
    return lib.top.TensorSpec(**told | other)


def told(lib: SimpleNamespace, data: bytes) -> dict[str, Any]:
    return {name: (t["dtype"], t["shape"], bytes(t["data"])) for name, t in lib.top.deserialize(data)}


def test_tensors_are_written_by_their_addresses(lib: SimpleNamespace, tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(7, np.int16), "e": np.zeros((0, 2), bool)}
    specs = {name: spec(lib, array) for name, array in arrays.items()}
    expected = {
        "a": ("F64", [2, 3], arrays["a"].tobytes()),
        "b": ("I16", [], arrays["b"].tobytes()),
        "e": ("BOOL", [0, 2], b""),
    }
    assert told(lib, lib.top.serialize(specs, metadata={"k": "v"})) == expected
    pairs = np.arange(4, dtype=np.uint8).reshape(2, 2)
    data = lib.top.serialize({"w": spec(lib, pairs, dtype="float4_e2m1fn_x2")})
    assert told(lib, data) == {"w": ("F4", [2, 4], bytes([0, 1, 2, 3]))}
    lib.top.serialize_file(specs, tmp_path / "m", {"k": "v"})
    assert told(lib, (tmp_path / "m").read_bytes()) == expected
    assert lib.safe_open(tmp_path / "m", "np").metadata() == {"k": "v"}


def test_tensor_specs_say_types_and_shapes_as_safetensors_does(lib: SimpleNamespace) -> None:
    about = {"data_ptr": 64, "data_len": 8}
    found = lib.top.TensorSpec(dtype="bfloat16", shape=(2, 2), **about)
    assert (found.dtype, found.shape, found.data_ptr, found.data_len) == ("BF16", [2, 2], 64, 8)
    assert repr(found) == "TensorSpec(dtype='BF16', shape=[2, 2], data_ptr=64, data_len=8)"
    assert lib.top.TensorSpec(dtype="float4_e2m1fn_x2", shape=(2, 4), **about).shape == [2, 8], "two to an entry"
    with pytest.raises(lib.error, match="nonsense"):
        lib.top.TensorSpec(dtype="nonsense", shape=(2, 2), **about)
    with pytest.raises(AttributeError):
        found.dtype = "F16"


def test_specs_that_do_not_fit_are_refused(lib: SimpleNamespace) -> None:
    array = np.arange(6.0)
    with pytest.raises(lib.error):
        lib.top.serialize({"a": spec(lib, array, data_len=40)})
    for wrong in ({"a": {"dtype": "float64"}}, {"a": array}, [array], {3: spec(lib, array)}):
        with pytest.raises(TypeError):
            lib.top.serialize(wrong)
    with pytest.raises(lib.error):
        lib.top.deserialize(b"neither of the two")


@pytest.mark.parametrize("other, message", [
    ({"data_ptr": 0}, "tensor 'a': 48 bytes at address 0"), ({"shape": (-6,)}, r"no tensor has shape \[-6\]"),
    ({"data_len": 40}, r"tensor 'a': shape \[6\] of F64 takes 48 bytes, data_len says 40"),
    ({"shape": (0,) * 65}, r"no tensor has shape \[0, "),
    ({"shape": (1 << 70,), "data_len": 1 << 73}, r"no tensor has shape .* data_len 9444732965739290427392"),
    ({"shape": 6}, "shape, data_ptr and data_len are integers, not "),
    ({"data_ptr": "here"}, "shape, data_ptr and data_len are integers, not .*'here'"),
    ({"dtype": "string"}, "element type 'string' is not known"), ({"dtype": []}, r"element type \[\] is not known"),
])  # fmt: skip
def test_specs_are_refused_with_what_is_wrong(other: dict[str, Any], message: str) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=message):
        OURS.top.serialize({"a": spec(OURS, np.arange(6.0), **other)})


def test_what_is_deserialized_is_in_c_order_whatever_was_saved() -> None:
    arrays = {"f": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "big": np.arange(3, dtype=">i4")}
    found = told(OURS, OURS.np.save(arrays))
    assert found["f"] == ("F64", [2, 3], np.arange(6.0).tobytes())
    assert found["big"] == ("I32", [3], np.arange(3, dtype="<i4").tobytes())
    with pytest.raises(zcrecord.UnsupportedError, match="tensor 's': strings have no bytes of elements"):
        OURS.top.deserialize(OURS.top.save({"s": np.array(["a"])}))


def test_tied_tensors_are_not_deserialized_out_of_proportion() -> None:
    data = r.saved(dict.fromkeys((f"w{i}" for i in range(1200)), np.zeros(1 << 20, np.uint8)))
    with pytest.raises(zcrecord.LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
        OURS.top.deserialize(data)


@pytest.mark.parametrize("mode", ["r", "rb"])
def test_file_that_is_open_is_opened_by_its_name(lib: SimpleNamespace, mode: str, tmp_path: Path) -> None:
    lib.np.save_file({"a": np.arange(3)}, tmp_path / "m")
    with open(tmp_path / "m", mode) as file, lib.top._safe_open_handle(file, framework="np", device="cpu") as f:
        assert f.get_tensor("a").tolist() == [0, 1, 2]


def test_closed_file_is_an_error(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.pt.save_file({"a": torch.zeros(2)}, tmp_path / "m")
    with lib.safe_open(tmp_path / "m", framework="pt") as f:
        pass
    for look in (f.keys, f.metadata, f.get_tensors, f.offset_keys, lambda: f.get_slice("a")):
        with pytest.raises(lib.error):
            look()


def test_many_tensors_are_taken_one_by_one_as_few_are(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.np.save_file({f"{i}": np.full(2, i) for i in range(100)}, tmp_path / "m")
    for framework in ("np", "pt"):
        with lib.safe_open(tmp_path / "m", framework) as f:
            assert [f.get_tensor(f"{i}").tolist() for i in range(100)] == [[i, i] for i in range(100)]
            with pytest.raises(lib.error):
                f.get_tensor("100")


def test_jax_arrays_come_back(lib: SimpleNamespace, tmp_path: Path) -> None:
    jnp = importlib.import_module("jax.numpy")
    flax = importlib.import_module(f"{lib.top.__name__}.flax")
    arrays = {"w": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(3, bool)}
    flax.save_file(dict(arrays), tmp_path / "m", metadata={"format": "flax"})
    for loaded in (flax.load_file(tmp_path / "m"), flax.load(flax.save(dict(arrays)))):
        for name, array in arrays.items():
            assert (loaded[name].dtype, loaded[name].tolist()) == (array.dtype, array.tolist())
        assert all(isinstance(array, jnp.ndarray) for array in loaded.values())


@pytest.mark.parametrize("module", ["tensorflow", "mlx", "paddle"])
def test_modules_of_other_frameworks_say_what_to_do(module: str) -> None:
    with pytest.raises(ImportError, match=rf"{module}\.load_file has no stand-in here; .*pip install safetensors"):
        exec(f"from {COMPAT}.{module} import load_file")
    with pytest.raises(zcrecord.DependencyError):
        importlib.import_module(f"{COMPAT}.{module}").save  # noqa: B018


def test_memory_that_tensors_are_views_of_is_told(lib: SimpleNamespace) -> None:
    whole = torch.arange(12.0).view(3, 4)
    row, column, empty = whole[1], whole[:, 1], whole[:0]
    assert [lib.pt.storage_ptr(t) - whole.data_ptr() for t in (whole, row, column)] == [0, 0, 0]
    assert [lib.pt.storage_size(t) for t in (whole, row, column)] == [48, 48, 48]
    assert [lib.pt._end_ptr(t) - t.data_ptr() for t in (whole, row, empty)] == [48, 16, 0]
    assert lib.pt._end_ptr(whole.view(-1)[::4]) - whole.data_ptr() == 36, "the last of three, each 16 behind the other"
    half = torch.ones(4, dtype=torch.float16)
    assert lib.pt._end_ptr(half[::2]) - half.data_ptr() == 6
    complete = [lib.pt._is_complete(t) for t in (whole, whole.T, row, column, whole[::2])]
    assert complete == [True, True, False, False, False]
    meta = torch.zeros(2, device="meta")
    assert (lib.pt.storage_ptr(meta), lib.pt.storage_size(meta), lib.pt._is_complete(meta)) == (0, 8, True)


def test_tensors_that_overlap_are_found(lib: SimpleNamespace) -> None:
    w, other, meta = torch.arange(8.0), torch.ones(2), torch.zeros(2, device="meta")
    shared = lib.pt._find_shared_tensors
    tensors = {"w": w, "tied": w, "other": other, "meta": meta, "empty": torch.zeros(0)}
    assert shared(tensors) == [{"w", "tied"}, {"other"}]
    assert shared({"front": w[:4], "back": w[4:]}) == [{"front"}, {"back"}]
    assert shared({"front": w[:4], "back": w[4:], "first": w[:1]}) == [{"first", "front"}, {"back"}]
    assert shared({"front": w[:5], "back": w[4:]}) == [{"front", "back"}]
    assert shared(tied().state_dict()) == [{"wte.weight", "head.weight"}, {"mlp.weight"}, {"mlp.bias"}]


def test_names_to_leave_out_are_told(lib: SimpleNamespace) -> None:
    w = torch.zeros(3, 3)
    leave = lib.pt._remove_duplicate_names
    assert leave({"b": w, "row": w[:1], "a": w, "alone": torch.ones(1)}) == {"a": ["b", "row"]}
    assert leave({"b": w, "a": w}, preferred_names=["b", "row"]) == {"b": ["a"]}
    assert leave({"b": w, "a": w}, discard_names=["a"]) == {"b": ["a"]}
    assert leave({"b": w, "a": w}, discard_names=["a", "b"]) == {"a": ["b"]}
    with pytest.raises(RuntimeError, match="row"):
        leave({"row": w[:1]})


def test_types_are_known_by_safetensors_names(lib: SimpleNamespace) -> None:
    assert lib.pt._getdtype("BF16") is torch.bfloat16
    assert (lib.pt._TYPES["F8_E4M3"], lib.pt._SIZE[torch.int16]) == (torch.float8_e4m3fn, 2)
    with pytest.raises(KeyError):
        lib.pt._getdtype("F3")
    with pytest.raises(AttributeError, match="_NONE"):
        lib.pt._NONE  # noqa: B018
    assert lib.pt._TYPES.items() <= OURS.pt._TYPES.items()
    assert {k: v for k, v in lib.pt._SIZE.items() if k in OURS.pt._SIZE}.items() == OURS.pt._SIZE.items()


# In the place of safetensors.

PUT_IN_PLACE = f"""
import sys, warnings
import safetensors.torch as genuine
for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
    del sys.modules[name]
import {COMPAT}
sys.modules["safetensors"] = {COMPAT}
"""

TRANSFORMERS = (
    PUT_IN_PLACE
    + """
warnings.simplefilter("ignore")  # theirs
import pathlib, torch, transformers as t

def ties(model):
    found = {}
    for name, tensor in model.state_dict().items():
        found.setdefault(tensor.data_ptr(), []).append(name)
    return [names for names in found.values() if len(names) > 1]

def same(model, other):
    one, two = model.state_dict(), other.state_dict()
    assert list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one), "other weights"
    assert ties(model) == ties(other), "other ties"

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(0)
small = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=100)
model = t.BertForMaskedLM(t.BertConfig(**small))
assert ties(model)
for shards in ({}, {"max_shard_size": "20KB"}):
    saved = folder / f"saved{len(shards)}"
    model.save_pretrained(saved, **shards)
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 1 if shards else len(files) == 1
    assert {file.read_bytes()[:4] for file in files} == {b"\\x89ZCR"}, "written by safetensors itself"
    again = type(model).from_pretrained(saved)
    same(model, again)
    again.save_pretrained(saved, **shards)  # over the files that it is mapped from
    same(model, again)
    same(model, type(model).from_pretrained(saved))
plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
genuine.save_file(plain, folder / "saved0" / "model.safetensors", metadata={"format": "pt"})
same(model, type(model).from_pretrained(folder / "saved0"))
assert not [n for n in sys.modules if n.startswith("safetensors.") and n != "safetensors.torch"]
"""
)


@pytest.mark.exhaustive(keep=0)
def test_transformers_saves_and_loads_with_it(tmp_path: Path) -> None:
    r.run_python(TRANSFORMERS, tmp_path, env=os.environ | {"HF_HUB_OFFLINE": "1"})


@pytest.mark.slow
def test_what_the_guide_puts_in_the_place_of_safetensors_works(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "zcrecord" / "compat" / "README.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "sys.modules" in b)
    r.run_python(f"import os\nos.chdir({str(tmp_path)!r})\n{block}")
    assert zcrecord.load_record(tmp_path / "archive.safetensors").names == ("embedding",)
