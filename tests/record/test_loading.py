"""Sources that can be loaded; others are refused by one typed error, one clear line, the path in front."""

from __future__ import annotations

import errno
import mmap
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import FormatError, RecordError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.storage.folders import archive_in

TREE = {"a": np.arange(1000), "m": {"b": np.ones((3, 5)), "c": "text"}}
DATA = r.saved(TREE)
LEVELS: list[Any] = ["touch", "index", "full"]
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX file systems")


def check_refused(source: Any, error: type[RecordError], message: str, **options: Any) -> None:
    """Loading fails with this error, in one line, at every level of verification, and the error pickles."""
    for verify in LEVELS:
        with pytest.raises(error, match=message) as caught:
            zcrecord.load_record(source, verify=verify, **options)
        text = str(caught.value)
        assert "\n" not in text
        copy = pickle.loads(pickle.dumps(caught.value))
        assert (type(copy), str(copy), copy.path) == (type(caught.value), text, caught.value.path)
        if isinstance(source, str | Path):
            assert caught.value.path == str(source)
            assert text.startswith(str(source))


@POSIX
def test_loads_any_class_with_a_path_also_of_a_link(tmp_path: Path) -> None:
    class Named:
        def __fspath__(self) -> bytes:
            return os.fsencode(tmp_path / "link")

    (tmp_path / "m.zcr").write_bytes(DATA)
    (tmp_path / "link").symlink_to("m.zcr")
    assert zcrecord.load_record(Named()).path == str(tmp_path / "link")


@pytest.mark.parametrize("name", ["missing.zcr", "", "no/such/folder"])
def test_refuses_a_missing_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(name, SourceNotFoundError, "no such file$")
    with pytest.raises(FileNotFoundError) as caught:
        zcrecord.load_record(name)
    assert caught.value.errno == errno.ENOENT


def test_refuses_a_folder(tmp_path: Path) -> None:
    check_refused(tmp_path, SourceError, ": is a folder without a model; name a file$")


@pytest.mark.parametrize("path", ["a\0b", "\ud800"], ids=["NUL", "surrogate"])
def test_refuses_a_path_that_no_file_can_have(path: str) -> None:
    with pytest.raises(RecordError, match="no file can have this name"):
        zcrecord.load_record(path)


@pytest.mark.parametrize("source", [5, None, 1.5, [1, 2], {}, object(), ..., (DATA,)], ids=lambda s: type(s).__name__)
def test_refuses_what_is_neither_path_nor_bytes(source: Any) -> None:
    check_refused(source, UnsupportedError, f"a {type(source).__name__} is neither a path nor contiguous bytes")


def test_refuses_bytes_with_gaps() -> None:
    spread = np.repeat(np.frombuffer(DATA, np.uint8), 2)
    sources = [spread.data[::2], spread[::2], np.asfortranarray(np.frombuffer(DATA, np.uint8).reshape(-1, 32))]
    for source in sources:
        check_refused(source, UnsupportedError, "is neither a path nor contiguous bytes")


def test_refuses_released_memory() -> None:
    view = memoryview(DATA)
    view.release()
    check_refused(view, UnsupportedError, "a memoryview is neither a path nor contiguous bytes")
    mapping = mmap.mmap(-1, len(DATA))
    mapping.close()
    check_refused(mapping, UnsupportedError, "a mmap is neither a path nor contiguous bytes")


def test_text_is_taken_for_a_path_and_bytes_for_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.zcr").write_bytes(DATA)
    record = zcrecord.load_record("m.zcr")
    monkeypatch.chdir("/")
    r.assert_same(record.tree(), TREE)
    check_refused(b"m.zcr", FormatError, "too few for an archive|not a zcrecord archive")
    assert zcrecord.load_record(DATA).path is None


@pytest.mark.parametrize(
    ("option", "message"),
    [({"verify": value}, "verify=.* is not known; 'touch', 'index' or 'full'") for value in ("", None, True, ["index"])]
    + [({"embedded": value}, "embedded=.* is not known; 'prefix' or 'suffix'") for value in ("", "middle", True, 0)],
    ids=repr,
)
def test_refuses_an_unknown_option(option: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        zcrecord.load_record(DATA, **option)


# The archive of a folder.


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_model_zcr_comes_before_other_archives(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model.zcr", "other.zcr")
    assert archive_in(folder) == str(tmp_path / "model.zcr")


def test_the_only_archive_may_have_any_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "weights.zcr", "weights-00001-of-00002.zcr", "weights-00002-of-00002.zcr")
    assert archive_in(str(folder)) == str(tmp_path / "weights.zcr")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.zcr", "b.zcr"), r"several archives: a\.zcr, b\.zcr; name one, or call one model\.zcr"),
        (("config.json", "model-00001-of-00002.zcr"), r"without an archive \(model\.zcr\); zcrecord convert"),
    ],
)
def test_a_folder_without_one_archive_says_so(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        archive_in(folder_with(tmp_path, *names))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        archive_in(tmp_path / "none")
