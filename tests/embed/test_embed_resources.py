"""An archive beside a package's modules is loaded as a resource: mapped from a folder, read once from a zip."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
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
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "weighty"
version = "1"
"""
USE = """
import importlib.resources, json, sys
import zcrecord, weighty

resource = importlib.resources.files("weighty") / "model.zcr"
record = zcrecord.load_record(resource)
start = {n: v.__array_interface__["data"][0] - record.info(n).offset for n, v in record.items() if n != "strings"}
print(json.dumps({"where": weighty.__file__, "mapped": record.archive.source.is_mapped, "w": record["w"].tolist(),
                  "start": sorted(set(start.values())), "maps": open("/proc/self/maps").read().count("model.zcr")}))
"""
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux lists what is mapped")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a package with an archive in it."""
    project = tmp_path_factory.mktemp("weighty")
    package = project / "weighty"
    package.mkdir()
    (project / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (package / "__init__.py").write_text('"""A package with weights."""\n', encoding="utf-8")
    zcrecord.save_record(TREE, package / "model.zcr", durable=False)
    code = "import hatchling.build; print(hatchling.build.build_wheel('dist'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return project / "dist" / done.stdout.split()[-1]


def used(*path: Path) -> dict[str, Any]:
    """Return the output of a program that finds the package on this path."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(r.ROOT), *map(str, path)])}
    result: dict[str, Any] = json.loads(r.run_python(USE, env=environment).stdout)
    assert result["w"] == TREE["w"].tolist()
    assert len(result["start"]) == 1, "views lie in one piece of memory"
    return result


@pytest.mark.slow
@LINUX
def test_resource_of_an_installed_wheel_is_mapped(wheel: Path, tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(tmp_path), str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = used(tmp_path)
    assert Path(result["where"]).is_relative_to(tmp_path)
    assert result["mapped"] and result["maps"] == 1


@pytest.mark.slow
@LINUX
def test_resource_of_a_zipped_package_is_read_into_aligned_memory(wheel: Path) -> None:
    result = used(wheel)  # which is a zip
    assert str(wheel) in result["where"]
    assert not result["mapped"] and result["maps"] == 0
    assert result["start"][0] % 65536 == 0


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


def test_record_of_a_resource_pickles_by_content(zipped: Any, tmp_path: Path) -> None:
    record = zcrecord.load_record(zipped(r.saved(TREE)))
    pickled = pickle.dumps(record)
    (tmp_path / "package.zip").unlink()
    r.assert_same(pickle.loads(pickled).tree(), TREE)


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
