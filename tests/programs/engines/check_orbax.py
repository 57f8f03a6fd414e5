"""orbax saves, keeps and restores steps by archives; what its own handlers saved is converted."""

import datetime
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import zcrecord
from tools.faults.kills import generation, kill_one, written
from zcrecord import formats
from zcrecord.orbax import ZcrCheckpointHandler, ZcrRestore, ZcrSave


def manager(folder: Path, **options: Any) -> Any:
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(**options))


def save_generation(folder: Path, number: int) -> None:
    rows = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    first = jax.device_put(written(number)["first"], rows)
    with manager(folder, max_to_keep=2) as steps:
        steps.save(number, args=ZcrSave({"first": first, "last": written(number)["last"]}))


def last_step(folder: Path) -> int:
    """Return the step that a later run goes on from, which is whole; -1 if there is none.

    Of an older one, which orbax was removing when it was killed, some files may be left.
    """
    last = max((int(name) for name in os.listdir(folder) if name.isdigit()), default=-1)
    if last >= 0:
        with zcrecord.load_record(folder / str(last) / "default" / "state.zcr", verify="full") as record:
            record.verify()
            assert generation(record) == last
    return last


def test_hundred_kills_leave_the_steps_from_before(tmp_path: Path) -> None:
    """The first test here: forked children start jax's threads, which this process does not have yet."""
    chance, within, last, new, torn = random.Random(5), 0.5, -1, 0, 0
    for number in range(100):
        kill_one(partial(save_generation, tmp_path, number), chance.uniform(0, within))
        found = last_step(tmp_path)
        assert found in (last, number)
        new += found == number
        torn += any(name.startswith(f"{number}.") for name in os.listdir(tmp_path))
        within *= 0.9 if found == number else 1.1
        last = found
    assert new and torn, "no save was killed in the middle, so nothing was tried"


def spread(*axes: Any) -> NamedSharding:
    return NamedSharding(jax.make_mesh((4, 2), ("x", "y")), PartitionSpec(*axes))


def state() -> dict[str, Any]:
    numbers = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    rows = jax.device_put(numbers, spread("x"))
    nibbles = jax.device_put((numbers % 8).astype(jax.numpy.int4), spread("x"))
    return {
        "rows": rows, "tied": [rows], "boxes": jax.device_put(numbers.astype(jax.numpy.bfloat16), spread("x", "y")),
        "columns": jax.device_put(numbers[:8], spread(None, "y")), "everywhere": jax.device_put(numbers, spread()),
        "one": jax.numpy.ones(3), "none": jax.device_put(numbers[:0], spread("x")), "nibbles": nibbles,
        "wide": np.arange(5), "scalar": np.float64(0.1), "key": jax.random.key(7), "step": 5, "rate": 0.5,
        "pair": (1, jax.numpy.zeros(2)), "nothing": None, "empty": {}, "when": datetime.date(2026, 11, 27),
        "tags": {"a", "b"}, "text": "x", "octets": b"abc",
    }  # fmt: skip


def like(tree: Any) -> Any:
    """Return a tree with ShapeDtypeStructs for jax's arrays, but for typed keys."""

    def described(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and not jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return leaf

    return jax.tree.map(described, tree)


def check_same(found: Any, expected: Any) -> None:
    pairs = zip(jax.tree.leaves_with_path(found), jax.tree.leaves_with_path(expected), strict=True)
    for (path, a), (other, b) in pairs:
        assert path == other and (isinstance(a, jax.Array), isinstance(a, np.ndarray)) == (
            isinstance(b, jax.Array), isinstance(b, np.ndarray | np.generic)
        ), path  # fmt: skip
        if isinstance(b, jax.Array):
            assert (a.dtype, a.sharding) == (b.dtype, b.sharding), path
            a, b = (jax.random.key_data(k) if k.dtype == jax.random.key(0).dtype else k for k in (a, b))
        same = bytes(a) == b if isinstance(b, bytes) else np.array_equal(np.asarray(a), np.asarray(b))
        assert same, path


def test_steps_come_back_with_their_shardings_while_training_goes_on(tmp_path: Path) -> None:
    saved, numbers = state(), np.arange(5)
    with manager(tmp_path, max_to_keep=2) as steps:
        for step in range(3):
            saved["wide"] = numbers
            steps.save(step, args=ZcrSave(saved))
            numbers = numbers + 1
            saved["wide"][:] = -1  # the save has a copy
            donated = jax.jit(lambda x: x + 1, donate_argnums=0)(saved["one"])
            saved["one"] = donated
        steps.wait_until_finished()
        assert steps.all_steps() == [1, 2]
        expected = {**saved, "wide": np.arange(5) + 2, "one": jax.numpy.ones(3) * 3}
        check_same(steps.restore(2, args=ZcrRestore(like(expected))), expected)
        shapes = steps.item_metadata(2)
        assert (shapes["rows"].shape, shapes["boxes"].dtype, shapes["step"]) == ((64, 16), jax.numpy.bfloat16, 5)
        plain = steps.restore(2, args=ZcrRestore())
    assert plain["tied"][0].sum() == 64 * 16 * 1023 / 2 and plain["pair"][0] == 1 and plain["tags"] == {"a", "b"}
    path = tmp_path / "2" / "default" / "state.zcr"
    record = zcrecord.load_record(path, verify="full")
    record.verify()
    assert record.info("rows").tied == ("rows", "tied.0") and record.attributes["octets"] == b"abc"
    files = [file for file in path.parent.iterdir() if file.suffix == ".zcr"]
    stored = sum(file.stat().st_size for file in files)
    assert len(files) == 3 and stored < 1.2 * sum(info.nbytes for info in record.infos()) + 30_000


def test_arrays_that_are_restored_otherwise_are_the_same(tmp_path: Path) -> None:
    numbers = np.arange(64 * 16, dtype=np.float32).reshape(64, 16)
    ocp.Checkpointer(ZcrCheckpointHandler()).save(
        tmp_path / "m", args=ZcrSave({"w": jax.device_put(numbers, spread("x"))})
    )
    for other in (spread("y", "x"), spread(None, "x"), spread(), jax.sharding.SingleDeviceSharding(jax.devices()[3])):
        wanted = {"w": jax.ShapeDtypeStruct((64, 16), np.float32, sharding=other)}
        found = ocp.Checkpointer(ZcrCheckpointHandler()).restore(tmp_path / "m", args=ZcrRestore(wanted))["w"]
        assert found.sharding == other and np.array_equal(found, numbers)


def test_what_a_record_does_not_hold_is_one_error_and_no_step(tmp_path: Path) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"'a': .*; 'b\.0': "):
        ocp.Checkpointer(ZcrCheckpointHandler()).save(tmp_path / "m", args=ZcrSave({"a": print, "b": [object()]}))
    assert not (tmp_path / "m").exists()


PROCESS = """
import os, sys
import numpy as np
import jax
process, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from zcrecord.orbax import ZcrRestore, ZcrSave
mesh = jax.make_mesh((8, 2), ("x", "y"))
def spread(rows, *axes):
    whole = np.arange(rows * 16, dtype=np.float32).reshape(rows, 16)
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
arrays = {"rows": spread(64, "x"), "boxes": spread(32, "y", "x"), "columns": spread(8, None, "y"), "same": spread(4)}
with ocp.CheckpointManager(folder) as manager:
    manager.save(0, args=ZcrSave({**arrays, "wide": np.arange(3), "step": 7}))
    manager.wait_until_finished()
    like = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for k, a in arrays.items()}
    found = manager.restore(0, args=ZcrRestore({**like, "wide": np.arange(3), "step": 0}))
assert found["step"] == 7 and found["wide"].tolist() == [0, 1, 2]
for name, array in arrays.items():
    assert found[name].sharding == array.sharding
    for one, other in zip(found[name].addressable_shards, array.addressable_shards, strict=True):
        assert np.array_equal(one.data, other.data)
"""


def test_two_processes_write_their_shards_and_one_record_has_them(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", PROCESS]
    both = [
        subprocess.Popen([*command, str(i), str(port), str(tmp_path / "steps")], stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    for process in both:
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said[-3000:]
    folder = tmp_path / "steps" / "0" / "default"
    record = zcrecord.load_record(folder / "state.zcr", verify="full")
    record.verify()
    assert record["boxes"].tolist() == np.arange(32 * 16).reshape(32, 16).tolist()
    sizes = [(folder / f"state-0000{i}-of-00003.zcr").stat().st_size for i in (2, 3)]
    assert sizes[0] < 2 * sizes[1] and sizes[1] < 2 * sizes[0], "both have half of the shards"


@pytest.mark.parametrize("ocdbt", [True, False])
@pytest.mark.parametrize("zarr3", [True, False])
def test_what_orbax_saved_itself_is_converted_and_opened(ocdbt: bool, zarr3: bool, tmp_path: Path) -> None:
    saved = {key: value for key, value in state().items() if key not in ("when", "tags", "octets", "none")}
    saved["tied"] += [jax.numpy.full((3, 2), i) for i in range(11)]  # a list of more than ten items
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
    with ocp.CheckpointManager(tmp_path / "steps", item_handlers=handler) as steps:
        steps.save(3, args=ocp.args.PyTreeSave(saved))
        steps.wait_until_finished()
    report = formats.convert(tmp_path / "steps" / "3", tmp_path / "m.zcr")
    opened, record = zcrecord.load_record(tmp_path / "steps" / "3"), zcrecord.load_record(tmp_path / "m.zcr")
    assert opened.content_digest() == record.content_digest() and report.tensors == len(record)
    found = record.tree()
    assert (found["step"], found["rate"], found["text"], found["nothing"], found["empty"]) == (5, 0.5, "x", None, {})
    assert found["scalar"] == 0.1 and found["pair"][0] == 1 and isinstance(found["tied"], list)
    assert [item.flat[0] for item in found["tied"][1:]] == list(range(11))
    assert jax.random.key_data(found["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()
    for name in ("rows", "boxes", "columns", "everywhere", "wide"):
        assert found[name].dtype == saved[name].dtype and np.array_equal(found[name], np.asarray(saved[name])), name
    assert np.array_equal(found["nibbles"].unpack(), np.asarray(saved["nibbles"]))


def test_damage_of_what_orbax_saved_is_an_error_that_names_the_array(tmp_path: Path) -> None:
    ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)).save(
        tmp_path / "m", args=ocp.args.PyTreeSave({"w": np.arange(1000)})
    )
    chunk = tmp_path / "m" / "w" / "0"
    data = chunk.read_bytes()
    chunk.write_bytes(data[: len(data) // 2])
    with pytest.raises(zcrecord.FormatError, match="tensor 'w': tensorstore cannot read it"):
        formats.convert(tmp_path / "m", tmp_path / "m.zcr")
    about = tmp_path / "m" / "w" / ".zarray"
    about.write_text(about.read_text("utf-8").replace("1000", "1000000000000"), "utf-8")
    with pytest.raises(zcrecord.LimitError, match="bytes of files claim 8000000000000 bytes of arrays"):
        formats.convert(tmp_path / "m", tmp_path / "m.zcr")
    about.unlink()
    with pytest.raises(zcrecord.FormatError, match="tensor 'w': tensorstore cannot open it"):
        formats.convert(tmp_path / "m", tmp_path / "m.zcr")
    metadata = tmp_path / "m" / "_METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace('"w"', '"../w"'), "utf-8")
    with pytest.raises(zcrecord.FormatError, match="its name is not that of a folder beside the metadata"):
        formats.convert(tmp_path / "m", tmp_path / "m.zcr")
    assert not (tmp_path / "m.zcr").exists()


def bare(folder: Path, kind: Any = "np.ndarray", shape: Any = (3,), path: Any = ("w",), **about: Any) -> Path:
    """Return a folder with one array, without orbax; its one chunk has three bytes, whatever zarr's own file says."""
    keys = [{"key": key, "key_type": 1} for key in path]
    leaf = {"key_metadata": keys, "value_metadata": {"value_type": kind}}
    (folder / "w").mkdir(parents=True)
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": {"w": leaf}}), encoding="utf-8")
    array = {"zarr_format": 2, "shape": shape, "chunks": [3, 1][: len(shape)], "dtype": "|u1", "compressor": None}
    array |= {"fill_value": 0, "order": "C", "filters": None} | about
    (folder / "w" / ".zarray").write_text(json.dumps(array), encoding="utf-8")
    (folder / "w" / "0").write_bytes(b"abc")
    return folder


def link(folder: Path, name: str, content: bytes | None) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder.parent / "elsewhere")
    if content is not None:
        (folder.parent / "elsewhere").write_bytes(content)


def pipe(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: link(bare(f), "w/0", b"key"), "is a link to .*elsewhere, out of its folder"),
        (lambda f: link(bare(f, "string"), "_strings.json", b'{"w": "key"}'), "is a link to .*elsewhere, out of its"),
        (lambda f: link(bare(f), "x", None), "is a link to .*elsewhere, out of its folder"),
        (lambda f: (bare(f) / "x").symlink_to("none"), "x: cannot be read: No such file"),
        (lambda f: pipe(bare(f), "_strings.json"), "_strings.json: not a regular file"),
        (lambda f: pipe(bare(f), "w/0"), "0: not a regular file"),
        (lambda f: bare(f, "scalar"), "'w': is no scalar: ValueError"),
        (lambda f: bare(f, ["np.ndarray"]), "a list where a str is due"),
        (lambda f: (bare(f, "string") / "_strings.json").write_bytes(b"[]"), "a list where a dict is due"),
        (lambda f: bare(f, path=["w"] * 10_000), "nested more than 100 deep"),
        (lambda f: bare(f, shape=(60_000_000,)), "claim 20000000 chunks of arrays"),
        (lambda f: bare(f, chunks=[1 << 40]), "claim 1099511627776 bytes of arrays"),
        (lambda f: bare(f, "scalar", (), dtype="|S1099511627776", fill_value=None), "claim 1099511627776 bytes"),
    ],
)
def test_a_hostile_folder_is_one_typed_error(harm: Any, message: str, tmp_path: Path) -> None:
    harm(tmp_path / "step")
    for act in (zcrecord.load_record, partial(formats.convert, dest=tmp_path / "m.zcr")):
        with pytest.raises(zcrecord.RecordError, match=message):
            act(tmp_path / "step")


@pytest.mark.parametrize("mmap", [True, False, None])
@pytest.mark.parametrize(
    "harm",
    [
        lambda f: (f / "w" / "0").write_bytes(b"xyz"),
        lambda f: link(f, "w/0", b"key"),
        lambda f: pipe(f, "w/0"),
    ],
)
def test_only_the_content_that_was_expected_is_given(harm: Any, mmap: Any, tmp_path: Path) -> None:
    expect = zcrecord.load_record(bare(tmp_path / "step")).content_digest()
    record = zcrecord.load_record(tmp_path / "step", expect=expect, mmap=mmap)
    assert bytes(record["w"]) == b"abc"
    harm(tmp_path / "step")
    with pytest.raises(
        zcrecord.SourceError, match=r"was changed since it was opened|out of its folder|not a regular file"
    ):
        record["w"]


def test_an_array_of_many_empty_rows_takes_no_time(tmp_path: Path) -> None:
    formats.convert(bare(tmp_path / "step", shape=(10**12, 0)), tmp_path / "m.zcr")
    assert zcrecord.load_record(tmp_path / "m.zcr")["w"].shape == (10**12, 0)
