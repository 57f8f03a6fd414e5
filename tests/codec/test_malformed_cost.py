"""Cost of a hostile archive: memory of a small constant times its size, and time that its size bounds.

Each archive is opened in a process of its own, which counts what is allocated. 100,000 entries of one kind share
what an archive of a few MB can hold once; 20,000 tensors share a payload of 64 MB.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from costly_archives import ARCHIVES, BIG, TAKES, N, alike, large, long_names, repeated, start, strings, tensors
from forge import Forge
from malformed import saved

from tools.measure import MIB
from tools.worker import ROOT

SHARING = 20_000  # tensors of one payload: each read by itself, they would take minutes
MOST = 32  # times the size of the archive: what whole columns of temporary numbers come to


ARCHIVE = pytest.mark.parametrize(("build", "kind", "message"), ARCHIVES.values(), ids=ARCHIVES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cost")
    (path / "small.zcr").write_bytes(saved({"a": np.ones(4, np.uint8), "b": {"c": 1}}))
    return path


def ask(folder: Path, data: bytes, level: str, *questions: str) -> dict[str, Any]:
    """Have questions answered in a process of their own; one that hangs is ended."""
    path = folder / "hostile.zcr"
    path.write_bytes(data)
    options = [path, level, ",".join(questions), folder / "small.zcr"]
    command = [sys.executable, "-m", "tests.support.cost", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    path.unlink()
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
def test_measurement_notices_a_copy_of_the_payload(folder: Path) -> None:
    data = saved({"a": np.ones(64 << 20, np.uint8)})
    assert 60 * MIB <= ask(folder, data, "touch", "copy")["grown"] <= 72 * MIB
    assert ask(folder, data, "index", "views")["grown"] < 4 * MIB


@pytest.mark.slow
@pytest.mark.exhaustive(keep=6)
@ARCHIVE
def test_opening_is_cheap(build: Callable[[], Forge], kind: str, message: str, folder: Path) -> None:
    """R30, R31, R40, R49."""
    answer = ask(folder, build().seal(), "index", "open")
    refused_as, text = answer["errors"]["open"]
    assert refused_as == kind and re.search(message, text)
    assert answer["grown"] < MOST * answer["size"]


@pytest.mark.slow
def test_touch_takes_no_more_where_names_share_their_pool(folder: Path) -> None:
    """R30."""
    questions = ["names", "views", "info", "infos", "tree", "modules", "attributes", "verify", "digest"]
    answer = ask(folder, long_names("tensors").seal(), "touch", *questions)
    for kind, message in answer["errors"].values():
        assert kind == "LimitError"
        assert re.search(TAKES, message)
    assert answer["grown"] < MOST * answer["size"]


@pytest.mark.slow
@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("level", ["touch", "index"])
def test_many_tensors_of_one_payload_take_a_small_multiple_of_the_archive(level: str, folder: Path) -> None:
    answer = ask(folder, tensors(4, count=SHARING).seal(), level, "names", "views", "infos", "info", "tree")
    assert {kind for kind, _ in answer["errors"].values()} == {""}
    assert answer["grown"] < MOST * answer["size"]


def shapes() -> Forge:
    """Give tensors a shape of their own: the binary number of each says where 2^26 is split into factors."""
    f = tensors(1, count=SHARING)
    dims = [BIG]
    column = f.columns["tensors"]
    column["dims"], column["rank"] = 0, 1
    for i in range(SHARING):
        edges = [0, *(bit + 1 for bit in range(25) if i >> bit & 1), 26]
        column["dims"][i], column["rank"][i] = len(dims), len(edges) - 1
        dims += [1 << b - a for a, b in itertools.pairwise(edges)]
    f.columns["dims"] = np.array(dims, "<u8")
    return large(f)


def attributes() -> Forge:
    """Let attributes each be the bytes of a payload of their own, all of the very same range."""
    f = start()
    column = repeated(f, "attributes", SHARING)
    names = [f.text(f"{i:06}".encode()) for i in range(len(column))]
    column["name"], column["name_size"] = np.array(names).T
    large(f)
    f.columns["payloads"] = np.repeat(f.columns["payloads"][:1], len(column))
    column["type"], column["value"] = 6, np.arange(len(column))
    f.set("tensors", 0, dims=f.add("dims", [BIG]))
    return f


WORK = {
    "bools of one range": lambda: alike(large(tensors(BIG, count=SHARING, dtype=1))),
    "strings of one range": lambda: alike(strings(SHARING)),
    "shapes": shapes,
    "attributes of one range": attributes,
    "views": lambda: large(tensors(BIG, count=SHARING, strided=True)),
    "views of one range": lambda: alike(large(tensors(BIG, count=SHARING, strided=True))),
}


@pytest.mark.slow
@pytest.mark.exhaustive(keep=("[strings]", "[views]"))
@pytest.mark.parametrize("build", WORK.values(), ids=WORK)
def test_payload_shared_by_many_is_not_read_for_each(build: Callable[[], Forge], folder: Path) -> None:
    """R70, R71, R72, R76: 20,000 times 64 MB would take longer than is waited."""
    answer = ask(folder, build().seal(), "index", "verify", "digest", "views")
    assert {kind for kind, _ in answer["errors"].values()} == {""}


@pytest.mark.slow
def test_a_content_digest_is_not_made_of_more_views_than_the_archive_bounds(folder: Path) -> None:
    """R76: 100,000 views, each from another byte on, would be 6 TB."""
    f = tensors(BIG - N, strided=True)
    f.columns["tensors"]["byte_offset"] = np.arange(len(f.columns["tensors"]))
    answer = ask(folder, large(f).seal(), "index", "verify", "digest", "views")
    errors = answer["errors"]
    assert errors.pop("digest")[0] == "LimitError"
    assert {kind for kind, _ in errors.values()} == {""}
