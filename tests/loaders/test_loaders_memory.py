"""Loading takes no more memory than the tensors and the bytes in flight; each measurement proves it would notice.

The measure is the peak of resident memory, mapped pages of the file included, of a process of its own.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord.loaders.torch import TorchLoader

MIB = 1 << 20
PAYLOAD, IN_FLIGHT, LITTLE = 96 * MIB, 8 * MIB, 8 * MIB
pytestmark = [
    pytest.mark.measured,
    pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells mapped pages as resident"),
]

MEASURED = """
import json, sys
import numpy as np
from tools.measure import peak_rss
from zcrecord import load_record
from zcrecord.loaders import PayloadRef, load_into

path, small, way = sys.argv[1:]
device = way.split()[0]
loader = "host" if device == "copy" else device
if device == "torch":
    import torch
    from zcrecord.loaders.torch import TorchLoader
    torch.set_num_threads(1)
    loader = TorchLoader("cpu")
load_into(load_record(small), loader)  # imports what is imported on the way
if way.endswith("held"):
    PayloadRef.let_go = lambda *_: None
record = load_record(path)
rooms = {} if "fresh" in way else {name: np.ones_like(view) for name, view in record.items()}
record = load_record(path)  # nothing of this mapping was touched
before = peak_rss()
if device == "copy":
    for name, room in rooms.items():
        np.copyto(room, record[name])
else:
    found = load_into(record, loader, dst=rooms, max_in_flight=8 << 20)
print(json.dumps(peak_rss() - before))
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Archives of a few large tensors, of many small ones, and of hardly anything."""
    folder = tmp_path_factory.mktemp("memory")
    count = PAYLOAD // 4
    trees = {
        "large": {f"w{i}": np.full(count // 4, i, np.float32) for i in range(4)},
        "many": {f"w{i}": np.full(1000, i, np.float32) for i in range(count // 1000)},
        "tiny": {"w": np.ones(3)},
    }
    for name, tree in trees.items():
        zcrecord.save_record(tree, folder / name, durable=False)
    return {name: folder / name for name in trees}


def grown(way: str, archives: dict[str, Path], of: str = "large") -> int:
    """Return by how much the peak of memory grows while a record is loaded one way."""
    return int(json.loads(r.run_python(MEASURED, archives[of], archives["tiny"], way).stdout))


@pytest.mark.parametrize(
    "way, least, most",
    [
        ("copy", PAYLOAD - LITTLE, 2 * PAYLOAD),  # as is the next, noticed
        ("host held", PAYLOAD - LITTLE, 2 * PAYLOAD),
        ("host", 0, IN_FLIGHT + LITTLE),
        ("read", 0, IN_FLIGHT + LITTLE),
        ("host fresh", PAYLOAD - LITTLE, PAYLOAD + IN_FLIGHT + LITTLE),
        ("read fresh", PAYLOAD - LITTLE, PAYLOAD + IN_FLIGHT + LITTLE),
        ("torch fresh", PAYLOAD - LITTLE, PAYLOAD + IN_FLIGHT + 2 * LITTLE),
        ("mapped fresh", 0, LITTLE),
    ],
)
def test_loading_takes_the_tensors_and_the_bytes_in_flight(
    way: str, least: int, most: int, archives: dict[str, Path]
) -> None:
    assert least <= grown(way, archives) < most


@pytest.mark.exhaustive(keep=0)
def test_many_small_payloads_take_little_besides_either(archives: dict[str, Path]) -> None:
    known = grown("host held", archives, "many")
    assert known > PAYLOAD - LITTLE
    assert grown("host", archives, "many") < known - PAYLOAD + IN_FLIGHT + LITTLE


def cached(path: Path) -> int:
    """Return the bytes of a file that the page cache has."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
        octets, pages = np.frombuffer(mapping, np.uint8), np.zeros(-(-len(mapping) // mmap.PAGESIZE), np.uint8)
        call = ctypes.CDLL(None, use_errno=True).mincore
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        assert not call(octets.ctypes.data, len(octets), pages.ctypes.data), os.strerror(ctypes.get_errno())
        del octets
    return int((pages & 1).sum()) * mmap.PAGESIZE


@pytest.mark.parametrize("way", ["host", "read", "torch"])
def test_page_cache_has_after_a_load_about_what_it_had_before(way: str, archives: dict[str, Path]) -> None:
    path, loader = archives["large"], TorchLoader("cpu") if way == "torch" else way
    record = zcrecord.load_record(path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        for warm in (False, True):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if warm:
                file.read()
            elif cached(path) > 16 * MIB:
                pytest.skip("platform: this file system keeps its pages, as tmpfs does")
            record.load_into(loader)
            assert (cached(path) > PAYLOAD - 16 * MIB) if warm else (cached(path) < 32 * MIB), warm
