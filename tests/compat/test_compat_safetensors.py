"""`zcrecord.compat.safetensors` does what safetensors does: most tests here run on both, with the import alone changed.

What is written and read comes after, then what programs import, private names included. What is different
on purpose in `test_compat_safetensors_differences`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import re
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


@pytest.mark.parametrize("framework", ["np", "pt"])
@pytest.mark.parametrize("save", [OURS.np.save_file, safetensors.numpy.save_file], ids=["ours", "theirs"])
def test_pread_reads_the_tensor_and_the_rows_that_are_asked_for(
    save: Any, framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save({"w": np.arange(90000).reshape(300, 300), "v": np.arange(900000)}, tmp_path / "m")
    read, preadv = [0], os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        read[0] += (nbytes := preadv(fd, buffers, offset))
        return nbytes

    monkeypatch.setattr(os, "preadv", counted)
    with OURS.safe_open(tmp_path / "m", framework, backend="pread") as file:
        assert file.get_slice("w").get_shape() == [300, 300] and read[0] < 10000
        assert file.get_slice("w")[299:, -2:].tolist() == [[89998, 89999]] and read[0] < 20000
        assert file.get_slice("w")[299].tolist()[-1] == 89999 and read[0] < 800000
        tensor = file.get_tensor("w")
        tensor += 1
        assert file.get_tensor("w")[0, 0] == 0 and tensor[0, 0] == 1 and read[0] < 2400000
        os.truncate(tmp_path / "m", 5000)  # what was mapped would end the process
        with pytest.raises(OURS.error, match="became shorter while it was read"):
            file.get_tensor("v")


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
        kept = [[1, 2, 3], [4, 5, 6]] if backend == "mmap" else [[0, 1, 2], [3, 4, 5]]
        assert f.get_tensor("w.b").tolist() == kept
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


# Names that programs import from safetensors, private ones included.


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


def test_a_spec_is_changed_by_replace_and_hashed() -> None:
    found = OURS.top.TensorSpec(dtype="float4_e2m1fn_x2", shape=(2, 4), data_ptr=64, data_len=8)
    moved = dataclasses.replace(found, data_ptr=128)
    assert (moved.dtype, moved.shape, moved.data_ptr) == ("F4", [2, 8], 128)
    assert {found: 1, moved: 2}[dataclasses.replace(moved, data_ptr=64)] == 1


def test_specs_that_do_not_fit_are_refused(lib: SimpleNamespace) -> None:
    array = np.arange(6.0)
    with pytest.raises(lib.error):
        lib.top.serialize({"a": spec(lib, array, data_len=40)})
    for wrong in ({"a": {"dtype": "float64"}}, {"a": array}, [array], {3: spec(lib, array)}):
        with pytest.raises(TypeError):
            lib.top.serialize(wrong)
    with pytest.raises(lib.error):
        lib.top.deserialize(b"neither of the two")
    with pytest.raises(TypeError):  # and reads no file
        lib.top.deserialize("model.safetensors")


@pytest.mark.parametrize("other, message", [
    ({"data_ptr": 0}, "tensor 'a': 48 bytes at address 0"), ({"shape": (-6,)}, r"no tensor has shape \[-6\]"),
    ({"data_len": 40}, r"tensor 'a': shape \[6\] of F64 takes 48 bytes, data_len says 40"),
    ({"shape": (0,) * 65}, r"no tensor has shape \[0, "),
    ({"data_ptr": 1 << 70}, "no tensor has .* data_ptr 1180591620717411303424"),
    ({"dtype": "float4_e2m1fn_x2", "shape": ()}, "float4_e2m1fn_x2 of rank 0 is two elements without an axis"),
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
