"""Writers of a hollow record's constants: forgotten, given up meanwhile, or into sinks that take less than they get.

And what they take for strings, which are right or refused, however they come.
"""

from __future__ import annotations

import contextlib
import gc
import io
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord.errors import FillError, ProducerError, RecordError, UnsupportedError
from zcrecord.hollow import HollowRecord, hollow_of

W = np.arange(24, dtype=np.float32).reshape(4, 6)
TEXTS = ["a", "", "bcd", "naïve", "x" * 20]
DATA = r.saved({"w": W, "t": zcrecord.StringTensor.from_strings(TEXTS), "v": W + 1})
RIGHT = zcrecord.StringTensor.from_strings(TEXTS).data.tobytes()


class Upload:
    """A sink's object that says what it was told."""

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


# Forgotten, or given up.


@pytest.mark.parametrize("cycle", [False, True], ids=["dropped", "in a cycle"])
def test_constant_of_a_forgotten_writer_is_filled_again_and_its_sink_told(cycle: bool) -> None:
    hollow, upload = with_upload()
    writer: Any = hollow.open("w")
    writer.write(W[:2])
    with pytest.raises(FillError, match="is being filled by another writer"):
        hollow.set("w", W)
    if cycle:
        writer.itself = writer
    del writer
    gc.collect()
    assert upload.told == ["write 48", "abort"]
    hollow.set("w", W)
    assert hollow.missing() == ["t", "v"]


def test_writer_that_is_lost_with_an_exception_is_let_go_of() -> None:
    def fill(hollow: HollowRecord) -> None:
        writer = hollow.open("w")
        writer.write(W[:2])
        raise KeyError("own")

    hollow = hollow_of(DATA)
    with contextlib.suppress(KeyError):
        fill(hollow)
    hollow.set("w", W)


def test_writer_that_was_closed_is_not_aborted_when_it_goes() -> None:
    hollow, upload = with_upload()
    writer = hollow.open("w")
    writer.write(W)
    writer.close()
    del writer
    gc.collect()
    assert upload.told == ["write 96", "close"]
    assert "w" not in hollow.missing()


def test_giving_up_the_record_has_open_sinks_abort_at_once_and_never_close() -> None:
    hollow, upload = with_upload()
    writer = hollow.open("w")
    writer.write(W)
    hollow.abort()
    assert upload.told == ["write 96", "abort"]
    with pytest.raises(FillError, match=r"tensor 'w': the hollow record was given up; make another"):
        writer.close()
    with pytest.raises(FillError, match="was given up"), writer:
        pass
    assert upload.told == ["write 96", "abort"]


def test_thread_that_is_at_a_sink_when_the_record_is_given_up_aborts_it_itself() -> None:
    hollow, upload = with_upload()
    inside, go_on, failed = threading.Event(), threading.Event(), []
    write = upload.write

    def slow(chunk: memoryview) -> None:
        inside.set()
        assert go_on.wait(30)
        write(chunk)

    upload.write = slow  # type: ignore[method-assign]

    def fill() -> None:
        try:
            hollow.set("w", W)
        except RecordError as error:
            failed.append(error)

    thread = threading.Thread(target=fill)
    thread.start()
    assert inside.wait(30)
    hollow.abort()
    assert upload.told == []
    go_on.set()
    thread.join()
    assert [str(error) for error in failed] == ["tensor 'w': the hollow record was given up; make another"]
    assert upload.told == ["write 96", "abort"]


# Memory.


def memory_of(hollow: HollowRecord) -> Any:
    assert hollow._octets is not None
    return weakref.ref(hollow._octets.obj)


@pytest.mark.measured
def test_sealed_hollow_record_keeps_none_of_the_memory_it_filled() -> None:
    hollow = hollow_of(DATA)
    memory = memory_of(hollow)
    hollow.stream(zcrecord.load_record(DATA))
    sealed = hollow.seal()
    gc.collect()
    assert memory() is not None, "nothing would be noticed"
    assert sealed["w"].tobytes() == W.tobytes()
    del sealed
    gc.collect()
    assert memory() is None
    assert hollow.names == ("w", "t", "v")
    assert hollow.info("w").shape == (4, 6)
    assert (hollow.state, hollow.missing()) == ("sealed", [])


# Sinks that take less than they are given.


class Slow(Upload):
    """Takes 10 bytes at a time, as a raw file may."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""

    def write(self, chunk: memoryview) -> Any:
        self.data += bytes(chunk[:10])
        return min(len(chunk), 10)


def test_sink_that_takes_a_part_is_given_the_rest() -> None:
    slow = Slow()
    hollow = hollow_of(DATA, sink=lambda _name, _info: slow)
    hollow.set("w", W)
    assert slow.data == W.tobytes()


def test_raw_file_is_a_sink(tmp_path: Path) -> None:
    def sink(name: str, _: zcrecord.TensorInfo) -> Any:
        return open(tmp_path / name, "wb", buffering=0)

    hollow = hollow_of(DATA, sink=sink)
    hollow.stream(io.BytesIO(DATA))
    hollow.seal()
    assert (tmp_path / "w").read_bytes() == W.tobytes()
    assert (tmp_path / "t").read_bytes() == RIGHT


class Full(io.RawIOBase):
    """A raw file that would block."""

    def write(self, _: Any) -> None:
        return None


@pytest.mark.parametrize("took", [0, -1, 97, "all", None])
def test_sink_that_takes_none_or_too_much_is_refused(took: Any) -> None:
    upload: Any = Upload()
    upload.write = lambda _: took
    hollow = hollow_of(DATA, sink=lambda _name, _info: Full() if took is None else upload)
    with pytest.raises(ProducerError, match=rf"tensor 'w': sink= took {took} of 96 bytes; its write returns how many"):
        hollow.set("w", W)
    assert took is None or upload.told == ["abort"]
    assert "w" in hollow.missing()


# Strings.


def ends(*numbers: int, text: bytes = RIGHT[:-48]) -> bytes:
    return text + np.array(numbers, "<u8").tobytes()


SIZE = sum(len(text.encode()) for text in TEXTS)
WRONG = {
    "not from 0": (ends(1, 1, 1, 4, 10, SIZE), "ends do not ascend from 0"),
    "descending": (ends(0, 4, 1, 4, 10, SIZE), "ends do not ascend from 0"),
    "past the end": (ends(0, 1, 1, 4, 10, 1 << 60), "do not end where their 32 bytes do"),
    "past the end by one": (ends(0, 1, 1, 4, 10, 33), "do not end where their 32 bytes do"),
    "too early": (ends(0, 1, 1, 4, 10, 24), "do not end where their 32 bytes do"),
    "no zeros behind": (ends(0, 1, 1, 4, 10, SIZE - 1), "do not end where their 32 bytes do"),
    "no numbers": (b"x" * len(RIGHT), "ends do not ascend from 0"),
}


def in_chunks(step: int) -> Callable[[HollowRecord, bytes], None]:
    def fill(hollow: HollowRecord, data: bytes) -> None:
        hollow.stream([("t", (data[at : at + step] for at in range(0, len(data), step)))])

    return fill


HOW: dict[str, Callable[[HollowRecord, bytes], None]] = {
    "whole": lambda hollow, data: hollow.set("t", data),
    "by 1": in_chunks(1),
    "by 5": in_chunks(5),
    "by 13": in_chunks(13),
    "by 32": in_chunks(32),
    "by 56": in_chunks(56),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("wrong", WRONG)
def test_strings_that_are_none_are_refused_and_right_ones_taken_after(wrong: str, how: str) -> None:
    data, message = WRONG[wrong]
    for sink in (None, lambda _name, _info: Upload()):
        hollow = hollow_of(DATA, sink=sink)
        with pytest.raises(ProducerError, match=rf"tensor 't': its strings.* {message}"):
            HOW[how](hollow, data)
        assert "t" in hollow.missing()
        HOW[how](hollow, RIGHT)
        assert "t" not in hollow.missing()


@pytest.mark.parametrize("texts", [["", ""], ["12345678"], ["", "1234567"], ["x"]])
def test_strings_of_any_padding_are_taken_byte_by_byte(texts: list[str]) -> None:
    right = zcrecord.StringTensor.from_strings(texts)
    hollow = hollow_of(r.saved({"t": right}))
    in_chunks(1)(hollow, right.data.tobytes())
    assert hollow.seal()["t"].unpack().tolist() == texts


@pytest.mark.parametrize("kind", ["U", "T"])
def test_numpys_arrays_of_texts_are_taken(kind: str) -> None:
    if kind == "T" and not hasattr(np.dtypes, "StringDType"):
        array = np.array(TEXTS)
    else:
        array = np.array(TEXTS, np.dtypes.StringDType() if kind == "T" else None)
    hollow = hollow_of(DATA)
    with pytest.raises(ProducerError, match=r"tensor 't': declared with shape \(5,\), got \(1, 5\)"):
        hollow.set("t", array[None])
    hollow.set("t", array)
    hollow.stream({"w": W, "v": W})
    assert hollow.seal()["t"].unpack().tolist() == TEXTS


def test_texts_for_other_elements_and_texts_that_are_no_utf_8_are_refused() -> None:
    hollow = hollow_of(DATA)
    with pytest.raises(ProducerError, match=r"tensor 'w': declared as float32, got string"):
        hollow.set("w", np.full((4, 6), "x"))
    with pytest.raises(UnsupportedError, match="tensor 't': a text with lone surrogates"):
        hollow.set("t", np.array(["a", "b", "c", "d", "\ud800"]))
