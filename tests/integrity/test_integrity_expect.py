"""A record can be pinned: load_record refuses whatever has not the content digest that is expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from records import saved

import zcrecord
from tools.range_server import serving
from zcrecord import IntegrityError, UnsupportedError, transport

TREE = {"a": np.arange(5000.0), "m": {"b": np.ones((3, 4), np.float32), "n": 5}}
DIGEST = zcrecord.load_record(saved(TREE)).content_digest()
OTHER = zcrecord.load_record(saved({**TREE, "a": np.zeros(5000)})).content_digest()
DATA = saved(TREE, alignment=4096)


def from_url(path: Path, **options: Any) -> Any:
    with serving(path.parent) as server:
        return zcrecord.load_record(f"{server.url}/{path.name}", **options)


def from_packed(path: Path, **options: Any) -> Any:
    there = path.with_suffix(".zst")
    transport.pack(path, there, force=True)
    return zcrecord.load_record(there, **options)


WAYS: dict[str, Callable[..., Any]] = {
    "mapped": zcrecord.load_record,
    "read": lambda path, **options: zcrecord.load_record(path, mmap=False, **options),
    "bytes": lambda path, **options: zcrecord.load_record(path.read_bytes(), **options),
    "copied when written": lambda path, **options: zcrecord.load_record(path, mode="c", **options),
    "touched": lambda path, **options: zcrecord.load_record(path, verify="touch", **options),
    "a part": lambda path, **options: zcrecord.load_record(path, names="m", **options),
    "packed": from_packed,
    "a URL": from_url,
}


@pytest.mark.parametrize("load", WAYS.values(), ids=WAYS)
def test_record_of_other_content_is_refused_with_both_digests(load: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(DATA)
    assert "m.b" in load(path, expect=DIGEST)
    with pytest.raises(IntegrityError, match=f"content digest {OTHER} was expected, it has {DIGEST}$"):
        load(path, expect=OTHER)


@pytest.mark.parametrize("wrong", [
    "", "sha256:", "sha256:00", DIGEST[7:], DIGEST + "0", DIGEST + "\n", DIGEST.upper(), "md5:" + DIGEST[7:],
    DIGEST.replace("sha256:", "SHA256:"), DIGEST[:-1] + "g", DIGEST[:-1] + "\uff11", 5, DIGEST.encode(), [DIGEST],
])  # fmt: skip
def test_what_is_no_digest_is_refused_before_anything_is_read(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"^expect=.* is not a content digest; give 'sha256:' and 64 hexa"):
        zcrecord.load_record(tmp_path / "not there.zcr", expect=wrong)
    with pytest.raises(UnsupportedError, match="is not a content digest"):
        zcrecord.load_record("https://localhost:1/not-there.zcr", expect=wrong)


def test_damage_that_a_digest_would_show_is_no_content_that_was_expected() -> None:
    data = bytearray(DATA)
    data[zcrecord.load_record(DATA).info("a").offset] ^= 1
    with pytest.raises(IntegrityError, match=f"content digest {DIGEST} was expected"):
        zcrecord.load_record(data, expect=DIGEST)
    forged = zcrecord.load_record(data).content_digest()
    assert len(zcrecord.load_record(data, expect=forged)) == 2, "it says what is there, verify says what was written"
