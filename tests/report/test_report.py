"""`zcrecord report`: the page says what the index says, is the same for the same archive, and lets nothing in or out.

What people do with the page is in test_report_page.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
from attacks import names as hostile
from attacks import tricks

import zcrecord
from tools.range_server import serving
from zcrecord import errors
from zcrecord.cli.dispatch import main
from zcrecord.report import describe_archive, report, report_page

pytestmark = pytest.mark.usefixtures("model_folder")

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "conformance" / "valid").glob("*.zcr"))
DESCRIBING = ROOT / "tests" / "programs" / "js" / "web" / "describing.mjs"


def embedded_of(path: Path) -> Any:
    return path.stem if path.stem in ("prefix", "suffix") else None


def described(path: Path, **options: Any) -> dict[str, Any]:
    with zcrecord.load_record(path, **options) as record:
        return describe_archive(record)


def description_in(page: bytes) -> dict[str, Any]:
    """Return the description in a page, as its script reads it."""
    found = re.search(rb'<script type="application/json" id="description">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    parsed: dict[str, Any] = json.loads(found[1])
    return parsed


def archives(folder: Path) -> list[Path]:
    """Archives of every kind, those that were made by hand and one with hostile names."""
    many = folder / "odd.zcr"
    values = {"big": 2**60, "least": -(2**63), "nan": float("nan"), "inf": -float("inf"), "yes": True, "none": None}
    texts = {"long": "é\U0001f600" * 3000, "list": ["y" * 500] * 30, "numbers": [1, 2**63], "tuple": (0.5, 1e300)}
    record = {"w": np.ones(3), **values, "deep": {"er": {**texts, "bytes": b"12345", "no": b""}}}
    zcrecord.save_record(record, many, durable=False, metadata={"tags": ["x"] * 50, "é": 0.1})
    return [*GOLDEN, c.make_archive(), hostile.archive(folder), many]


def test_the_description_has_what_the_record_tells() -> None:
    path = c.make_archive()
    told = described(path)
    with zcrecord.load_record(path) as record:
        tensors, modules, payloads = told["tensors"], told["modules"], told["payloads"]
        names = [""]
        for key, parent in list(zip(modules["key"], modules["parent"], strict=True))[1:]:
            names.append(f"{names[parent]}.{key}".removeprefix("."))
        for i, info in enumerate(record.infos()):
            assert f"{names[tensors['module'][i]]}.{tensors['key'][i]}".removeprefix(".") == info.name
            assert told["dtypes"][tensors["dtype"][i]] == info.dtype.name
            assert told["shapes"][tensors["shape"][i]] == str(list(info.shape))
            assert tensors["payload"][i] == info.payload
            strided = told["strided"].get(str(i), {"byteOffset": 0, "nbytes": info.nbytes})
            assert ("strides" in strided) == (info.strides is not None)
            if info.strides is not None:
                assert told["strides"][strided["strides"]] == str(list(info.strides))
            assert strided["nbytes"] == info.nbytes
            start = told["archive"]["payloadOffset"] + payloads["offset"][tensors["payload"][i]]
            assert start + strided["byteOffset"] == info.offset
            assert payloads["digest"][tensors["payload"][i]] == f"{info.digest:016x}"
        assert names == list(record.modules)
        assert told["metadata"] == {"key": ["author", "tags"], "value": ["me", {"items": ["x", "y"], "count": 2}]}
        values = dict(zip(told["attributes"]["key"], told["attributes"]["value"], strict=True))
        assert values == {"rate": {"number": "nan"}, "note": "a text", "blob": {"nbytes": 5}, "heads": 2}


@pytest.mark.needs("node")
def test_the_browser_describes_every_archive_as_python_does(tmp_path: Path) -> None:
    paths = archives(tmp_path)
    asked = "\n".join(json.dumps([str(path), path.name, embedded_of(path)]) for path in paths)
    done = subprocess.run(["node", DESCRIBING], input=asked, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for path, line in zip(paths, done.stdout.rstrip("\n").split("\n"), strict=True):
        assert json.loads(line) == described(path, embedded=embedded_of(path)), path.name


@pytest.mark.slow
def test_the_same_archive_gives_the_same_page_anywhere(tmp_path: Path) -> None:
    path = c.make_archive()
    other = tmp_path / "elsewhere" / path.name
    other.parent.mkdir()
    other.write_bytes(path.read_bytes())
    os.utime(other, (0, 0))
    report(path, "one.html")
    report(other, "two.html")
    code = "import sys, zcrecord.report as r; r.report('model.zcr', sys.argv[1])"
    done = c.python("-c", code, "three.html", env={**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"})
    assert done.returncode == 0, done.stderr
    pages = {Path(f"{name}.html").read_bytes() for name in ("one", "two", "three")}
    assert len(pages) == 1
    assert str(tmp_path).encode() not in pages.pop()


def test_the_page_asks_for_nothing_and_admits_its_own_code_alone(tmp_path: Path) -> None:
    page = report_page(described(hostile.archive(tmp_path))).decode()
    markup = re.sub(r"(<(script|style)[^>]*>).*?(</\2>)", r"\1\3", page, flags=re.DOTALL)
    assert not re.search(r"https?:|\bsrc=|url\(|@import|<link|<img|<iframe|\son\w+=|\sstyle=", markup)
    asking = r"https?:|\bimport\b\s*[({\"']|\bfetch\(|XMLHttp|innerHTML|insertAdjacent|eval\(|url\("
    assert not re.search(asking, code_in(page))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    hashes = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in re.findall(r'<(?:script type="module"|style)>(.*?)</', page, re.DOTALL)
    ]
    style, script = hashes
    nothing = [f"{what} 'none'" for what in ("default-src", "base-uri", "form-action")]
    assert policy[1].split("; ") == [nothing[0], f"script-src {script}", f"style-src {style}", *nothing[1:]]


def code_in(page: str) -> str:
    found = re.search(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return found[1]


def test_names_and_the_files_own_name_cannot_leave_their_place(tmp_path: Path) -> None:
    path = tmp_path / "<b>&amp;\u202e'\" {script} .zcr"
    record = {"</script><script>alert(1)</script>": np.ones(1), "<!--<script>": np.ones(1), "{style}": np.ones(1)}
    zcrecord.save_record(record, path, durable=False)
    report(path, "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 2 and page.count("<script") == 2 and "<!--" not in page.replace("<!doctype", "")
    assert "<b>" not in page and "\u202e" not in page
    assert description_in(page.encode())["tensors"]["key"] == list(record)
    title = re.search("<title>(.*)</title>", page)
    assert title is not None and html.unescape(title[1]) == "<b>&amp;\\u202e'\" {script} .zcr"


def test_values_that_share_their_words_are_not_told_out_of_proportion(tmp_path: Path) -> None:
    shared = ["z" * 1000] * 50
    record = {f"a{i}": shared for i in range(100)}
    zcrecord.save_record({"w": np.ones(1), **record}, "lists.zcr", durable=False)
    assert len(report_page(described(Path("lists.zcr")))) < 100 * 20 * 250 + 100_000


def test_strides_that_tensors_share_are_written_once() -> None:
    """A page is a small multiple of its archive, though strides take 20 characters for 8 bytes."""
    f = tricks.tensors(5000)
    f.columns["dims"], f.columns["strides"] = np.ones(64, "<u8"), np.full(64, -(2**50), "<i8")
    f.columns["dims"][0] = 4
    f.columns["strides"][0] = 1
    f.columns["tensors"]["rank"], f.columns["tensors"]["dims"], f.columns["tensors"]["strides"] = 64, 0, 0
    data = f.seal()
    told = describe_archive(zcrecord.load_record(data))
    assert len(told["strided"]) == 5000 and len(told["strides"]) == 1
    assert len(report_page(told)) < 4 * len(data) + 100_000


def test_no_payload_is_fetched_of_an_archive_behind_a_url(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.zeros(1_000_000), "blob": b"x" * 500_000}, tmp_path / "big.zcr", durable=False)
    with serving(tmp_path) as server:
        assert main(["report", f"{server.url}/big.zcr", "-o", "page.html", "--quiet"]) == 0
        assert 0 < server.sent < 200_000
    assert description_in(Path("page.html").read_bytes()) == described(tmp_path / "big.zcr")


def test_a_damaged_payload_is_none_of_the_reports_business(archive: Path) -> None:
    c.damage(archive)
    assert report(archive, "page.html").tensors == 7


def test_the_content_digest_is_there_if_asked_for(archive: Path, run: c.Commands) -> None:
    digest = zcrecord.load_record(archive).content_digest()
    assert run.json("report model.zcr --digest")["content_digest"] == digest
    assert description_in(Path("model.html").read_bytes())["archive"]["contentDigest"] == digest
    report(archive, "other.html")
    assert description_in(Path("other.html").read_bytes())["archive"]["contentDigest"] is None


def test_command_line_says_what_was_written_and_where(archive: Path, run: c.Commands) -> None:
    out = run("report model.zcr")
    size = Path("model.html").stat().st_size
    assert re.match(rf"model\.html: 7 tensors in 5 modules, \d+ bytes of archive, {size} bytes of page, \d", out)
    assert run.err == ""
    run.quietly("report model.zcr -o quiet.html")
    assert Path("quiet.html").read_bytes() == Path("model.html").read_bytes()
    run.fails("report model.zcr", r"model\.html: exists already; --force")
    run.quietly("report model.zcr --force")
    run.misused("report https://example.org/model.zcr?key=secret", "OUT is required if the source is a URL")


def test_standard_streams_serve_for_both(archive: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: Any) -> None:
    c.pipe_in(monkeypatch, archive.read_bytes())
    assert main(["report", "-", "-o", "-"]) == 0
    out, err = capsysbinary.readouterr()
    assert description_in(out) == {**described(archive), "name": "archive"}
    assert err.startswith(b"standard output: 7 tensors")


@pytest.mark.parametrize(("make", "message"), [
    (c.truncated, r"in\.zcr: .*truncated"), (lambda path: None, r"in\.zcr: no such file"),
])  # fmt: skip
def test_what_is_no_archive_leaves_no_page(run: c.Commands, make: Any, message: str) -> None:
    make(Path("in.zcr"))
    before = set(os.listdir())
    run.fails("report in.zcr --force", message)
    assert set(os.listdir()) == before


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="platform: a shell")
def test_a_page_that_cannot_be_written_whole_leaves_the_old_one(archive: Path) -> None:
    Path("page.html").write_text("old", encoding="utf-8")
    before = set(os.listdir())
    command = f'ulimit -f 16; "{sys.executable}" -m zcrecord report model.zcr -o page.html --force'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 1
    assert re.match(r"zcrecord: error: .*page\.html: cannot write: File too large; the file there before", done.stderr)
    assert Path("page.html").read_text(encoding="utf-8") == "old"
    assert set(os.listdir()) == before
    with pytest.raises(errors.SourceError, match="is a directory"):
        report(archive, ".", force=True)


@pytest.mark.slow
def test_starts_without_what_only_serving_needs(archive: Path) -> None:
    done = c.python(
        "-c", "import sys; from zcrecord.report import report; report('model.zcr', 'a.html'); print(*sys.modules)"
    )
    assert not {"aiohttp", "onnx", "fsspec", "http.server"} & set(done.stdout.decode().split())
