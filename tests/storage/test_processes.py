"""Records among threads and processes: forked, pickled, handed to pools and back; interrupted.

Whatever could hang, crash or be told apart only by a signal runs in a Python of its own.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from tools.bench.sharing import BARE, OWN, SHARED, serve, torch_workers, total_pss, write_archive, write_models
from tools.measure import MIB
from tools.worker import call_alone
from zcrecord import (
    IntegrityError,
    Record,
    SourceNotFoundError,
    UnsupportedError,
    load_record,
)

FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="platform: no fork")
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX signals")
TREE: dict[str, Any] = {
    "a": np.ones(64), "b": np.ones(64), "n": {"w": np.arange(6.0), "deep": [np.zeros(3), {"v": np.arange(4)}]},
    "big": np.zeros(1 << 17), "twin": np.zeros(1 << 17), "s": np.array(["x", "yz"]), "blob": b"blob",
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


def unlikely(info: zcrecord.TensorInfo) -> bool:
    """A predicate that can be pickled."""
    return info.nbytes < 1000


def renamed(name: str) -> str:
    """A renaming that can be pickled."""
    return f"model.{name}"


PARTS: dict[str, Callable[[Record], Record]] = {
    "whole": lambda rec: rec,
    "module": lambda rec: rec.module("n"),
    "module of a module": lambda rec: rec.module("n").module("deep.1"),
    "patterns": lambda rec: rec.select(["n.*", "a"]),
    "an iterator of patterns": lambda rec: rec.select(iter(["n.*", "a"])),
    "predicate": lambda rec: rec.select(unlikely),
    "names": lambda rec: rec.select(rename={"n": "m", "": "model", re.compile(r"deep\.(\d)"): r"layer\1"}),
    "function": lambda rec: rec.select(rename=renamed),
    "part of a part": lambda rec: rec.select(["n", "b"], rename={"n": "m"}).select("m").module("m"),
}
SOURCES: dict[str, Callable[[Path], Record]] = {
    "path": load_record,
    "touched": lambda path: load_record(path, verify="touch"),
    "read": lambda path: load_record(path, mmap=False),
    "bytes": lambda path: load_record(path.read_bytes()),
    "bytearray": lambda path: load_record(bytearray(path.read_bytes())),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("protocol", [*range(pickle.HIGHEST_PROTOCOL + 1), "copy", "deepcopy"])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("source", SOURCES)
def test_record_survives_pickling_and_copying(source: str, part: str, protocol: Any, path: Path) -> None:
    rec = PARTS[part](SOURCES[source](path))
    again: Any = (
        pickle.loads(pickle.dumps(rec, protocol)) if isinstance(protocol, int) else getattr(copy, protocol)(rec)
    )
    assert type(again) is Record
    assert again.archive.verified == ("touch" if source == "touched" and part == "whole" else "index")
    assert (again.names, again.path, again.mode) == (rec.names, rec.path, "r")
    assert again.content_digest() == rec.content_digest()
    r.assert_same(again.tree(), rec.tree())
    assert again.archive.source.is_mapped is rec.archive.source.is_mapped


@pytest.mark.parametrize("embedded", ["prefix", "suffix"])
def test_embedded_record_survives_pickling(embedded: Any, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data + bytes(99) if embedded == "prefix" else bytes(4096) + data)
    rec = load_record(path, embedded=embedded)
    r.assert_same(pickle.loads(pickle.dumps(rec)).tree(), TREE)
    r.assert_same(pickle.loads(pickle.dumps(rec.module("n"))).tree(), TREE["n"])


@pytest.mark.parametrize("part", ["whole", "module", "patterns"])
def test_unpickling_refuses_a_file_that_was_replaced_or_removed(part: str, path: Path) -> None:
    data = pickle.dumps(PARTS[part](load_record(path)))
    zcrecord.save_record({**TREE, "n": {**TREE["n"], "deep": []}}, path)
    with pytest.raises(IntegrityError, match=r"m\.zcr: is not the archive that was pickled; it was replaced since"):
        pickle.loads(data)
    zcrecord.save_record(TREE, path)
    assert pickle.loads(data)["w" if part == "module" else "n.w"][1] == 1
    path.unlink()
    with pytest.raises(SourceNotFoundError, match=r"m\.zcr: no such file"):
        pickle.loads(data)


def test_what_cannot_be_pickled_is_refused_in_one_line(path: Path) -> None:
    rec = load_record(path, mode="c")
    for part in (rec, rec.module("n"), rec.select("a")):
        with pytest.raises(
            UnsupportedError, match=r"m\.zcr: a record of mode 'c' may hold edits.*; save it, or pickle"
        ):
            pickle.dumps(part)
    whole = load_record(path)
    part = whole.module("n")
    whole.close()
    with pytest.raises(UnsupportedError, match=r"m\.zcr: the record is closed"):
        pickle.dumps(whole)
    assert pickle.loads(pickle.dumps(part)).names == part.names
    part.close()
    with pytest.raises(UnsupportedError, match=r"m\.zcr: the record is closed"):
        pickle.dumps(part)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("mode", ["r", "c"])
def test_views_are_pickled_by_value(mode: Any, protocol: int, path: Path) -> None:
    rec = load_record(path, mode=mode)
    again = pickle.loads(pickle.dumps({name: rec[name] for name in ("a", "b", "n.w")}, protocol))
    path.unlink()
    assert again["n.w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert again["a"].flags.writeable is (mode == "c" or protocol < 5)


POOL = """
import concurrent.futures as futures
import multiprocessing
import operator
import sys
import zcrecord

how, path = sys.argv[1:]
rec = zcrecord.load_record(path)
with futures.ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(how)) as pool:
    loaded = pool.submit(zcrecord.load_record, path)
    part = pool.submit(operator.methodcaller('module', 'n'), rec)
    of_bytes = pool.submit(zcrecord.load_record, open(path, 'rb').read())
    chosen = pool.submit(operator.methodcaller('select', 'n.*', rename={'n': 'm'}), rec)
    sums = pool.map(operator.methodcaller('sum'), rec.module('n.deep').values())
    lengths = list(pool.map(len, [rec, rec.module('n'), rec.select('a')]))
    failed = pool.submit(operator.getitem, rec, 'n.x')
    assert loaded.result().content_digest() == rec.content_digest()
    assert loaded.result().path == path and part.result().path == path and of_bytes.result().path is None
    assert part.result()['w'].tolist() == rec['n.w'].tolist()
    assert chosen.result().names == ('m.w', 'm.deep.0', 'm.deep.1.v'), chosen.result().names
    assert of_bytes.result()['twin'].nbytes == 1 << 20
    assert (list(map(float, sums)), lengths) == ([0.0, 6.0], [8, 3, 1]), lengths
    error = failed.exception(timeout=60)
    assert type(error) is zcrecord.TensorNotFoundError and (error.path, error.tensor) == (path, 'n.x'), error
    assert "'n.x': not in this record; close names: 'n.w'" in str(error), error
    assert pool.submit(len, rec).result(timeout=60) == 8, 'the pool lives'
print('fine')
"""


@pytest.mark.slow
@FORK
@pytest.mark.parametrize("way", ["fork", "spawn", "forkserver"])
def test_pool_of_processes_takes_and_returns_records_and_errors(way: str, path: Path) -> None:
    assert r.run_python(POOL, way, path).stdout == "fine\n"


FORKED = """
import os, sys
import numpy as np
import zcrecord
path, how = sys.argv[1:]
options = {'read': {'mmap': False}, 'part': {'names': '*'}}.get(how, {})
source = open(path, 'rb').read() if how == 'bytes' else path
rec = zcrecord.load_record(source, mode='c', **options)
touched = rec['a'], rec['twin'], rec['n.w']
rec['n.w'][0] = 50
ready, go = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    for name in ('a', 'b', 'big', 'twin', 'n.w'):
        rec[name][1:] = 7
    os.write(ready[1], b'x')
    os.read(go[0], 1)
    assert rec['n.w'].tolist() == [50, 7, 7, 7, 7, 7]
    assert (rec['b'][1:] == 7).all() and rec['b'][0] == 1 and rec['a'][0] == 1
    assert (rec['twin'][1:] == 7).all() and rec['big'][0] == 0
    os._exit(0)
os.read(ready[0], 1)
assert rec['n.w'].tolist() == [50, 1, 2, 3, 4, 5], rec['n.w']
assert (rec['a'] == 1).all() and (rec['b'] == 1).all(), (rec['a'], rec['b'])
assert not rec['big'].any() and not rec['twin'].any()
for name in ('a', 'b', 'big', 'twin', 'n.w'):
    rec[name][0] = -1
os.write(go[1], b'x')
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 0, status
assert rec['b'][0] == -1 and (rec['b'][1:] == 1).all()
"""


@pytest.mark.slow
@FORK
@pytest.mark.parametrize("way", ["path", "read", "bytes", "part"])
def test_edits_of_parent_and_child_are_each_their_own(way: str, path: Path) -> None:
    before = path.read_bytes()
    r.run_python(FORKED, path, way)
    assert path.read_bytes() == before


@pytest.mark.parametrize("mode", ["r", "c"])
def test_closing_while_threads_make_parts_and_views_gives_a_part_or_one_error(mode: Any, path: Path) -> None:
    def work(rec: Record, barrier: threading.Barrier) -> None:
        barrier.wait()
        try:
            for _ in range(50):
                assert rec.module("n")["w"].tolist() == [0, 1, 2, 3, 4, 5]
                assert (rec["b"] == 1).all()
                assert not rec.select("twin")["twin"].any()
        except UnsupportedError as error:
            assert "the record is closed" in str(error)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(20):
            rec, barrier = load_record(path, mode=mode), threading.Barrier(4)
            running = [pool.submit(work, rec, barrier) for _ in range(3)]
            barrier.wait()
            rec.close()
            for each in running:
                each.result()


INTERRUPTED = """
import os, signal, sys, threading, time
import numpy as np
import zcrecord
from pathlib import Path
path = Path(sys.argv[1])

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

{before}
assert threading.active_count() == 1
try:
    {work}
except KeyboardInterrupt:
    while threading.active_count() > 1:  # one that was about to start ends by itself; for one that does not, we hang
        time.sleep(0.001)
    if os.path.exists('/proc/self/fd'):
        held = [os.readlink(f'/proc/self/fd/{{fd}}') for fd in os.listdir('/proc/self/fd') if fd > '2' and
                os.path.exists(f'/proc/self/fd/{{fd}}')]
        assert not [name for name in held if 'scratch' in name], held
    raise
print('finished')
"""


def assert_interrupted(code: tuple[str, str], path: Path) -> None:
    before, work = code
    done = r.run_python(INTERRUPTED.format(before=before, work=work), path, ok=False)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "AssertionError" not in done.stderr
    assert "finished" not in done.stdout


READS = {
    "verify, between payloads": ("", """
    zcrecord.load_record(path).verify(progress=lambda done, _: interrupt() if done > 1 << 22 else None)"""),
    "the digest of one payload of many GiB": ("""
from tools.bench.sparse import write_holes
write_holes(path.with_name('holes'), 64 << 30)
signal.signal(signal.SIGALRM, lambda *_: interrupt())
signal.setitimer(signal.ITIMER_REAL, 0.05)
""", "zcrecord.load_record(path.with_name('holes')).content_digest()"),
    "a plain read, by whichever reader": ("""
read, left = os.preadv, [3]
def interrupting(fd, buffers, offset):
    left[0] -= 1
    if not left[0]:
        interrupt()
    return read(fd, buffers, offset)
os.preadv = interrupting
""", "zcrecord.load_record(path, mmap=False)"),
    "a plain read, again and again": ("""
read = os.preadv
def interrupting(fd, buffers, offset):
    interrupt()
    return read(fd, [buffers[0][: 1 << 20]], offset)
os.preadv = interrupting
""", "zcrecord.load_record(path, mmap=False)"),
}  # fmt: skip


@pytest.mark.slow
@POSIX
@pytest.mark.parametrize("case", READS)
def test_control_c_during_a_long_read_ends_it(case: str, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({f"w{i}": np.full(1 << 20, i) for i in range(5)}, path, durable=False)
    assert_interrupted(READS[case], path)


# Memory that processes share.


smaps = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")

WEIGHTS = 128  # MiB: enough that copies are not lost among what four processes take anyway
PROMISED = 1.15


def assert_one_copy(sums: dict[str, int], nbytes: int) -> None:
    most = PROMISED * (nbytes + sums[BARE])
    assert sums[OWN] > most + nbytes, "private copies are to be noticed, and were not"
    assert sums[SHARED] < most
    assert sums[SHARED] - sums[BARE] < PROMISED * nbytes, "hidden by what the processes take without weights"


@smaps
@pytest.mark.exhaustive(keep=0)
def test_four_sessions_that_use_one_matrix_in_two_branches_hold_it_once(tmp_path: Path) -> None:
    paths = write_models(tmp_path, WEIGHTS)
    assert_one_copy(serve(paths), Path(paths[SHARED]).stat().st_size)


@smaps
@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("start", ["fork", "spawn", "DataLoader, fork"])
def test_four_torch_workers_over_one_archive_hold_its_weights_once(start: str, tmp_path: Path) -> None:
    path = write_archive(tmp_path, WEIGHTS)
    sums = call_alone(f"{torch_workers.__module__}:{torch_workers.__name__}", path=str(path), start=start)
    assert_one_copy(sums, path.stat().st_size)


@smaps
def test_memory_of_a_process_that_is_gone_is_an_error_and_not_nothing() -> None:
    with pytest.raises(OSError, match="No such file or directory"):
        total_pss([1 << 22])
    assert total_pss([os.getpid()]) > MIB
