"""A Windows program that was signed with its archive attached: readers find the archive that is signed, and no other.

The programs here are headers and no more; test_attach_programs has some that were built, signed and run.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import records as r
import windows

import zcrecord
from zcrecord import FormatError, RecordError, UnsupportedError
from zcrecord.cli.dispatch import main
from zcrecord.embed import attach, detach

FOUND = {name: (data, archive) for name, data, archive in windows.found()}
REFUSED = dict(windows.refused())
TREE = {"w": np.arange(6.0), "large": np.ones(1 << 18, np.float32)}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "m.zcr"
    path.write_bytes(r.saved(TREE))
    return path


@pytest.fixture(params=[True, False], ids=["64 bits", "32 bits"])
def app(request: pytest.FixtureRequest, archive: Path, tmp_path: Path) -> Path:
    """A signed program with the archive attached."""
    path = tmp_path / "app.exe"
    path.write_bytes(windows.program(wide=request.param))
    attach(path, archive)
    sign(path)
    return path


def sign(path: Path) -> bytes:
    """Do to a program what a signer does: a table behind it, named in its headers; return the bytes before."""
    before = path.read_bytes()
    data = bytearray(before + bytes(-len(before) % 8))
    (pe,) = struct.unpack_from("<I", data, 60)
    struct.pack_into("<II", data, pe + (136 if data[pe + 25] == 2 else 120) + 32, len(data), 40)
    path.write_bytes(data + b"\1" * 40)
    return before


@pytest.mark.parametrize("name", FOUND)
def test_archive_is_found_before_the_signature(name: str) -> None:
    """R16."""
    data, archive = FOUND[name]
    record = zcrecord.load_record(data, embedded="suffix", verify="full")
    assert bytes(record.archive.buffer) == archive
    assert data[record.archive.offset :].startswith(archive)


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_else_is_taken_for_an_archive(name: str) -> None:
    """R16."""
    with pytest.raises(FormatError, match=r"magic|^trailer: no archive of a size up to|too few"):
        zcrecord.load_record(REFUSED[name], embedded="suffix")


def test_signature_s_bytes_are_none_of_the_archive_s(app: Path) -> None:
    for options in ({}, {"mmap": False}, {"mode": "c"}, {"verify": "full"}, {"embedded": "suffix"}):
        record = zcrecord.load_record(app, **options)
        r.assert_same(record.tree(), TREE)
        assert record.archive.offset % 65536 == 0 and bytes(record.archive.buffer) == r.saved(TREE)
    r.assert_same(pickle.loads(pickle.dumps(zcrecord.load_record(app))).tree(), TREE)
    assert main(["verify", str(app)]) == 0


def test_detach_copies_the_archive_and_leaves_a_signed_program_alone(app: Path, archive: Path, tmp_path: Path) -> None:
    before = app.read_bytes()
    report = detach(app, tmp_path / "again.zcr", keep=True)
    assert (tmp_path / "again.zcr").read_bytes() == archive.read_bytes()
    assert (report.program_bytes, report.archive_bytes) == (512, archive.stat().st_size)
    changes: list[Callable[[], object]] = [
        lambda: detach(app),
        lambda: detach(app, tmp_path / "no.zcr"),
        lambda: attach(app, archive),
    ]
    changes.append(lambda: attach(app, archive, force=True))  # its headers would go on to name a table
    for change in changes:
        with pytest.raises(UnsupportedError, match=r"it was signed .*take the signature off first .*keep=True"):
            change()
    assert app.read_bytes() == before
    assert not (tmp_path / "no.zcr").exists()


def test_signature_comes_after_attaching_and_goes_before_detaching(archive: Path, tmp_path: Path) -> None:
    app = tmp_path / "app.exe"
    app.write_bytes(windows.program())
    sign(app)
    with pytest.raises(FormatError, match="a Windows program, signed, with no archive before its signature; attach"):
        zcrecord.load_record(app)
    with pytest.raises(FormatError, match="no archive is attached to this file"):
        detach(app)
    with pytest.raises(UnsupportedError, match=r"has an Authenticode signature, .*; attach first, then sign"):
        attach(app, archive)
    app.write_bytes(windows.program())
    attach(app, archive)
    app.write_bytes(sign(app))
    assert detach(app).exact and app.read_bytes() == windows.program()


def test_headers_that_lie_lead_nowhere_else() -> None:
    """Any number in them: an archive of those that are there, or one typed error."""
    known = {windows.ARCHIVE, windows.OTHER, windows.UNSEALED}
    accepted = 0
    for question in windows.questions():
        try:
            record = zcrecord.load_record(question.data, embedded="suffix")
        except RecordError:
            continue
        accepted += 1
        assert bytes(record.archive.buffer) in known
    assert 20 < accepted < len(windows.questions()) // 10
