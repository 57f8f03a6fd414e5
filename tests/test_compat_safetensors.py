"""`zcrecord.compat.safetensors` does what safetensors does: most tests here run on both, with the import alone changed.

What only this package does, and what is different on purpose, comes after.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
import safetensors
import safetensors.numpy
import safetensors.torch
import torch

import zcrecord
import zcrecord.compat.safetensors as ours

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
COMPAT = "zcrecord.compat.safetensors"


def package(name: str) -> SimpleNamespace:
    """Return a package of the two, with its modules."""
    top, numpy, framework = (importlib.import_module(name + part) for part in ("", ".numpy", ".torch"))
    return SimpleNamespace(safe_open=top.safe_open, error=top.SafetensorError, np=numpy, pt=framework)


OURS = package(COMPAT)


@pytest.fixture(params=["safetensors", COMPAT])
def lib(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Either package, under the same names."""
    return package(request.param)


def tied(seed: int = 0) -> Any:
    """Return a module whose embedding and head are one."""
    torch.manual_seed(seed)
    head = torch.nn.Linear(4, 10, bias=False)
    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(10, 4), "mlp": torch.nn.Linear(4, 4), "head": head})
    head.weight = model["wte"].weight
    return model


def same_state(one: Any, other: Any) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# What both do.


def test_arrays_come_back_from_a_file(lib: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"embedding": np.arange(512.0).reshape(32, 16), "attention.weight": np.zeros((3, 3), np.float16)}
    lib.np.save_file(tensors, tmp_path / "model.safetensors")
    loaded = lib.np.load_file(tmp_path / "model.safetensors")
    assert type(loaded) is dict
    assert sorted(loaded) == sorted(tensors)
    for name, array in tensors.items():
        r.assert_same(loaded[name], array)
        assert loaded[name].flags.writeable


def test_tensors_come_back_from_a_file(lib: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"embedding": torch.arange(512).view(32, 16), "b.w": torch.ones(3, dtype=torch.bfloat16)}
    lib.pt.save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    for loaded in (
        lib.pt.load_file(str(tmp_path / "model.safetensors")),
        lib.pt.load_file(tmp_path / "model.safetensors", device="cpu"),
        lib.pt.load_file(tmp_path / "model.safetensors", "cpu", backend="pread"),
    ):
        assert sorted(loaded) == sorted(tensors)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
        assert all(loaded[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_tensors_come_back_from_bytes(lib: SimpleNamespace, tmp_path: Path) -> None:
    data = lib.pt.save({"a": torch.tensor([1.5, -2]), "empty": torch.zeros(0, 3), "scalar": torch.tensor(7)})
    assert type(data) is bytes
    loaded = lib.pt.load(data)
    assert loaded["a"].tolist() == [1.5, -2]
    assert loaded["empty"].shape == (0, 3)
    assert loaded["scalar"].item() == 7
    data = lib.np.save({"a": np.array([1.5, -2])}, metadata={"made": "here"})
    assert lib.np.load(data)["a"].tolist() == [1.5, -2]
    (tmp_path / "m").write_bytes(data)
    assert lib.safe_open(tmp_path / "m", "np").metadata() == {"made": "here"}


DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_of_torch_comes_back(lib: SimpleNamespace, dtype: torch.dtype, tmp_path: Path) -> None:
    raw = (torch.arange(32, dtype=torch.uint8) % 2).view(dtype)
    lib.pt.save_file({"w": raw}, tmp_path / "m")
    found = lib.pt.load_file(tmp_path / "m")["w"]
    assert found.dtype == dtype
    assert found.view(torch.uint8).tolist() == raw.view(torch.uint8).tolist()
    assert lib.safe_open(tmp_path / "m", "pt").get_slice("w").get_dtype() == safetensors_name(dtype)


def safetensors_name(dtype: torch.dtype) -> str:
    """Return what safetensors itself says of an element type."""
    header = json.loads(safetensors.torch.save({"w": torch.zeros(1, dtype=dtype)})[8:].split(b"}}")[0] + b"}}")
    return str(header["w"]["dtype"])


@pytest.mark.parametrize("framework", ["np", "numpy", "pt", "torch", "pytorch"])
def test_tensors_are_taken_one_by_one(lib: SimpleNamespace, framework: str, tmp_path: Path) -> None:
    lib.np.save_file({"a": np.arange(3), "b": np.ones((2, 2))}, tmp_path / "m", metadata={"k": "v", "é": ""})
    with lib.safe_open(tmp_path / "m", framework=framework) as f:
        taken = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118  # as people write it
        assert f.metadata() == {"k": "v", "é": ""}
        assert sorted(f.offset_keys()) == sorted(f.keys()) == ["a", "b"]
        assert sorted(f.get_tensors()) == ["a", "b"]
    kind = np.ndarray if framework in ("np", "numpy") else torch.Tensor
    assert all(isinstance(tensor, kind) for tensor in taken.values())
    assert taken["a"].tolist() == [0, 1, 2]
    assert taken["b"].tolist() == [[1, 1], [1, 1]]


def test_file_without_metadata_says_none(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.np.save_file({"a": np.arange(3)}, tmp_path / "m")
    assert lib.safe_open(tmp_path / "m", "np").metadata() is None


SLICES: dict[str, Any] = {
    "columns": np.s_[:, 1:3],
    "rows": np.s_[2:],
    "every second": np.s_[:, ::2],
    "one row": np.s_[1],
    "last row": np.s_[-1],
    "one column": np.s_[..., 2],
    "all": np.s_[:],
    "dots": np.s_[...],
    "block": np.s_[1:3, 2:4],
    "element": np.s_[0, 0],
}


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("index", SLICES.values(), ids=SLICES)
def test_parts_are_taken_of_a_tensor(lib: SimpleNamespace, index: Any, framework: str, tmp_path: Path) -> None:
    whole = np.arange(20, dtype=np.float32).reshape(4, 5)
    lib.np.save_file({"w": whole}, tmp_path / "m")
    with lib.safe_open(tmp_path / "m", framework=framework) as f:
        part = f.get_slice("w")
        assert (part.get_shape(), part.get_dtype()) == ([4, 5], "F32")
        assert np.array_equal(np.asarray(part[index]), whole[index])
        assert tuple(part[index].shape) == whole[index].shape


def test_ranks_load_their_columns(lib: SimpleNamespace, tmp_path: Path) -> None:
    weight = torch.arange(24.0).view(4, 6)
    lib.pt.save_file({"fc.weight": weight}, tmp_path / "m")
    shards = []
    for rank in range(3):
        with lib.safe_open(tmp_path / "m", framework="pt", device="cpu") as f:
            part = f.get_slice("fc.weight")
            _, columns = part.get_shape()
            each = columns // 3
            shards.append(part[:, rank * each : (rank + 1) * each])
    assert torch.equal(torch.cat(shards, 1), weight)


@pytest.mark.parametrize("framework", ["np", "pt"])
def test_writing_to_what_was_loaded_leaves_the_file(lib: SimpleNamespace, framework: str, tmp_path: Path) -> None:
    lib.np.save_file({"a": np.zeros(100), "b": np.ones(3)}, tmp_path / "m")
    before = hashlib.sha256((tmp_path / "m").read_bytes()).digest()
    with lib.safe_open(tmp_path / "m", framework=framework) as f:
        tensor = f.get_tensor("a")
        tensor += 5
    loaded = (lib.np if framework == "np" else lib.pt).load_file(tmp_path / "m")
    loaded["b"] += 5
    assert tensor.tolist() == [5] * 100
    assert loaded["a"].tolist() == [0] * 100
    assert hashlib.sha256((tmp_path / "m").read_bytes()).digest() == before


def test_module_comes_back(lib: SimpleNamespace, tmp_path: Path) -> None:
    model, fresh = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    lib.pt.save_model(model, str(tmp_path / "m"), metadata={"format": "pt"})
    missing, unexpected = lib.pt.load_model(fresh, str(tmp_path / "m"))
    assert not missing
    assert not unexpected
    assert same_state(model, fresh)


def test_tied_module_comes_back(lib: SimpleNamespace, tmp_path: Path) -> None:
    model, fresh = tied(1), tied(2)
    assert not same_state(model, fresh)
    lib.pt.save_model(model, tmp_path / "m")
    missing, unexpected = lib.pt.load_model(fresh, tmp_path / "m", strict=True, device="cpu")
    assert not missing
    assert not unexpected
    assert same_state(model, fresh)
    assert fresh["head"].weight is fresh["wte"].weight


def test_module_and_file_that_differ_are_told(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.pt.save_file({"weight": torch.ones(2, 3), "scale": torch.ones(2)}, tmp_path / "m")
    model = torch.nn.Linear(3, 2)
    missing, unexpected = lib.pt.load_model(model, tmp_path / "m", strict=False)
    assert list(missing) == ["bias"]
    assert unexpected == ["scale"]
    assert model.weight.tolist() == [[1] * 3] * 2
    with pytest.raises(RuntimeError, match=r"(?s)Error\(s\) in loading state_dict for Linear.*bias.*scale"):
        lib.pt.load_model(torch.nn.Linear(3, 2), tmp_path / "m")
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        lib.pt.load_model(torch.nn.Linear(4, 2), tmp_path / "m")


def test_what_is_missing_is_missing_under_all_its_tied_names(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.pt.save_file({"mlp.weight": torch.ones(4, 4), "mlp.bias": torch.ones(4)}, tmp_path / "m")
    missing, unexpected = lib.pt.load_model(tied(), tmp_path / "m", strict=False)
    assert "wte.weight" in missing or "head.weight" in missing
    assert not unexpected


def test_channels_last_module_comes_back(lib: SimpleNamespace, tmp_path: Path) -> None:
    model = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    fresh = torch.nn.Conv2d(3, 4, 2)
    lib.pt.save_model(model, tmp_path / "m", force_contiguous=True)
    lib.pt.load_model(fresh, tmp_path / "m")
    assert same_state(model, fresh)
    assert lib.pt.load_file(tmp_path / "m")["weight"].is_contiguous()


def test_errors_are_those_that_people_catch(lib: SimpleNamespace, tmp_path: Path) -> None:
    lib.np.save_file({"a": np.arange(3)}, tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        lib.safe_open(tmp_path / "none", framework="np")
    with pytest.raises(FileNotFoundError):
        lib.pt.load_file(tmp_path / "none")
    with pytest.raises(lib.error):
        lib.safe_open(tmp_path / "m", framework="abacus")
    with pytest.raises(lib.error):
        lib.safe_open(tmp_path / "m", framework="np", device="cuda")
    with pytest.raises(lib.error):
        lib.safe_open(tmp_path / "m", framework="np", backend="telepathy")
    with lib.safe_open(tmp_path / "m", framework="np") as f:
        with pytest.raises(lib.error):
            f.get_tensor("b")
        with pytest.raises(lib.error):
            f.get_slice("b")
    with pytest.raises(lib.error):
        f.get_tensor("a")
    with pytest.raises(lib.error):
        lib.np.load(b"too short")
    with pytest.raises(TypeError):
        lib.np.save_file({"a": np.arange(3)}, tmp_path / "m", metadata={"steps": 5})
    with pytest.raises(lib.error):
        lib.np.save_file({"a": np.arange(3)}, tmp_path / "none" / "m")


SAME = [("numpy", name) for name in safetensors.numpy.__dict__ if name in ("load", "load_file", "save", "save_file")]
SAME += [("torch", name) for name in ("load", "load_file", "load_model", "save", "save_file", "save_model")]


@pytest.mark.parametrize("module, name", SAME)
def test_arguments_are_the_same(module: str, name: str) -> None:
    def arguments(package: str) -> Any:
        function = getattr(importlib.import_module(f"{package}.{module}"), name)
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert arguments(COMPAT) == arguments("safetensors")


# What is written and read.


@pytest.mark.parametrize("suffix", ["safetensors", "zcr", "bin"])
def test_an_archive_is_written_whatever_its_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    OURS.np.save_file({"b.w": np.ones(3), "a": np.zeros(2)}, path, metadata={"k": "v"})
    record = zcrecord.load_record(path, verify="full")
    assert list(record) == ["b.w", "a"]
    assert list(record.tree()) == ["b.w", "a"], "names are kept whole"
    assert record.metadata == {"k": "v"}


def test_any_archive_is_read(tmp_path: Path) -> None:
    tree = {"m": [{"w": np.ones(2)}], "steps": 5, "text": np.array(["a", "b"])}
    zcrecord.save_record(
        tree, tmp_path / "m", metadata={"n": 1, "l": ["a"], "none": None, "b": b"x", "bs": [b"x"], "t": "é"}
    )
    with OURS.safe_open(tmp_path / "m", framework="np") as f:
        assert f.keys() == ["m.0.w", "text"]
        assert f.metadata() == {"n": "1", "l": '["a"]', "none": "null", "t": "é"}
        assert f.get_tensor("m.0.w").tolist() == [1, 1]
        assert f.get_slice("text").get_dtype() == "string"


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("framework", ["np", "pt"])
def test_genuine_files_are_read_by_their_content(framework: str, backend: str, tmp_path: Path) -> None:
    tensors = {"w.b": torch.arange(6.0).view(2, 3), "s": torch.tensor(3), "e": torch.zeros(0)}
    path = tmp_path / "model.zcr"
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    before = path.read_bytes()
    with OURS.safe_open(path, framework=framework, backend=backend) as f:
        assert sorted(f.keys()) == ["e", "s", "w.b"]
        assert f.metadata() == {"format": "pt"}
        assert f.get_slice("w.b")[-1:, :2].tolist() == [[3, 4]]
        tensor = f.get_tensor("w.b")
        tensor += 1
        assert f.get_tensor("w.b").tolist() == [[1, 2, 3], [4, 5, 6]]
        assert tuple(f["e"].shape) == (0,)
    assert path.read_bytes() == before
    assert OURS.pt.load_file(path)["s"].item() == 3
    assert OURS.np.load(before)["w.b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert OURS.pt.load(before)["w.b"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_genuine_files_give_the_tensors_that_safetensors_gives(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = (torch.arange(48, dtype=torch.uint8) % 2).view(dtype)
    safetensors.torch.save_file({"a": torch.ones(3, dtype=torch.uint8), "w": raw}, tmp_path / "m")
    found, theirs = OURS.pt.load_file(tmp_path / "m"), safetensors.torch.load_file(tmp_path / "m")
    assert found.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_genuine_file_of_a_tied_module_loads(tmp_path: Path) -> None:
    model, fresh = tied(1), tied(2)
    safetensors.torch.save_model(model, str(tmp_path / "m"))
    assert OURS.pt.load_model(fresh, tmp_path / "m") == ([], [])
    assert same_state(model, fresh)


def test_file_that_is_neither_is_one_typed_error(tmp_path: Path) -> None:
    for data in (b"", b"short", bytes(999), b"GGUF" + bytes(200), (2).to_bytes(8, "little") + b"{x"):
        (tmp_path / "m").write_bytes(data)
        for framework in ("np", "pt"):
            with pytest.raises(zcrecord.FormatError) as caught:
                OURS.safe_open(tmp_path / "m", framework=framework)
            assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")
        with pytest.raises(zcrecord.FormatError):
            OURS.np.load(data)


# What is different on purpose.


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
    tensors = {"t": w.clone().T, "gaps": w.clone()[:, ::2], "last": torch.rand(2, 3, 4, 4).to(
        memory_format=torch.channels_last)}  # fmt: skip
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


def test_types_that_numpy_lacks_come_in_numpy(tmp_path: Path) -> None:
    tensors = {"bf16": torch.ones(2, dtype=torch.bfloat16), "f8": torch.ones(2, dtype=torch.float8_e4m3fn)}
    OURS.pt.save_file(tensors, tmp_path / "m")
    loaded = OURS.np.load_file(tmp_path / "m")
    assert {name: array.dtype.name for name, array in loaded.items()} == {"bf16": "bfloat16", "f8": "float8_e4m3fn"}
    assert loaded["bf16"].astype(float).tolist() == [1, 1]


@pytest.mark.parametrize(
    "tensors, message",
    [
        ([1], "a mapping from names to tensors is expected, not a list"),
        ({"a": 3}, "tensor 'a': a int is no tensor"),
        ({"a": {"b": np.ones(1)}}, "tensor 'a': a dict is no tensor"),
        ({"a": [1.0, 2.0]}, "tensor 'a': a list is no tensor"),
        ({"a": None}, "tensor 'a': a NoneType is no tensor"),
        ({3: np.ones(1)}, "key 3 is a int"),
        ({"": np.ones(1)}, "an empty key"),
        ({"a": np.array([None])}, "tensor 'a': dtype object"),
        ({"a": torch.eye(2).to_sparse()}, "tensor 'a': "),
    ],
)
def test_what_cannot_be_saved_is_named_and_the_old_file_stays(tensors: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"old")
    for save_file in (OURS.np.save_file, OURS.pt.save_file, ours.save_file):
        with pytest.raises(zcrecord.UnsupportedError, match=message):
            save_file(tensors, tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == b"old"


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


@pytest.mark.parametrize("call", ["load_file(path)", "load(data)", "load_model(None, path)"])
def test_without_torch_the_error_says_how_to_install_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m"
    OURS.np.save_file({"w": np.ones(1)}, path)
    monkeypatch.setitem(sys.modules, "torch", None)
    module: ModuleType = OURS.pt
    with pytest.raises(zcrecord.DependencyError, match=r"zcrecord\[torch\]"):
        eval(call, {**vars(module), "path": path, "data": path.read_bytes()})


def test_tensors_go_to_the_device_that_is_named(tmp_path: Path) -> None:
    OURS.pt.save_file({"a": torch.ones(3), "b": torch.zeros(2, 2, dtype=torch.bfloat16)}, tmp_path / "m")
    with OURS.safe_open(tmp_path / "m", framework="pt", device="meta") as f:
        found = [f.get_tensor("a"), f.get_slice("b")[:, :1], *f.get_tensors().values()]
    found += OURS.pt.load_file(tmp_path / "m", device="meta").values()
    assert [tensor.device.type for tensor in found] == ["meta"] * 6
    assert (tuple(found[0].shape), tuple(found[1].shape)) == ((3,), (2, 1))


def test_other_frameworks_are_named(tmp_path: Path) -> None:
    OURS.np.save_file({"w": np.ones(1)}, tmp_path / "m")
    with pytest.raises(zcrecord.UnsupportedError, match=r"framework 'tf' is not known; pt, torch, .* are"):
        OURS.safe_open(tmp_path / "m", "tf")


def test_jax_arrays_come_in_jax(tmp_path: Path) -> None:
    jax = importlib.import_module("jax")
    OURS.np.save_file({"w": np.arange(3, dtype=np.float32)}, tmp_path / "m")
    with OURS.safe_open(tmp_path / "m", framework="flax") as f:
        assert isinstance(f.get_tensor("w"), jax.Array)
        assert f.get_slice("w")[1:].tolist() == [1, 2]


MEASURED = """
import gc, importlib, json, sys
from tools.measure import memory

library = importlib.import_module(sys.argv[1])

def taken(path):
    loaded = library.load_file(path)
    return loaded, [tensor.sum() for tensor in loaded.values()]

taken(sys.argv[3])
gc.collect()
before = memory().private
kept = taken(sys.argv[2])
print(json.dumps(memory().private - before))
"""


@LINUX
@pytest.mark.parametrize("module", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["archive", "genuine"])
def test_loading_takes_no_private_memory(module: str, kind: str, tmp_path: Path) -> None:
    save_file = OURS.np.save_file if kind == "archive" else safetensors.numpy.save_file
    for name, count in (("large", 1 << 23), ("small", 8)):
        save_file({"a": np.ones(count, np.float32), "b": np.zeros(count, np.float32)}, tmp_path / name)
    arguments = tmp_path / "large", tmp_path / "small"
    assert json.loads(r.run_python(MEASURED, f"{COMPAT}.{module}", *arguments).stdout) < 4 * MIB
    if module == "numpy" and kind == "genuine":
        theirs = json.loads(r.run_python(MEASURED, "safetensors.numpy", *arguments).stdout)
        assert theirs > 60 * MIB, "this test would not notice"
