"""Malformed .npz files: each fault is one typed error, nothing is unpickled, and nothing costs what it claims."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from exchange import MIB, MOST, array, cost, described, npy, npz, read, refused

import zcrecord
from zcrecord.errors import FormatError, LimitError, RecordError, UnsupportedError
from zcrecord.foreign.npz import BYTES, STRUCTURE
from zcrecord.formats import convert

HUGE = 10**30


def duplicated() -> bytes:
    whole = npz(("v.npy", npy(described(), b"ab")), ("w.npy", npy(described(), b"ab")))
    return whole.replace(b"v.npy", b"w.npy")


def overlapping() -> bytes:
    """Two entries of the directory lead to one member."""
    whole = bytearray(npz(("v.npy", npy(described(), b"ab")), ("w.npy", npy(described(), b"ab"))))
    at = whole.rindex(b"PK\x01\x02")
    whole[at + 42 : at + 46] = bytes(4)
    return bytes(whole)


def changed(at: bytes, back: int, value: bytes) -> bytes:
    """Return a file of one array with bytes changed so far behind a signature."""
    whole = bytearray(array())
    place = whole.index(at) + back
    whole[place : place + len(value)] = value
    return bytes(whole)


NPZ: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing in it": (lambda: b"", "damaged, or not a .npz file .it does not end as a zip file"),
    "no zip file": (lambda: b"\0abc" * 100, "damaged, or not a .npz file"),
    "Git LFS pointer": (lambda: b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "a name twice": (duplicated, "tensor 'w': this name is there twice"),
    "a name twice, once without its suffix": (
        lambda: npz(("w", npy(described(), b"ab")), ("w.npy", npy(described(), b"ab"))),
        "tensor 'w': this name is there twice",
    ),
    "an empty name": (lambda: npz((".npy", npy(described(), b"ab"))), "a member without a name"),
    "members that overlap": (overlapping, "tensor '[vw]': this member overlaps another|damaged"),
    "a wrong checksum": (lambda: array().replace(b"\nab", b"\nac"), "Bad CRC-32"),
    "a member that is no array": (lambda: npz(("w.npy", b"hello, world")), "the magic of .npy is missing"),
    "an empty member": (lambda: npz(("w.npy", b"")), "ends 8 bytes early"),
    "a folder": (lambda: npz(("w/", b"")), "ends 8 bytes early"),
    "version 4": (lambda: npz(("w.npy", npy(described(), b"ab", (4, 0)))), "version 4.0 of .npy is not known"),
    "a header past the end": (lambda: npz(("w.npy", npy(described())[:20])), "bytes early"),
    "a header too long": (lambda: npz(("w.npy", npy(described() + " " * 70_000, b"ab", (2, 0)))),
                          "its .npy header would have .* bytes, more than 65535"),
    "a header not UTF-8": (lambda: npz(("w.npy", npy(b"\xff", version=(3, 0)))), "its .npy header is not UTF-8"),
    "a header that is no dict": (lambda: npz(("w.npy", npy("[]"))), "its .npy header is no dict"),
    "a header that runs": (lambda: array("__import__('os')"), "its .npy header cannot be read"),
    "a header of brackets": (lambda: npz(("w.npy", npy("{" + "(" * 60_000 + "}"))), "its .npy header cannot be read"),
    "no dtype": (lambda: npz(("w.npy", npy("{'fortran_order': False, 'shape': ()}"))), "its .npy header lacks descr"),
    "a field twice": (lambda: npz(("w.npy", npy("{'shape': (1,), 'shape': (1,)}"))), "has 'shape' twice"),
    "an unknown field": (lambda: npz(("w.npy", npy("{'order': 'C'}"))), "has 'order' twice, of the wrong kind"),
    "order that is text": (lambda: array("'|u1'", "(2,)", "'no'"), "has 'fortran_order' twice, of the wrong kind"),
    "a negative dimension": (lambda: array("'|u1'", "(-2,)"), "its .npy header cannot be read"),
    "an empty dimension": (lambda: array("'|u1'", "(2,,2)"), "its shape .* is not a tuple"),
    "a dimension that begins with zero": (lambda: array("'|u1'", "(02,)"), r"its shape \(02,\) is not a tuple"),
    "a shape that is a number": (lambda: array("'|u1'", "(2)"), r"its shape \(2\) is not a tuple"),
    "a space that Python has not": (lambda: array("\xa0'|u1'"), "its .npy header cannot be read"),
    "a huge dimension": (lambda: array("'|u1'", f"({HUGE},)"), "its shape .* is not a tuple"),
    "65 dimensions": (lambda: array("'|u1'", f"({'1, ' * 65})", data=b"a"), "65 dimensions, at most 64"),
    "a product beside a zero": (lambda: array("'|u1'", f"(0, {2**60})", data=b""), "claims more than 2\\^56 bytes"),
    "a dtype that is none": (lambda: array("'hello'"), "its dtype 'hello' is not one of numpy's"),
    "a dtype of three bytes": (lambda: array("'<f3'"), "its dtype '<f3' is not one of numpy's"),
    "too few bytes": (lambda: array(data=b"a"), r"shape \(2,\) of uint8 takes 2 bytes, the file has 1"),
    "too many bytes": (lambda: array(data=b"abc"), r"shape \(2,\) of uint8 takes 2 bytes, the file has 3"),
    "a character that is none": (lambda: array("'<U1'", "(1,)", data=b"\xff\xff\xff\xff"), "not in Unicode"),
    "a member past the end": (lambda: changed(b"PK\x01\x02", 20, b"\xff\xff\xff\x7f"),
                              "stored in 2147483647 bytes, of which 70 should come"),
    "damaged deflate": (
        lambda: npz(("w.npy", npy(described("'|u1'", "(500,)"), bytes(500))), deflate=True).replace(b"\x60", b"\x61"),
        "damaged|Bad CRC|early|bytes",
    ),
    "a stream that ends early, with bytes behind it": (
        lambda: bomb(described("'|u1'", "(600,)"), 500, missing=100), "ends 100 bytes early",
    ),
    "an entry of its own that is no JSON": (lambda: npz(("w.npy", npy(described(), b"ab")), (STRUCTURE, b"{")),
                                            "its 'zcrecord' entry is no JSON"),
    "an entry of its own that is compressed": (lambda: npz((STRUCTURE, b"{}"), deflate=True), "is compressed"),
    "an entry of its own twice": (
        lambda: npz((STRUCTURE, b'{"version":1}'), ("xcrecord.json", b'{"version":1}')).replace(
            b"xcrecord", b"zcrecord"
        ),
        "missing|twice|damaged",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", NPZ)
def test_refuses_npz_with(fault: str, tmp_path: Path) -> None:
    make, pattern = NPZ[fault]
    refused(make(), tmp_path, pattern, ".npz")


NPZ_UNSUPPORTED: dict[str, tuple[Callable[[], bytes], str]] = {
    "objects": (lambda: array("'|O'"), "an array of objects is a pickle, which may run anything"),
    "a structure": (lambda: array("[('a', '<f4'), ('b', '|u1')]"), "a structured array"),
    "float8": (lambda: array("'<f1'"), "numpy names bfloat16, float8 and their like so"),
    "dates": (lambda: array("'<M8[ns]'", "(1,)"), r"dtype <M8\[ns\] has no place in an archive"),
    "long doubles": (lambda: array("'<f16'", "(1,)", data=bytes(16)), "has no place in an archive"),
    "lone surrogates": (lambda: array("'<U1'", "(1,)", data=b"\0\xd8\0\0"), "lone surrogates"),
    "encryption": (lambda: changed(b"PK\x01\x02", 8, b"\x01"), "this member is encrypted"),
    "other compression": (
        lambda: array().replace(b"\x14\0" + bytes(4), b"\x14\0\0\0\x0e\0"),
        "compression 14; numpy stores or deflates",
    ),
}


@pytest.mark.parametrize("fault", NPZ_UNSUPPORTED)
def test_refuses_npz_of(fault: str, tmp_path: Path) -> None:
    make, pattern = NPZ_UNSUPPORTED[fault]
    refused(make(), tmp_path, pattern, ".npz", UnsupportedError)


@pytest.mark.slow
def test_npz_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = npz(("a.npy", npy(described(), b"ab")), ("b.npy", npy(described("'<U2'"), bytes(16))))
    assert set(read(whole, tmp_path, ".npz")) == {"a", "b"}
    for end in range(len(whole)):
        with pytest.raises(RecordError):
            read(whole[:end], tmp_path, ".npz")


@pytest.mark.slow
@pytest.mark.parametrize("deflate", [False, True])
def test_npz_with_a_byte_flipped_is_refused_or_holds_the_same(deflate: bool, tmp_path: Path) -> None:
    members = ("a.npy", npy(described("'<u2'"), b"abcd")), ("b.npy", npy(described("'<U2'"), b"a\0\0\0" * 4))
    whole = npz(*members, deflate=deflate)
    want = [patterns_of(value) for value in read(whole, tmp_path, ".npz").values()]
    for i in range(len(whole)):
        data = bytearray(whole)
        data[i] ^= 0xFF
        try:
            record = read(bytes(data), tmp_path, ".npz")
        except RecordError:
            continue
        assert [patterns_of(value) for value in record.values()] == want, f"byte {i}"


def patterns_of(value: Any) -> Any:
    return list(value.strings()) if isinstance(value, zcrecord.StringTensor) else r.patterns(value)


def bomb(header: str, nbytes: int, *, missing: int = 0) -> bytes:
    """Return a deflated member of so many zeros behind a header, made without holding them; more may be claimed."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = npy(header)
    parts, crc = [packer.compress(head)], zlib.crc32(head)
    for done in range(0, nbytes, MIB):
        zeros = bytes(min(MIB, nbytes - done))
        parts.append(packer.compress(zeros))
        crc = zlib.crc32(zeros, crc)
    raw = b"".join([*parts, packer.flush(), bytes(missing)])
    size = len(head) + nbytes + missing
    local = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 20, 0, 8, 0, 33, crc, len(raw), size, 5, 0) + b"w.npy"
    entry_ = struct.pack(
        "<4sHHHHHHIIIHHHHHII", b"PK\x01\x02", 20, 20, 0, 8, 0, 33, crc, len(raw), size, 5, 0, 0, 0, 0, 0, 0
    )
    entry_ += b"w.npy"
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, len(entry_), len(local) + len(raw), 0)
    return local + raw + entry_ + end


@pytest.mark.slow
def test_npz_that_inflates_costs_one_piece(tmp_path: Path) -> None:
    said, peak = cost(bomb(described("'<f4'", f"({64 * MIB},)"), 256 * MIB), tmp_path, "npz")
    assert said == "read"
    assert peak < 8 * MIB


@pytest.mark.slow
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize(
    "header, nbytes, pattern",
    [
        (described("'|u1'", "(2,)"), 256 * MIB, "takes 2 bytes, the file has "),
        (described("'|u1'", f"({2**50},)"), 256 * MIB, f"takes {2**50} bytes, the file has {256 * MIB}"),
        (described("'<U1'", f"({64 * MIB},)"), 256 * MIB, "strings take much more memory than the file"),
        (described("'|S0'", f"({2**50},)"), 0, "strings take much more memory than the file"),
    ],
    ids=["more than its shape", "less than its shape", "strings", "strings of no bytes"],
)
def test_npz_that_claims_too_much_costs_nothing(header: str, nbytes: int, pattern: str, tmp_path: Path) -> None:
    data = bomb(header, nbytes)
    _, peak = cost(data, tmp_path, "npz")
    assert peak < 4 * MIB + 8 * len(data)
    with pytest.raises((FormatError, LimitError), match=pattern):
        read(data, tmp_path, ".npz")


def test_the_entry_of_its_own_is_bounded_for_readers_and_writers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zcrecord.save_record({"w": np.ones(2), "note": "x" * 900}, tmp_path / "in.zcr")
    convert(tmp_path / "in.zcr", tmp_path / "in.npz")
    assert read((tmp_path / "in.npz").read_bytes(), tmp_path, ".npz").attributes == {"note": "x" * 900}
    monkeypatch.setattr("zcrecord.foreign.npz.MAX_TEXT", 900)
    monkeypatch.setattr("zcrecord.formats.npz.MAX_TEXT", 900)
    with pytest.raises(LimitError, match=r"in\.zcr: attributes and metadata take 9\d\d bytes as JSON, .*at most 900"):
        convert(tmp_path / "in.zcr", tmp_path / "out.npz")
    with pytest.raises(FormatError, match=r"in\.npz: zcrecord\.json has 9\d\d bytes, at most 900 are legal"):
        convert(tmp_path / "in.npz", tmp_path / "new.zcr")
    assert not {"out.npz", "new.zcr"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_npz_of_many_names_costs_no_more_than_a_small_constant_times_its_length(tmp_path: Path) -> None:
    data = npz(*((f"{i}.npy", npy(described("'|u1'", "(0,)"))) for i in range(5000)))
    said, peak = cost(data, tmp_path, "npz")
    assert said == "read"
    assert peak < MOST * len(data)


def test_names_of_byte_strings_are_a_hint_and_no_more(tmp_path: Path) -> None:
    for hint in (["nobody"], "text", 3, ["w"]):
        archive = r.saved({"w": np.ones(2)}, metadata={BYTES: hint})
        (tmp_path / "in.zcr").write_bytes(archive)
        convert(tmp_path / "in.zcr", tmp_path / "out.npz", force=True)
        assert np.load(tmp_path / "out.npz")["w"].tolist() == [1, 1]
