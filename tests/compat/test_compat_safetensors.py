"""`zcrecord.compat.safetensors` does what safetensors does: most tests here run on both, with the import alone changed.

What is written and read comes after. What programs import is in `test_compat_safetensors_programs`, what is different
on purpose in `test_compat_safetensors_differences`.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
import safetensors
import safetensors.torch
import torch
from stand_ins import COMPAT, OURS, PACKAGES, package, same_state, tied

import zcrecord


@pytest.fixture(params=PACKAGES)
def lib(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Either package, under the same names."""
    return package(request.param)


def test_arrays_come_back_from_a_file_and_from_bytes(lib: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"embedding": np.arange(512.0).reshape(32, 16), "attention.weight": np.zeros((3, 3), np.float16)}
    lib.np.save_file(tensors, tmp_path / "m")
    data = lib.np.save(tensors, metadata={"made": "here"})
    for loaded in (lib.np.load_file(tmp_path / "m"), lib.np.load(data)):
        assert type(loaded) is dict and sorted(loaded) == sorted(tensors)
        for name, array in tensors.items():
            r.assert_same(loaded[name], array)
            assert loaded[name].flags.writeable
    assert lib.safe_open(tmp_path / "m", "np").metadata() is None
    (tmp_path / "m").write_bytes(data)
    assert lib.safe_open(tmp_path / "m", "np").metadata() == {"made": "here"}


def test_tensors_come_back_from_a_file_and_from_bytes(lib: SimpleNamespace, tmp_path: Path) -> None:
    tensors = {"b.w": torch.ones(3, dtype=torch.bfloat16), "empty": torch.zeros(0, 3), "scalar": torch.tensor(7)}
    path = tmp_path / "model.safetensors"
    lib.pt.save_file(tensors, str(path), metadata={"format": "pt"})
    data = lib.pt.save(tensors)
    assert type(data) is bytes
    found = [lib.pt.load_file(str(path)), lib.pt.load_file(path, device="cpu"), lib.pt.load(data)]
    for loaded in (*found, lib.pt.load_file(path, "cpu", backend="pread")):
        assert sorted(loaded) == sorted(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(loaded[name], tensor) and loaded[name].dtype == tensor.dtype


DTYPES = [getattr(torch, d.torch) for d in zcrecord.dtypes.DTYPES if d.torch and d.safetensors]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type_of_torch_comes_back(lib: SimpleNamespace, dtype: torch.dtype, tmp_path: Path) -> None:
    raw = (torch.arange(32, dtype=torch.uint8) % 2).view(dtype)
    lib.pt.save_file({"w": raw}, tmp_path / "m")
    for reader in (lib, OURS):  # which reads genuine files, too
        found = reader.pt.load_file(tmp_path / "m")["w"]
        assert found.dtype == dtype
        assert found.view(torch.uint8).tolist() == raw.view(torch.uint8).tolist()
    assert lib.safe_open(tmp_path / "m", "pt").get_slice("w").get_dtype() == safetensors_name(dtype)


def safetensors_name(dtype: torch.dtype) -> str:
    """Return safetensors' own name of an element type."""
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


SLICES: dict[str, Any] = {
    "columns": np.s_[:, 1:3], "every second": np.s_[:, ::2], "last row": np.s_[-1], "one column": np.s_[..., 2],
    "all": np.s_[:], "dots": np.s_[...], "block": np.s_[1:3, 2:4], "element": np.s_[0, 0],
}  # fmt: skip


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


def channels_last(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("make", [tied, channels_last])
def test_module_comes_back(lib: SimpleNamespace, make: Any, tmp_path: Path) -> None:
    model, fresh = make(1), make(2)
    assert not same_state(model, fresh)
    lib.pt.save_model(model, str(tmp_path / "m"), metadata={"format": "pt"}, force_contiguous=True)
    missing, unexpected = lib.pt.load_model(fresh, tmp_path / "m", strict=True, device="cpu")
    assert not missing and not unexpected and same_state(model, fresh)
    assert make is channels_last or fresh["head"].weight is fresh["wte"].weight
    assert all(tensor.is_contiguous() for tensor in lib.pt.load_file(tmp_path / "m").values())


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


def test_errors_are_those_that_people_catch(lib: SimpleNamespace, tmp_path: Path) -> None:
    array = {"a": np.arange(3)}
    lib.np.save_file(array, tmp_path / "m")
    with lib.safe_open(tmp_path / "m", framework="np") as f:
        for take in (f.get_tensor, f.get_slice):
            with pytest.raises(lib.error):
                take("b")
    wrong: list[tuple[Any, Any]] = [
        (FileNotFoundError, lambda: lib.safe_open(tmp_path / "none", framework="np")),
        (FileNotFoundError, lambda: lib.pt.load_file(tmp_path / "none")),
        (lib.error, lambda: lib.safe_open(tmp_path / "m", framework="abacus")),
        (lib.error, lambda: lib.safe_open(tmp_path / "m", framework="np", device="cuda")),
        (lib.error, lambda: lib.safe_open(tmp_path / "m", framework="np", backend="telepathy")),
        (lib.error, lambda: f.get_tensor("a")),
        (lib.error, lambda: lib.np.load(b"too short")),
        (TypeError, lambda: lib.np.save_file(array, tmp_path / "m", metadata={"steps": 5})),
        (lib.error, lambda: lib.np.save_file(array, tmp_path / "none" / "m")),
    ]
    for error, act in wrong:
        with pytest.raises(error):
            act()


SAME = [
    (module, name)
    for module in ("", ".numpy", ".torch", ".flax")
    for name, value in vars(importlib.import_module(f"safetensors{module}")).items()
    if not name.startswith("_") and getattr(value, "__module__", "").startswith(("safetensors", "builtins"))
]


@pytest.mark.parametrize("module, name", SAME)
def test_every_public_name_is_there_with_the_same_arguments(module: str, name: str) -> None:
    def arguments(package: str) -> Any:
        function = getattr(importlib.import_module(package + module), name)
        return {} if name == "SafetensorError" else inspect.signature(function).parameters

    ours, theirs = arguments(COMPAT), arguments("safetensors")
    assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()]
    defaults = {p.name: p.default for p in theirs.values() if p.default is not ...}  # which stands for some
    assert {name: p.default for name, p in ours.items() if name in defaults} == defaults


def test_an_archive_is_written_whatever_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    OURS.np.save_file({"b.w": np.ones(3), "a": np.zeros(2)}, path, metadata={"k": "v"})
    record = zcrecord.load_record(path, verify="full")
    assert list(record) == list(record.tree()) == ["b.w", "a"], "names are kept whole"
    assert record.metadata == {"k": "v"}


def test_any_archive_is_read(tmp_path: Path) -> None:
    tree = {"m": [{"w": np.ones(2)}], "steps": 5, "text": np.array(["a", "b"])}
    metadata = {"n": 1, "l": ["a"], "none": None, "b": b"x", "bs": [b"x"], "t": "é"}
    zcrecord.save_record(tree, tmp_path / "m", metadata=metadata)
    with OURS.safe_open(tmp_path / "m", framework="np") as f:
        assert f.keys() == ["m.0.w", "text"]
        assert f.metadata() == {"n": "1", "l": '["a"]', "none": "null", "t": "é"}
        assert f.get_tensor("m.0.w").tolist() == [1, 1]
        assert f.get_slice("text").get_dtype() == "string"
    with OURS.safe_open(tmp_path / "m", framework="pt", device="meta") as f:
        assert f.get_tensor("text").unpack().tolist() == f.get_tensors()["text"].unpack().tolist() == ["a", "b"]


@pytest.mark.parametrize("save", [OURS.np.save_file, safetensors.numpy.save_file], ids=["ours", "theirs"])
def test_pread_reads_the_whole_file_when_it_is_opened(save: Any, tmp_path: Path) -> None:
    save({"w": np.arange(9000)}, tmp_path / "m")
    with OURS.safe_open(tmp_path / "m", "np", backend="pread") as file:
        (tmp_path / "m").write_bytes(b"")  # what was mapped would be gone
        assert file.get_tensor("w")[-1] == 8999


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


def test_file_that_is_neither_is_one_typed_error(tmp_path: Path) -> None:
    for data in (b"", b"short", bytes(999), b"GGUF" + bytes(200), (2).to_bytes(8, "little") + b"{x"):
        (tmp_path / "m").write_bytes(data)
        for framework in ("np", "pt"):
            with pytest.raises(zcrecord.FormatError) as caught:
                OURS.safe_open(tmp_path / "m", framework=framework)
            assert str(caught.value).startswith(f"{tmp_path / 'm'}: ")
        with pytest.raises(zcrecord.FormatError):
            OURS.np.load(data)
