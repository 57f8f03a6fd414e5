"""Checkpoints of torch become archives: nested as they were, ties kept, and nothing runs that is in them."""

from __future__ import annotations

import collections
import json
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from forked import run_torch

import zcrecord
from zcrecord import RecordWriter
from zcrecord.formats.copying import copy_file
from zcrecord.tensors.strides import address

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")


def nothing(done: int, total: int | None) -> None:
    """Progress that nobody looks at."""


def converted(path: Path, progress: Any = nothing) -> zcrecord.Record:
    """Return the archive of a checkpoint, every digest checked."""
    with RecordWriter(path.with_suffix(".zcr")) as out:
        assert copy_file("torch", str(path), out, progress) == path.stat().st_size
    return zcrecord.load_record(path.with_suffix(".zcr"), verify="full")


def saved(value: Any, folder: Path, **options: Any) -> zcrecord.Record:
    """Return the archive of what torch saved."""
    torch.save(value, folder / "m.pt", **options)
    return converted(folder / "m.pt")


def tied() -> Any:
    """Return a module whose embedding and head are one, as language models have them."""
    linears = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
    head = torch.nn.Linear(4, 10, bias=False)
    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(10, 4), "h": linears, "lm_head": head})
    head.weight = model["wte"].weight
    return model


# What comes over.


def test_state_dict_comes_as_save_record_would_save_it(tmp_path: Path) -> None:
    model = tied()
    record = saved(model.state_dict(), tmp_path)
    assert list(record) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        r.assert_same(record[name], tensor.numpy())
    assert list(record.modules) == ["", "wte", "h", "h.0", "h.1", "lm_head"]
    assert record.content_digest() == zcrecord.load_record(r.saved(model)).content_digest()


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    record = saved({"model": tied().state_dict()}, tmp_path)
    assert set(record.info("model.wte.weight").tied) == {"model.wte.weight", "model.lm_head.weight"}
    assert r.address(record["model.wte.weight"]) == r.address(record["model.lm_head.weight"])


def test_views_of_one_storage_share_what_they_reach_of_it(tmp_path: Path) -> None:
    base = torch.arange(1000, dtype=torch.float32)
    record = saved({"rows": base[:40], "some": base[10:30:2], "all": base[:40].view(4, 10).T}, tmp_path)
    assert record["some"].tolist() == list(range(10, 30, 2))
    assert record["all"].shape == (10, 4)
    assert record.nbytes == 160, "what no tensor reaches of the storage is left out"
    assert r.address(record["some"]) == r.address(record["rows"]) + 40


def test_tensors_that_only_lie_in_one_storage_are_apart(tmp_path: Path) -> None:
    base = torch.arange(6, dtype=torch.float32)
    record = saved({"a": base[:3], "b": base[3:]}, tmp_path)
    assert record["b"].tolist() == [3, 4, 5]
    assert record.info("a").payload != record.info("b").payload


DTYPES = [getattr(torch, d.torch) for d in zcrecord.dtypes.DTYPES if d.torch and hasattr(torch, d.torch)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_of_every_element_type_comes_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(32, dtype=torch.uint8) % (2 if dtype == torch.bool else 128)
    record = saved({"w": raw.view(dtype)}, tmp_path)
    assert record.info("w").dtype.name == str(dtype).removeprefix("torch.")
    assert record["w"].tobytes() == bytes(raw.tolist())


def test_plain_values_become_attributes_and_order_is_kept(tmp_path: Path) -> None:
    value = {
        "w": torch.ones(2), "steps": 5, "lr": 0.5, "name": "é", "none": None, "yes": True, "raw": b"\0x",
        "buffer": bytearray(b"ab"), "size": torch.Size([2, 3]), "empty": [], "nothing": {}, "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"), "mixed": [1, "a", torch.zeros(1)], "pair": (torch.ones(1), 2),
        "counter": collections.Counter("aab"), "wide": 2**100, "phase": 1j, "last": torch.zeros(()),
    }  # fmt: skip
    tree = saved(value, tmp_path).tree()
    assert list(tree) == list(value)
    assert (tree["steps"], tree["lr"], tree["name"], tree["none"], tree["yes"]) == (5, 0.5, "é", None, True)
    assert (bytes(tree["raw"]), bytes(tree["buffer"])) == (b"\0x", b"ab")
    assert (tree["size"], tree["empty"], tree["nothing"]) == ((2, 3), [], {})
    assert (tree["dtype"], tree["device"]) == (torch.bfloat16, torch.device("cuda:1"))
    assert (tree["counter"], tree["wide"], tree["phase"]) == ({"a": 2, "b": 1}, 2**100, 1j)
    assert tree["mixed"][:2] == [1, "a"]
    assert type(tree["pair"]) is tuple
    assert tree["last"].shape == ()


NESTED: dict[str, Any] = {
    "nested": {"a.b": {"c.d": torch.ones(1), "c.n": 1}, "lr.min": 0.5, "e": {"f.g": 2}, "w.x": torch.ones(2)},
    "a state dict and a value": {"w.x": torch.ones(2), "b.y": torch.ones(1), "epoch": 3},
    "a list of state dicts": [{"w.x": torch.ones(2)}, {"w.x": torch.zeros(2)}],
    "integers": {0: {"w.x": torch.ones(2)}, 1: {}},
    "tuples": {"t": {(("a", 1), (2, (None,))): torch.ones(1), (): 2}, "s": {((0.5,), True)}},
}


@pytest.mark.parametrize("name", NESTED)
def test_names_stay_whole_in_all_that_is_no_state_dict_alone(name: str, tmp_path: Path) -> None:
    record = saved(NESTED[name], tmp_path)
    assert record.content_digest() == r.round_trip(NESTED[name]).content_digest()
    assert list(record.modules) == list(r.round_trip(NESTED[name]).modules)
    assert str(record.tree("torch")) == str(NESTED[name])


def test_state_dict_alone_is_split_whatever_extra_state_it_has(tmp_path: Path) -> None:
    state = {"a.w": torch.ones(1), "a._extra_state": {"n.m": 1}, "_extra_state": 5}
    assert saved(state, tmp_path).attributes == {"a._extra_state.n.m": 1, "_extra_state": 5}
    assert list(saved(state, tmp_path).modules) == ["", "a", "a._extra_state"]


def test_checkpoint_from_before_zip_files_comes_the_same(tmp_path: Path) -> None:
    value = {"model": tied().state_dict(), "epoch": 5}
    old = saved(value, tmp_path, _use_new_zipfile_serialization=False)
    assert (tmp_path / "m.pt").read_bytes()[:2] != b"PK"
    assert old.content_digest() == saved(value, tmp_path).content_digest()


# What is refused.


class Foreign:
    """A class that torch has not heard of."""


class Command:
    """An object that runs a command when it is unpickled without care."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False])
def test_object_of_a_foreign_class_is_one_line_that_says_so(zipped: bool, tmp_path: Path) -> None:
    with pytest.raises(zcrecord.FormatError, match=r"holds an object of \S*Foreign, .*state_dict") as caught:
        saved({"model": Foreign()}, tmp_path, _use_new_zipfile_serialization=zipped)
    assert str(caught.value).startswith(str(tmp_path / "m.pt"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "m.zcr").exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_nothing_that_is_in_a_file_runs(protocol: int, tmp_path: Path) -> None:
    command = Command(f"touch {tmp_path / 'ran'}")
    (tmp_path / "m.pt").write_bytes(pickle.dumps(command, protocol))
    with pytest.raises(zcrecord.FormatError, match=r"holds an object of|no torch checkpoint"):
        converted(tmp_path / "m.pt")
    with pytest.raises(zcrecord.FormatError, match=r"holds an object of"):
        saved({"a": command}, tmp_path)
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "m.pt").read_bytes()[:0] or pickle.dumps(command))
    assert (tmp_path / "ran").exists(), "this test would not notice"


REFUSED = {
    "a set of bytes": ({"e": {b"a"}, "w": torch.ones(1)}, "tensor 'e': a bytes as a key, or in a set, has no equal"),
    "sparse": ({"s": torch.eye(3).to_sparse()}, "tensor 's': "),
    "objects of numpy": ({"a": [np.array([None])]}, "tensor 'a.0': a numpy array of dtype 'O8'; only plain numbers"),
    "text of numpy": ({"a": np.array(["x"])}, "tensor 'a': a numpy array of dtype 'U1'; only plain numbers"),
    "dates of numpy": ({"a": np.datetime64("2020")}, "tensor 'a': a numpy array of dtype 'M8'; only plain numbers"),
    "no names": (torch.ones(3), "a single Tensor without a name; save a dict"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_archive_cannot_hold_is_named(name: str, tmp_path: Path) -> None:
    value, message = REFUSED[name]
    with pytest.raises(zcrecord.UnsupportedError, match=message):
        saved(value, tmp_path)
    assert not (tmp_path / "m.zcr").exists()


NAMESPACES = {
    "fields without names": (b"}K\1K\1s", "in 'x': key 1 is a int; keys are non-empty strings"),
    "a state that is no dict": (b"K\1", "tensor 'x': a namespace without names"),
}


@pytest.mark.parametrize("name", NAMESPACES)
def test_namespace_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    state, message = NAMESPACES[name]
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        pickle_ = b"\x80\x02}X\1\0\0\0xctypes\nSimpleNamespace\n)R" + state + b"bs."
        for member, data in (("data.pkl", pickle_), ("version", b"3\n")):
            file.writestr(f"m/{member}", data)
    with pytest.raises(zcrecord.RecordError, match=message):
        converted(tmp_path / "m.pt")


def test_file_of_another_kind_is_named_where_that_is_plain(tmp_path: Path) -> None:
    for head, message in {
        b"": "the file is empty",
        b"GGUF" + bytes(99): "this is a GGUF file, not a torch checkpoint; zcrecord convert",
        b"version https://git-lfs.github.com/spec/v1": "Git LFS pointer",
        b"hello "
        * 99: r"no torch checkpoint, which begins as a zip file or a pickle; name its format by source_format=$",
        b"\x80\x02"
        + b"hello " * 99: "no torch checkpoint, or a damaged one: its pickle cannot be read; copy it again$",
    }.items():
        (tmp_path / "m.pt").write_bytes(head)
        with pytest.raises(zcrecord.FormatError, match=message):
            converted(tmp_path / "m.pt")


def test_zip_file_of_something_else_is_no_checkpoint(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        file.writestr("a/readme.txt", "hello")
    with pytest.raises(zcrecord.FormatError, match="no torch checkpoint, or a damaged one"):
        converted(tmp_path / "m.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_truncated_anywhere_it_is_an_error(zipped: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3), "n": 1}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    whole = (tmp_path / "m.pt").read_bytes()
    for size in range(0, len(whole), 7):
        (tmp_path / "m.pt").write_bytes(whole[:size])
        with pytest.raises(zcrecord.FormatError, match=r"no torch checkpoint|empty|holds an object of"):
            converted(tmp_path / "m.pt")


@pytest.mark.parametrize("at, value", [(28, b"\x00\x70"), (30, b"\x04\x00")])
def test_a_directory_that_cannot_be_read_is_refused(at: int, value: bytes, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    data = bytearray((tmp_path / "m.pt").read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + at : entry + at + 2] = value
    (tmp_path / "m.pt").write_bytes(data)
    with pytest.raises(
        zcrecord.FormatError, match=r"m\.pt: its directory is damaged; readers of zip files would differ"
    ):
        converted(tmp_path / "m.pt")


def test_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    endless: list[Any] = [torch.ones(1)]
    endless.append(endless)
    with pytest.raises(zcrecord.LimitError, match="nested more than 100 deep; does it contain itself"):
        saved(endless, tmp_path)


def test_long_texts_in_the_tuples_of_a_set_are_counted_before_they_are_compared(tmp_path: Path) -> None:
    texts = ["x" * 5000 + end for end in "ab"]
    with pytest.raises(zcrecord.LimitError, match="tensor 's': the same lists or texts are there millions of times"):
        saved({"s": {(i, texts[i % 2], texts[i // 2 % 2]) for i in range(1000)}}, tmp_path)


def test_lists_that_are_made_of_a_repeated_dicts_keys_are_repeated_too(tmp_path: Path) -> None:
    with pytest.raises(zcrecord.LimitError, match="the same lists or texts are there millions of times"):
        saved({"l": [{i + 0.5: 0 for i in range(100)}] * 500}, tmp_path)


@pytest.mark.slow
def test_few_bytes_that_stand_for_billions_of_items_are_refused(tmp_path: Path) -> None:
    value: Any = ["x"] * 10
    for _ in range(12):
        value = [value, {"a": 1}] * 10
    with pytest.raises(zcrecord.LimitError, match="millions of times"):
        saved({"bomb": value}, tmp_path)
    assert (tmp_path / "m.pt").stat().st_size < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("item", [b"]", b")", b"}"])
def test_items_of_a_byte_each_are_refused_before_they_take_much_memory(item: bytes, tmp_path: Path) -> None:
    """An item takes some 900 bytes in memory, so that a file of 1 MiB would take 900 MiB."""
    pickled = b"\x80\x02}X\1\0\0\0a](" + item * 90_000 + b"es."
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        file.writestr("m/data.pkl", pickled)
        file.writestr("m/version", b"3\n")
    with pytest.raises(
        zcrecord.LimitError, match=r"m\.pt: tensor 'a': its items would take more than 64 MiB and 64 tim"
    ):
        converted(tmp_path / "m.pt")


@pytest.mark.slow
def test_a_vocabulary_without_weights_is_no_attack(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(80_000)}
    assert saved({"words": words}, tmp_path).tree() == {"words": words}


@pytest.mark.slow
def test_lists_that_are_there_many_times_are_welcome(tmp_path: Path) -> None:
    betas, text = (0.9, 0.999), "a text that is there many times"
    groups = [{"betas": betas, "text": text, "lr": 0.1} for _ in range(3000)]
    assert saved({"w": torch.ones(1), "groups": groups}, tmp_path).tree()["groups"] == groups


def test_small_file_cannot_claim_terabytes(tmp_path: Path) -> None:
    for tensor in (torch.zeros(1).expand(1 << 40), torch.zeros(1 << 20).as_strided((1 << 12, 1 << 19), (1, 1))):
        with pytest.raises(zcrecord.LimitError, match=r"its tensors claim \d{10,} bytes, the file has \d{4,7};"):
            saved({"w": tensor}, tmp_path)


def test_small_expanded_tensor_comes_packed(tmp_path: Path) -> None:
    assert saved({"w": torch.ones(1).expand(3, 4)}, tmp_path)["w"].tolist() == np.ones((3, 4)).tolist()


WITHOUT = """
import sys
sys.modules["torch"] = None
import zcrecord, zcrecord.formats
zcrecord.formats.convert("m.pt", "m.zcr")
for path in ("m.pt", "m.zcr"):
    record = zcrecord.load_record(path)
    print(record["w"].tolist(), record.attributes)
"""


def test_a_checkpoint_is_read_where_torch_is_not_installed(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "dtype": torch.bfloat16, "device": torch.device("cuda", 1)}, tmp_path / "m.pt")
    made = subprocess.run([sys.executable, "-c", WITHOUT], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert made.stdout.splitlines() == ["[1.0, 1.0] {'dtype.value': 'bfloat16', 'device.value': 'cuda:1'}"] * 2
    tree = zcrecord.load_record(tmp_path / "m.zcr").tree()
    assert (tree["dtype"], tree["device"]) == (torch.bfloat16, torch.device("cuda", 1))


def views() -> dict[str, Any]:
    """Tensors of one storage that overlap, are tied or in other orders, and one of another type alone."""
    base = torch.arange(1000, dtype=torch.float32)
    return {"rows": base[:40], "same": base[:40], "turned": base[:40].view(4, 10).T, "odd": base[1:9:2],
            "half": torch.ones(3, dtype=torch.float16)}  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
def test_tensors_are_views_of_the_file_and_an_index_names_them(zipped: bool, tmp_path: Path) -> None:
    torch.save({"m": views(), "step": 3}, tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    record, own = zcrecord.load_record(tmp_path / "m.pt"), converted(tmp_path / "m.pt")
    assert record.content_digest() == own.content_digest()
    if not zipped:
        decodings = {record.info(name).decoding for name in record.names}
        assert decodings <= {None, "not aligned in its file"}  # its keys are addresses, of any number of digits
        if decodings == {None}:
            return
        with pytest.raises(zcrecord.UnsupportedError, match="is not aligned in its file, and an index names ranges"):
            zcrecord.index(tmp_path / "m.pt", tmp_path / "index.zcr")
        return
    start, size = address(record.archive.buffer), (tmp_path / "m.pt").stat().st_size
    assert all(start <= r.address(record[name]) < start + size for name in record.names)
    assert record.info("m.same").tied == own.info("m.same").tied == ("m.rows", "m.same", "m.turned", "m.odd")
    zcrecord.index(tmp_path / "m.pt", tmp_path / "index.zcr")
    indexed = zcrecord.load_record(tmp_path / "index.zcr", verify="full")
    assert indexed.content_digest() == own.content_digest() and indexed.info("m.odd").tied == own.info("m.odd").tied
    r.damage(tmp_path / "m.pt", np.float32(7).tobytes())
    with pytest.raises(zcrecord.IntegrityError):
        zcrecord.load_record(tmp_path / "index.zcr", verify="full")


def test_a_checkpoint_of_a_big_endian_machine_is_swapped(tmp_path: Path) -> None:
    value = {"c": torch.tensor([1 + 2j]), "b": torch.ones(2, dtype=torch.bfloat16), "u": torch.arange(3), **views()}
    torch.save(value, tmp_path / "little.pt")
    with (
        zipfile.ZipFile(tmp_path / "little.pt") as found,
        zipfile.ZipFile(tmp_path / "m.pt", "w") as packed,
    ):
        for name in found.namelist():
            data, item = found.read(name), 4
            if name.endswith("byteorder"):
                data = b"big"
            elif name.startswith("little/data/"):
                item = {"0": 4, "1": 2, "2": 8, "4": 2}.get(name.rpartition("/")[2], 4)
                data = np.frombuffer(data, f"u{item}").byteswap().tobytes()
            packed.writestr(name, data)
    assert converted(tmp_path / "m.pt").content_digest() == converted(tmp_path / "little.pt").content_digest()
    loaded = torch.load(tmp_path / "m.pt")
    assert all(torch.equal(loaded[name], value[name]) for name in value), "torch would not swap these"


def test_conjugate_and_negated_tensors_come_as_their_values(tmp_path: Path) -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    record = saved({"c": value.conj(), "n": torch._neg_view(torch.ones(2))}, tmp_path)
    assert record["c"].tolist() == [1 - 2j, 3 + 4j] and record["n"].tolist() == [-1, -1]


@pytest.mark.parametrize("count", [1000, 2001])
def test_as_many_items_as_pickles_group_come_over(count: int, tmp_path: Path) -> None:
    value = {"d": {f"k{i}": i for i in range(count)}, "l": [i if i % 2 else str(i) for i in range(count)]}
    assert saved(value, tmp_path).tree() == value


MEASURED = """
import gc, json, sys
import torch
from tools.measure import memory
from zcrecord import RecordWriter
from zcrecord.formats.copying import copy_file
from zcrecord.tensors.strides import address

most = 0

def look(*_):
    global most
    most = max(most, memory().private)

def act(path):
    {act}

act(sys.argv[2])
gc.collect()
before = most = memory().private
act(sys.argv[1])
print(json.dumps(most - before))
"""
READ = "with RecordWriter(path + '.zcr', durable=False) as out: copy_file('torch', path, out, look)"
WHOLE = "kept = torch.load(path); look()"


@pytest.mark.measured
@LINUX
def test_conversion_takes_no_private_memory_for_tensors(tmp_path: Path) -> None:
    for name, count in (("large", 1 << 21), ("small", 8)):
        torch.save({"model": {f"w{i}": torch.ones(count) * i for i in range(8)}}, tmp_path / name)
    grown = [
        json.loads(run_torch(MEASURED.format(act=act), tmp_path / "large", tmp_path / "small").stdout)
        for act in (READ, WHOLE)
    ]
    assert grown[0] < 4 * MIB
    assert grown[1] > 60 * MIB, "this test would not notice"


# Arrays and scalars of numpy: read without numpy's own unpickling, or refused by name.

RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
SCALAR: Any = np.float64(1).__reduce__()[0]
NUMPY = [
    np.arange(6, dtype=np.uint32), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.ones((2, 0), np.int8),
    np.array(True), np.arange(3, dtype=">i2"), np.float64(0.1), np.float16(2), np.int64(-3), np.bool_(False),
    np.complex64(1j), np.array([1 + 2j]), np.zeros((1,) * 32),
]  # fmt: skip


@pytest.mark.parametrize("value", NUMPY, ids=lambda value: f"{value.dtype.str} {value.shape}"[:12])
def test_numbers_of_numpy_come_as_save_record_saves_them(value: Any, tmp_path: Path) -> None:
    state = {"best": value, "again": [value, b""]}
    record = saved(state, tmp_path)
    assert np.array_equal(record["best"], value)
    assert record["best"].dtype == value.dtype.newbyteorder("<")
    assert record.content_digest() == r.round_trip(state).content_digest()
    assert record.info("best").tied == (("best", "again.0") if value.size else ())
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "m.pt", weights_only=True)  # torch refuses them


class Pickled:
    """A call that a pickle of its own making asks for."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.reduced = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> Any:
        return self.reduced


FORGED = {
    "no state": Pickled(RECONSTRUCT, np.ndarray, (1 << 40,), "d"),
    "too few bytes": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1 << 40,), np.dtype("f8"), False, b"x")),
    "less than none": Pickled(
        RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (-1,), np.dtype("f8"), False, b"12345678")
    ),
    "no shape": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, 2.5, np.dtype("f8"), False, b"12345678")),
    "no dtype": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1,), "f8", False, b"12345678")),
    "a list": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("O"), False, [1])),
    "a dtype made of text": Pickled(SCALAR, Pickled(np.dtype, "f8,O"), b"12345678"),
    "a dim of 2^70": Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (2**70, 0), np.dtype("f8"), False, b"")),
    "dims of 2^80": Pickled(
        RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (2**40,) * 2 + (0,), np.dtype("?"), False, b"")
    ),
    "an order that is a tensor": Pickled(
        RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (1,), np.dtype("f8"), torch.ones(2), b"12345678")
    ),
    "a large scalar": Pickled(SCALAR, Pickled(np.dtype, "V999999999"), b"x"),
}


@pytest.mark.parametrize("name", FORGED)
def test_arrays_of_numpy_that_are_none_are_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"m\.pt: tensor 'x\.0': (a|no valid pickle of a) numpy array"):
        saved({"x": [FORGED[name]]}, tmp_path)


def test_empty_array_of_numpy_has_as_many_rows_as_numpy_allows(tmp_path: Path) -> None:
    assert saved({"x": np.empty((1 << 53, 0))}, tmp_path)["x"].shape == (1 << 53, 0)


def test_array_of_numpy_as_a_key_is_one_number(tmp_path: Path) -> None:
    key = Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (2,), np.dtype("i4"), False, b"12345678"))
    with pytest.raises(
        zcrecord.UnsupportedError, match=r"m\.pt: a numpy array of shape \(2,\) is a key; save a number"
    ):
        saved({key: 1}, tmp_path)
    key = Pickled(RECONSTRUCT, np.ndarray, (0,), b"b", state=(1, (), np.dtype("i4"), False, b"\7\0\0\0"))
    assert saved({key: 1}, tmp_path).tree() == {7: 1}
