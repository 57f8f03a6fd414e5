"""Tensors on torch devices: the same values, each payload once, through a ring of buffers that never grows.

The ring runs on the CPU, and with a stand-in for cuda that copies as late as a device may (`torch_devices`).
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from torch_devices import LazyTorch

import zcrecord
from zcrecord.dtypes import DTYPES, DType
from zcrecord.errors import DependencyError, LimitError, LoadCancelledError, SourceError, UnsupportedError
from zcrecord.frameworks import torch as frameworks_module
from zcrecord.loaders import load_into, loader_for, plan_load
from zcrecord.loaders import torch as loader_module
from zcrecord.loaders.torch import TorchLoader

KINDS = [d for d in DTYPES if d.torch and hasattr(torch, d.torch)]
KIB = 1 << 10
SIZES = [1, 1000, 64 * KIB, 200 * KIB, 64 << 20]  # of max_in_flight
SECONDS = 30  # after which something hangs


def opened(folder: Path, record: Any) -> zcrecord.Record:
    zcrecord.save_record(record, folder / "model.zcr", durable=False)
    return zcrecord.load_record(folder / "model.zcr")


def octets(tensor: torch.Tensor) -> bytes:
    plain: Any = tensor.as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(plain.tobytes())


PAIRS = next(d for d in DTYPES if d.name == "float4_e2m1fn")


def many_kinds_of_views() -> dict[str, Any]:
    base = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    large = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    return {
        "large": large, "tied": large, "rows": large[40:90].reshape(5, 10), "turned": large[40:90].reshape(10, 5).T,
        "backwards": large[:50][::-1], "bytes": large.view(np.uint8)[4:44], "fortran": np.asfortranarray(base),
        "alone": base[::-1, :, ::-1].copy()[::-1], "scalar": np.array(7, np.int64), "empty": np.zeros((0, 3), np.int8),
        "other": np.ones(50), "equal": np.ones(50), "bools": np.array([True, False]), "complex": base * 1j,
        "pairs": zcrecord.PackedTensor(np.arange(12, dtype=np.uint8), PAIRS, (3, 8)),
    }  # fmt: skip


def within(work: Callable[[], object]) -> BaseException | None:
    """Return the exception of `work`; fails the test if it has not come back by then."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None


def readers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("zcrecord-reader")]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> LazyTorch:
    """A torch whose cuda device copies as late as it may."""
    made = LazyTorch()
    monkeypatch.setattr(loader_module, "import_torch", lambda: made)
    return made


# Values.


@pytest.mark.parametrize("kind", KINDS, ids=lambda d: d.name)
def test_every_element_type_comes_bit_for_bit_backwards_too(kind: DType, tmp_path: Path) -> None:
    arrays = {str(shape): r.filled(kind, shape) for shape in [(), (0, 3), (7,), (3, 1, 5)]}
    if not kind.packed:
        arrays["backwards"] = r.filled(kind, (5, 4))[::-1, ::-2]
    found = load_into(opened(tmp_path, arrays), TorchLoader("cpu"))
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert str(found[name].dtype) == f"torch.{kind.torch}"
        assert tuple(found[name].shape) == array.shape
        assert octets(found[name]) == array.tobytes()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("size", SIZES)
def test_values_strides_and_ties_are_those_of_record_torch(
    size: int, device: str, fake: LazyTorch, tmp_path: Path
) -> None:
    record = many_kinds_of_views()
    if size == 1:
        record = {name: value for name, value in record.items() if getattr(value, "nbytes", 0) < 1000}
    rec = opened(tmp_path, record)
    expected, found = rec.torch(), load_into(rec, TorchLoader(device), max_in_flight=size)
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].stride() == tensor.stride()
        assert octets(found[name]) == octets(tensor), name
    if size > 1:
        assert found["large"] is found["tied"]
        assert len({found[name].untyped_storage()._cdata for name in ("large", "rows", "turned", "bytes")}) == 1
    assert found["other"].untyped_storage()._cdata != found["equal"].untyped_storage()._cdata
    assert not readers()


def test_rows_of_a_rank_are_loaded_and_nothing_else(fake: LazyTorch, tmp_path: Path) -> None:
    rec = opened(tmp_path, {"w": np.arange(40.0).reshape(8, 5)})
    found = load_into(rec, TorchLoader("cuda"), slices={"w": slice(2, 4)})
    assert found["w"].tolist() == np.arange(10.0, 20.0).reshape(2, 5).tolist()
    assert fake.room == (1 << 40) - 80


@pytest.mark.parametrize("mode", ["no grad", "inference", "default device"])
def test_whatever_mode_torch_is_in_tensors_are_ordinary_ones(mode: str, tmp_path: Path) -> None:
    rec = opened(tmp_path, {"w": np.ones(9, np.float32), "back": np.arange(9.0)[::-1]})
    modes: dict[str, Any] = {"no grad": torch.no_grad(), "inference": torch.inference_mode()}
    with modes.get(mode) or torch.device("meta"):
        found = load_into(rec, TorchLoader("cpu"))
    assert not found["w"].is_inference()
    found["w"].requires_grad_()
    (found["w"] * 2).sum().backward()
    assert found["w"].grad is not None
    assert found["back"].tolist() == list(range(8, -1, -1))


# Into the caller's tensors.


def test_tensors_go_into_those_that_are_given(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    rec = opened(tmp_path, {"plain": weight, "across": weight + 1, "turned": (weight + 2).T, "none": np.zeros((0, 2))})
    dst = {
        "plain": torch.nn.Parameter(torch.zeros(3, 4)), "across": torch.zeros(4, 3).T,
        "turned": torch.zeros(4, 3), "none": torch.zeros((0, 2), dtype=torch.float64),
    }  # fmt: skip
    found = load_into(rec, TorchLoader("cpu"), dst=dst)
    for name, target in dst.items():
        assert found[name] is target
        assert target.tolist() == rec[name].tolist()
    conjugate = torch.zeros(2, dtype=torch.complex64).conj()
    load_into(opened(tmp_path, {"c": np.array([1j, 2], np.complex64)}), TorchLoader("cpu"), dst={"c": conjugate})
    assert conjugate.tolist() == [1j, 2]
    with torch.inference_mode():
        target = torch.zeros(3, 4)
        load_into(rec, TorchLoader("cpu"), dst={"plain": target})
    assert target.tolist() == weight.tolist()


@pytest.mark.parametrize(
    "target, message",
    [
        (torch.zeros(4), r"dst has to be torch\.float32 of shape \(3,\), and is torch\.float32 of shape \(4,\)"),
        (torch.zeros(3, dtype=torch.int32), r"dst has to be torch\.float32 .* and is torch\.int32 of shape \(3,\)"),
        (torch.zeros(3, device="meta"), "dst has to be on cpu, and is on meta"),
        (np.zeros(3, np.float32), r"dst has to be torch\.float32 of shape \(3,\), and is ndarray"),
    ],
)
def test_a_target_of_another_kind_is_refused(target: Any, message: str, tmp_path: Path) -> None:
    rec = opened(tmp_path, {"w": np.ones(3, np.float32)})
    with pytest.raises(UnsupportedError, match=f"tensor 'w': {message}"):
        load_into(rec, TorchLoader("cpu"), dst={"w": target})


# Elements and devices that torch does not have.


@pytest.mark.parametrize("kind", [d for d in DTYPES if d.numpy is not None and d.torch is None], ids=lambda d: d.name)
def test_elements_that_torch_has_no_type_for_are_refused_by_name(kind: DType, tmp_path: Path) -> None:
    loader = TorchLoader("cpu")
    if kind is not PAIRS:
        assert not loader.can_load("cpu", kind)
    rec = opened(tmp_path, {"fine": np.ones(3), "odd": r.filled(kind, (3,))})
    with pytest.raises(UnsupportedError, match=rf"model\.zcr: tensor 'odd': .*{kind.name}.*; leave"):
        load_into(rec, loader)
    assert load_into(rec, loader, names="fine")["fine"].tolist() == [1, 1, 1]


def test_strings_come_as_views_beside_tensors_on_a_device(
    fake: LazyTorch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(frameworks_module, "import_torch", lambda: fake)
    rec = opened(tmp_path, {"vocab": np.array(["a", "bb"]), "w": np.ones(3)})
    for found in (rec.torch("cuda"), rec.torch("cuda", "*")):
        assert list(found) == ["vocab", "w"]
        assert found["vocab"].unpack().tolist() == ["a", "bb"]
        assert octets(found["w"]) == np.ones(3).tobytes()


def test_devices_that_are_not_here_or_hold_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="'meta' have no bytes to be loaded; use record"):
        TorchLoader("meta")
    for device in ("cuda:63", "nowhere", 5.5):
        with pytest.raises(UnsupportedError, match="torch has no device"):
            TorchLoader(device)
    with pytest.raises(LimitError, match="readers=0: at least one has to read"):
        TorchLoader("cpu", readers=0)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DependencyError, match=r"pip install torch, or in a checkout .*'\.\[torch\]'"):
        TorchLoader("cpu")


def test_a_device_s_name_chooses_the_loader_and_its_number_counts(fake: LazyTorch) -> None:
    loader = loader_for("cuda:0")
    assert type(loader) is TorchLoader
    assert (loader.device, TorchLoader("cuda").device) == ("cuda:0", "cuda:0")
    float32 = next(d for d in DTYPES if d.name == "float32")
    able = {name: loader.can_load(name, float32) for name in ("cuda", "cuda:0", "cuda:1", "cpu", "nowhere")}
    assert able == {"cuda": True, "cuda:0": True, "cuda:1": False, "cpu": False, "nowhere": False}


def test_loading_before_beginning_is_an_error(tmp_path: Path) -> None:
    (ref,) = plan_load(opened(tmp_path, {"w": np.ones(3)})).refs
    with pytest.raises(UnsupportedError, match=r"begin\(plan\) comes before load\(ref\)"):
        TorchLoader("cpu").load(ref)
    TorchLoader("cpu").abort()
    TorchLoader("cpu").finish()


# The ring.


class Told:
    """A remote source that notes its reads, and calls a function at each."""

    def __init__(self, on_read: Callable[[int], object] = lambda _: None) -> None:
        self.reads: list[int] = []
        self._on_read = on_read

    def readinto_at(self, offset: int, target: memoryview) -> None:
        self.reads.append(len(target))
        self._on_read(offset)
        target[:] = numbered(len(target), offset)


def remote(folder: Path, source: Any, nbytes: int, count: int = 1, **changes: Any) -> Any:
    """A plan whose bytes come from `source`: `count` tensors of `nbytes` each, numbered on through all of them."""
    rec = opened(folder, {f"t{i}": np.full(nbytes, i, np.uint8) for i in range(count)})
    plan = plan_load(rec)
    refs = tuple(
        dataclasses.replace(ref, buffer=None, path=None, source=source, offset=i * nbytes)
        for i, ref in enumerate(plan.refs)
    )
    return dataclasses.replace(plan, refs=refs, **changes)


def loaded(loader: TorchLoader, plan: Any) -> bytes:
    """Return the bytes of all tensors of a plan."""
    loader.begin(plan)
    tensors = [loader.load(ref) for ref in plan.refs]
    loader.finish()
    return b"".join(map(octets, tensors))


def numbered(nbytes: int, start: int = 0) -> bytes:
    """Return a source's bytes from `start` on: they do not repeat within 16 MiB, so that each tells its place."""
    return (np.arange(start, start + nbytes) * 40503 >> 16).astype(np.uint8).tobytes()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 50])
def test_buffers_together_are_no_larger_than_max_in_flight(
    size: int, count: int, fake: LazyTorch, tmp_path: Path
) -> None:
    nbytes = 1000 if size == 1 else 300_000
    plan = remote(tmp_path, Told(), nbytes // count, count, max_in_flight=size)
    assert loaded(TorchLoader("cuda", readers=3), plan) == numbered(nbytes // count * count)
    assert 0 < fake.pinned <= min(size, nbytes + 4096 * count)


def test_a_buffer_is_filled_again_only_after_the_event_behind_its_copies(fake: LazyTorch, tmp_path: Path) -> None:
    plan = remote(tmp_path, Told(), 1 << 20, max_in_flight=128 * KIB)  # two buffers, sixteen pieces
    fake.waits = False
    assert loaded(TorchLoader("cuda"), plan) != numbered(1 << 20), "a loader that does not wait would not be noticed"
    fake.waits = True
    fake.calls.clear()
    assert loaded(TorchLoader("cuda"), plan) == numbered(1 << 20)
    kinds = fake.kinds()
    assert kinds.count("copy") == kinds.count("record") == kinds.count("wait") == 16
    copies = [i for i, kind in enumerate(kinds) if kind == "copy"]
    waits = [i for i, kind in enumerate(kinds) if kind == "wait"]
    assert all(waits[i] < copies[i + 2] for i in range(14)), kinds
    assert kinds[0] == "follow", "copies come after what the user's stream does with that memory"
    assert kinds[-1] == "drain"


def test_reading_goes_on_while_the_device_copies(fake: LazyTorch, tmp_path: Path) -> None:
    all_read = threading.Event()

    def read(_: int) -> None:
        if len(source.reads) >= 4:
            all_read.set()

    source = Told(read)

    def busy() -> None:  # a device that is not done with the first buffer before the other three are read, too
        assert all_read.wait(SECONDS), "nothing is read while the device copies"

    fake.on_wait = busy
    plan = remote(tmp_path, source, 1 << 20, max_in_flight=256 * KIB)
    assert loaded(TorchLoader("cuda", readers=2), plan) == numbered(1 << 20)
    assert fake.pinned == 256 * KIB


def test_several_readers_read_at_once(tmp_path: Path) -> None:
    meeting = threading.Barrier(3)  # broken, and the test failed, unless three read at a time
    plan = remote(tmp_path, Told(lambda _: meeting.wait(SECONDS)), 6 * 64 * KIB, max_in_flight=6 * 64 * KIB)
    assert loaded(TorchLoader("cpu", readers=3), plan) == numbered(6 * 64 * KIB)


def test_loading_to_a_second_gpu_takes_no_memory_of_the_first(fake: LazyTorch, tmp_path: Path) -> None:
    plan = remote(tmp_path, Told(), 1 << 20, max_in_flight=128 * KIB)
    assert loaded(TorchLoader("cuda:1"), plan) == numbered(1 << 20)
    assert fake.contexts == {1}


def test_small_tensors_share_buffers_reads_and_events(fake: LazyTorch, tmp_path: Path) -> None:
    source = Told()
    plan = remote(tmp_path, source, 100, 200, max_in_flight=64 * KIB)
    assert loaded(TorchLoader("cuda"), plan) == numbered(20_000)
    assert fake.kinds().count("record") == 1
    assert source.reads == [20_000]


def test_bytes_far_apart_are_not_read_along(tmp_path: Path) -> None:
    source = Told()
    plan = remote(tmp_path, source, 100, 4)
    far = [0, 164, 5000, 9100]  # a gap of alignment is read, one of more than a page is not
    refs = tuple(dataclasses.replace(ref, offset=at) for ref, at in zip(plan.refs, far, strict=True))
    plan = dataclasses.replace(plan, refs=refs)
    assert loaded(TorchLoader("cpu"), plan) == b"".join(numbered(100, at) for at in far)
    assert source.reads == [264, 4200]


# Failures: nothing hangs, and all is released.


def assert_all_is_released(fake: LazyTorch, loader: TorchLoader) -> None:
    assert not readers()
    gc.collect()
    assert fake.held, "no buffer and no event was ever made"
    assert not [made for made in (ref() for ref in fake.held) if made is not None]
    loader.abort()


def refuse(offset: int) -> None:
    if offset >= 256 * KIB:
        raise SourceError("the connection was closed")


@pytest.mark.parametrize("failing", ["", "drain"])
def test_an_error_of_a_reader_ends_the_load_and_names_the_tensor(failing: str, fake: LazyTorch, tmp_path: Path) -> None:
    plan = remote(tmp_path, Told(refuse), 200 * KIB, 20, max_in_flight=256 * KIB)
    loader = TorchLoader("cuda")

    def work() -> None:
        try:
            loaded(loader, plan)
        except BaseException:
            fake.failing = failing
            loader.abort()
            raise

    error = within(work)
    assert isinstance(error, SourceError)
    assert str(error) == "tensor 't1': the connection was closed"
    del error  # its traceback holds what was under way
    assert_all_is_released(fake, loader)
    fake.failing = ""
    again = remote(tmp_path, Told(), 200 * KIB, 2)
    assert loaded(loader, again) == numbered(400 * KIB), "a loader may be used again"


def test_cancelling_releases_buffers_and_events(fake: LazyTorch, tmp_path: Path) -> None:
    rec = opened(tmp_path, {f"t{i}": np.full(300 * KIB, i, np.uint8) for i in range(10)})
    cancel, loader = threading.Event(), TorchLoader("cuda")

    def progress(done: int, _: int | None) -> None:
        if done > 1 << 20:
            cancel.set()

    error = within(lambda: load_into(rec, loader, max_in_flight=128 * KIB, progress=progress, cancel=cancel))
    assert isinstance(error, LoadCancelledError)
    del error
    assert_all_is_released(fake, loader)


def test_aborting_in_the_middle_waits_for_reads_under_way_and_drops_the_rest(fake: LazyTorch, tmp_path: Path) -> None:
    both, gate = threading.Barrier(3), threading.Event()

    def read(_: int) -> None:
        both.wait(SECONDS)
        assert gate.wait(SECONDS)

    source = Told(read)
    plan = remote(tmp_path, source, 256 * KIB, 4, max_in_flight=1 << 20)  # a buffer for each tensor
    loader = TorchLoader("cuda", readers=2)
    loader.begin(plan)
    for ref in plan.refs:
        loader.load(ref)
    both.wait(SECONDS)  # two are being read, and the third is due
    released = threading.Timer(0.5, gate.set)
    released.start()
    assert within(loader.abort) is None
    assert gate.is_set(), "it came back while something was read into its buffers"
    assert source.reads == [256 * KIB] * 2
    assert_all_is_released(fake, loader)


def test_memory_that_cannot_be_had_is_an_error_that_says_what_to_do(fake: LazyTorch, tmp_path: Path) -> None:
    rec = opened(tmp_path, {"first": np.zeros(500 * KIB, np.uint8), "second": np.zeros(600 * KIB, np.uint8)})
    fake.room = 1 << 20
    loader = TorchLoader("cuda")
    message = r"model\.zcr: tensor 'second': cuda:0 has no room for 614400 bytes; load fewer tensors with names="
    with pytest.raises(LimitError, match=message):
        load_into(rec, loader)
    assert_all_is_released(fake, loader)
    fake.failing = "pin"
    with pytest.raises(LimitError, match="cannot allocate 512064 bytes to copy from; lower max_in_flight"):
        load_into(rec, loader, "first")
