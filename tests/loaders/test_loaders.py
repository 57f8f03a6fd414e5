"""`load_into` loads each payload once, watched, in bounded pieces, and releases everything on failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import records as r

import zcrecord
from tools.range_server import serving
from zcrecord import LoadCancelledError, PackedTensor, Record, TensorNotFoundError, UnsupportedError, load_record
from zcrecord.archive.archive import open_archive
from zcrecord.archive.memory_source import MemorySource
from zcrecord.dtypes import DType
from zcrecord.loaders import LoadPlan, PayloadRef, load, load_into, loader_for, plan_load, shard
from zcrecord.loaders.host import HostLoader
from zcrecord.storage.memory import Memory

OWN = [name for name in load._OWN if name != "cpu"]  # which is "mapped"; a loader that is added there is tested here
COPYING = [name for name in OWN if name != "mapped"]
BASE = np.arange(4000, dtype=np.float32).reshape(100, 40)

own = pytest.mark.parametrize("device", OWN)
copying = pytest.mark.parametrize("device", COPYING)


def tree() -> dict[str, Any]:
    """Return tensors of every kind that a device can have, several of them over one payload."""
    return {
        "m": {"w": BASE, "tied": BASE, "rows": BASE[3:9], "last": BASE[::-1], "column": BASE[:, 7]},
        "alone": np.arange(60, dtype=np.int16).reshape(12, 5),
        "fortran": np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        "scalar": np.float64(3.5),
        "half": np.ones((2, 3), ml_dtypes.bfloat16),
        "packed": PackedTensor.pack(np.arange(-8, 7).reshape(3, 5).astype(ml_dtypes.int4)),
        "none": np.zeros((0, 7), np.int8),
        "equal": np.arange(60, dtype=np.int16).reshape(12, 5),
    }


@pytest.fixture()
def path(tmp_path: Path) -> Path:
    zcrecord.save_record(tree(), tmp_path / "m.zcr", durable=False)
    return tmp_path / "m.zcr"


@pytest.fixture()
def record(path: Path) -> Record:
    return load_record(path)


class Noting:
    """A loader that notes its calls, and fails where it is asked to."""

    device = "paper"

    def __init__(self, fails_in: str = "", error: BaseException | None = None) -> None:
        self.calls: list[str] = []
        self._fails_in, self._error = fails_in, error or RuntimeError("no ink")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call.partition(" ")[0] == self._fails_in:
            raise self._error

    def can_load(self, device: str, dtype: DType) -> bool:
        return device == "paper" and dtype.bits > 0

    def begin(self, plan: LoadPlan) -> None:
        self._note(f"begin {len(plan.refs)}")

    def load(self, ref: PayloadRef, dst: Any | None = None) -> Any:
        self._note(f"load {ref.name}" if dst is None else f"load {ref.name} to {dst}")
        return f"<{ref.name}>"

    def finish(self) -> None:
        self._note("finish")

    def abort(self) -> None:
        self._note("abort")


# Plans.


def test_plan_has_every_payload_once_in_the_order_of_the_file_uncopied(record: Record, path: Path) -> None:
    plan, data = plan_load(record), path.read_bytes()
    assert [ref.offset for ref in plan.refs] == sorted(ref.offset for ref in plan.refs)
    assert len({ref.payload for ref in plan.refs}) == len(plan.refs) == 7
    assert plan.nbytes == sum(ref.nbytes for ref in plan.refs) == BASE.nbytes + 2 * 120 + 96 + 8 + 12 + 8
    assert plan.largest == BASE.nbytes
    assert list(plan.targets) == list(record)
    whole = np.frombuffer(record.archive.buffer, np.uint8)
    for ref in plan.refs:
        assert (ref.path, ref.source) == (str(path), None)
        assert ref.buffer is not None and ref.buffer.readonly
        assert bytes(ref.buffer) == data[ref.offset : ref.offset + ref.nbytes]
        assert np.shares_memory(np.frombuffer(ref.buffer, np.uint8), whole)


def test_path_is_absolute_and_that_of_bytes_in_memory_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    assert {ref.path for ref in plan_load(load_record("m.zcr")).refs} == {str(path)}
    for other in (load_record(path.read_bytes()), load_record("m.zcr", mmap=False)):
        plan = plan_load(other)
        assert {plan.path, *(ref.path for ref in plan.refs)} == {None}
        assert plan.nbytes == plan_load(load_record(path)).nbytes


def test_a_part_of_a_payload_is_planned_as_that_part(record: Record) -> None:
    for name, planned in {
        "m.rows": (6 * 160, (6, 40), None, 0),
        "m.column": (99 * 160 + 4, (100,), (40,), 0),
        "m.last": (BASE.nbytes, (100, 40), (-40, 1), 99 * 160),
    }.items():
        (ref,) = plan_load(record, name).refs
        assert (ref.nbytes, ref.shape, ref.strides, ref.byte_offset) == planned


def test_archive_attached_to_a_program_is_planned_by_its_place_in_the_file(path: Path) -> None:
    path.write_bytes(bytes(65536) + path.read_bytes())
    record = load_record(path)
    assert plan_load(record, "alone").refs[0].offset == record.info("alone").offset > 65536
    r.assert_same(load_into(record, "read"), dict(record))


def test_limit_may_be_any_integer_from_1_on(record: Record) -> None:
    limit: Any
    for limit in (0, 1.5, None, np.True_, "64"):
        with pytest.raises(zcrecord.LimitError, match="is not a number of bytes"):
            plan_load(record, max_in_flight=limit)
    limit = np.uint8(200)
    assert type(plan_load(record, max_in_flight=limit).max_in_flight) is int
    r.assert_same(load_into(record, "host", max_in_flight=limit), dict(record))


# Values.


@own
@pytest.mark.parametrize("options", [{}, {"mmap": False}, {"mode": "c"}, {"verify": "touch"}], ids=str)
def test_device_has_the_tensors_of_the_record(device: str, options: Any, record: Record, path: Path) -> None:
    r.assert_same(load_into(load_record(path, **options), device), dict(record))
    r.assert_same(load_into(load_record(path.read_bytes()), device), dict(record))


@own
def test_tied_tensors_are_one_object_and_views_share_memory(device: str, record: Record) -> None:
    found = load_into(record, device)
    assert found["m.w"] is found["m.tied"]
    for name in ("m.rows", "m.last", "m.column"):
        assert np.shares_memory(found["m.w"], found[name])


@copying
def test_copies_are_aligned_writable_and_apart_from_the_record_and_from_equal_ones(device: str, record: Record) -> None:
    found = load_into(record, device)
    assert r.address(found["m.w"]) % 64 == 0
    found["m.w"][0], found["alone"][:] = 7, 0
    assert found["m.tied"][0, 0] == 7
    assert (record["m.w"][0, 1], record["alone"][0, 1]) == (1, 1)
    assert found["equal"].tolist() == tree()["equal"].tolist()


def test_mapped_views_are_the_mapping_itself_and_keep_it(record: Record) -> None:
    addresses = {name: r.address(view) for name, view in record.items() if isinstance(view, np.ndarray) and view.size}
    found = load_into(record, "cpu")
    assert {name: r.address(found[name]) for name in addresses} == addresses
    assert not any(found[name].flags.writeable for name in addresses)
    assert not record.close()
    assert found["m.w"].tobytes() == BASE.tobytes()


@own
def test_edits_of_a_private_record_are_loaded(device: str, path: Path) -> None:
    edited = load_record(path, mode="c")
    edited["alone"][:] = 5
    found = load_into(edited, device)
    assert (found["alone"] == 5).all()
    assert found["equal"].tolist() == tree()["equal"].tolist()


@own
def test_parts_and_choices_are_loaded_by_their_own_names(device: str, record: Record) -> None:
    r.assert_same(load_into(record.module("m"), device), dict(record.module("m")))
    assert list(load_into(record, device, "m")) == [n for n in record if n.startswith("m.")]
    assert list(load_into(record, device, ["*al*", "m.w"])) == ["m.w", "alone", "scalar", "half", "equal"]
    with pytest.raises(TensorNotFoundError, match="close names: 'alone'"):
        load_into(record, device, "alonne")


def test_record_of_nothing_is_loaded_as_nothing() -> None:
    told: list[tuple[int, int | None]] = []
    for device in OWN:
        found = load_into(load_record(r.saved({"e": np.zeros((0, 3))})), device, progress=lambda *now: told.append(now))
        assert found["e"].shape == (0, 3)
    assert told == [(0, 0)] * len(OWN)


def test_strings_are_refused_unless_their_bytes_are_asked_for(tmp_path: Path) -> None:
    zcrecord.save_record({"s": np.array(["a", "bc"]), "w": BASE}, tmp_path / "s.zcr")
    record = load_record(tmp_path / "s.zcr")
    with pytest.raises(UnsupportedError, match=r"s\.zcr: tensor 's': no device has tensors of strings; leave it out"):
        load_into(record, "host")
    for device in OWN:
        assert load_into(record, device, raw=True)["s"].tobytes() == bytes(record.raw("s"))


# Rows of the first axis; `test_loaders_boxes` has other boxes.


@own
def test_first_key_that_matches_chooses_the_rows(device: str, record: Record) -> None:
    slices = {"m.w": slice(1, 3), "m.*": slice(5), "alone": slice(-2, None), "none": slice(3), "equal": slice(5, 5)}
    names = ["m.w", "m.tied", "m.rows", "alone", "half", "none", "equal"]
    found = load_into(record, device, names, slices=slices)
    assert found["m.w"].tobytes() == BASE[1:3].tobytes()
    assert found["m.tied"].tobytes() == BASE[:5].tobytes()
    assert found["m.rows"].tobytes() == BASE[3:8].tobytes()
    assert np.shares_memory(found["m.w"], found["m.tied"])
    assert found["alone"].tobytes() == record["alone"][-2:].tobytes()
    assert [found[name].shape for name in ("half", "none", "equal")] == [(2, 3), (0, 7), (0, 5)]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no axis": ("scalar", slice(1), "takes parts of axes, and this tensor has no axis"),
    "too many axes": ("alone", (slice(1),) * 3, "a box of 3 axes, and this tensor has 2"),
    "too many dots": ("alone", (..., slice(1), ...), r"at most one \.\.\. in a box"),
    "steps of columns": ("alone", (..., slice(0, 9, 2)), "takes contiguous elements, and not every 2th"),
    "backwards": ("alone", slice(None, None, -1), "takes contiguous elements"),
    "no range": ("alone", lambda rows: rows, "takes ranges, and not 12"),
    "a number": ("alone", 3, r"maps names or patterns to slices, or .* not 'alone' to 3; write slice\(i, i \+ 1\)"),
    "a number in it": ("alone", (slice(1), 3), r"and not 'alone' to \(slice.*, 3\); write slice\(i, i \+ 1\)"),
    "dots alone": ("alone", ..., "and not 'alone' to Ellipsis"),
    "a number for names": (3, slice(1), "and not 3 to slice"),  # type: ignore[dict-item]
    "unequal parts": ("alone", shard(0, 5), "12 rows cannot be divided equally among 5 ranks; uneven=True"),
    "unequal columns": ("alone", shard(0, 2, 1), "5 elements of axis 1 cannot be divided equally among 2 ranks"),
    "a shard of no axis": ("alone", shard(0, 2, -3), "has a shard of axis -3, and this tensor has 2 axes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_rows_that_cannot_be_had_are_refused(what: str, record: Record) -> None:
    name, rows, message = REFUSED[what]
    with pytest.raises(UnsupportedError, match=message):
        plan_load(record, slices={name: rows})


def test_rows_of_unknown_tensors_and_ranks_are_refused(record: Record) -> None:
    with pytest.raises(TensorNotFoundError, match="close names: 'alone'"):
        plan_load(record, slices={"alonne": slice(1)})
    rank: Any = np.int64(1)
    assert shard(rank, 4)(8) == slice(2, 4)
    for rank, message in {0.5: "both are integers", None: "both are integers", 4: "ranks are counted from 0"}.items():
        with pytest.raises(UnsupportedError, match=f"rank {rank!r} of 4: {message}"):
            shard(rank, 4)
    with pytest.raises(UnsupportedError, match=r"axis=0\.5 is not an integer"):
        shard(0, 4, 0.5)  # type: ignore[arg-type]


# Other sources.


@copying
def test_remote_bytes_are_asked_for_once_and_only_the_chosen_ones(device: str, record: Record, path: Path) -> None:
    data, asked = path.read_bytes(), []

    class Far:
        def readinto_at(self, offset: int, target: memoryview) -> None:
            asked.append((offset, len(target)))
            target[:] = data[offset : offset + len(target)]

    class FarSource(MemorySource):
        remote = Far()

    archive = open_archive(Memory(memoryview(data)), verify="index", source_in=FarSource)
    (ref,) = plan_load(archive, "m.w").refs
    assert (ref.path, ref.buffer) == (None, None)
    assert load_into(archive, device, "m.w")["m.w"].tobytes() == BASE.tobytes()
    assert asked == [(record.info("m.w").offset, BASE.nbytes)]
    r.assert_same(load_into(archive, device), dict(record))
    with pytest.raises(UnsupportedError, match=r"'m\.w': its bytes are not in this machine's memory; load it into"):
        load_into(archive, "mapped", "m.w")


def test_views_of_a_remote_record_are_of_fetched_bytes_which_are_checked(record: Record, path: Path) -> None:
    with serving(path.parent) as server:
        far = load_record(f"{server.url}/m.zcr")
        found = load_into(far, "cpu", "alone")
        assert found["alone"].tobytes() == record["alone"].tobytes()
        assert r.address(found["alone"]) == r.address(far["alone"])
        asked = len(server.requests)
        rows = load_into(far, "mapped", "alone", slices={"alone": slice(3, 5)})["alone"]
        assert rows.tobytes() == record["alone"][3:5].tobytes()
        assert len(server.requests) == asked, "each range is fetched once"
        r.assert_same(load_into(far, "cpu"), dict(record))
        with pytest.raises(UnsupportedError, match=r"http://.*m\.zcr: tensor 'alone': dst= has 3 bytes"):
            load_into(far, "host", dst={"alone": bytearray(3)})
        r.damage(path, record.info("alone").offset)
        with pytest.raises(zcrecord.IntegrityError, match=r"http://.*m\.zcr: tensor 'alone': payload"):
            load_into(load_record(f"{server.url}/m.zcr"), "cpu", "alone")


# Into the caller's memory.


@copying
def test_tensors_go_into_the_memory_that_is_given(device: str, record: Record) -> None:
    room, half = np.zeros((12, 5), np.int16), np.zeros((2, 3), ml_dtypes.bfloat16)
    none = np.empty((7, 0), ml_dtypes.bfloat16)
    names = ["alone", "half", "equal", "none"]
    found = load_into(record, device, names, dst={"alone": room, "half": half, "none": none})
    assert room.tobytes() == record["alone"].tobytes() == found["equal"].tobytes()
    assert half.tobytes() == record["half"].tobytes()
    assert np.shares_memory(found["alone"], room)
    assert not np.shares_memory(found["equal"], room)
    assert found["none"].shape == (0, 7)
    octets = bytearray(16)
    assert load_into(record, device, "packed", dst={"packed": memoryview(octets)[:8]})["packed"].shape == (3, 5)
    assert octets == bytes(record.raw("packed")) + bytes(8)


@copying
@pytest.mark.parametrize("scalar", [np.float32(2.5), np.array(2.5, ml_dtypes.bfloat16)], ids=["own", "other"])
def test_memory_of_rank_0_is_filled(scalar: Any, device: str) -> None:
    room = np.zeros((), scalar.dtype)
    found = load_into(load_record(r.saved({"s": scalar})), device, dst={"s": room})["s"]
    assert room.tobytes() == scalar.tobytes()
    assert found.shape == ()
    assert np.shares_memory(found, room)


ROOMS: dict[str, tuple[str, Any, str]] = {
    "too large for nothing": ("none", bytearray(1), "'none': dst= has 1 bytes, the tensor 0"),
    "nothing": ("alone", np.empty((0, 5), np.int16), "'alone': dst= has 0 bytes, the tensor 120"),
    "nothing, read-only": ("none", b"", "'none': dst= is read-only"),
    "axes the other way": ("half", np.zeros((3, 2), ml_dtypes.bfloat16).T, "'half': dst= of a ndarray has no contig"),
    "too small": ("alone", bytearray(119), r"'alone': dst= has 119 bytes, the tensor 120; make it np\.empty\(120"),
    "read-only": ("alone", bytes(120), "'alone': dst= is read-only"),
    "gaps": ("alone", np.zeros((12, 10), np.int16)[:, ::2], "'alone': dst= of a ndarray has no contiguous bytes"),
    "no memory": ("alone", 3, "'alone': dst= of a int has no contiguous bytes"),
    "one of several views": ("m.rows", bytearray(960), "'m.rows': shares its bytes with tensors of another form"),
}


@pytest.mark.parametrize("what", ROOMS)
def test_memory_that_does_not_fit_is_refused(what: str, record: Record) -> None:
    name, room, message = ROOMS[what]
    for device in COPYING:
        with pytest.raises(UnsupportedError, match=message):
            load_into(record, device, dst={name: room})


def test_memory_for_tensors_that_are_not_loaded_or_are_tied_is_refused(record: Record) -> None:
    with pytest.raises(TensorNotFoundError):
        load_into(record, "host", "alone", dst={"half": bytearray(12)})
    both = {"m.w": bytearray(BASE.nbytes), "m.tied": bytearray(BASE.nbytes)}
    with pytest.raises(UnsupportedError, match=r"'m\.tied': is tied to another tensor that has a dst"):
        load_into(record, "host", ["m.w", "m.tied"], dst=both)
    with pytest.raises(UnsupportedError, match="a view copies nothing, so it takes no dst="):
        load_into(record, "mapped", "alone", dst={"alone": bytearray(120)})


# Loaders.


def test_loader_is_told_each_payload_between_begin_and_finish(record: Record) -> None:
    loader = Noting()
    found = load_into(record, loader, ["m.w", "m.tied", "alone", "none"], dst={"alone": "desk"})
    assert loader.calls == ["begin 2", "load m.w", "load alone to desk", "load none", "finish"]
    assert found == {"m.w": "<m.w>", "m.tied": "<m.w>", "alone": "<alone>", "none": "<none>"}


def test_loader_is_not_begun_with_tensors_that_it_cannot_load(record: Record) -> None:
    class Picky(Noting):
        def can_load(self, device: str, dtype: DType) -> bool:
            return super().can_load(device, dtype) and dtype.name != "int16"

    loader = Picky()
    with pytest.raises(UnsupportedError, match="'alone': Picky loads no int16 to 'paper'; leave it out with names="):
        load_into(record, loader, ["alone", "half"])
    with pytest.raises(UnsupportedError, match=r"'m\.w': is one of several views of its bytes, and Picky makes no vie"):
        load_into(record, loader, "m")
    assert loader.calls == []


class Half:
    """A loader that does not say to which device it loads."""

    def can_load(self, *_: Any) -> bool:
        return True


MISUSE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a path": (lambda rec: load_into(str(rec.path), "host"), "a str is not a record; load_record"),  # type: ignore[arg-type]
    "a hollow record": (lambda rec: load_into(rec.hollow(), "host"), "a HollowRecord is not a record"),
    "a plan of a path": (lambda rec: plan_load(str(rec.path)), "a str is not a record"),  # type: ignore[arg-type]
    "a list of memory": (lambda rec: load_into(rec, "host", dst=[bytearray(8)]), r"dst= takes memory by name.*a list"),  # type: ignore[arg-type]
    "rows of all": (lambda rec: load_into(rec, "host", slices=slice(2)), "slices= takes boxes by name.*, not a slice"),  # type: ignore[arg-type]
    "no progress": (lambda rec: load_into(rec, "host", progress=3), "progress= takes a function, not a int"),  # type: ignore[arg-type]
    "no cancel": (lambda rec: load_into(rec, "host", cancel=3), "cancel= takes an Event or a function, not a int"),  # type: ignore[arg-type]
    "no loader": (lambda rec: load_into(rec, None), "loader= takes a loader, or the name of a device"),  # type: ignore[arg-type]
    "half a loader": (lambda rec: load_into(rec, Half()), "loader= takes a loader, or the name of a device"),  # type: ignore[arg-type]
    "a number": (lambda _: loader_for(3), "a int is neither a loader nor a device's name"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("what", MISUSE)
def test_misuse_is_one_typed_error(what: str, record: Record) -> None:
    act, message = MISUSE[what]
    with pytest.raises(UnsupportedError, match=message):
        act(record)


def test_loaders_are_found_by_the_device_they_load_to() -> None:
    assert isinstance(loader_for("host"), HostLoader)
    assert loader_for("host") is not loader_for("host")
    assert [loader_for(name).device for name in ("cpu", "mapped", "read")] == ["cpu", "cpu", "read"]


@pytest.mark.parametrize("where", ["begin", "load", "finish"])
@pytest.mark.parametrize("error", [RuntimeError("no ink"), KeyboardInterrupt(), zcrecord.SourceError("gone")], ids=repr)
def test_loader_that_fails_is_aborted_once_and_its_error_raised(
    where: str, error: BaseException, record: Record
) -> None:
    loader = Noting(where, error)
    with pytest.raises(type(error)) as caught:
        load_into(record, loader, "alone")
    assert caught.value is error
    assert loader.calls.index("abort") == len(loader.calls) - 1
    if where == "load" and isinstance(error, zcrecord.RecordError):
        assert error.tensor == "alone"


def test_loader_whose_abort_fails_hides_no_error(record: Record) -> None:
    class Broken(Noting):
        def abort(self) -> None:
            raise ValueError("worse")

    with pytest.raises(RuntimeError, match="no ink"):
        load_into(record, Broken("load"), "alone")


@own
def test_abort_may_come_at_any_time_and_again(device: str, record: Record) -> None:
    loader = loader_for(device)
    loader.abort()
    plan = plan_load(record)
    loader.begin(plan)
    loader.load(plan.refs[0])
    loader.abort()
    loader.abort()
    r.assert_same(load_into(record, loader), dict(record))


# Progress and cancelling.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """A record of one payload of 20 MiB and some small ones."""
    path = tmp_path_factory.mktemp("large") / "m.zcr"
    big = np.arange(5 << 20, dtype=np.uint32)
    zcrecord.save_record({"w": big, **{f"b{i}": np.full(100, i) for i in range(5)}}, path, durable=False)
    return load_record(path)


@own
def test_progress_grows_to_the_whole_and_tells_that_once(device: str, large: Record) -> None:
    told: list[tuple[int, int | None]] = []
    load_into(large, device, progress=lambda *now: told.append(now))
    done = [now for now, _ in told]
    total = (20 << 20) + 5 * 800
    assert {whole for _, whole in told} == {total}
    assert done == sorted(set(done))
    assert done[-1] == total
    assert device == "mapped" or len([now for now in done if now < 20 << 20]) >= 2, "nothing was told in between"


@pytest.mark.parametrize("limit", [3, 1 << 20, 64 << 20])
def test_large_payload_is_the_same_whatever_may_be_in_flight(limit: int, large: Record) -> None:
    part = large if limit > 3 else large.select("b*")
    r.assert_same(load_into(part, "host", max_in_flight=limit), dict(part))
    if limit > 3:
        room = np.zeros(5 << 20, np.uint32)
        load_into(part, "host", "w", max_in_flight=limit, dst={"w": room})
        assert room.tobytes() == large["w"].tobytes()


def test_ref_is_not_read_past_its_end(record: Record) -> None:
    (ref,) = plan_load(record, "alone").refs
    for start, nbytes in ((0, 121), (119, 2), (121, 1)):
        with pytest.raises(ValueError, match=r"buffer is smaller than requested size|offset must be"):
            ref.read_into(memoryview(bytearray(nbytes)), start)
    target = bytearray(2)
    ref.read_into(memoryview(target), 118)
    assert target == record["alone"].tobytes()[118:]


@copying
def test_loading_is_cancelled_between_pieces_of_one_payload(device: str, large: Record) -> None:
    told: list[int] = []
    event = threading.Event()

    def stop(done: int, _: int | None) -> None:
        told.append(done)
        event.set()

    with pytest.raises(LoadCancelledError, match=r"m\.zcr: .*cancelled after \d+ of 20975520 bytes; nothing"):
        load_into(large, device, progress=stop, cancel=event)
    assert len(told) == 1
    assert told[0] < 20 << 20


@pytest.mark.parametrize("asked, calls", [(0, ["abort"]), (2, ["begin 2", "load alone", "abort"])])
def test_loading_is_cancelled_before_it_begins_and_between_payloads(
    asked: int, calls: list[str], record: Record
) -> None:
    loader, left = Noting(), iter(range(asked))
    with pytest.raises(LoadCancelledError, match="cancelled after"):
        load_into(record, loader, ["alone", "half"], cancel=lambda: next(left, None) is None)
    assert loader.calls == calls


def test_an_error_of_the_progress_function_ends_the_load(large: Record) -> None:
    def tired(*_: Any) -> None:
        raise KeyError("tired")

    threads = threading.active_count()
    for device in OWN:
        with pytest.raises(KeyError, match="tired"):
            load_into(large, device, progress=tired)
    assert threading.active_count() == threads


def test_closed_record_is_refused_and_closing_meanwhile_harms_nothing(record: Record, path: Path) -> None:
    def closing(*_: Any) -> None:
        record.close()

    r.assert_same(load_into(record, "host", progress=closing), dict(load_record(path)))
    with pytest.raises(UnsupportedError, match="the record is closed"):
        load_into(record, "host")
