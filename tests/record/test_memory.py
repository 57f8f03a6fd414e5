"""Loading takes no memory for payloads, saving none but for what has to be packed. Each process proves it would notice.

Private memory is what a copy costs; it is measured in a process of its own, from the kernel's figures, beside what
Python and numpy allocate (tracemalloc). `tools.measure` says what the figures are.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.measure import most_allocated
from zcrecord.archive.boxes import BLOCK

MIB = 1 << 20
PAYLOAD = 64 * MIB
LITTLE = 4 * MIB
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")

MEASURED = """
import gc, io, json, mmap, sys, tracemalloc
import numpy as np
import zcrecord
from tools.measure import memory

path, small = sys.argv[1:3]

def read(path):
    with open(path, 'rb') as file:
        return file.read()

held = {{p: {held} for p in sys.argv[1:3]}}

def act(path):
{act}

def grown():
    gc.collect()
    before = memory()
    kept = act(path)
    gc.collect()
    after = memory()
    return {{'private': after.private - before.private, 'rss': after.rss - before.rss}}, kept

act(small)  # imports what is imported on the way
result, kept = grown()
del kept
tracemalloc.start()
kept = act(path)
result['peak'] = tracemalloc.get_traced_memory()[1]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A large archive and a small one of the same names."""
    folder = tmp_path_factory.mktemp("memory")
    for name, each in (("large", PAYLOAD // 8), ("small", 800)):
        tree = {f"w{i}": np.full(each // 4, i, np.float32) for i in range(6)}
        tree["f"] = np.full((each // 400, 100), 1, np.float32, "F")
        packed = zcrecord.PackedTensor(np.full(each, 0x21, np.uint8), "int4", (each * 2,))
        zcrecord.save_record({"m": tree, "p": packed, "b": b"blob"}, folder / name, durable=False)
    return folder / "large", folder / "small"


def measured(act: str, archives: tuple[Path, Path], held: str = "None") -> dict[str, int]:
    """Return how much private and resident memory `act(path)` adds, and the most that it allocates on the way.

    `held[path]` is made before anything is measured.
    """
    code = MEASURED.format(act="\n".join("    " + line for line in act.strip().splitlines()), held=held)
    result: dict[str, int] = json.loads(r.run_python(code, *archives).stdout)
    return result


ALL_VIEWS = """
rec = zcrecord.load_record({source}{options})
return rec, [rec[name] for name in rec], list(rec.values()), dict(rec.items()), rec.tree(), rec.attributes, rec.modules
"""
EDIT = """
with zcrecord.edit(path, path + ".edited", force=True, durable=False) as model:
    model.rename("m.*", "*")
    model.drop("w3")
    model["new"] = np.ones(3)
assert zcrecord.load_record(path + ".edited")["w4"][0] == 4
"""
NOTHING_READ = {
    "path": ALL_VIEWS.format(source="path", options=""),
    "path, touched": ALL_VIEWS.format(source="path", options=", verify='touch'"),
    "suffix": ALL_VIEWS.format(source="path", options=", embedded='suffix'"),
    "edit": EDIT,
}
ALL_READ = {
    "full verification": ALL_VIEWS.format(source="path", options=", verify='full'"),
    "verify": "rec = zcrecord.load_record(path)\nrec.verify()\nreturn rec",
    "sums": "rec = zcrecord.load_record(path)\nreturn rec, [v.sum() for n, v in rec.items() if n != 'p']",
}


def _all_views(source: Path | bytes) -> list[Any]:
    return list(zcrecord.load_record(source).values())


def test_loading_and_views_allocate_nothing_that_grows_with_the_payload(tmp_path: Path) -> None:
    """By count, on every machine; the measurements below notice what is allocated by other means."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"m": [{"w": np.ones((4 * MIB, 2), np.uint8)}, np.ones(2 * MIB, "<f4")]}, path, durable=False)
    data = path.read_bytes()
    for source in (path, data):
        record = zcrecord.load_record(source)
        assert most_allocated(partial(_all_views, source)) < MIB // 4
        assert most_allocated(record.verify) < 2 * MIB
        assert most_allocated(record["m.0.w"].copy) >= 8 * MIB, "a copy would be noticed"


@pytest.mark.measured
@LINUX
@pytest.mark.parametrize("act", NOTHING_READ | ALL_READ)
def test_loading_and_reading_take_no_memory_for_payloads(act: str, archives: tuple[Path, Path]) -> None:
    memory = measured((NOTHING_READ | ALL_READ)[act], archives)
    assert memory["private"] < LITTLE and memory["peak"] < LITTLE
    assert memory["rss"] < LITTLE if act in NOTHING_READ else memory["rss"] > PAYLOAD // 2, "payloads were read, or not"


@pytest.mark.measured
@LINUX
@pytest.mark.parametrize("held", ["read(p)", "np.frombuffer(read(p), np.uint8)"])
def test_loading_from_bytes_adds_nothing_to_them(held: str, archives: tuple[Path, Path]) -> None:
    memory = measured(ALL_VIEWS.format(source="held[path]", options=""), archives, held)
    assert memory["private"] < LITTLE and memory["peak"] < LITTLE


@pytest.mark.measured
@LINUX
def test_content_digest_takes_memory_for_the_largest_permuted_tensor_alone(archives: tuple[Path, Path]) -> None:
    memory = measured("rec = zcrecord.load_record(path)\nrec.content_digest()\nreturn rec", archives)
    assert memory["private"] < LITTLE
    assert memory["peak"] < PAYLOAD // 8 + LITTLE


@pytest.mark.measured
@LINUX
def test_a_copy_of_one_tensor_or_of_the_file_would_be_noticed(archives: tuple[Path, Path]) -> None:
    one = measured("rec = zcrecord.load_record(path)\nv = rec['m.w3']\nreturn rec, np.array(v)", archives)
    assert one["private"] >= PAYLOAD // 8 > LITTLE and one["peak"] >= PAYLOAD // 8
    whole = measured(ALL_VIEWS.format(source="read(path)", options=""), archives)
    assert PAYLOAD - LITTLE < whole["private"] < PAYLOAD + 2 * LITTLE, "one copy, made by the test itself"
    assert PAYLOAD - LITTLE < whole["peak"] < PAYLOAD + LITTLE


SAVED = """
import sys, tracemalloc
import numpy as np
import zcrecord

class Nowhere:
    def write(self, data):
        return len(data)

once = np.ones((2, 2))
zcrecord.save_record([{{'x': once}}, once], Nowhere())  # imports what it needs
array = {array}
tree = {{'x': array}}
tracemalloc.start()
zcrecord.save_record({record}, Nowhere())
print(tracemalloc.get_traced_memory()[1])
"""
SAVES = {
    "C order": ("np.ones((4096, 2048))", "tree"),
    "F order": ("np.ones((4096, 2048), order='F')", "tree"),
    "transposed": ("np.ones((4096, 2048)).T", "tree"),
    "tied": ("np.ones((4096, 2048))", "[tree, array]"),
    "overlapping rows": ("np.ones((4096, 2048))", "[array[:4000], array[100:], array[::2]]"),
    "equal": ("np.ones((2, 2048, 2048))", "[array[0], array[1]]"),
    "packed": ("zcrecord.PackedTensor(np.ones(1 << 26, np.uint8), 'int4', (1 << 27,))", "tree"),
}


def peak_of_saving(array: str, record: str) -> int:
    """Return how many bytes Python and numpy hold at the most while a record of `array` is saved."""
    return int(r.run_python(SAVED.format(array=array, record=record)).stdout)


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("kind", SAVES)
def test_saving_takes_no_memory_for_arrays_that_lie_in_one_piece(kind: str) -> None:
    assert peak_of_saving(*SAVES[kind]) < LITTLE


@pytest.mark.slow
def test_saving_a_copy_would_be_noticed() -> None:
    assert peak_of_saving("np.ones((4096, 2048))", "{'x': array.copy()}") >= PAYLOAD


@pytest.mark.slow
def test_saving_one_array_with_gaps_holds_one_packed_copy_at_the_most() -> None:
    assert peak_of_saving("np.ones((4096, 4096))[:, ::2]", "tree") < PAYLOAD + LITTLE


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By how they are cut, a large catalogue and a small one, of one tensor that is split over shards."""
    folder = tmp_path_factory.mktemp("split")
    for axis, cut in enumerate(("rows", "columns")):
        for size, count in (("large", PAYLOAD // 4096), ("small", 8)):
            values = np.full((count, 1024), 7, np.float32)
            save_split(folder / f"{cut}-{size}.zcr", {"w": values}, {"w": boxes_along(axis, 4, values.shape)})
    return {cut: (folder / f"{cut}-large.zcr", folder / f"{cut}-small.zcr") for cut in ("rows", "columns")}


SAVE_AND_HASH = """
rec = zcrecord.load_record(path)
zcrecord.save_record(rec, path + ".one", durable=False)
return rec, rec.content_digest()
"""


@pytest.mark.measured
@LINUX
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_split_tensors_are_saved_and_hashed_in_memory_of_a_block(cut: str, split: dict[str, tuple[Path, Path]]) -> None:
    memory = measured(SAVE_AND_HASH, split[cut])
    assert memory["private"] < BLOCK + LITTLE  # the C library may keep the block for the next one
    assert memory["rss"] < BLOCK + 2 * LITTLE, "pages of the shards were not let go of"
    assert memory["peak"] < BLOCK + LITTLE


@pytest.mark.measured
@LINUX
def test_assembling_a_split_tensor_would_be_noticed(split: dict[str, tuple[Path, Path]]) -> None:
    memory = measured("rec = zcrecord.load_record(path)\nreturn rec['w']", split["columns"])
    assert memory["private"] > PAYLOAD - LITTLE and memory["peak"] >= PAYLOAD
