"""An archive attached to a program: what is written, what is refused, and that nothing is ever half done."""

from __future__ import annotations

import contextlib
import os
import pickle
import stat
import struct
import zipapp
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import windows

import zcrecord
from tools.measure import most_allocated
from zcrecord import DestinationExistsError, FormatError, IntegrityError, RecordError, SourceError, UnsupportedError
from zcrecord.embed import attach, detach
from zcrecord.transport import pack

MIB = 1 << 20
BLOCK = 65536
POSIX = pytest.mark.skipif(os.name != "posix", reason="platform: POSIX files and signals")
TREE = {"w": np.arange(6.0).reshape(2, 3), "large": np.ones(1 << 18, np.float32), "s": np.array(["a", "bc"])}
ARCHIVE = r.saved(TREE)
OTHER = r.saved({"w": np.arange(3.0)}, alignment=16)
ELF = b"\x7fELF" + bytes(60)


def elf(nbytes: int = 5000) -> bytes:
    """Return bytes that start as an ELF program does."""
    return ELF[:nbytes] + np.random.default_rng(nbytes).bytes(max(nbytes - len(ELF), 0))


def put(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture
def program(tmp_path: Path) -> Path:
    put(tmp_path / "app", elf()).chmod(0o755)
    return tmp_path / "app"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return put(tmp_path / "m.zcr", ARCHIVE)


@pytest.mark.parametrize("size", [1, 64, 5000, *range(BLOCK - 33, BLOCK - 30), BLOCK, BLOCK + 1])
def test_file_is_program_zeros_note_and_archive_and_detach_undoes_it(size: int, archive: Path, tmp_path: Path) -> None:
    program = put(tmp_path / "app", elf(size))
    report = attach(program, archive, force=True)  # one byte may be text
    data = program.read_bytes()
    assert report.offset == -(-(size + 32) // BLOCK) * BLOCK
    assert (report.program_bytes, report.archive_bytes, report.replaced_bytes) == (size, len(ARCHIVE), None)
    note = b"\x89ZCA\r\n\x1a\n" + size.to_bytes(8, "little") + bytes(12)
    note += zlib.crc32(note).to_bytes(4, "little")
    assert data == elf(size) + bytes(report.offset - 32 - size) + note + ARCHIVE
    undone = detach(program, tmp_path / "again.zcr")
    assert (undone.program_bytes, undone.archive_bytes, undone.exact) == (size, len(ARCHIVE), True)
    assert program.read_bytes() == elf(size)
    assert (tmp_path / "again.zcr").read_bytes() == ARCHIVE


def test_record_is_mapped_where_it_lies_in_the_program(program: Path, archive: Path) -> None:
    report = attach(program, archive)
    record = zcrecord.load_record(program, verify="full")
    assert record.archive.source.is_mapped and record.archive.offset == report.offset
    start = r.address(record["w"]) - record.info("w").offset
    for name in ("w", "large"):
        info = record.info(name)
        assert info.offset % BLOCK == zcrecord.load_record(archive).info(name).offset % BLOCK
        assert r.address(record[name]) == start + info.offset
        assert program.read_bytes()[info.offset : info.offset + info.nbytes] == record[name].tobytes()


def test_attached_archive_is_as_good_as_a_file_with_every_option(program: Path, archive: Path) -> None:
    attach(program, archive)
    digest = zcrecord.load_record(archive).content_digest()
    for options in ({"mmap": False}, {"mode": "c"}, {"verify": "touch"}, {"expect": digest}, {"embedded": "suffix"}):
        r.assert_same(zcrecord.load_record(program, **options).tree(), TREE)
    assert list(zcrecord.load_record(program, names="w")) == ["w"]
    r.assert_same(zcrecord.load_record(program.read_bytes()).tree(), TREE)
    r.assert_same(pickle.loads(pickle.dumps(zcrecord.load_record(program))).tree(), TREE)


def test_archive_of_any_source_replaces_the_one_before(archive: Path, program: Path, tmp_path: Path) -> None:
    attach(program, archive)
    first = program.read_bytes()
    pack(archive, tmp_path / "m.zcr.zst", durable=False)
    second = put(tmp_path / "second", elf())
    for source in (ARCHIVE, memoryview(ARCHIVE), program, tmp_path / "m.zcr.zst"):
        attach(second, source)
        assert second.read_bytes() == first
    report = attach(program, OTHER)
    assert (report.program_bytes, report.replaced_bytes) == (5000, len(ARCHIVE))
    attach(second, OTHER)
    assert program.read_bytes() == second.read_bytes()
    assert detach(program, discard=True).program_bytes == 5000
    assert program.read_bytes() == elf()


@pytest.mark.slow
def test_attaching_holds_a_piece_at_a_time(program: Path, tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(4 * MIB)}, tmp_path / "large.zcr", durable=False)

    assert most_allocated((tmp_path / "large.zcr").read_bytes) > 32 * MIB, "a copy would not be noticed"
    assert most_allocated(lambda: attach(program, tmp_path / "large.zcr", durable=False)) < 2 * MIB
    options: dict[str, Any] = {"keep": True, "force": True, "durable": False}
    assert most_allocated(lambda: detach(program, tmp_path / "again.zcr", **options)) < 2 * MIB


def test_nothing_is_written_over(program: Path, archive: Path, tmp_path: Path) -> None:
    dest = tmp_path / "bundle"
    assert attach(program, archive, dest).dest == str(dest)
    assert program.read_bytes() == elf() and zcrecord.load_record(dest)["w"].sum() == 15
    with pytest.raises(DestinationExistsError, match=r"bundle: exists already; force=True replaces it"):
        attach(program, archive, dest)
    assert attach(program, OTHER, dest, force=True).replaced_bytes is None
    for force in (False, True):
        with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
            attach(program, archive, archive, force=force)
    assert attach(program, archive, program).dest == str(program)
    with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
        detach(program, program, force=True)
    with pytest.raises(DestinationExistsError, match="exists already"):
        detach(program, put(tmp_path / "there", b"there"))
    assert archive.read_bytes() == ARCHIVE and zcrecord.load_record(program)["w"].sum() == 15


def test_detached_archive_is_beside_the_program(program: Path, archive: Path, tmp_path: Path) -> None:
    for name in ("app", "app.exe"):
        attach(program, archive, tmp_path / name, force=True)
        assert detach(tmp_path / name).dest == str(tmp_path / "app.zcr")
        assert (tmp_path / "app.zcr").read_bytes() == ARCHIVE
        attach(tmp_path / name, archive)
        (tmp_path / "app.zcr").unlink()
        assert detach(tmp_path / name, discard=True).dest is None
        assert not (tmp_path / "app.zcr").exists()
    for more in ({"keep": True}, {"dest": tmp_path / "again.zcr"}):
        with pytest.raises(UnsupportedError, match="app: discard throws the archive away; leave out"):
            detach(program, discard=True, **more)


@POSIX
def test_mode_attributes_and_links_stay(program: Path, archive: Path, tmp_path: Path) -> None:
    program.chmod(0o4711)
    attribute = "user.zcrecord"
    try:
        os.setxattr(program, attribute, b"stays")
    except (AttributeError, OSError):
        attribute = ""  # neither macOS nor some file systems have any
    (tmp_path / "link").symlink_to(program)
    attach(tmp_path / "link", archive)
    attach(program, archive, tmp_path / "bundle")
    assert (tmp_path / "link").is_symlink() and zcrecord.load_record(program)["w"].sum() == 15
    assert not attribute or os.getxattr(program, attribute) == b"stays"
    detach(program, discard=True)
    assert [stat.S_IMODE(p.stat().st_mode) for p in (program, tmp_path / "bundle")] == [0o4711, 0o4711]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="platform: only root gives files away")
def test_owner_stays(program: Path, archive: Path) -> None:
    os.chown(program, 1234, 4321)
    program.chmod(0o4755)
    attach(program, archive)
    status = program.stat()
    assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (1234, 4321, 0o4755)


@POSIX
@pytest.mark.parametrize("swapped", ["scratch file", "program"])
def test_mode_and_owner_go_to_no_file_by_a_link_and_come_from_no_other_program(
    swapped: str, program: Path, archive: Path, tmp_path: Path
) -> None:
    other = put(tmp_path / "other", b"private")
    other.chmod(0o4600)

    def swap(*_: Any) -> None:
        [scratch] = tmp_path.glob(".bundle.*")
        victim = scratch if swapped == "scratch file" else program
        if not victim.is_symlink():
            (tmp_path / "link").symlink_to(other)
            os.replace(tmp_path / "link", victim)

    with contextlib.nullcontext() if swapped == "scratch file" else pytest.raises(SourceError, match="was replaced"):
        attach(program, archive, tmp_path / "bundle", progress=swap)
    assert stat.S_IMODE(other.stat().st_mode) == 0o4600
    assert swapped == "scratch file" or not (tmp_path / "bundle").exists()


def macho(signed: bool, wide: bool = True) -> bytes:
    """Return the headers of a Mach-O program."""
    commands = [(0x19, 72), *([(0x1D, 16)] if signed else []), (0x2, 24)]
    body = b"".join(struct.pack("<II", kind, size) + bytes(size - 8) for kind, size in commands)
    magic = b"\xcf\xfa\xed\xfe" if wide else b"\xce\xfa\xed\xfe"
    return (
        magic + bytes(12) + struct.pack("<II", len(commands), len(body)) + bytes(8 if wide else 4) + body + bytes(500)
    )


def universal(*slices: bytes) -> bytes:
    """Return a Mach-O program for several machines."""
    starts = range(4096, 4096 * (len(slices) + 1), 4096)
    entries = [bytes(8) + struct.pack(">II", at, len(part)) + bytes(4) for at, part in zip(starts, slices, strict=True)]
    head = b"\xca\xfe\xba\xbe" + struct.pack(">I", len(slices)) + b"".join(entries)
    return b"".join(part.ljust(4096, b"\0") for part in (head, *slices))


def zipped(tmp_path: Path) -> bytes:
    """Return a zipapp: a zip behind a line for the shell."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "__main__.py").write_text("print('ready')\n", encoding="utf-8")
    zipapp.create_archive(tmp_path / "source", tmp_path / "app.pyz", interpreter="/usr/bin/env python3")
    return (tmp_path / "app.pyz").read_bytes()


BREAK: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "text": (lambda _: b"notes\n", "it is text, and no executable"),
    "text in UTF-8, a character of which is cut at 4096 bytes": (lambda _: b"a" + "é".encode() * 3000, "it is text"),
    "shell script": (lambda _: b"#!/bin/sh\necho ready\n", "it is a script, whose interpreter would read on"),
    "zipapp": (zipped, r"it ends in a zip's directory \(a zipapp\?\), which has to be last"),
    "ELF before a zip": (lambda p: elf() + zipped(p), "it ends in a zip's directory"),
    "zip with a comment": (lambda p: zipped(p)[:-2] + b"\4\0more", "it ends in a zip's directory"),
    "signed PE32+": (lambda _: windows.program(table=(9999, 8)), "it has an Authenticode signature"),
    "signed PE32": (lambda _: windows.program(wide=False, table=(9999, 8)), "it has an Authenticode signature"),
    "signed Mach-O": (lambda _: macho(signed=True), "it has a code signature"),
    "signed Mach-O, 32 bits": (lambda _: macho(signed=True, wide=False), "it has a code signature"),
    "signed Mach-O for two": (lambda _: universal(macho(False), macho(True)), "it has a code signature"),
}
BEAR: dict[str, bytes] = {
    "PE32+": windows.program(),
    "PE32": windows.program(wide=False),
    "PE cut short": windows.program(table=(9999, 8))[:140],
    "MZ alone": b"MZ" + b"\xff" * 98,
    "Mach-O": macho(signed=False),
    "Mach-O for two": universal(macho(False), macho(False, wide=False)),
    "Mach-O cut short": macho(signed=True)[:40],
    "Mach-O of no sense": b"\xcf\xfa\xed\xfe" + b"\xff" * 200,
    "Mach-O, commands of no size": b"\xcf\xfa\xed\xfe" + bytes(12) + b"\xff" * 8 + bytes(2000),
    "Java class": b"\xca\xfe\xba\xbe\0\0\0\x3d" + bytes(500),
    "universal, of itself": b"\xca\xfe\xba\xbe" + struct.pack(">I", 2) + bytes(500),
    "zip's end in the middle": elf() + b"PK\5\6" + bytes(18) + b"x",
    "firmware": bytes(range(256)) * 9,
    "Latin-1": b"gr\xf6\xdfer" * 2000,
}


@pytest.mark.parametrize("kind", BREAK)
def test_program_that_would_break_is_refused_unless_forced(kind: str, archive: Path, tmp_path: Path) -> None:
    make, message = BREAK[kind]
    program = put(tmp_path / "app", data := make(tmp_path))
    with pytest.raises(UnsupportedError, match=rf"app: nothing can be .*: {message}.*; force=True attaches it$"):
        attach(program, archive)
    assert program.read_bytes() == data
    attach(program, archive, force=True)
    assert zcrecord.load_record(program)["w"].sum() == 15
    detach(program, discard=True)
    assert program.read_bytes() == data


def test_model_of_another_format_is_refused_unless_forced(archive: Path, tmp_path: Path) -> None:
    model = put(tmp_path / "m.gguf", b"GGUF\3" + bytes(99))
    with pytest.raises(UnsupportedError, match="this is a GGUF file, whose readers would not see the archive"):
        attach(model, archive)
    attach(model, archive, force=True)
    with pytest.raises(FormatError, match=r"m\.gguf: this is a GGUF file, with a zcrecord archive attached"):
        zcrecord.load_record(model)
    assert zcrecord.load_record(model, embedded="suffix")["w"].sum() == 15
    assert detach(model, discard=True).exact


@pytest.mark.parametrize("kind", BEAR)
def test_program_that_bears_it_is_attached_to(kind: str, archive: Path, tmp_path: Path) -> None:
    program = put(tmp_path / "app", BEAR[kind])
    attach(program, archive)
    assert zcrecord.load_record(program)["w"].sum() == 15


NOT_PROGRAMS: list[tuple[Any, str]] = [
    ("other.zcr", r"other\.zcr: this is an archive, not a program with one attached$"),
    ("cut.zcr", r"cut\.zcr: this is a zcrecord archive, not a program$"),
    ("empty", "empty: the program is empty$"), ("missing", "missing: no such file"), (".", "is a directory"),
    ("/dev/null", "/dev/null: not a regular file"), (7, "a int is neither a path nor a binary file object"),
]  # fmt: skip


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("program, message", NOT_PROGRAMS)
def test_what_is_no_program_is_refused_come_what_may(program: Any, message: str, force: bool, tmp_path: Path) -> None:
    for name, data in (("other.zcr", OTHER), ("cut.zcr", OTHER[:-1]), ("empty", b"")):
        put(tmp_path / name, data)
    with pytest.raises(RecordError, match=message):
        attach(tmp_path / program if isinstance(program, str) else program, ARCHIVE, force=force)


def test_damaged_archive_is_refused_before_anything_is_written(program: Path, archive: Path, tmp_path: Path) -> None:
    at = zcrecord.load_record(ARCHIVE).info("large").offset
    damaged = put(tmp_path / "damaged.zcr", ARCHIVE[:at] + b"\xff" + ARCHIVE[at + 1 :])
    with pytest.raises(IntegrityError, match=r"damaged\.zcr: tensor 'large': .* its digest does not match"):
        attach(program, damaged)
    with pytest.raises(FormatError, match="it is truncated, copy it again"):
        attach(program, put(tmp_path / "cut.zcr", ARCHIVE[:-8]))
    with pytest.raises(FormatError, match="this is an ELF program with no archive at its end"):
        attach(program, put(tmp_path / "elf", elf()))
    assert program.read_bytes() == elf()
    attach(program, damaged, verify="index")
    with pytest.raises(IntegrityError, match=r"app: tensor 'large': .* its digest does not match"):
        zcrecord.load_record(program, verify="full")


def test_nothing_to_detach_is_an_error(program: Path, archive: Path) -> None:
    with pytest.raises(FormatError, match=r"app: no archive is attached to this file$"):
        detach(program, discard=True)
    with pytest.raises(UnsupportedError, match=r"m\.zcr: this is an archive, not a program with one attached$"):
        detach(archive, discard=True)
    assert archive.read_bytes() == ARCHIVE


@pytest.mark.parametrize("before", [81, 4095])
def test_archive_appended_by_other_means_is_replaced_and_detached(before: int, program: Path, tmp_path: Path) -> None:
    appended = elf(before) + ARCHIVE
    with pytest.raises(FormatError, match=r"app: not a zcrecord archive; one is at its end, but from offset \d+"):
        zcrecord.load_record(put(program, appended))
    r.assert_same(zcrecord.load_record(program, embedded="suffix").tree(), TREE)
    report = attach(program, OTHER)
    assert (report.program_bytes, report.replaced_bytes) == (before, len(ARCHIVE))
    assert not detach(put(program, appended), tmp_path / "again.zcr").exact
    assert program.read_bytes() == elf(before) and (tmp_path / "again.zcr").read_bytes() == ARCHIVE


@pytest.mark.parametrize("at", range(32))
def test_every_damage_of_the_note_is_noticed(at: int, program: Path, archive: Path) -> None:
    start = attach(program, archive).offset
    data = bytearray(program.read_bytes())
    data[start - 32 + at] ^= 1
    put(program, bytes(data))
    assert zcrecord.load_record(program)["w"].sum() == 15, "who loads does not need it"
    if at < 8:  # then it is none, and what it was is taken for the program's
        assert detach(program, discard=True).exact is False
        return
    with pytest.raises(IntegrityError, match="app: the note before the archive: its CRC does not match"):
        detach(program, discard=True)


@pytest.mark.parametrize("size", [0, 4999, 5001, BLOCK - 31, BLOCK, 2**63, 2**64 - 1])
def test_note_that_does_not_fit_is_refused(size: int, program: Path, archive: Path) -> None:
    start = attach(program, archive).offset
    data = program.read_bytes()
    note = data[start - 32 : start - 24] + size.to_bytes(8, "little") + bytes(12)
    changed = data[: start - 32] + note + zlib.crc32(note).to_bytes(4, "little") + data[start:]
    if size == 5001:  # the last byte of padding might be the program's; nothing tells
        assert detach(put(program, changed), discard=True).program_bytes == 5001
        return
    put(program, changed)
    for act in (lambda: detach(program, discard=True), lambda: attach(program, archive)):
        with pytest.raises(FormatError, match=f"the note before the archive: it does not follow a program of {size} b"):
            act()


def test_every_truncation_of_a_program_with_an_archive_is_refused(tmp_path: Path) -> None:
    attach(put(tmp_path / "app", elf(200)), OTHER)
    data = (tmp_path / "app").read_bytes()
    for size in [*range(1, 2000, 7), *range(BLOCK - 40, len(data))]:
        with pytest.raises(RecordError):
            zcrecord.load_record(data[:size])


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
@pytest.mark.parametrize("after", [1, 3])
def test_program_stays_as_it_was_when_attaching_fails(error: Any, after: int, program: Path, tmp_path: Path) -> None:
    calls = []

    def fail(done: int, total: int | None) -> None:
        calls.append((done, total))
        if len(calls) == after:
            raise error

    before = program.stat()
    with pytest.raises((KeyboardInterrupt, OSError)):
        attach(program, ARCHIVE, progress=fail)
    assert program.read_bytes() == elf() and os.listdir(tmp_path) == ["app"]
    assert (program.stat().st_ino, program.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
