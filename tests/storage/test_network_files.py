"""Files of network file systems are read by position: the same record, one typed error for a fault, never SIGBUS."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuse_mount
import numpy as np
import pytest
import records as r
from processes import output

import zcrecord
from zcrecord import SourceError, UnsupportedError, load_record
from zcrecord.formats import convert
from zcrecord.loaders.torch import TorchLoader
from zcrecord.storage import memory
from zcrecord.transport import pack

MIB = 1 << 20
TREE: dict[str, Any] = {
    "layers": [{"w": np.arange(2000.0).reshape(40, 50) + i, "b": np.arange(i + 3, dtype=np.int8)} for i in range(9)],
    "text": np.array(["x", "yz"]), "twins": [np.ones(500), np.ones(500)], "none": np.zeros((0, 3)), "n": 5,
    "large": np.random.default_rng(0).random(MIB // 2),
}  # fmt: skip
FILES = ["m.zcr", "shards.zcr", "references.zcr", "m.safetensors", "hub", "m.npz", "m.zcr.zst"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    zcrecord.save_record(TREE, folder / "m.zcr")
    zcrecord.save_record(TREE, folder / "shards.zcr", max_shard_size=100_000)
    plain = {name: value for name, value in TREE.items() if name != "text"}
    zcrecord.save_record(plain, folder / "plain.zcr")
    (folder / "hub").mkdir()
    convert(folder / "plain.zcr", folder / "hub" / "m.safetensors", max_shard_size=100_000)
    convert(folder / "plain.zcr", folder / "m.safetensors")
    convert(folder / "m.zcr", folder / "m.npz")
    zcrecord.index(folder / "m.safetensors", folder / "references.zcr")
    pack(folder / "m.zcr", folder / "m.zcr.zst")
    return folder


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_network_file_system", lambda _: "NFS")


@pytest.mark.parametrize("file", FILES)
def test_record_of_a_network_file_system_is_that_of_a_local_one_and_nothing_of_it_is_mapped(
    file: str, made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local = load_record(made / file)
    monkeypatch.setattr(memory, "_network_file_system", lambda _: "NFS")
    with caplog.at_level(logging.INFO, "zcrecord"):
        record = load_record(made / file, verify="full")
    whole = file in ("m.npz", "m.zcr.zst")
    logged = [] if whole else [f"{made / file} is on NFS: tensors are read when used, not mapped"]
    logged = [line.replace("hub is", f"hub{os.sep}m.safetensors.index.json is") for line in logged]
    assert [line.getMessage() for line in caplog.records] == logged
    assert record.content_digest() == local.content_digest() and record.archive.source.on_demand is not whole
    for other in (record, load_record(made / file, mode="c"), pickle.loads(pickle.dumps(record))):
        r.assert_same(other.tree(), local.tree())
        assert list(dict(other)) == list(local)
    boxes = {"*": np.s_[1:3]}
    for loader in ("cpu", "host", "read", TorchLoader("cpu")):
        found = record.load_into(loader, "layers.*", slices=boxes)
        for name, view in local.select("layers.*").items():
            assert np.array_equal(np.asarray(found[name]), view[1:3]), name
    record.torch("cpu", "large")["large"][0] = 7
    assert record["large"][0] == TREE["large"][0]


def test_what_is_not_used_any_more_is_not_in_memory_and_edits_are(made: Path) -> None:
    record, edited = (load_record(made / "m.zcr", mmap=None, mode=mode) for mode in ("r", "c"))
    first = record["large"]
    assert np.shares_memory(first, record["large"]) and not first.flags.writeable
    assert r.address(first) % 64 == 0
    edited["layers.0.w"][0] = 7
    assert edited["layers.0.w"][0, 0] == 7 and record["layers.0.w"][0, 0] == 0


def test_bytes_of_a_file_are_read_in_order_alone(made: Path) -> None:
    octets: Any = memory.read_on_demand(str(made / "m.zcr")).octets
    assert bytes(octets[2:][:9:1]) == (made / "m.zcr").read_bytes()[2:11]
    for selected in (slice(None, None, 2), slice(9, 0, -1), 0):
        with pytest.raises(UnsupportedError, match="slices of step 1"):
            octets[selected]


@pytest.mark.parametrize("file", ["m.zcr", "shards.zcr", "m.safetensors"])
def test_chosen_tensors_alone_are_read_and_stay(file: str, made: Path, tmp_path: Path, reads: list[int]) -> None:
    shutil.copytree(made, tmp_path / "m")
    record = load_record(tmp_path / "m" / file, mmap=False, names="layers.3.*")
    assert sum(reads) < 200_000
    for name in os.listdir(tmp_path / "m"):
        if name != "hub":
            (tmp_path / "m" / name).write_bytes(b"")
    assert np.array_equal(record["layers.3.w"], TREE["layers"][3]["w"])
    for way in ("cpu", "host", "read"):
        assert np.array_equal(record.load_into(way)["layers.3.w"], TREE["layers"][3]["w"]), way
        assert record.load_into(way, slices={"layers.3.w": np.s_[:, :2]})["layers.3.w"].shape[1] == 2
    private = zcrecord.Record(record.archive.private())["layers.3.w"]
    assert np.array_equal(private, TREE["layers"][3]["w"]) and private.flags.writeable


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads by position."""
    sizes: list[int] = []
    preadv = os.preadv

    def noted(fd: int, buffers: Any, offset: int) -> int:
        sizes.append(preadv(fd, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, "preadv", noted)
    return sizes


USES: dict[str, Callable[[Any], Any]] = {
    "view": lambda record: record["large"],
    "all": dict,
    "torch": lambda record: record.torch(),
    "host": lambda record: record.load_into("host", "l*"),
    "device": lambda record: record.load_into(TorchLoader("cpu"), "l*"),
    "box": lambda record: record.load_into("host", "large", slices={"*": np.s_[300_000:300_009]}),
    "verify": lambda record: record.verify(),
}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fault", ["eio", "shorter", "changed"])
def test_fault_of_the_server_is_one_typed_error(
    fault: str, use: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(shutil.copy(made / "m.zcr", tmp_path))
    record, files = load_record(path), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    message = {
        "eio": "cannot be read: Input/output error",
        "shorter": "(became shorter|was changed)",
        "changed": "was changed",
    }[fault]
    if fault == "eio":

        def broken(*_: Any) -> int:
            raise OSError(errno.EIO, "io")

        monkeypatch.setattr(os, "preadv", broken)
    elif fault == "shorter":
        os.truncate(path, 100_000)
    else:
        os.utime(path, ns=(1, 1))
    with pytest.raises(SourceError, match=rf"m\.zcr: .*{message}"):
        USES[use](record)
    assert not files or len(os.listdir("/proc/self/fd")) <= files


UNDER_LIMIT = """
import resource, sys
from tools.measure import peak_rss
import numpy as np, zcrecord
from zcrecord.compat.safetensors import safe_open

path, way, limited = sys.argv[1:]
zcrecord.load_record(path, mmap=False, names="small")
space = int(open("/proc/self/statm").read().split()[0]) * 4096 + (400 << 20)
resource.setrlimit(resource.RLIMIT_AS, (space, space))
before = peak_rss()
if way == "pread":
    tensor = safe_open(path, "np", backend="pread").get_tensor("w3")
elif way == "names":
    tensor = zcrecord.load_record(path, mmap=False, names="w3")["w3"]
else:
    tensor = zcrecord.load_record(path)["w3"]
print(tensor.nbytes, peak_rss() - before)
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: ulimit -v and /proc are Linux's")
def test_one_tensor_of_a_file_larger_than_the_address_space_takes_its_own_size(tmp_path: Path) -> None:
    path, size = tmp_path / "m.safetensors", 96 * MIB  # of 1.6 GB, with holes
    entries = {f"w{i}": {"dtype": "F32", "shape": [size // 4], "data_offsets": [i * size, i * size + size]}
               for i in range(17)}  # fmt: skip
    entries["small"] = {"dtype": "U8", "shape": [8], "data_offsets": [17 * size, 17 * size + 8]}
    header = str(entries).replace("'", '"').encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + 17 * size + 8)
    for way in ("pread", "names"):
        nbytes, grown = map(int, output(sys.executable, "-c", UNDER_LIMIT, str(path), way, "").split())
        assert nbytes == size and size <= grown <= size + 2 * MIB, (way, grown)
    with pytest.raises(Exception, match="raise its limit"):
        output(sys.executable, "-c", UNDER_LIMIT, str(path), "mapped", "")


@pytest.mark.slow
@pytest.mark.needs("mount")
@pytest.mark.skipif(not os.access("/dev/fuse", os.W_OK), reason="platform: FUSE needs /dev/fuse and its rights")
@pytest.mark.parametrize("fault", ["", "short", "eio", "shorter"])
def test_file_of_fuse_is_read_whatever_becomes_of_it(fault: str, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "files")
    with fuse_mount.mounted(tmp_path / "files", tmp_path / "at", "" if fault == "shorter" else fault) as folder:
        record = load_record(folder / "m.zcr")
        assert record.archive.source.on_demand and not record.archive.source.mappings()
        if fault in ("", "short"):
            r.assert_same(record.tree(), TREE)
            r.assert_same(load_record(folder / "m.safetensors")["large"], TREE["large"])
            return
        if fault == "shorter":
            os.truncate(tmp_path / "files" / "m.zcr", 200_000)
        for use in USES.values():
            with pytest.raises(SourceError, match="Input/output error" if fault == "eio" else "shorter|changed"):
                use(record)
