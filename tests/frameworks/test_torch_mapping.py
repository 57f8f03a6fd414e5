"""torch over a mapped file: which writes end the process and which do not; files that are gone; file descriptors.

What could crash runs in a Python of its own.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import run_torch

import zcrecord
from zcrecord.errors import SourceError

POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX keeps files that are open")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux lists open files")

# Writes to a read-only view: its memory is the mapping, and torch has no read-only tensors.

START = """
import sys, warnings
import numpy as np, torch, zcrecord
path, how = sys.argv[1:]
source = open(path, "rb").read() if how == "bytes" else path
rec = zcrecord.load_record(source)
def net():
    with torch.device("meta"):
        return torch.nn.Linear(4, 2)
"""
END = """
print("taken", flush=True)
write()
print("written", rec["weight"].tolist() == [[1.0] * 4] * 2)
"""
UNWARNED = "warnings.filterwarnings('ignore', message='.* not writable')\n"  # torch's only notice, once in a process
UNSAFE = {
    "from_numpy": "write = lambda t=torch.from_numpy(rec['weight']): t.mul_(2)",
    "as_tensor": "write = lambda t=torch.as_tensor(rec['weight']): t.mul_(2)",
    "frombuffer": "write = lambda t=torch.frombuffer(rec['weight'], dtype=torch.float32): t.mul_(2)",
    "load_state_dict and a step": """
model = net()
model.load_state_dict({name: torch.from_numpy(view) for name, view in rec.items()}, assign=True)
def write():
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()""",
}
SAFE = {
    "record.torch()": "write = lambda t=rec.torch()['weight']: t.mul_(2)",
    "mode='c'": "write = lambda t=torch.from_numpy(zcrecord.load_record(source, mode='c')['weight']): t.mul_(2)",
    "a copy of torch's": "write = lambda t=torch.tensor(rec['weight']): t.mul_(2)",
    "a copy of numpy's": "write = lambda t=torch.from_numpy(rec['weight'].copy()): t.mul_(2)",
    "load_state_dict and a step": UNSAFE["load_state_dict and a step"].replace(
        "{name: torch.from_numpy(view) for name, view in rec.items()}", "rec.torch()"
    ),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tree = {"weight": np.ones((2, 4), np.float32), "bias": np.zeros(2, np.float32)}
    zcrecord.save_record(tree, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


@pytest.mark.parametrize("way", UNSAFE)
def test_a_write_through_torch_to_a_view_ends_the_process_or_changes_the_given_bytes(way: str, path: Path) -> None:
    code = START + UNWARNED + UNSAFE[way] + END
    done = run_torch(code, path, "file", ok=False)
    assert done.stdout.split() == ["taken"]
    assert -done.returncode in (signal.SIGSEGV, signal.SIGBUS), "README's Limits may say so no longer"
    done = run_torch(code, path, "bytes")
    assert done.stdout.split() == ["taken", "written", "False"], "README's Limits may say so no longer"


@pytest.mark.parametrize("source", ["file", "bytes"])
@pytest.mark.parametrize("way", SAFE)
def test_the_three_safe_ways_may_be_written_and_change_nothing_else(way: str, source: str, path: Path) -> None:
    before = path.read_bytes()
    done = run_torch(START + SAFE[way] + END, path, source)  # where a warning is an error
    assert done.stdout.split() == ["taken", "written", "True"]
    assert path.read_bytes() == before


def replace(path: Path) -> None:
    zcrecord.save_record({"a": np.zeros(3)}, path, durable=False)


def in_a_file_s_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def below_a_file(path: Path) -> None:
    path.unlink()
    path.parent.rename(path.parent.with_name("moved"))
    path.parent.write_bytes(b"")


GONE: dict[str, Callable[[Path], Any]] = {
    "replaced": replace,
    "removed": Path.unlink,
    "a folder now": in_a_file_s_place,
    "in a folder that is a file now": below_a_file,
}


def odd() -> dict[str, Any]:
    """Tensors that share bytes, in each of the ways in which torch's come about."""
    base = np.arange(12.0).reshape(3, 4)
    tree: dict[str, Any] = {"a": np.ones(64), "equal": np.ones(64), "base": base, "tied": base, "rows": base[1:]}
    tree |= {"turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "back": np.arange(5.0)[::-1]}
    tree |= {"half": torch.ones(4).bfloat16(), "empty": np.ones((0, 3)), "scalar": np.float64(2.5)}
    return tree


@POSIX
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("how", GONE)
def test_a_file_that_is_gone_is_copied_out_of_what_is_mapped(how: str, part: bool, tmp_path: Path) -> None:
    path = tmp_path / "folder" / "m.zcr"
    path.parent.mkdir()
    zcrecord.save_record({"n": odd()}, path, durable=False)
    rec = zcrecord.load_record(path)
    rec = rec.module("n") if part else rec
    before = rec.torch()
    GONE[how](path)
    found = rec.torch()
    assert list(found) == list(before)
    for name, tensor in before.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor)
    found, rec = ({name.removeprefix("n."): each for name, each in found.items()}, rec if part else rec.module("n"))
    assert found["turned"].stride() == (1, 2)
    found["a"].mul_(2)
    found["base"][1, 0] = 50
    assert found["equal"].sum() == 64, "equal ones that are not tied are apart"
    assert found["tied"][1, 0] == found["rows"][0, 0] == 50, "tied ones stay tied"
    assert rec["a"].sum() == 64
    assert rec.torch()["base"][1, 0] == 4, "each call has its own"
    assert rec.torch(names="half")["half"].dtype is torch.bfloat16


MEMORY = """
import os, sys
import torch, zcrecord
from tools.measure import memory
path = sys.argv[1]
rec = zcrecord.load_record(path)
zcrecord.load_record(path).torch(names="w0")
os.unlink(path)
before = memory().private
found = rec.torch(names="w0")
assert found["w0"][5] == 1
print(memory().private - before)
"""


@pytest.mark.slow
@LINUX
def test_of_a_file_that_is_gone_no_more_is_copied_than_was_asked_for(tmp_path: Path) -> None:
    zcrecord.save_record({f"w{i}": np.full(16 << 20, i + 1, np.uint8) for i in range(6)}, tmp_path / "m", durable=False)
    taken = int(run_torch(MEMORY, tmp_path / "m").stdout)
    assert 16 << 20 <= taken < 24 << 20, "it would notice what is copied"


@POSIX
def test_a_file_that_was_changed_in_place_is_refused(path: Path) -> None:
    rec = zcrecord.load_record(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(SourceError, match=r"m\.zcr: was replaced or changed since it was opened; load it again"):
        rec.torch()


FEW = """
import os, resource, sys
import zcrecord
path = sys.argv[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
before = len(os.listdir("/proc/self/fd"))
held = [zcrecord.load_record(path) for _ in range(300)]
held += [zcrecord.load_record(path, mode="c") for _ in range(100)]
held += [rec["weight"] for rec in held]
held += [held[0].torch() for _ in range(100)]
assert len(os.listdir("/proc/self/fd")) == before
print(len(held))
"""


@LINUX
def test_neither_archives_nor_views_nor_torch_s_tensors_take_file_descriptors(path: Path) -> None:
    assert run_torch(FEW, path).stdout == "900\n"
