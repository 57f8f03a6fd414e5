"""Files of other formats open as the records that their conversions are: views, or decoded when used."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import records as r
import safetensors.numpy
import torch
from exhaustive import rounds
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zcrecord
from tools.measure import most_allocated
from tools.range_server import serving
from zcrecord import FormatError, IntegrityError, LimitError, SourceError, UnsupportedError
from zcrecord.foreign import open_foreign, safetensors_header
from zcrecord.foreign.npy import encode_npy_header
from zcrecord.foreign.pickled import unpickle
from zcrecord.foreign.readers import FileReader, open_beside, path_beside
from zcrecord.foreign.receiver import Outline
from zcrecord.foreign.torch_types import TorchNames
from zcrecord.formats import convert
from zcrecord.storage.memory import Memory
from zcrecord.tensors.strides import address
from zcrecord.writing import module_tree

W = np.arange(600, dtype=np.float32).reshape(20, 30)
TREE: dict[str, Any] = {
    "encoder": {"w": W, "b": np.ones(30, bool), "half": np.ones((2, 2), np.float16)},
    "layers": [{"w": W + 1}, {"w": W + 2}],
    "empty": np.zeros((0, 3), np.int8),
    "step": 500,
    "blob": b"bytes",
}


def gguf_file(path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="extra: gguf")
    made = gguf.GGUFWriter(path, "llama")
    made.add_tensor("blk.0.norm", W)
    kind = gguf.GGMLQuantizationType.Q8_0
    made.add_tensor("blk.0.q", gguf.quants.quantize(np.ones((4, 64), np.float32), kind), raw_dtype=kind)
    made.add_array("tokens", ["a", "b"])
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


def converted(suffix: str, **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        zcrecord.save_record(TREE, path.with_suffix(".zcr"))
        convert(path.with_suffix(".zcr"), path, **options)
        os.unlink(path.with_suffix(".zcr"))

    return write


def torch_file(path: Path) -> None:
    w = torch.from_numpy(W.copy())
    torch.save(
        {"model": {"fc.w": w, "tied": w, "turned": w.T}, "epoch": 3, "bf16": torch.ones(3, dtype=torch.bfloat16)}, path
    )


def deflated(path: Path) -> None:
    arrays: dict[str, Any] = {"a.w": W, "F": np.asfortranarray(W), "words": np.array(["a", "bc"])}
    np.savez_compressed(path, **arrays)


FILES: dict[str, Callable[[Path], Any]] = {
    "m.safetensors": converted(".safetensors"),
    "m.safetensors.index.json": converted(".safetensors", max_shard_size=2500),
    "m.npz": converted(".npz"),
    "deflated.npz": deflated,
    "swapped.npz": lambda path: np.savez(path, big=W.astype(">f4"), b=np.ones(5, np.int8)),
    "m.gguf": gguf_file,
    "m.pt": torch_file,
}  # fmt: skip


@pytest.fixture(params=FILES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / "hub" / request.param
    path.parent.mkdir()
    FILES[request.param](path)
    return path


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_opens_as_the_record_that_its_conversion_is(path: Path, mmap: bool) -> None:
    convert(path, path.parent / "own.zcr")
    own, opened = zcrecord.load_record(path.parent / "own.zcr"), zcrecord.load_record(path, mmap=mmap)
    assert opened.names == own.names and opened.metadata == own.metadata
    assert opened.content_digest() == own.content_digest()
    for name in own.names:
        assert opened.raw(name) == own.raw(name), name
    zcrecord.save_record(opened, path.parent / "saved.zcr")
    assert zcrecord.load_record(path.parent / "saved.zcr", verify="full").content_digest() == own.content_digest()
    opened.verify()


def test_parts_pickles_private_copies_and_frameworks_take_it(path: Path) -> None:
    record = zcrecord.load_record(path, expect=zcrecord.load_record(path).content_digest())
    name = next(
        n for n in record.names if record.info(n).nbytes and record.info(n).dtype.name.startswith(("float", "uint"))
    )
    part = zcrecord.load_record(path, names=[name])
    again = pickle.loads(pickle.dumps(record))
    assert part.names == (name,) and part.raw(name) == record.raw(name) == again.raw(name)
    edited = zcrecord.load_record(path, mode="c")
    edited[name][...] = 7
    assert (edited[name] == 7).all() and record.raw(name) == zcrecord.load_record(path).raw(name)
    numeric = [n for n in record.names if record.info(n).dtype.name != "string"]
    assert set(record.select(numeric).torch()) == set(numeric)


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf"])
def test_views_lie_in_the_mapping_and_info_says_so(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / name)
    record = zcrecord.load_record(tmp_path / name)
    start = address(record.archive.buffer)
    for tensor in record.infos():
        if tensor.nbytes:
            assert tensor.decoding is None
            assert start <= address(record.raw(tensor.name)) < start + os.path.getsize(tmp_path / name)


def test_what_does_not_lie_as_it_is_used_is_decoded_while_it_is_used(tmp_path: Path) -> None:
    FILES["deflated.npz"](tmp_path / "d.npz")
    record = zcrecord.load_record(tmp_path / "d.npz")
    assert [record.info(n).decoding for n in record.names] == ["deflated", "deflated", None]
    view = record["a.w"]
    assert address(record["a.w"]) == address(view) and not view.flags.writeable
    assert record["F"].flags.f_contiguous
    FILES["swapped.npz"](tmp_path / "s.npz")
    swapped = zcrecord.load_record(tmp_path / "s.npz")
    assert swapped.info("big").decoding == "big-endian" and swapped["big"].dtype == np.dtype("<f4")


def test_an_unaligned_tensor_is_copied_at_first_use(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'
    )
    data = len(header).to_bytes(8, "little") + header + b"\1" + np.float32(2).tobytes()
    (tmp_path / "m.safetensors").write_bytes(data)
    record = zcrecord.load_record(tmp_path / "m.safetensors")
    assert record.info("b").decoding == "not aligned in its file"
    assert record["b"].flags.aligned and record["b"].tolist() == [2.0] and record["a"].tolist() == [1]
    assert zcrecord.load_record(data)["b"].tolist() == [2.0]


def test_a_folder_opens_as_its_one_model_an_archive_first(tmp_path: Path) -> None:
    FILES["m.safetensors.index.json"](tmp_path / "m.safetensors.index.json")
    assert zcrecord.load_record(tmp_path)["encoder.w"].tolist() == W.tolist()
    zcrecord.save_record({"x": np.ones(1)}, tmp_path / "model.zcr")
    assert zcrecord.load_record(tmp_path).names == ("x",)
    (tmp_path / "none").mkdir()
    with pytest.raises(SourceError, match="none: is a folder without a model; name a file"):
        zcrecord.load_record(tmp_path / "none")


def test_links_are_followed_inside_the_folder_or_a_hub_cache_alone(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    FILES["m.safetensors.index.json"](snapshot / "m.safetensors.index.json")
    shards = sorted(snapshot.glob("*.safetensors"))
    for number, shard in enumerate(shards):
        shard.rename(blobs / f"{number}")
        shard.symlink_to(blobs / f"{number}")
    assert zcrecord.load_record(snapshot)["encoder.w"].tolist() == W.tolist()
    (blobs / "0").rename(tmp_path / "elsewhere")
    shards[0].unlink()
    shards[0].symlink_to(tmp_path / "elsewhere")
    for use in (zcrecord.load_record, lambda folder: convert(folder, tmp_path / "out.zcr")):
        with pytest.raises(SourceError, match=r"is a link to .*elsewhere, out of its folder"):
            use(snapshot)


@pytest.mark.parametrize("type_name", ["zcr:catalogue", "zcr:references"])
def test_no_file_of_another_format_is_taken_for_one_that_names_others(type_name: str, tmp_path: Path) -> None:
    structure = {"version": 1, "items": [[0, [], "object", type_name]]}
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"__metadata__": {"zcrecord": json.dumps(structure)}, "w": tensor}).encode()
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(2, np.float32).tobytes())
    with serving(tmp_path) as server:
        for source in (path, f"{server.url}/{path.name}"):
            with pytest.raises(FormatError, match="gives the record the type name of archives that name other files"):
                zcrecord.load_record(source)
    with pytest.raises(FormatError, match="gives the record the type name"):
        convert(path, tmp_path / "m.zcr")


@pytest.mark.parametrize("suffix", ["npz", "pt"])
def test_full_verification_and_an_index_compare_the_checksums_of_members(suffix: str, tmp_path: Path) -> None:
    path, w = tmp_path / f"m.{suffix}", np.arange(100_000, dtype=np.float32)
    np.savez(path, w=w) if suffix == "npz" else torch.save({"w": torch.from_numpy(w)}, path)
    zcrecord.load_record(path, verify="full").verify()
    r.damage(path, w[50:60].tobytes())
    record = zcrecord.load_record(path)
    for check in (
        record.verify,
        lambda: zcrecord.load_record(path, verify="full"),
        lambda: zcrecord.index(path, tmp_path / "index.zcr"),
    ):
        with pytest.raises(IntegrityError, match=r"the CRC-32 of its member '.*' does not match"):
            check()
    if suffix == "pt":  # members of numpy's are not aligned
        assert zcrecord.index(path, tmp_path / "index.zcr", digest="none").tensors == 1


def test_a_checkpoint_without_checksums_is_one(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert zcrecord.load_record(tmp_path / "m.pt", verify="full")["w"].tolist() == [1, 1, 1]


def test_a_bad_file_gets_the_error_of_its_reader(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes((10**6).to_bytes(8, "little") + b"{")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x07\x12\x01x")
    with pytest.raises(FormatError, match=r"m\.safetensors: .*header"):
        zcrecord.load_record(tmp_path / "m.safetensors")
    with pytest.raises(UnsupportedError, match=r"zcrecord\.onnx\.scan\(path\) gives its weights as they lie"):
        zcrecord.load_record(tmp_path / "m.onnx")
    with pytest.raises(FormatError, match="not a zcrecord archive"):
        zcrecord.load_record(b"\0" * 200)


@pytest.mark.parametrize("name", ["m.safetensors", "m.gguf"])
def test_a_url_is_read_in_two_requests(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / name)
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/{name}")
        wanted = record.names[0]
        assert record.raw(wanted) == zcrecord.load_record(tmp_path / name).raw(wanted)
        again = pickle.loads(pickle.dumps(record))
        assert again.raw(wanted) == record.raw(wanted)
        np.savez(tmp_path / "a.npz", a=W)
        with pytest.raises(
            UnsupportedError, match=r"is a \.npz file, which is not read by URL; download it, or convert"
        ):
            zcrecord.load_record(f"{server.url}/a.npz")
        (tmp_path / "m.safetensors.index.json").write_text(
            '{"weight_map": {"a": "b.safetensors"}}' + " " * 128, encoding="utf-8"
        )
        with pytest.raises(UnsupportedError, match=r"is an index of shards, .* that zcrecord index made"):
            zcrecord.load_record(f"{server.url}/m.safetensors.index.json")


def test_by_url_no_tensor_is_read_from_memory_that_was_not_fetched(tmp_path: Path) -> None:
    far = np.arange(50_000, dtype=np.float32)  # past the first request
    entries = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [50_000], "data_offsets": [1, 200_001]},
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\1" + far.tobytes())
    zcrecord.save_record({"w": far, "blob": b"bytes"}, tmp_path / "m.zcr")
    convert(tmp_path / "m.zcr", tmp_path / "b.safetensors")
    digest = zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    with serving(tmp_path) as server:
        with pytest.raises(UnsupportedError, match="has a tensor that is not aligned in it, and is not read by URL"):
            zcrecord.load_record(f"{server.url}/m.safetensors")
        url = f"{server.url}/b.safetensors"
        ways: list[dict[str, Any]] = [{}, {"names": ["w"]}, {"mode": "c"}]
        for way in ways:
            assert zcrecord.load_record(url, **way)["w"].tolist() == far.tolist()
        assert zcrecord.load_record(url).tree()["w"].tolist() == far.tolist()
        record = zcrecord.load_record(url, expect=digest)
        assert record.tree()["blob"] == b"bytes" == pickle.loads(pickle.dumps(record)).tree()["blob"]
        pickled = pickle.dumps(record)
        octets = bytearray((tmp_path / "b.safetensors").read_bytes())
        octets[-1] ^= 1
        (tmp_path / "b.safetensors").write_bytes(octets)  # under the same ETag
        with pytest.raises(IntegrityError, match="its digest does not match"):
            pickle.loads(pickled)["w"]


def test_a_file_whose_tensors_are_all_decoded_has_a_content_digest(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", w=np.arange(1000.0))
    convert(tmp_path / "m.npz", tmp_path / "m.zcr")
    digest = zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    assert zcrecord.load_record(tmp_path / "m.npz", expect=digest).info("w").decoding == "not aligned in its file"


@pytest.mark.parametrize("value", ["[" * 700 + "1" + "]" * 700, '{"tuple":[' * 300 + "1" + "]}" * 300])
def test_a_value_of_nested_lists_is_refused_however_deep(value: str, tmp_path: Path) -> None:
    structure = f'{{"version":1,"metadata":{{"x":{value}}}}}'
    header = json.dumps({"__metadata__": {"zcrecord": structure}}).encode()
    (tmp_path / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    for use in (zcrecord.load_record, lambda path: convert(path, tmp_path / "m.zcr")):
        with pytest.raises(FormatError, match="a value for 'x' that no attribute has"):
            use(tmp_path / "m.safetensors")


def test_what_needs_an_archive_says_how_to_make_one(tmp_path: Path) -> None:
    FILES["m.safetensors"](tmp_path / "m.safetensors")
    with (
        pytest.raises(
            UnsupportedError, match=r"edit takes an archive; make one by zcrecord convert m\.safetensors model\.zcr"
        ),
        zcrecord.edit(tmp_path / "m.safetensors"),
    ):
        pass


# Limits of what small files cost.


def nothing(*_: Any) -> Any:
    """Nothing, for every name in a pickle."""


DOUBLED = b")q\0" + b"h\0h\0\x86q\0" * 40
SLOW = {"doubled": DOUBLED, "deep": b")" + b"\x85" * 100_000, "long": b"(" + b"K\1" * 17 + b"t"}


@pytest.mark.parametrize("name", ["a\0b", "\ud800"])
def test_names_that_no_archive_has_are_refused_by_every_way_in(name: str, tmp_path: Path) -> None:
    torch.save({name: torch.zeros(4), "w": torch.ones(4)}, tmp_path / "m.pt")
    for read in (zcrecord.load_record, lambda path: convert(path, tmp_path / "m.zcr")):
        with pytest.raises(UnsupportedError, match=r"its name (contains NUL|has lone surrogates)"):
            read(tmp_path / "m.pt")


@pytest.mark.parametrize("key", [b"K\1", b"\x88", b"N", b"G\x3f\xf0" + bytes(6)])
def test_a_key_that_is_given_twice_is_damage(key: bytes) -> None:
    """Looking for it again and again could take long: a file chooses the numbers in front of it in the table."""
    for items in (b"(" + key + b"N" + key + b"Nu", key + b"Ns" + key + b"Ns"):
        if key == b"N" and not items.startswith(b"("):
            continue  # it is found at once
        with pytest.raises(ValueError, match="its pickle has a key twice"):
            unpickle(b"}" + items + b".", 0, nothing, nothing)


MANY = {
    "deques": (b"ccollections\ndeque\nq\1", b"h\1)R"),
    "sets": (b"]q\2(" + b"".join(b"K%c" % i for i in range(5)) + b"ec__builtin__\nset\nq\1", b"h\1h\2\x85R"),
    "paths": (b"X" + (1 << 17).to_bytes(4, "little") + b"a/" * (1 << 16) + b"q\2cpathlib\nPosixPath\nq\1",
              b"h\1h\2\x85R"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MANY)
def test_containers_and_paths_of_a_small_pickle_are_few(kind: str) -> None:
    start, each = MANY[kind]
    data = b"\x80\x02(" + start + each * 300_000 + b"l."
    names = TorchNames(len(data), lambda *_: None)
    with pytest.raises(LimitError, match=r"its pickle asks for \d+ bytes"):
        unpickle(data, 0, names.find_class, nothing)


def test_an_index_of_shards_that_is_nested_deep_is_refused(tmp_path: Path) -> None:
    for depth in range(900, 1000):
        text = '{"metadata": ' + '{"a": ' * depth + "1" + "}" * depth + ', "weight_map": {"w": "a.safetensors"}}'
        (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
        with pytest.raises(zcrecord.RecordError):
            zcrecord.load_record(tmp_path / "model.safetensors.index.json")


def test_a_shard_swapped_for_a_link_while_it_is_opened_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, secret = tmp_path / "hub", tmp_path / "secret.safetensors"
    hub.mkdir()
    for file in (hub / "a.safetensors", secret):
        safetensors.numpy.save_file({"w": W}, file)
    index = {"metadata": {}, "weight_map": {"w": "a.safetensors"}}
    path = hub / "model.safetensors.index.json"
    path.write_text(json.dumps(index), encoding="utf-8")
    look = os.lstat

    def late(path: Any, **options: Any) -> os.stat_result:
        status = look(path, **options)
        if os.path.basename(path) == "a.safetensors":
            os.unlink(path)
            os.symlink(secret, path)
        return status

    record = zcrecord.load_record(path)
    reads: list[Callable[[], Any]] = [lambda: record["w"], lambda: convert(path, tmp_path / "m.zcr")]
    for read in reads:
        monkeypatch.setattr("zcrecord.foreign.readers.os.lstat", late)
        with pytest.raises(SourceError, match=r"a\.safetensors: was replaced by another file while it was opened"):
            read()
        monkeypatch.undo()
        (hub / "a.safetensors").unlink()
        safetensors.numpy.save_file({"w": W}, hub / "a.safetensors")


def test_a_file_that_appears_while_it_is_opened_is_refused_and_closed(tmp_path: Path) -> None:
    opened: list[FileReader] = []

    def open_late(path: str) -> FileReader:
        Path(path).write_bytes(b"late")
        opened.append(FileReader(path))
        return opened[0]

    with pytest.raises(SourceError, match="shard: appeared while it was opened; open it again"):
        open_beside(str(tmp_path / "index.json"), "shard", open_late)
    with pytest.raises(ValueError, match="closed"):
        _ = opened[0].inode


def test_a_link_that_becomes_a_file_while_it_is_followed_is_one_typed_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("elsewhere")

    def replaced(path: str, **_: object) -> str:  # as before Python 3.13
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)

    monkeypatch.setattr(os.path, "realpath", replaced)
    with pytest.raises(SourceError, match="cannot be read: Invalid argument"):
        path_beside(str(tmp_path / "model.json"), "link")


def test_items_of_a_set_of_one_hash_are_few() -> None:
    prime = (1 << 61) - 1
    names = TorchNames(10_000, lambda *_: None)
    wide = [b"\x8a\x14" + (prime * (1 << 80 | i)).to_bytes(20, "little", signed=True) for i in range(101)]
    made = b"c__builtin__\nset\n](" + b"%s" + b"e\x85R."
    assert len(unpickle(made % b"".join(wide[:100]), 0, names.find_class, nothing)[0]) == 100
    with pytest.raises(LimitError, match="a hundred keys have the same hash; the file is malicious"):
        unpickle(made % b"".join(wide), 0, names.find_class, nothing)


@pytest.mark.parametrize("key", SLOW)
def test_a_tuple_that_takes_long_to_hash_is_no_key(key: str) -> None:
    with pytest.raises(UnsupportedError, match="a tuple of more than 16 items"):
        unpickle(b"\x80\x02}" + SLOW[key] + b"K\x01s.", 0, nothing, nothing)


def test_keys_of_one_hash_are_few() -> None:
    prime = (1 << 61) - 1
    wide = [b"\x8a\x14" + (prime * (1 << 80 | i)).to_bytes(20, "little", signed=True) + b"N" for i in range(101)]
    found, _ = unpickle(b"}(" + b"".join(wide[:100]) + b"u.", 0, nothing, nothing)
    assert len(found) == 100 and len(set(map(hash, found))) == 1
    with pytest.raises(LimitError, match="a hundred keys have the same hash; the file is malicious"):
        unpickle(b"}(" + b"".join(wide) + b"u.", 0, nothing, nothing)


def test_strings_of_all_arrays_together_are_bounded(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for i in range(2):
            file.writestr(f"{i}.npy", encode_npy_header("|S0", (5_000_000,)))
    (tmp_path / "m.npz").write_bytes(out.getvalue())
    with pytest.raises(LimitError, match="strings take much more memory than the file"):
        zcrecord.load_record(tmp_path / "m.npz")


def lines_of(function: Callable[[], object]) -> int:
    """Return how many lines of Python run, the one of a loop each time around."""
    lines = 0

    def count(_frame: object, event: str, _argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += event == "line"
        return count

    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


def test_each_decoded_tensor_costs_the_same_however_many_there_are(tmp_path: Path) -> None:
    lines = []
    for count in (100, 800):
        arrays: dict[str, Any] = {f"w{i}": np.arange(9) for i in range(count)}
        np.savez_compressed(tmp_path / "m.npz", **arrays)
        record = zcrecord.load_record(tmp_path / "m.npz")
        lines.append(lines_of(lambda record=record: [record[name].sum() for name in record.names]))  # type: ignore[misc]
    assert lines[1] < 10 * lines[0]


def test_a_checkpoint_that_is_read_into_memory_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    torch.save({"w": torch.ones(5000)}, path)
    record = zcrecord.load_record(path, mmap=False)
    octets = bytearray(path.read_bytes())
    with open(path, "r+b") as file:  # changed in place
        file.write(octets.replace(np.float32(1).tobytes(), np.float32(7).tobytes()))
    assert record["w"].sum() == 5000


def test_what_was_read_into_memory_is_read_again_where_its_pickle_is_loaded(tmp_path: Path) -> None:
    head = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'  # 54 bytes: the elements are not aligned
    (tmp_path / "m.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + np.ones(2, np.float32).tobytes())
    for mmap in (True, False):
        record = pickle.loads(pickle.dumps(zcrecord.load_record(tmp_path / "m.safetensors", mmap=mmap)))
        assert record["w"].sum() == 2
        assert record.archive.source.files[0].octets.readonly == mmap


# Tensors put at once.


peer: Any = safetensors.numpy
KEYS = st.sampled_from(["a", "b", "a-", "a/", "é", "10", "9", "", "weight", "日本"])
NAMES = st.lists(st.lists(KEYS, min_size=1, max_size=6).map(".".join).filter(bool), max_size=12, unique=True)


def opened(data: bytes, kind: str, *, by_columns: bool) -> Any:
    """Return the index of a file, without its memory, and the bytes of its tensors."""
    with pytest.MonkeyPatch.context() as patch:
        if not by_columns:
            patch.setattr(Outline, "put_state", lambda *_: False)
        archive = open_foreign(kind, Memory(memoryview(data)))
    index = archive.index._replace(memory=memoryview(b""))
    columns = [None if column is None else np.asarray(column).tolist() for column in index[2:]]
    return columns, bytes(index.text), [np.asarray(view).tobytes() for view in archive.views()]


def values(names: list[str], forms: list[int]) -> dict[str, Any]:
    dtypes = [np.float32, np.uint8, np.float16]
    found = zip(names, forms * len(names), strict=False)
    return {name: np.arange(form % 5, dtype=dtypes[form % 3]).reshape(1, -1) for name, form in found}


@pytest.mark.slow
@given(NAMES, st.lists(st.integers(0, 15), min_size=1, max_size=12))
@example(["a", "a.b", "c.d"], [2])
@example(["b.a.w", "a.w", "b.a.c.w", "b.w", "a.b.w", "b.c"], [1, 7, 2, 6, 3, 5])
@example([".".join("a" * 99), ".".join("b" * 100), ".".join("c" * 101)], [1])
@settings(max_examples=rounds(400), deadline=None)
def test_tensors_put_at_once_are_as_if_put_one_by_one(names: list[str], forms: list[int]) -> None:
    data = peer.save(values(names, forms), metadata={"made": "here"})
    assert opened(data, "safetensors", by_columns=True) == opened(data, "safetensors", by_columns=False)


@pytest.mark.parametrize("odd", ["a..b", ".a", "a.", "a.b", ".".join("a" * 101)])
def test_usual_names_are_put_at_once_and_odd_ones_one_by_one(odd: str) -> None:
    usual = ["a.b.w", "a.c", "b", "é.w", ".".join("c" * 100)]
    assert module_tree.state_entries(usual) is not None
    assert module_tree.state_entries([*usual, odd]) is None


def test_an_index_of_no_shards_and_files_of_no_tensors_are_empty_records(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}}', encoding="utf-8")
    for source in (path, peer.save({}), saved(tmp_path / "m.gguf", [], ["a"])):
        assert list(zcrecord.load_record(source)) == []


def test_shards_of_tensors_of_several_types_are_put_at_once(tmp_path: Path) -> None:
    parts = [values([f"{part}.{i}.w" for i in range(9)], [part, 3, 7, 0, 6]) for part in (1, 0)]
    files = {f"m-{k}.safetensors": part for k, part in enumerate(parts)}
    for name, part in files.items():
        (tmp_path / name).write_bytes(peer.save(part))
    path = tmp_path / "m.safetensors.index.json"
    weight_map = {name: file for file, part in files.items() for name in part}
    path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    record = zcrecord.load_record(path)
    assert sorted(record) == sorted([*parts[0], *parts[1]])
    for name, value in (parts[0] | parts[1]).items():
        assert np.array_equal(record[name], value)
        assert record[name].dtype == value.dtype


@pytest.mark.parametrize("names", ["blk.0.Q blk.0.norm Q blk.1.Q", "Q.a Q", "Q Q.Q", "a a.Q b.Q", "Q.a.b Q"])
def test_quantised_tensors_and_others_are_where_their_conversion_has_them(names: str, tmp_path: Path) -> None:
    """Of those that are put at once, and of the others, where a name goes on behind a quantised one's."""
    path, made = tmp_path / "m.gguf", gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for i, name in enumerate(names.split()):
        kind = gguf.GGMLQuantizationType.Q8_0 if i % 2 else gguf.GGMLQuantizationType.Q4_0
        if name.endswith("Q"):
            values = gguf.quants.quantize(np.full((4 + i % 3, 64), i, np.float32), kind)
            made.add_tensor(name, values, raw_dtype=kind)
        else:
            made.add_tensor(name, W + i)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    convert(path, tmp_path / "m.zcr")
    opened, own = zcrecord.load_record(path), zcrecord.load_record(tmp_path / "m.zcr")
    walks = ([(at, key, getattr(c, "shape", c)) for at, key, c in record.walk()] for record in (opened, own))
    assert next(walks) == next(walks) and opened.content_digest() == own.content_digest()
    assert sum(module.type_name == "zcr:quantized" for module in opened.modules.values()) == f"{names} ".count("Q ")


def test_names_of_modules_that_take_much_are_not_put_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_tree, "_BASE_BUDGET", 10)
    assert module_tree.state_entries(["abcd.efghi"]) is not None
    assert module_tree.state_entries(["abcd.efgh.i"]) is None


def saved(path: Path, names: list[str], words: list[str]) -> bytes:
    made = gguf.GGUFWriter(path, "llama")
    made.add_array("words", words)
    for name in names:
        made.add_tensor(name, np.ones(3, np.float32))
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()
    return path.read_bytes()


def test_words_of_every_length_come_as_they_are(tmp_path: Path) -> None:
    """Also where one crosses the bytes that are looked at together, is long, is empty, or has NUL."""
    words = ["x" * (i * 7 % 300) + "é" * (i % 3) + "\0" * (i % 5 == 0) for i in range(3000)] + ["y" * 70_000, "z"]
    data = saved(tmp_path / "m.gguf", [f"a.{i}.w" for i in range(300)], words)
    assert zcrecord.load_record(data).metadata["words"] == words
    assert opened(data, "gguf", by_columns=True) == opened(data, "gguf", by_columns=False)


# Metadata.


def header(entries: int, name: str = "") -> bytes:
    text = json.dumps({"__metadata__": {name + f"{i:x}": "" for i in range(entries)}}, separators=(",", ":")).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize("name", ["", "\n"], ids=["plain", "escaped"])
def test_short_entries_of_metadata_cost_what_is_counted_for_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = header(20_000, name)
    zcrecord.load_record(data)
    peak = most_allocated(lambda: zcrecord.load_record(data))
    assert peak < (1 << 20) + 20_000 * safetensors_header._ENTRY_COST
    assert len(zcrecord.load_record(data).metadata) == 20_000
    monkeypatch.setattr(safetensors_header, "_MEMORY", 1 << 10)
    with pytest.raises(zcrecord.LimitError, match="entries of metadata take far more memory than the file"):
        zcrecord.load_record(data)


@pytest.mark.slow
def test_a_file_of_many_names_and_words_is_opened_in_its_index_and_4_mib(tmp_path: Path) -> None:
    names = [f"model.layers.{i // 100}.experts.{i // 10 % 10}.w{i % 10}.weight" for i in range(10_000)]
    data = saved(tmp_path / "m.gguf", names, [f"word{i}" for i in range(128_000)])
    index = zcrecord.load_record(data).archive.index
    nbytes = sum(np.asarray(column).nbytes for column in index[2:] if column is not None)
    assert most_allocated(lambda: zcrecord.load_record(data)) < nbytes + (4 << 20)


def test_a_vocabulary_is_in_memory_twice_at_most_while_its_file_is_opened(tmp_path: Path) -> None:
    data = saved(tmp_path / "m.gguf", [], [f"word{i}" for i in range(200_000)])
    index = zcrecord.load_record(data).archive.index
    assert most_allocated(lambda: zcrecord.load_record(data)) < 2.5 * (len(index.text) + index.words.nbytes)
