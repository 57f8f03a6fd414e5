"""Full verification finds all that is damaged, says where it is and what uses it, by however many threads."""

from __future__ import annotations

import itertools
import os
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forge import Forge
from records import saved

import zcrecord
from zcrecord import FormatError, IntegrityError, LimitError, SourceError
from zcrecord.archive import damage
from zcrecord.archive.damage import Damage
from zcrecord.storage import threads

MIB = 1 << 20
CHANGED, FILLED = "its digest does not match", "bytes between payloads that are not zero"


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    a = rng.random(300).astype(np.float32)
    layers = [{"w": rng.random(100 + i), "b": rng.random(3)} for i in range(50)]
    return {"a": a, "tied": a, "layers": layers, "note": b"some bytes", "empty": b"", "blobs": [b"of a list", b"other"]}


def flip(data: bytearray, *names: str) -> None:
    record = zcrecord.load_record(bytes(data))
    for name in names:
        data[record.info(name).offset] ^= 1


def found_in(data: Any, **options: Any) -> list[Damage]:
    return damage.find(zcrecord.load_record(data).archive, **options)


def test_all_damage_is_found_with_its_range_and_its_users() -> None:
    data = bytearray(saved(tree(), metadata={"raw": b"of the file"}))
    assert found_in(data) == []
    record = zcrecord.load_record(bytes(data))
    flip(data, "a", "layers.7.w", "layers.49.b")
    for text in (b"some bytes", b"of a list", b"of the file"):
        data[data.index(text)] ^= 1
    found = found_in(data)
    assert {d.what for d in found} == {CHANGED}
    assert [d.tensors for d in found[:3]] == [("a", "tied"), ("layers.7.w",), ("layers.49.b",)]
    assert {d.attributes for d in found[3:]} == {("note",), ("blobs",), ()}
    assert {d.metadata for d in found[3:]} == {("raw",), ()}
    assert [d.offset for d in found] == sorted(d.offset for d in found)
    for d, name in zip(found, ("a", "layers.7.w", "layers.49.b"), strict=False):
        assert (d.offset, d.nbytes) == (record.info(name).offset, record.info(name).nbytes)


def test_gap_is_found_beside_payloads_and_named_after_them() -> None:
    data = bytearray(saved({"a": np.ones(3, np.uint8), "b": np.ones(5, np.uint8)}))
    at = zcrecord.load_record(bytes(data)).info("a").offset
    data[at + 3], data[at + 64] = 1, 7
    gap, payload = found_in(data)
    assert (gap.what, gap.offset, gap.nbytes, gap.tensors) == (FILLED, at + 3, 61, ())
    assert (payload.what, payload.offset, payload.nbytes, payload.tensors) == (CHANGED, at + 64, 5, ("b",))
    with pytest.raises(IntegrityError, match=r"tensor 'b': .* in 1 more place, copy it again$"):
        zcrecord.load_record(data).verify()
    data[at + 64], data[at + 70] = 1, 7
    with pytest.raises(FormatError, match=r"holds bytes that are not zero, as does 1 more$") as caught:
        zcrecord.load_record(data).verify()
    assert [d.what for d in caught.value.damage] == [FILLED, FILLED]


def test_equal_tensors_that_are_stored_once_are_one_damaged_range() -> None:
    data = bytearray(saved({"a": np.ones(100), "b": np.ones(100), "c": np.zeros(9)}))
    flip(data, "b")
    (found,) = found_in(data)
    assert found.tensors == ("a", "b")


def test_error_names_the_first_and_counts_the_others() -> None:
    data = bytearray(saved(tree()))
    flip(data, "layers.3.w")
    with pytest.raises(IntegrityError, match=r"'layers\.3\.w'.* the file is damaged, copy it again$") as caught:
        zcrecord.load_record(data).verify()
    assert len(caught.value.damage) == 1
    flip(data, "layers.4.w")
    with pytest.raises(IntegrityError, match=r"'layers\.3\.w'.* damaged there and in 1 more place, copy it again$"):
        zcrecord.load_record(data, verify="full")
    flip(data, "a")
    with pytest.raises(IntegrityError, match=r"'a': .* damaged there and in 2 more places, copy it again$") as caught:
        zcrecord.load_record(data, verify="full")
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.damage == caught.value.damage
    assert [d.tensors for d in again.damage] == [("a", "tied"), ("layers.3.w",), ("layers.4.w",)]


def test_range_is_that_in_the_file_an_archive_is_attached_to(tmp_path: Path) -> None:
    data = bytearray(saved(tree()))
    alone = zcrecord.load_record(bytes(data)).info("a").offset
    flip(data, "a")
    path = tmp_path / "app"
    path.write_bytes(b"\x7fELF".ljust(65536, b"\0") + data)
    with pytest.raises(IntegrityError, match=rf"payload \[{65536 + alone:#x}, ") as caught:
        zcrecord.load_record(path).verify()
    assert caught.value.offset == caught.value.damage[0].offset == 65536 + alone


def test_part_finds_its_own_damage_under_its_own_names() -> None:
    data = bytearray(saved(tree()))
    flip(data, "a", "layers.7.w")
    part = zcrecord.load_record(data).module("layers")
    assert [d.tensors for d in damage.find(part.archive)] == [("7.w",)]


def test_archive_without_digests_is_checked_for_what_lies_between() -> None:
    data = bytearray(saved({"a": np.ones(3, np.uint8)}, digest="none"))
    at = zcrecord.load_record(bytes(data)).info("a").offset
    data[at] ^= 1
    assert found_in(data) == []
    data[at + 3] ^= 1
    assert [d.what for d in found_in(data)] == [FILLED]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of which every third payload is damaged, large and small ones."""
    path = tmp_path_factory.mktemp("large") / "m.zcr"
    rng = np.random.default_rng(0)
    sizes = [20 * MIB, 100, 9 * MIB, *[4000] * 300, 11 * MIB, 8 * MIB, 8 * MIB + 1]
    names = {f"w{i}": np.frombuffer(rng.bytes(n), np.uint8) for i, n in enumerate(sizes)}
    zcrecord.save_record(names, path, durable=False)
    data = bytearray(path.read_bytes())
    for name in list(names)[::3]:
        info = zcrecord.load_record(path).info(name)
        data[info.offset + info.nbytes - 1] ^= 1
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_any_number_of_threads_finds_the_same(threads: int, large: Path) -> None:
    found = found_in(large, threads=threads)
    assert [d.tensors[0] for d in found] == [f"w{i}" for i in range(0, 306, 3)]


def test_work_is_shared_by_threads(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    found_in(large, threads=3)
    assert len(started) == 2, "and this thread"
    assert not any(thread.is_alive() for thread in started)
    started.clear()
    found_in(saved(tree()), threads=3)
    assert not started, "what is small is read before a thread has started"


def test_where_no_thread_is_to_be_had_the_caller_checks_all(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(found_in(large, threads=3)) == 102


@pytest.mark.parametrize("threads", [1, 4])
def test_progress_is_told_in_the_calling_thread_and_ends_at_the_whole(threads: int, large: Path) -> None:
    steps: list[tuple[int, int, int]] = []
    found_in(large, threads=threads, progress=lambda done, total: steps.append((done, total, threading.get_ident())))
    assert {ident for *_, ident in steps} == {threading.get_ident()}
    assert [done for done, *_ in steps] == sorted(done for done, *_ in steps)
    assert steps[-1][0] == steps[-1][1] <= large.stat().st_size
    assert len({total for _, total, _ in steps}) == 1
    if threads == 1:
        leaps = [b[0] - a[0] for a, b in itertools.pairwise(steps)]
        assert max(leaps) <= 9 * MIB


@pytest.mark.parametrize("work", [lambda r, p: r.verify(progress=p), lambda r, p: r.content_digest(progress=p)])
def test_interruption_ends_all_threads(work: Callable[[Any, Any], Any], large: Path) -> None:
    before = threading.active_count()

    def interrupt(done: int, _: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(zcrecord.load_record(large), interrupt)
    assert threading.active_count() == before


def test_content_digest_is_the_same_by_one_thread_and_by_many(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = zcrecord.load_record(large)
    found = set()
    for number in (1, 2, 5):
        steps: list[tuple[int, int]] = []
        monkeypatch.setattr("zcrecord.archive.digest.cores", lambda count=number: count)
        found.add(record.content_digest(progress=lambda *step, steps=steps: steps.append(step)))
        assert steps[-1] == (record.nbytes, record.nbytes) and steps == sorted(steps)
    assert len(found) == 1


def test_names_of_what_uses_damaged_bytes_are_bounded_by_the_index() -> None:
    f = Forge(saved({"m": {f"{i:03}": b"some" for i in range(100)}}))
    start, size = f.text(b"x" * 100_000)
    f.set("modules", 1, name=start, name_size=size, key_size=size)
    sound = zcrecord.load_record(f.seal())
    sound.verify()
    f.payload[0] ^= 1
    damaged = zcrecord.load_record(f.seal())
    with pytest.raises(LimitError, match="full names of attributes add up to 10000000 bytes, more than 64 times"):
        damaged.verify()


@pytest.mark.skipif(os.name != "posix", reason="platform: fork")
def test_child_that_is_forked_in_the_middle_does_not_take_it_for_done() -> None:
    """The threads that had begun the check do not exist in the child."""
    children: list[int] = []

    def fork() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later Pythons, and jax where another test has brought it, warn of forks
            children.extend([] if children else [os.fork()])

    both = threading.Barrier(2)

    def work(_: int, going: threads.Going) -> None:
        both.wait()  # neither takes both
        while threading.current_thread() is not threading.main_thread() and not children and going():
            time.sleep(0.001)

    told = "done"
    try:
        threads.run_threads(work, range(2), 2, fork)
    except SourceError as error:
        told = error.message
    if children[0] == 0:
        os._exit(7 if "was forked meanwhile" in told else 1)
    assert told == "done"
    assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 7
