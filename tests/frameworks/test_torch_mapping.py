"""torch over a mapped file: which writes end the process and which do not; files that are gone; file descriptors.

What could crash runs in a Python of its own.
"""

from __future__ import annotations

import gc
import mmap
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
from zcrecord.frameworks import torch_pages
from zcrecord.frameworks.torch_pages import paged

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


# Pages of parts.


PAGE = mmap.PAGESIZE
ROWS, COLUMNS = 64, 4 * PAGE  # of float32: a row has 16 pages
Asked = set[int]


@pytest.fixture
def weight(tmp_path: Path) -> Any:
    """A tensor over a mapped file, as servers are given it."""
    values = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
    zcrecord.save_record({"w": values, "b": np.ones(8, np.float32)}, tmp_path / "model.zcr", durable=False)
    return paged(zcrecord.load_record(tmp_path / "model.zcr").torch(writable=False)["w"])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """The addresses of all pages that the system is asked for."""
    pages: Asked = set()

    def note(start: int, nbytes: int, advice: int) -> None:
        if advice == mmap.MADV_WILLNEED:
            pages.update(range(start // PAGE, -(-(start + nbytes) // PAGE)))

    monkeypatch.setattr(torch_pages, "advise", note)
    return pages


def pages_of(part: Any) -> Asked:
    """Return the pages that hold an element, each looked at by itself."""
    address, strides = part.data_ptr(), part.stride()
    offsets = (sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*part.shape))
    return {(address + 4 * offset) // PAGE for offset in offsets}


def test_check_is_given_the_pages_of_each_part_that_is_read(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.arange(12.0).reshape(3, 4)}, tmp_path / "model.zcr")
    asked: list[tuple[int, bool]] = []
    weight = paged(
        zcrecord.load_record(tmp_path / "model.zcr").torch(writable=False)["w"],
        lambda runs, whole: asked.append((runs[0][0], whole)),
    )
    parts = weight[1:].clone(), weight.narrow(1, 0, 2).sum(), weight.t().shape
    assert [weight.t().sum().item(), weight[None].clone().sum().item()] == [66, 66]
    assert len(parts) == 3
    page = weight.data_ptr() // PAGE * PAGE
    assert asked == [(page, False), (page, False), (page, True), (page, True)]


LOOKS: dict[str, Callable[[Any], Any]] = {
    "size": lambda w: (w.size(), w.shape, w.dim(), w.dtype, w.device, len(w), w.numel(), w.is_contiguous()),
    "narrow": lambda w: w.narrow(0, 1, 2).narrow(1, 3, 4),
    "index": lambda w: (w[1:3, ::2], w[0], w[..., None]),
    "view": lambda w: w.view(-1).view(torch.int32),
    "chunk": lambda w: [part.t() for part in w.chunk(4, dim=1)],
    "data": lambda w: w.data.detach(),
}


def test_views_read_nothing(weight: Any, asked: Asked) -> None:
    for way, look in LOOKS.items():
        look(weight)
        assert not asked, way


PARTS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda w: w.narrow(0, 16, 16),
    "columns": lambda w: w.narrow(1, PAGE, PAGE),
    "columns of rows": lambda w: w[8:40:3, 5 : PAGE + 9],
    "every other column": lambda w: w[3:5, ::2],
    "transposed": lambda w: w.t()[100:200],
    "one element": lambda w: w[7, 9],
    "reshaped": lambda w: w.view(ROWS, 4, PAGE)[:, 1],
    "expanded": lambda w: w[:2, :3].unsqueeze(0).expand(5, 2, 3),
    "nothing": lambda w: w[:0],
}


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("part", PARTS)
def test_a_copy_asks_for_the_pages_of_the_part_and_for_no_others(part: str, weight: Any, asked: Asked) -> None:
    source = PARTS[part](weight)
    expected = pages_of(source.as_subclass(torch.Tensor))
    target = torch.nn.Parameter(torch.zeros(source.shape), requires_grad=False)
    target.data.copy_(source)
    assert asked == expected
    assert torch.equal(target, PARTS[part](torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)))


READS: dict[str, Callable[[Any], Any]] = {
    "clone": lambda w: w.clone(),
    "to": lambda w: w.to(torch.float64),
    "cat": lambda w: torch.cat([w, w]),
    "item": lambda w: w.item(),
    "index_select": lambda w: w[torch.tensor([0])],
    "equal": lambda w: torch.equal(w, torch.zeros_like(w)),
}


@pytest.mark.parametrize("way", READS)
def test_whatever_else_is_done_with_a_part_asks_for_all_of_it(way: str, weight: Any, asked: Asked) -> None:
    part = weight[5, 10:11] if way == "item" else weight[5, : 2 * PAGE]
    result = READS[way](part)
    assert asked == pages_of(part.as_subclass(torch.Tensor))
    assert not isinstance(result, type(weight))


@pytest.mark.slow
@LINUX
def test_columns_of_a_cold_file_are_read_and_not_what_lies_between(tmp_path: Path) -> None:
    path = tmp_path / "cold.zcr"
    zcrecord.save_record({"w": np.ones((256, 16 * PAGE), np.float32)}, path)  # 64 MiB: a row has 64 pages

    def bytes_read(columns: slice) -> int:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        weight = paged(zcrecord.load_record(path).torch(writable=False)["w"])
        before = read_by_this_process()
        assert weight[:, columns].contiguous().sum() > 0
        return read_by_this_process() - before

    whole, part = bytes_read(slice(None)), bytes_read(slice(0, 4 * PAGE))
    if not whole:
        pytest.skip("platform: this file system keeps files in memory")
    assert part < 0.3 * whole


def read_by_this_process() -> int:
    lines = Path("/proc/self/io").read_text(encoding="utf-8").splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda w: w.mul_(0),
    "copy_": lambda w: w.copy_(torch.zeros(w.shape)),
    "setitem": lambda w: w.__setitem__(slice(None), 0),
    "imul": lambda w: w.__imul__(0),
    "out": lambda w: torch.zeros(w.shape, out=w),
    "init": lambda w: torch.nn.init.zeros_(w),
    "through data": lambda w: w.data.zero_(),
    "through a view": lambda w: w.view(-1).zero_(),
    "through rows": lambda w: [row.zero_() for row in w],
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_gives_the_tensor_memory_of_its_own(way: str, tmp_path: Path) -> None:
    path = tmp_path / "model.zcr"
    zcrecord.save_record({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}, path)
    record = zcrecord.load_record(path)
    tensors = {name: paged(tensor) for name, tensor in record.torch(writable=False).items()}
    WRITES[way](tensors["a"])
    assert tensors["a"].tolist() == [[0.0] * 3] * 2
    assert tensors["b"].tolist() == [1.0] * 4
    assert record["a"].tolist() == [[1.0] * 3] * 2
    tensors["a"].add_(2)  # again, in the memory that it has now
    assert tensors["a"].tolist() == [[2.0] * 3] * 2


def test_a_write_to_a_part_leaves_the_rest_and_a_parameter_may_be_trained(weight: Any) -> None:
    weight[3, 5:9] = -1
    assert weight[3, 4:10].tolist() == [3 * COLUMNS + 4, -1, -1, -1, -1, 3 * COLUMNS + 9]
    parameter = torch.nn.Parameter(weight[:1])
    with torch.no_grad():
        parameter.mul_(0)
    assert isinstance(parameter, torch.nn.Parameter) and parameter.sum() == 0


def test_tensors_of_other_subclasses_take_part(weight: Any) -> None:
    class Sharded(torch.nn.Parameter):  # type: ignore[misc]  # mypy does not follow torch
        """As vLLM's parameters are: a subclass with methods of its own."""

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    parameter = Sharded(torch.zeros(2, COLUMNS), requires_grad=False)
    parameter.data.copy_(weight[2:4])
    parameter.copy_(weight[2:4])
    assert parameter[0, 1] == 2 * COLUMNS + 1


@LINUX
def test_the_mapping_goes_with_the_last_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": np.ones(9)}, path)
    part = paged(zcrecord.load_record(path).torch(writable=False)["w"])[3:]
    gc.disable()  # a cycle of references would keep it until it is collected
    try:
        assert part.sum() == 6
        assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
        del part
        assert str(path) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    finally:
        gc.enable()
