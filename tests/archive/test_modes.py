"""Mode "c": edits reach a private copy and nothing else.

What is tied stays tied; what is only equal, and stored once, is edited each by itself; the file stays as it is.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from forge import Forge
from other_processors import COUNTS_MEMORY

import zcrecord
from zcrecord import FormatError, IntegrityError, PackedTensor, Record, SourceError, UnsupportedError, load_record

MIB = 1 << 20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux lists what is mapped, and how")
ARRAYS = ["a", "b", "c", "tied", "deep.0", "base", "step", "cols", "flat", "big", "twin", "twin2", "turned", "rank0"]


def make() -> dict[str, Any]:
    """Return a record with tensors that are tied, equal, overlapping, packed, text, empty, and of 1 MiB."""
    w, base, half = np.arange(40.0), np.arange(24).reshape(4, 6), MIB // 8
    packed = PackedTensor.pack(np.array([1, -2, 3, -4, 5]).astype("int4"))
    return {
        "a": np.ones(64), "b": np.ones(64), "c": np.ones(64),
        "tied": w, "deep": [w, w.copy()],
        "base": base, "step": base[::2], "cols": base[:, 1:3], "flat": base.reshape(-1)[6:18],
        "big": np.zeros(half), "twin": np.zeros(half), "twin2": np.zeros(half),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)), "rank0": np.array(7),
        "p": packed, "p2": PackedTensor(packed.packed.copy(), "int4", (5,)),
        "s": np.array(["x", "yz"]), "s2": np.array(["x", "yz"]),
        "empty": np.zeros((0, 3)), "blob": np.ones(64).tobytes(), "n": 5,
    }  # fmt: skip


ARCHIVE = r.saved(make(), metadata={"m": 1})
WAYS: dict[str, dict[str, Any]] = {
    "a path": {},
    "a path, touched": {"verify": "touch"},
    "a path, verified in full": {"verify": "full"},
    "a path, read and touched": {"mmap": False, "verify": "touch"},
    "a prefix": {"embedded": "prefix"},
    "a suffix": {"embedded": "suffix"},
    "a suffix, read": {"embedded": "suffix", "mmap": False},
    "a bytearray": {},
    "bytes before bytes": {"embedded": "prefix"},
    "a part of a path": {"names": "*"},
    "a part of bytes": {"names": "*"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "m.zcr").write_bytes(ARCHIVE)
    return tmp_path / "m.zcr"


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Record]]:
    """A way to load the archive; whatever a test does with the record, its source is afterwards what it was."""
    name: str = request.param
    embedded = WAYS[name].get("embedded")
    data = {None: ARCHIVE, "prefix": ARCHIVE + bytes(999), "suffix": bytes(4096) + ARCHIVE}[embedded]
    source: Any = bytearray(data) if "bytearray" in name else data
    if "path" in name or name.startswith(("a prefix", "a suffix")):
        source = tmp_path / "m.zcr"
        source.write_bytes(data)
    before = hashlib.sha256(data).digest()
    yield lambda mode="c", **more: load_record(source, mode=mode, **WAYS[name], **more)
    after = source.read_bytes() if isinstance(source, Path) else source
    assert hashlib.sha256(after).digest() == before, "an edit reached the source"


@pytest.fixture
def rec(way: Callable[..., Record]) -> Record:
    return way()


EQUAL = [("a", "b"), ("b", "a"), ("c", "b"), ("deep.0", "deep.1"), ("big", "twin"), ("twin", "big"), ("twin2", "twin")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("touched", [True, False], ids=["touched before", "touched later"])
@pytest.mark.parametrize(("edited", "other"), EQUAL)
def test_an_edit_leaves_equal_tensors_alone(edited: str, other: str, touched: bool, rec: Record) -> None:
    before = load_record(ARCHIVE)[other]
    assert not touched or not np.shares_memory(rec[edited], rec[other])
    rec[edited][::3] = -1
    assert rec[other].tobytes() == before.tobytes()
    rec[other][1] = 5
    assert rec[edited][1] == before[1] and (rec[edited][::3] == -1).all()


def test_edit_of_one_of_two_tied_tensors_changes_the_other(rec: Record) -> None:
    assert rec.info("tied").tied == ("tied", "deep.0")
    rec["tied"][3] = -1
    assert rec["deep.0"][3] == -1
    rec["deep.0"][:] = 2
    assert (rec["tied"] == 2).all()
    assert rec["deep.1"].tolist() == np.arange(40.0).tolist()


def test_overlapping_views_see_each_others_edits(rec: Record) -> None:
    want = make()
    base, views = want["base"], ("base", "step", "cols", "flat")
    for number, name in enumerate(views):
        for tree in (want, rec):
            tree[name][..., 0] = -number
            tree[name][-1, ...] = 100 + number
    for name in views:
        assert rec[name].tolist() == want[name].tolist()
        assert np.shares_memory(rec[name], rec["base"])
    assert base.tolist() == rec["base"].tolist()


def test_every_view_of_a_tensor_is_the_same_memory(rec: Record) -> None:
    tree, modules = rec.tree(), rec.module("deep")
    for name in ARRAYS:
        views = [rec[name], rec.get(name), rec.array(name), dict(rec.items())[name], rec.select(name)[name]]
        views += [rec.select(["*"])[name], rec.select(rename={name: "other"})["other"]]
        views.append(list(rec.values())[rec.names.index(name)])
        inner = tree
        for key in name.split("."):
            inner = inner[int(key) if isinstance(inner, list) else key]
        views.append(inner)
        if name.startswith("deep."):
            views += [modules[name[5:]], modules.select("*")[name[5:]], rec.select("deep").module("deep")[name[5:]]]
        assert {r.address(view) for view in views} == {r.address(views[0])}, name
        assert all(view.flags.writeable for view in views), name


def test_packed_tensors_may_be_written_each_by_itself(rec: Record) -> None:
    rec["p"].packed[0] = 0x21
    assert rec["p"].unpack().astype(int).tolist() == [1, 2, 3, -4, 5]
    assert rec["p2"].unpack().astype(int).tolist() == [1, -2, 3, -4, 5]
    rec["p2"].packed[-1] = 2
    assert rec["p2"].unpack().astype(int).tolist() == [1, -2, 3, -4, 2]
    assert rec["p"][:2].unpack().astype(int).tolist() == [1, 2]


def test_text_bytes_and_raw_payloads_stay_read_only_and_raw_ones_show_edits(rec: Record) -> None:
    assert not rec["s"].data.flags.writeable
    assert list(rec["s"].strings()) == list(rec["s2"].strings()) == [b"x", b"yz"]
    rec["a"][:] = 0
    rec["c"][:] = 8
    blob = rec.attributes["blob"]
    assert blob.readonly
    assert bytes(blob) == np.ones(64).tobytes(), "an attribute is nobody's tensor, however equal"
    assert rec.raw("a").readonly
    assert bytes(rec.raw("a")) == bytes(512)
    assert bytes(rec.raw("c")) == np.full(64, 8.0).tobytes()


@pytest.mark.parametrize("mode", ["w", "r+", "", None])
def test_unknown_modes_are_refused(mode: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"^mode=.* is not known; 'r' or 'c'$"):
        load_record(ARCHIVE, mode=mode)


@pytest.mark.parametrize("verify", ["touch", "index"])
def test_threads_that_touch_a_twin_first_all_get_one_memory(verify: Any, path: Path) -> None:
    rec = load_record(path, mode="c", verify=verify)
    barrier = threading.Barrier(8)
    found: list[tuple[int, int]] = []

    def touch() -> None:
        barrier.wait()
        found.extend((r.address(rec["b"]), r.address(rec["twin"])) for _ in range(20))

    r.run_in_threads(touch, 8)
    assert len(found) == 160
    assert len(set(found)) == 1


def test_saving_saves_the_edits_and_keeps_the_ties(rec: Record, tmp_path: Path) -> None:
    want = make()
    for tree in (want, rec):
        tree["a"][:5] = 3
        tree["tied"][0] = -7
        tree["twin"][10] = 1
        tree["step"][0] = 99
    rec["p"].packed[0] = 0x21
    want["p"] = PackedTensor.pack(np.array([1, 2, 3, -4, 5]).astype("int4"))
    assert rec.content_digest() == r.round_trip(want).content_digest()
    report = zcrecord.save_record(rec, tmp_path / "edited.zcr")
    again = load_record(tmp_path / "edited.zcr", verify="full")
    r.assert_same(again.tree(), want)
    assert again.info("tied").tied == ("tied", "deep.0")
    assert again.info("base").tied == ("base", "step", "cols", "flat")
    assert report.deduplicated == MIB + 64 * 8 * 2 + 32, "big and twin2; b, c and the attribute; the texts"


def test_record_may_be_saved_over_its_own_file(path: Path) -> None:
    rec = load_record(path, mode="c")
    rec["a"][:] = 4
    rec["twin"][:] = 4
    zcrecord.save_record(rec, path)
    again = load_record(path, verify="full")
    assert (again["a"] == 4).all()
    assert (again["twin"] == 4).all()
    assert not again["twin2"].any()
    assert (rec["b"] == 1).all()
    assert not rec["twin2"].any(), "touched only now, and of the file that is gone"


def test_verify_is_about_what_was_loaded_and_not_about_edits(path: Path) -> None:
    for rec in (load_record(path, mode="c"), load_record(ARCHIVE, mode="c"), load_record(path, mode="c", names="*")):
        for name in ("a", "twin", "tied"):
            rec[name][:] = 3
        rec.verify()
        rec.module("deep").verify()
    rec = load_record(path, mode="c", mmap=False, verify="full")
    for part in (rec, rec.module("deep")):
        with pytest.raises(UnsupportedError, match=r"m\.zcr: may have been edited.*load it with verify='full'"):
            part.verify()


def test_verify_finds_damage_that_was_there_before_an_edit(tmp_path: Path) -> None:
    data = bytearray(ARCHIVE)
    data[load_record(ARCHIVE).info("tied").offset + 7] ^= 1
    (tmp_path / "m.zcr").write_bytes(data)
    for source in (tmp_path / "m.zcr", bytes(data)):
        rec = load_record(source, mode="c")
        rec["tied"][:] = np.arange(40.0)  # as it was meant to be
        calls: list[Callable[[], Any]] = [rec.verify, rec.select("tied").verify]
        calls += [partial(load_record, source, mode="c", verify="full", mmap=mapped) for mapped in (True, False)]
        for call in calls:
            with pytest.raises(IntegrityError, match=r"tensor 'tied': payload .* its digest does not match"):
                call()


@pytest.mark.parametrize("verify", ["touch", "index"])
def test_file_replaced_meanwhile_changes_nothing_here_and_is_what_is_loaded_next(verify: Any, path: Path) -> None:
    rec = load_record(path, mode="c", verify=verify)
    part = rec.select(["a", "b", "twin*"])
    rec["a"][:] = 3
    tree = make()
    tree["b"][:], tree["twin"][:] = 50, 50
    zcrecord.save_record(tree, path)
    for record in (rec, part):
        assert (record["a"] == 3).all()
        assert (record["b"] == 1).all()
        assert not record["twin"].any()
    again = load_record(path, mode="c")
    assert (again["b"] == 50).all()
    assert (again["twin"] == 50).all()


def test_private_copy_of_a_file_that_was_replaced_is_refused(path: Path) -> None:
    rec = load_record(path)
    zcrecord.save_record({"a": np.zeros(3)}, path)
    with pytest.raises(SourceError, match=r"m\.zcr: was replaced or changed since it was opened; load it again"):
        rec.archive.private()


@LINUX
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", ["a", "b", "twin", "twin2"])
def test_close_tells_whether_a_view_still_holds_the_file(name: str, part: bool, path: Path) -> None:
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    rec = load_record(path, mode="c", names="*" if part else None)
    list(rec.values())
    view = rec[name]
    holds = name != "b"  # a small twin, which has memory of its own
    assert rec.close() is not holds
    assert mapped() is holds
    view[:] = 5
    assert (view == 5).all()
    del view
    assert rec.close() is True
    assert not mapped()
    with pytest.raises(UnsupportedError, match="the record is closed"):
        rec["a"]


@pytest.mark.parametrize("mode", ["r", "c"])
def test_part_outlives_the_record_it_is_of(mode: Any, path: Path) -> None:
    with load_record(path, mode=mode) as rec:
        part = rec.select(["deep", "a", "b", "twin"])
        inner = part.module("deep")
    assert (part["b"] == 1).all() and not part["twin"].any()
    part.verify()
    private = part.archive.private() if mode == "r" else part.archive
    assert private.view(private.find("a")).flags.writeable
    del private
    part.close()
    assert inner["1"].tolist() == np.arange(40.0).tolist()
    assert inner.close() is True


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 1 << 50), (1 << 40, 1 << 20), (0, 1 << 63)])
def test_forged_twins_are_refused_before_anything_is_copied(offset: int, nbytes: int, tmp_path: Path) -> None:
    forged = Forge(r.saved({"a": np.ones(64), "b": np.ones(64), "c": np.zeros(8)}))
    for row in (0, 1):
        forged.set("payloads", row, offset=offset, nbytes=nbytes)
    (tmp_path / "m.zcr").write_bytes(forged.seal())
    for verify, mapped in itertools.product(("touch", "index"), (False, True)):
        with pytest.raises(FormatError, match=r"ends past the region of payloads|larger than an archive may be"):
            load_record(tmp_path / "m.zcr", mode="c", mmap=mapped, verify=verify)["b"]  # type: ignore[call-overload]


SPARSE = """
import mmap, os, sys
import numpy as np
from pathlib import Path
import zcrecord
from tools.bench.sparse import write_holes
from tools.measure import memory
path = Path(sys.argv[1])
write_holes(path, 64 << 30)
assert path.stat().st_size > 64 << 30
before, blocks = memory().private, path.stat().st_blocks
with open('/proc/sys/vm/overcommit_memory') as file:
    careful = file.read().strip() == '0'
if careful and os.sysconf('SC_PHYS_PAGES') * mmap.PAGESIZE < 32 << 30:
    with path.open('rb') as file:
        try:
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            pass
        else:
            raise SystemExit('a mapping that reserves memory would be noticed')
rec = zcrecord.load_record(path, mode='c')
views = list(rec.values())
for view in views:
    view.reshape(-1)[[0, -1]] = 1
assert all(view.reshape(-1)[-1] == 1 for view in views)
assert memory().private - before < 8 << 20, memory().private - before
assert path.stat().st_blocks == blocks
assert not zcrecord.load_record(path)[rec.names[-1]].reshape(-1)[-1:].any()
"""


@pytest.mark.measured
@LINUX
@COUNTS_MEMORY
def test_file_larger_than_memory_is_opened_and_edited(tmp_path: Path) -> None:
    r.run_python(SPARSE, tmp_path / "holes.zcr")
