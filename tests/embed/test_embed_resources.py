"""An archive beside a package's modules is loaded as a resource: mapped from a folder, read once from a zip."""

from __future__ import annotations

import importlib.resources
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r

import zcrecord
from zcrecord import FormatError, IntegrityError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.transport import pack

MIB = 1 << 20
TREE = {"w": np.arange(6.0).reshape(2, 3), "big": np.arange(2 * MIB // 8), "strings": np.array(["a", "bc"])}


@pytest.mark.parametrize("place", ["folder", "zip"])
def test_resource_is_mapped_or_read(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"weighty_{place}/__init__.py": b"", f"weighty_{place}/model.zcr": r.saved(TREE)}
    root = tmp_path / place
    if place == "zip":
        with zipfile.ZipFile(root, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in files.items():
                file.writestr(name, data)
    else:
        (root / f"weighty_{place}").mkdir(parents=True)
        for name, data in files.items():
            (root / name).write_bytes(data)
    monkeypatch.syspath_prepend(root)
    record = zcrecord.load_record(importlib.resources.files(f"weighty_{place}") / "model.zcr")
    r.assert_same(record.tree(), TREE)
    start = {r.address(record[name]) - record.info(name).offset for name in ("w", "big")}
    assert len(start) == 1, "views lie in one piece of memory"
    assert record.archive.source.is_mapped == (place == "folder")
    assert place == "folder" or start.pop() % 65536 == 0


@pytest.fixture
def zipped(tmp_path: Path) -> Any:
    """Return a function that puts bytes into a zip and reads them back as `importlib.resources` does."""

    def put(data: bytes, name: str = "model.zcr") -> Any:
        path = tmp_path / "package.zip"
        with zipfile.ZipFile(path, "w") as file:
            file.writestr(f"package/{name}", data)
        return zipfile.Path(path) / "package" / name

    return put


def test_resource_is_as_good_as_the_archive_with_every_option(zipped: Any, tmp_path: Path) -> None:
    resource = zipped(r.saved(TREE))
    r.assert_same(zcrecord.load_record(resource, verify="full").tree(), TREE)
    editable = zcrecord.load_record(resource, mode="c")
    editable["w"][0, 0] = 9
    assert zcrecord.load_record(resource, names="w")["w"][0, 0] == 0
    assert zcrecord.load_record(zipped(bytes(64) + r.saved(TREE)), embedded="suffix")["w"].sum() == 15
    zcrecord.save_record(TREE, tmp_path / "m.zcr", durable=False)
    pack(tmp_path / "m.zcr", tmp_path / "m.zcr.zst", durable=False)
    resource = zipped((tmp_path / "m.zcr.zst").read_bytes())
    r.assert_same(zcrecord.load_record(resource).tree(), TREE)
    assert list(zcrecord.load_record(resource, names="w")) == ["w"]


def test_wrong_resource_is_an_error_that_names_it(zipped: Any) -> None:
    where = r"package\.zip/package/model\.zcr: "
    with pytest.raises(FormatError, match=where + "the file is empty$"):
        zcrecord.load_record(zipped(b""))
    with pytest.raises(FormatError, match=where + "this is a text file"):
        zcrecord.load_record(zipped(b"text " * 99))
    data = bytearray(r.saved(TREE))
    data[-40] ^= 1
    with pytest.raises(FormatError, match=where + "trailer: "):
        zcrecord.load_record(zipped(bytes(data)))
    with pytest.raises(IntegrityError, match=where + r"content digest sha256:0+ was expected"):
        zcrecord.load_record(zipped(r.saved(TREE)), expect="sha256:" + 64 * "0")


def test_missing_and_unreadable_resources_are_errors_that_name_them(zipped: Any, tmp_path: Path) -> None:
    resource = zipped(r.saved(TREE))
    with pytest.raises(SourceNotFoundError, match=r"package\.zip/package/other\.zcr: no such resource$"):
        zcrecord.load_record(resource.parent / "other.zcr")
    with pytest.raises(SourceError, match=r"package\.zip/package/?: cannot be read: "):
        zcrecord.load_record(resource.parent)
    data = (tmp_path / "package.zip").read_bytes()
    at = data.index(np.arange(9).tobytes())
    (tmp_path / "package.zip").write_bytes(data[:at] + b"damage" + data[at + 6 :])
    with pytest.raises(SourceError, match=r"model\.zcr: cannot be read: Bad CRC-32"):
        zcrecord.load_record(zipfile.Path(tmp_path / "package.zip") / "package" / "model.zcr")


def test_what_only_looks_like_a_resource_is_no_source() -> None:
    class Named:
        read_bytes = None

    with pytest.raises(SourceError, match="cannot be read: "):
        zcrecord.load_record(Named())
    with pytest.raises(UnsupportedError, match="a object is neither a path nor contiguous bytes"):
        zcrecord.load_record(object())
