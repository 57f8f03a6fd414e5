"""Sharded jax arrays: shards equal to the tensor's boxes, views where they can be, and no bytes of other processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import records as r
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.range_server import serving
from zcrecord.errors import IntegrityError, TensorNotFoundError, UnsupportedError

MIB = 1 << 20

# Eight devices are made of one CPU, before jax is imported.
DEVICES = """
import gc, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, zcrecord
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from tools.measure import memory

line = Mesh(np.array(jax.devices()), ("x",))
grid = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
rows, columns, everywhere = (NamedSharding(line, P(*axes)) for axes in (("x",), (None, "x"), ()))
both, some = NamedSharding(grid, P("x", "y")), NamedSharding(grid, P("y"))  # `some`: each shard on four devices

def address(shard):
    return shard.data.block_until_ready().unsafe_buffer_pointer()

def is_view(shard, array):
    start = array.__array_interface__["data"][0]
    return start <= address(shard) < start + array.nbytes
"""
EQUAL = """
rec = zcrecord.load_record(sys.argv[1])
for name, sharding in {"rows": rows, "columns": columns, "both": both, "some": some, "everywhere": everywhere}.items():
    for key, array in rec.jax(["w", "half", "turned", "tied"], shardings=sharding).items():
        assert array.sharding == sharding and array.dtype == rec[key].dtype
        assert np.array_equal(np.asarray(array), rec[key]), (name, key)
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), rec[key][shard.index]), (name, key, shard.index)
mixed = rec.jax(shardings={"w": both, "n*": rows, "scalar": everywhere})
assert list(mixed) == list(rec)
assert mixed["w"].sharding == both and mixed["narrow"].sharding == rows
assert mixed["half"].sharding == SingleDeviceSharding(jax.devices()[0])
assert np.array_equal(np.asarray(mixed["narrow"]), rec["narrow"].unpack())
assert mixed["scalar"].item() == 3 and mixed["none"].shape == (0, 8)
tied = rec.jax(["w", "tied"], shardings=both)
assert tied["w"] is tied["tied"]
"""
VIEWS = """
rec = zcrecord.load_record(sys.argv[1])
found = rec.jax(["w", "half"], shardings=rows)
assert all(is_view(s, rec[name]) for name in ("w", "half") for s in found[name].addressable_shards)
copied = rec.jax(["w"], shardings=columns)["w"].addressable_shards
assert not any(is_view(s, rec["w"]) for s in copied)
shared = rec.jax(["w"], shardings=some)["w"].addressable_shards
assert all(is_view(s, rec["w"]) for s in shared)
assert len({address(s) for s in shared}) == 2, "of each shard the same bytes for four devices"
odd = rec.jax(["odd"], shardings=rows)["odd"].addressable_shards
assert [is_view(s, rec["odd"]) for s in odd] == [True] + [False] * 7, "the others start at no multiple of 64"
own = zcrecord.load_record(sys.argv[1], mode="c")
before = own.jax(["w"], shardings=rows)["w"]
own["w"][0, 0] = -9
assert before[0, 0] == rec["w"][0, 0] and own.jax(["w"], shardings=rows)["w"][0, 0] == -9
"""
MEMORY = """
rec = zcrecord.load_record(sys.argv[2])
kept = jax.block_until_ready(rec.jax(shardings=rows))
gc.collect()
before = memory().private
found = jax.block_until_ready(zcrecord.load_record(sys.argv[1]).jax(shardings=rows))
as_views = memory().private - before
copies = jax.block_until_ready(zcrecord.load_record(sys.argv[1]).jax(shardings=columns))
assert as_views < 4 << 20, as_views
assert memory().private - before > 16 << 20, "a copy of 32 MiB, some in memory that was free, is noticed"
"""
UNEVEN = """
from zcrecord.errors import UnsupportedError
try:
    rec.jax("odd", shardings=columns)
except UnsupportedError as error:
    print(error)
"""
SPLIT = """
rec = zcrecord.load_record(sys.argv[1])
for sharding in (rows, columns, both, some, everywhere):
    for name, array in rec.jax(shardings=sharding).items():
        assert np.array_equal(np.asarray(array), rec[name]), name
found = rec.jax(["rows"], shardings=rows)["rows"]  # saved by four ranks, two devices' shards in each one's file
mapped = [np.frombuffer(rec.archive.source.file_archive(k).buffer, np.uint8) for k in range(4)]
lies_in = [[k for k in range(4) if is_view(shard, mapped[k])] for shard in found.addressable_shards]
assert lies_in == [[0], [0], [1], [1], [2], [2], [3], [3]], lies_in
"""
BASE = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = {
        "w": BASE,
        "tied": BASE,
        "half": (BASE % 100).astype("bfloat16"),
        "turned": np.asfortranarray(BASE + 1),
        "narrow": zcrecord.PackedTensor.pack((BASE % 7).astype("int4")),
        "odd": np.arange(8 * 5, dtype=np.int16).reshape(8, 5),
        "scalar": np.array(3, np.float32),
        "none": np.zeros((0, 8), np.float32),
    }
    folder = tmp_path_factory.mktemp("sharded")
    zcrecord.save_record(tree, folder / "m.zcr", durable=False)
    splits = {"rows": boxes_along(0, 4, BASE.shape), "columns": boxes_along(1, 3, BASE.shape)}
    save_split(folder / "split.zcr", {"rows": BASE, "columns": BASE + 1, "plain": BASE + 2}, splits)
    return folder / "m.zcr"


@pytest.mark.slow
def test_shards_are_views_where_they_can_be_equal_for_every_sharding_and_refused_where_they_differ(path: Path) -> None:
    told = r.run_python(DEVICES + EQUAL + VIEWS + UNEVEN, path).stdout
    assert re.search(r"tensor 'odd': its shape \(8, 5\) cannot be sharded so: .*partitioned 8 times", told), told


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("what", ["SPLIT", "MEMORY"])
def test_shards_of_split_tensors_are_views_too_and_rows_take_no_memory(what: str, path: Path, tmp_path: Path) -> None:
    if what == "SPLIT":
        r.run_python(DEVICES + SPLIT, path.with_name("split.zcr"))
        return
    for name, count in (("large", 2 * MIB), ("small", 2048)):
        record = {f"w{i}": np.full((64, count // 64), i, np.float32) for i in range(4)}
        zcrecord.save_record(record, tmp_path / name, durable=False)
    r.run_python(DEVICES + MEMORY, tmp_path / "large", tmp_path / "small")


PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
import zcrecord
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank = int(sys.argv[3])
mesh = Mesh(np.array(jax.devices()), ("x",))
rec = zcrecord.load_record(sys.argv[1], cache=False)
rows, columns = (NamedSharding(mesh, P(*axes)) for axes in (("x",), (None, "x")))
first = Mesh(np.array(jax.devices()[:1]), ("x",))
found = rec.jax(shardings={"rows": rows, "columns": columns, "first": NamedSharding(first, P())})
for name in ("rows", "columns"):
    (shard,) = found[name].addressable_shards
    assert found[name].shape == (8, 1 << 18) and not found[name].is_fully_addressable
    want = np.arange(1 << 21, dtype=np.uint32).reshape(8, 1 << 18) + (name == "columns")
    assert np.array_equal(np.asarray(shard.data), want[shard.index]), name
assert len(found["first"].addressable_shards) == 1 - rank and found["first"].dtype == np.uint32
print(rec.path, "done")
"""


@pytest.mark.exhaustive(keep=0)
def test_each_of_two_processes_fetches_its_own_bytes_alone(tmp_path: Path) -> None:
    value = np.arange(1 << 21, dtype=np.uint32).reshape(8, 1 << 18)
    zcrecord.save_record({"rows": value, "columns": value + 1, "first": value + 2}, tmp_path / "m.zcr", durable=False)
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "m.zcr").symlink_to(tmp_path / "m.zcr")
    with socket.socket() as reserved, serving(tmp_path) as server:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as jax's server does: both have the port
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        processes = []
        for rank in range(2):
            command = [sys.executable, "-c", PROCESS, f"{server.url}/{rank}/m.zcr", str(port), str(rank)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in ended)
    for rank, (told, _) in enumerate(ended):
        assert told.endswith(f"/{rank}/m.zcr done\n")
        fetched = sum(request.sent for request in server.requests if request.path.startswith(f"/{rank}/"))
        mine = value.nbytes + value.nbytes * (rank == 0)  # half of two tensors, and the first has one of its own
        assert mine <= fetched < mine + 130_000, "and the archive's ends"


def one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def test_only_the_ranges_of_shards_are_fetched_and_whole_tensors_are_checked(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 255, (4, 300_000), np.uint8)
    zcrecord.save_record({"a": value, "b": value + 1}, tmp_path / "m.zcr", durable=False)
    data = bytearray((tmp_path / "m.zcr").read_bytes())
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/m.zcr", cache=False)
        server.forget()
        found = record.jax("b", shardings=one_device())["b"]
        assert np.array_equal(np.asarray(found), value + 1)
        assert server.sent == value.nbytes
        data[zcrecord.load_record(tmp_path / "m.zcr").info("a").offset] ^= 1
        (tmp_path / "m.zcr").write_bytes(data)
        with pytest.raises(IntegrityError, match=r"tensor 'a': payload .* its digest does not match"):
            zcrecord.load_record(f"{server.url}/m.zcr", cache=False).jax(shardings=one_device())


def test_one_device_is_a_sharding_too_and_arrays_outlive_their_record(path: Path) -> None:
    with zcrecord.load_record(path) as record:
        want = np.array(record["w"])
        found = record.jax("w", shardings={"*": one_device()})["w"]
        assert found.unsafe_buffer_pointer() == r.address(record["w"])
    assert np.array_equal(np.asarray(found), want)


def test_what_is_no_sharding_or_does_not_fit_and_unknown_names_are_refused(path: Path) -> None:
    record, spec = zcrecord.load_record(path), PartitionSpec("x")
    refused: list[tuple[Any, str]] = [
        (spec, r"shardings= takes a Sharding, .* not a P\w*; jax\.sharding\.Named"),
        ({"w": spec}, "shardings= maps 'w' to a Sharding, not a P"),
        ({3: one_device()}, "shardings= maps 3 to a Sharding"),
        ({"scalar": NamedSharding(jax.make_mesh((1,), ("x",)), spec)}, r"'scalar': its shape \(\) cannot be sharded"),
    ]
    for shardings, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            record.jax(shardings=shardings)
    with pytest.raises(TensorNotFoundError, match=r"'ww': .*close names: 'w'"):
        record.jax(shardings={"ww": one_device()})
    with pytest.raises(TensorNotFoundError, match="'ww'"):
        record.jax("ww", shardings=one_device())


def test_64_bits_are_refused_by_name_and_strings_come_as_views(tmp_path: Path) -> None:
    zcrecord.save_record({"s": np.array(["a"]), "d": np.ones(3), "w": np.ones(3, np.float32)}, tmp_path / "m.zcr")
    record = zcrecord.load_record(tmp_path / "m.zcr")
    for shardings in (one_device(), {"s": one_device()}):
        found = record.jax(["w", "s"], shardings=shardings)
        assert (list(found), found["s"].strings().__next__(), found["w"].tolist()) == (["s", "w"], b"a", [1, 1, 1])
    with pytest.raises(UnsupportedError, match="tensor 'd': jax would make float32 of float64"):
        record.jax(["d", "w"], shardings=one_device())
