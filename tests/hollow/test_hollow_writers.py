"""Writers of constants: forgotten, aborted by another thread, or into sinks that write less than they get; strings."""

from __future__ import annotations

import gc
import io
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord.errors import FillError, ProducerError, UnsupportedError
from zcrecord.hollow import HollowRecord, hollow_of

W = np.arange(24, dtype=np.float32).reshape(4, 6)
TEXTS = ["a", "", "bcd", "naïve", "x" * 20]
DATA = r.saved({"w": W, "t": zcrecord.StringTensor.from_strings(TEXTS), "v": W + 1})
RIGHT = zcrecord.StringTensor.from_strings(TEXTS).data.tobytes()


class Upload:
    """A sink's object that notes its calls."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def write(self, chunk: memoryview) -> None:
        self.told.append(f"write {len(chunk)}")

    def close(self) -> None:
        self.told.append("close")

    def abort(self) -> None:
        self.told.append("abort")


def with_upload() -> tuple[HollowRecord, Upload]:
    upload = Upload()
    return hollow_of(DATA, sink=lambda _name, _info: upload), upload


# Forgotten, or aborted.


@pytest.mark.parametrize("lost", ["dropped", "in a cycle", "with an exception"])
def test_constant_of_a_forgotten_writer_is_filled_again_and_its_sink_told(lost: str) -> None:
    def begin() -> None:
        writer: Any = hollow.open("w")
        writer.write(W[:2])
        with pytest.raises(FillError, match="is being filled by another writer"):
            hollow.set("w", W)
        if lost == "in a cycle":
            writer.itself = writer
        if lost == "with an exception":
            raise KeyError("own")

    hollow, upload = with_upload()
    try:
        begin()
    except KeyError:
        assert lost == "with an exception"
    gc.collect()
    assert upload.told == ["write 48", "abort"]
    hollow.set("w", W)
    assert hollow.missing() == ["t", "v"]


def test_writer_is_done_once_and_not_aborted_when_it_goes() -> None:
    hollow, upload = with_upload()
    with hollow.open("w") as writer:
        writer.write(W)
    writer.close()
    writer.abort()
    with pytest.raises(FillError, match=r"tensor 'w': its writer was closed, or something failed; open it again"):
        writer.write(b"")
    del writer
    gc.collect()
    assert upload.told == ["write 96", "close"]
    assert "w" not in hollow.missing()


def test_aborting_the_record_aborts_open_sinks_at_once_and_closes_none() -> None:
    hollow, upload = with_upload()
    writer = hollow.open("w")
    writer.write(W)
    hollow.abort()
    assert upload.told == ["write 96", "abort"]
    with pytest.raises(FillError, match=r"tensor 'w': the hollow record was aborted; make another"):
        writer.close()
    with pytest.raises(FillError, match="was aborted"), writer:
        pass
    assert upload.told == ["write 96", "abort"]


def test_thread_that_is_at_a_sink_when_the_record_is_aborted_aborts_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    hollow, upload = with_upload()
    inside, go_on = threading.Event(), threading.Event()
    write = upload.write

    def slow(chunk: memoryview) -> None:
        inside.set()
        assert go_on.wait(30)
        write(chunk)

    monkeypatch.setattr(upload, "write", slow)
    with ThreadPoolExecutor(1) as pool:
        filling = pool.submit(hollow.set, "w", W)
        assert inside.wait(30)
        hollow.abort()
        assert upload.told == []
        go_on.set()
        assert str(filling.exception()) == "tensor 'w': the hollow record was aborted; make another"
    assert upload.told == ["write 96", "abort"]


@pytest.mark.measured
def test_sealed_hollow_record_keeps_none_of_the_memory_it_filled() -> None:
    hollow = hollow_of(DATA)
    assert hollow._memory is not None
    memory = weakref.ref(hollow._memory.obj)
    hollow.stream(zcrecord.load_record(DATA))
    sealed = hollow.seal()
    gc.collect()
    assert memory() is not None, "nothing would be noticed"
    assert sealed["w"].tobytes() == W.tobytes()
    del sealed
    gc.collect()
    assert memory() is None
    assert (hollow.names, hollow.state, hollow.missing()) == (("w", "t", "v"), "sealed", [])
    assert hollow.info("w").shape == (4, 6)


# Sinks that write less than they are given.


def test_sink_that_writes_a_part_is_given_the_rest(tmp_path: Path) -> None:
    written = b""

    class Slow(Upload):
        def write(self, chunk: memoryview) -> Any:
            nonlocal written
            written += bytes(chunk[:10])
            return min(len(chunk), 10)

    hollow_of(DATA, sink=lambda _name, _info: Slow()).set("w", W)
    assert written == W.tobytes()

    def raw_file(name: str, _: zcrecord.TensorInfo) -> Any:
        return open(tmp_path / name, "wb", buffering=0)

    hollow = hollow_of(DATA, sink=raw_file)
    hollow.stream(io.BytesIO(DATA))
    hollow.seal()
    assert (tmp_path / "w").read_bytes() == W.tobytes()
    assert (tmp_path / "t").read_bytes() == RIGHT


class Full(io.RawIOBase):
    """A raw file that would block."""

    def write(self, _: Any) -> None:
        return None


@pytest.mark.parametrize("count", [0, -1, 97, "all", None])
def test_sink_that_writes_nothing_or_too_much_is_refused(count: Any) -> None:
    upload: Any = Upload()
    upload.write = lambda _: count
    hollow = hollow_of(DATA, sink=lambda _name, _info: Full() if count is None else upload)
    with pytest.raises(ProducerError, match=rf"tensor 'w': sink= wrote {count} of 96 bytes; its write returns"):
        hollow.set("w", W)
    assert count is None or upload.told == ["abort"]
    assert "w" in hollow.missing()


# Strings.


def ends(*numbers: int) -> bytes:
    return RIGHT[:-48] + np.array(numbers, "<u8").tobytes()


SIZE = sum(len(text.encode()) for text in TEXTS)
WRONG = {
    "not from 0": (ends(1, 1, 1, 4, 10, SIZE), "strings do not ascend from 0"),
    "descending": (ends(0, 4, 1, 4, 10, SIZE), "strings do not ascend from 0"),
    "past the end": (ends(0, 1, 1, 4, 10, 1 << 60), "strings do not ascend from 0"),
    "past the end by one": (ends(0, 1, 1, 4, 10, 33), "strings do not ascend from 0"),
    "too early": (ends(0, 1, 1, 4, 10, 24), "strings do not ascend from 0"),
    "no zeros behind": (ends(0, 1, 1, 4, 10, SIZE - 1), "padding after its strings is not zero"),
    "no numbers": (b"x" * len(RIGHT), "strings do not ascend from 0"),
}


def by(step: int) -> Callable[[bytes], Any]:
    return lambda data: (data[start : start + step] for start in range(0, len(data), step))


@pytest.mark.parametrize("step", [0, 1, 5, 13, 32, 56], ids=["whole", "1", "5", "13", "32", "56"])
@pytest.mark.parametrize("wrong", WRONG)
def test_malformed_strings_are_refused_and_right_ones_taken_after(wrong: str, step: int) -> None:
    data, message = WRONG[wrong]
    chunks = by(step) if step else bytes
    for sink in (None, lambda _name, _info: Upload()):
        hollow = hollow_of(DATA, sink=sink)
        with pytest.raises(ProducerError, match=rf"tensor 't': the .*{message}"):
            hollow.stream([("t", chunks(data))])
        assert "t" in hollow.missing()
        hollow.stream([("t", chunks(RIGHT))])
        assert "t" not in hollow.missing()


@pytest.mark.parametrize("texts", [["", ""], ["12345678"], ["", "1234567"], ["x"]])
def test_strings_of_any_padding_are_taken_byte_by_byte(texts: list[str]) -> None:
    right = zcrecord.StringTensor.from_strings(texts)
    hollow = hollow_of(r.saved({"t": right}))
    hollow.stream([("t", by(1)(right.data.tobytes()))])
    assert hollow.seal()["t"].unpack().tolist() == texts


@pytest.mark.parametrize("kind", ["U", "T"])
def test_numpys_arrays_of_texts_are_taken(kind: str) -> None:
    array = np.array(TEXTS, np.dtypes.StringDType() if kind == "T" and hasattr(np.dtypes, "StringDType") else None)
    hollow = hollow_of(DATA)
    with pytest.raises(ProducerError, match=r"tensor 't': declared with shape \(5,\), got \(1, 5\)"):
        hollow.set("t", array[None])
    hollow.stream({"t": array, "w": W, "v": W})
    assert hollow.seal()["t"].unpack().tolist() == TEXTS


@pytest.mark.parametrize("value, kind, message", [
    (zcrecord.StringTensor.from_strings([*"abcd", "x" * 40]), ProducerError, "80 bytes were declared, at least"),
    (b"abc", ProducerError, "80 bytes were declared, 3 produced"),
    (iter([1.5]), ProducerError, "contiguous bytes are due, got a float"),
    (np.array(["a", "b", "c", "d", "\ud800"]), UnsupportedError, "a text with lone surrogates"),
])  # fmt: skip
def test_strings_of_other_bytes_are_refused(value: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"tensor 't': .*({message})"):
        hollow_of(DATA).stream([("t", value)])
