"""File objects, written and read: they work, or are refused with one typed error that says what to do."""

# ruff: noqa: SIM115  # what is made for a test is closed, or let go of, at its end

from __future__ import annotations

import codecs
import contextlib
import errno
import functools
import gzip
import io
import os
import pickle
import tempfile
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
import zcrecord.onnx
from zcrecord import (
    FormatError,
    LazyTensor,
    PipeClosedError,
    RecordError,
    SourceError,
    UnsupportedError,
    formats,
    transport,
)
from zcrecord.formats import npz, safetensors
from zcrecord.record import load
from zcrecord.storage import files

TREE = {"a": np.arange(300_000), "m": {"b": np.ones((3, 5)), "c": "text"}}
DATA = r.saved(TREE)
LEVELS: list[Any] = ["touch", "index", "full"]
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


def unread(**options: Any) -> Any:
    """The writing end of a pipe whose other end is closed."""
    read, write = os.pipe()
    os.close(read)
    return open(write, "wb", **options)


def shut() -> Any:
    with tempfile.TemporaryFile() as file:
        return file


class Boasting(io.RawIOBase):
    """A file object that reports more bytes than it was given."""

    def write(self, data: Any) -> int:
        return len(data) + 1


FULL, CLOSED = "cannot write.*: No space left on device", "cannot write to the file object: Broken pipe"
NOT_FOR_WRITING = r"the file object is not open for writing \(.*\); open it as with open\(path, 'wb'\)"
REFUSING: dict[str, tuple[Any, type[RecordError], int | None, str]] = {
    "a full device": (lambda: open("/dev/full", "wb"), SourceError, errno.ENOSPC, FULL),
    "a full device without a buffer": (lambda: open("/dev/full", "wb", buffering=0), SourceError, errno.ENOSPC, FULL),
    "a full device behind a large buffer": (lambda: open("/dev/full", "wb", 1 << 24), SourceError, errno.ENOSPC, FULL),
    "a pipe that nobody reads": (unread, PipeClosedError, errno.EPIPE, CLOSED),
    "a file opened to be read": (lambda: open(os.devnull, "rb"), SourceError, None, NOT_FOR_WRITING),
    "one without a buffer": (lambda: open(os.devnull, "rb", buffering=0), SourceError, None, NOT_FOR_WRITING),
    "a closed file": (shut, SourceError, None, "the file object is closed; open it again"),
    "text": (lambda: open(os.devnull, "w", encoding="utf-8"), UnsupportedError, None, "text mode; open it in binary"),
    "text by another name": (lambda: codecs.getwriter("utf-8")(io.BytesIO()), UnsupportedError, None, "accept bytes"),
    "one that claims too much": (Boasting, UnsupportedError, None, r"write\(\) .* returned \d+, expected at most \d+"),
    "a store's own": (lambda: Raising(OSError("the bucket is gone")), SourceError, None, "object: the bucket is gone"),
}  # fmt: skip


TREES: dict[str, Callable[[], Any]] = {
    "large": lambda: TREE,
    "empty": dict,
    "lazy": lambda: {"w": LazyTensor("u1", (9,), lambda: [bytes(9)])},
}


class Raising(io.BytesIO):
    """A file object that raises this when it is written to."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def write(self, _: Any) -> int:
        raise self._error


@POSIX
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="platform: no /dev/full")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("case", REFUSING)
def test_whatever_a_file_object_refuses_is_one_typed_error(case: str, tree: str) -> None:
    make, kind, number, message = REFUSING[case]
    file = make()
    with pytest.raises(RecordError, match=message) as caught:
        zcrecord.save_record(TREES[tree](), file)
    assert (type(caught.value), getattr(caught.value, "errno", None)) == (kind, number)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, BrokenPipeError) == (kind is PipeClosedError)
    assert pickle.loads(pickle.dumps(caught.value)).args == caught.value.args
    with contextlib.suppress(OSError):
        file.close()  # where its buffer is written once more


def test_what_is_a_file_object_s_own_comes_as_it_is() -> None:
    for error in (RuntimeError("its own"), ValueError("its own"), KeyError("its own")):
        with pytest.raises(type(error), match="its own"):
            zcrecord.save_record(TREE, Raising(error))


def recorded(rec: zcrecord.Record, file: Any) -> None:
    with zcrecord.RecordWriter(file) as out:
        out.add("a", rec["a"])


WRITERS: dict[str, Callable[[zcrecord.Record, Any], Any]] = {
    "npz": lambda rec, file: npz.write(rec.select("a"), file),
    "safetensors": lambda rec, file: safetensors.write(rec.select("a"), file),
    "pack": lambda rec, file: transport.pack(rec.path, file),
    "RecordWriter": recorded,
}


@POSIX
@pytest.mark.parametrize("write", WRITERS)
def test_the_first_refusal_is_told_and_not_what_cleaning_up_came_to(write: str, tmp_path: Path) -> None:
    zcrecord.save_record(TREE, tmp_path / "m.zcr")
    rec, file = zcrecord.load_record(tmp_path / "m.zcr"), unread()
    with pytest.raises(PipeClosedError, match=CLOSED):
        WRITERS[write](rec, file)
    with contextlib.suppress(BrokenPipeError):
        file.close()


@functools.cache
def gzip_of_data() -> bytes:
    return gzip.compress(DATA, 1)


FILES: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "open": (lambda path: open(path, "rb"), True),
    "open without a buffer": (lambda path: open(path, "rb", buffering=0), True),
    "open behind other bytes": (lambda path: behind(path), False),
    "replaced meanwhile": (lambda path: replaced(path), False),
    "a temporary file": (lambda path: filled(tempfile.TemporaryFile()), False),
    "a pipe": (lambda path: piped(), False),
    "gzip": (lambda path: gzip.GzipFile(fileobj=io.BytesIO(gzip_of_data())), False),
    "a gzip file": (lambda path: gzipped(path), False),
    "a member of a zip": (lambda path: zipfile.ZipFile(zipped()).open("m.zcr"), False),
    "BytesIO": (lambda path: io.BytesIO(DATA), False),
    "BytesIO behind other bytes": (lambda path: filled(io.BytesIO(b"12345"), 5), False),
}  # fmt: skip


def zipped() -> io.BytesIO:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m.zcr", DATA)
    return file


def filled(file: Any, start: int = 0) -> Any:
    file.seek(start)
    file.write(DATA)
    file.seek(start)
    return file


def behind(path: Path) -> Any:
    path.write_bytes(b"12345" + DATA)
    file = open(path, "rb")
    file.seek(5)
    return file


def replaced(path: Path) -> Any:
    file = open(path, "rb")
    path.unlink()
    zcrecord.save_record({"another": np.ones(1)}, path)
    return file


def piped() -> Any:
    read, write = os.pipe()

    def fill() -> None:
        with open(write, "wb") as file:
            file.write(DATA)

    threading.Thread(target=fill).start()
    return open(read, "rb")


def gzipped(path: Path) -> Any:
    path.write_bytes(gzip_of_data())
    return gzip.open(path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("verify", LEVELS)
@pytest.mark.parametrize("mode", ["r", "c"])
@pytest.mark.parametrize("case", FILES)
def test_loads_a_file_object_from_where_it_is(case: str, mode: Any, verify: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(DATA)
    make, mapped = FILES[case]
    with make(path) as file:
        rec = zcrecord.load_record(file, mode=mode, verify=verify)
        r.assert_same(rec.tree(), TREE)
        assert (rec.path is not None) == mapped
        assert rec["a"].flags.writeable == (mode == "c")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_object_is_its_open_file(mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(DATA)
    looked = files.path_of_open

    def late(file: Any) -> str | None:
        result = looked(file)
        path.unlink()
        zcrecord.save_record({"another": np.ones(1)}, path)
        return result

    monkeypatch.setattr(load, "path_of_open", late)
    with path.open("rb") as file:
        r.assert_same(zcrecord.load_record(file, mmap=mmap).tree(), TREE)


def test_views_of_a_bytesio_are_its_own_bytes_until_it_is_written_to() -> None:
    with io.BytesIO(DATA) as file:
        rec = zcrecord.load_record(file)
        assert np.shares_memory(rec["a"], np.frombuffer(file.getvalue(), np.uint8))
        file.write(bytes(len(DATA) + 1))
    r.assert_same(rec.tree(), TREE)


class Odd:
    """A file object whose `read` gives or raises this."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def read(self, _: int) -> Any:
        if isinstance(self._given, Exception):
            raise self._given
        return self._given


def closed(file: Any) -> Any:
    file.close()
    return file


ODD: dict[str, tuple[Callable[[], Any], type[RecordError], str]] = {
    "text": (lambda: io.StringIO("x" * 500), UnsupportedError, r"a file object in text mode; open .*'rb'\)"),
    "a closed BytesIO": (lambda: closed(io.BytesIO(DATA)), SourceError, "the file object is closed; open it again"),
    "a closed file": (lambda: closed(open(os.devnull, "rb")), SourceError, "the file object is closed; open it"),
    "one for writing": (lambda: open(os.devnull, "wb"), SourceError, "cannot be read: (read|not readable|File not)"),
    "a cut gzip": (lambda: gzip.GzipFile(fileobj=io.BytesIO(gzip_of_data()[:-99])), SourceError, "read: Compr"),
    "one that fails": (lambda: Odd(OSError(errno.EIO, "I/O error")), SourceError, "cannot be read: I/O error"),
    "one that fails its own way": (lambda: Odd(RuntimeError()), SourceError, "cannot be read: RuntimeError"),
    "one that would block": (lambda: Odd(None), SourceError, "has no bytes ready; open it in blocking mode"),
    "numbers": (lambda: Odd(5), UnsupportedError, r"read\(\) of the file object returned int, expected bytes"),
    "an empty one": (lambda: io.BytesIO(), FormatError, "the file is empty|0 bytes are too few"),
    "no archive": (lambda: Odd(b""), FormatError, "the file is empty|0 bytes are too few"),
}  # fmt: skip


READERS: dict[str, Callable[[Any], Any]] = {
    "hollow": lambda file: zcrecord.load_record(DATA).hollow().stream(file),
    "onnx": lambda file: zcrecord.onnx.convert(file, io.BytesIO()),
    "convert": lambda file: formats.convert(file, io.BytesIO(), source_format="safetensors"),
    "pack": lambda file: transport.pack(file, io.BytesIO()),
    "unpack": lambda file: transport.unpack(file, io.BytesIO()),
}


@pytest.mark.parametrize("read", READERS)
def test_a_closed_file_object_is_told_by_whatever_reads_it(read: str) -> None:
    for file in (closed(io.BytesIO(DATA)), closed(open(os.devnull, "rb"))):
        with pytest.raises(SourceError, match="the file object is closed; open it again"):
            READERS[read](file)


@pytest.mark.parametrize("case", ODD)
def test_refuses_a_file_object_that_cannot_be_read(case: str) -> None:
    make, error, message = ODD[case]
    source = make()
    with pytest.raises(error, match=message) as caught:
        zcrecord.load_record(source)
    with contextlib.suppress(AttributeError):  # an odd one has no such method
        source.close()
    assert "\n" not in str(caught.value)
