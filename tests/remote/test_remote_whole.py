"""All of a remote archive read once, verified or hashed: what is wrong is found, in little memory, and stays found."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from collisions import colliding
from records import saved
from remote_archives import cached_files, write_sparse

import zcrecord
from tools.range_server import Server, serving
from zcrecord import FormatError, IntegrityError
from zcrecord.codec.layout import HEADER_SIZE, decode_header
from zcrecord.remote.ranges import PayloadRange
from zcrecord.remote.read_ahead import ReadAhead

MIB = 1 << 20


def weights() -> dict[str, Any]:
    """One of each kind that has rules of its own: strided, tied, bools, packed, strings, bytes, empty."""
    rng = np.random.default_rng(8)
    base = rng.standard_normal((700, 300)).astype(np.float32)
    return {
        "base": base,
        "turned": base.T,
        "again": base,
        "mask": rng.integers(0, 2, 5000).astype(bool),
        "packed": np.arange(-7, 8).astype(ml_dtypes.int4),
        "words": np.array(["one", "two"], dtype=np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else base,
        "graph": b"some bytes" * 100,
        "none": np.zeros((0, 3)),
        "large": rng.integers(0, 255, 3 * MIB, np.uint8),
        "module": {"kind": "conv", "w": np.arange(9.0)},
    }


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the archive count as one that is not kept."""
    monkeypatch.setattr("zcrecord.remote.read_ahead._MOST", 1 << 17)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of a folder that holds `m.zcr`, the archive of `weights()`."""
    (tmp_path / "m.zcr").write_bytes(saved(weights()))
    with serving(tmp_path) as state:
        yield state


def local(server: Server) -> Any:
    return zcrecord.load_record(server.folder / "m.zcr")


def change(server: Server, at: int, value: int) -> None:
    data = bytearray((server.folder / "m.zcr").read_bytes())
    data[at] = value
    (server.folder / "m.zcr").write_bytes(data)


@pytest.mark.slow
def test_the_content_digest_is_that_of_the_local_file_and_can_be_expected(server: Server) -> None:
    digest = local(server).content_digest()
    url = f"{server.url}/m.zcr"
    assert zcrecord.load_record(url).content_digest() == digest
    reports: list[tuple[int, int]] = []
    assert zcrecord.load_record(url, cache=False).content_digest(progress=lambda *n: reports.append(n)) == digest
    assert len(reports) > 1 and reports == sorted(reports) and reports[-1][0] == reports[-1][1] > 0
    rec = zcrecord.load_record(url, expect=digest)
    assert np.array_equal(rec["turned"], weights()["turned"])
    assert np.array_equal(rec.load_into("host", "large")["large"], weights()["large"])
    part = zcrecord.load_record(url, expect=digest, names="module")
    assert part["module.w"].tolist() == list(range(9))
    with pytest.raises(IntegrityError, match=r"m\.zcr: content digest sha256:0+ was expected, it has sha256:"):
        zcrecord.load_record(url, expect="sha256:" + "0" * 64)


def poison(server: Server, ranges: list[tuple[int, int]] | None = None) -> None:
    """Have the server send other bytes for `large` from now on, of the same XXH3; and so each of some ranges."""
    path = server.folder / "m.zcr"
    info = local(server).info("large")
    data = bytearray(path.read_bytes())
    for lo, hi in ranges or [(info.offset, info.offset + info.nbytes)]:
        data[lo:hi] = colliding(bytes(data[lo:hi]), bytes(hi - lo))
    path.write_bytes(data)
    if ranges is None:
        zcrecord.load_record(path).verify()  # it does not notice


@pytest.mark.slow
@pytest.mark.parametrize("way", ["view", "host", "another process"])
def test_expected_bytes_are_not_exchanged_for_others_of_their_short_digest(server: Server, way: str) -> None:
    rec = zcrecord.load_record(f"{server.url}/m.zcr", expect=local(server).content_digest(), cache=False)
    pickled = pickle.dumps(rec)
    poison(server)
    with pytest.raises(IntegrityError, match=r"payload .* its digest does not match"):
        if way == "another process":
            pickle.loads(pickled)["large"]
        else:
            rec["large"] if way == "view" else rec.load_into("host", "large")


@pytest.mark.slow
def test_a_forged_entry_of_the_cache_is_not_taken_for_what_was_expected(server: Server, cache: Path) -> None:
    url = f"{server.url}/m.zcr"
    assert zcrecord.load_record(url, cache=cache)["large"].any()
    rec = zcrecord.load_record(url, expect=local(server).content_digest(), cache=cache)
    for path in cached_files(cache):
        if path.stat().st_size > 1 << 12:
            path.write_bytes(colliding(path.read_bytes(), bytes(path.stat().st_size)))
    assert np.array_equal(rec["large"], weights()["large"])


@pytest.mark.slow
def test_what_a_loader_was_given_once_is_not_given_to_it_otherwise_again(server: Server) -> None:
    rec = zcrecord.load_record(f"{server.url}/m.zcr", expect=local(server).content_digest())
    info = rec.info("large")
    ahead = ReadAhead(rec.archive.source.remote)
    ahead.expect([PayloadRange(info.offset, info.nbytes, info.digest, "large")], 3 << 18)
    room = memoryview(bytearray(1 << 18))
    for at in range(0, 8 << 18, 1 << 18):
        ahead.readinto_at(info.offset + at, room)
    poison(server, [part for ranges in ahead._batches for part in ranges])
    with pytest.raises(IntegrityError, match="bytes fetched before differ"):
        ahead.readinto_at(info.offset, room)


@pytest.mark.parametrize("loader", ["host", "cpu"])
@pytest.mark.parametrize("box", [None, slice(1000, 2000)])
def test_parts_are_as_expected_in_another_process(server: Server, loader: str, box: slice | None) -> None:
    tree = weights()
    (server.folder / "m.zcr").write_bytes(saved({**tree, "rows": tree["large"][1000:9000]}))
    rec = zcrecord.load_record(f"{server.url}/m.zcr", expect=local(server).content_digest(), cache=False)
    again = pickle.loads(pickle.dumps(rec))
    poison(server)
    with pytest.raises(IntegrityError, match="digest does not match"):
        again.load_into(loader, "rows" if box is None else "large", slices=box and {"large": box})


def test_a_pickled_record_is_known_by_more_than_the_checksum_of_its_index(server: Server) -> None:
    """Anybody can match a CRC of 32 bits."""
    data = (server.folder / "m.zcr").read_bytes()
    header = decode_header(data[-HEADER_SIZE:])
    assert header is not None
    index = data[header.index_offset : header.index_offset + header.index_size]
    digest = hashlib.sha256(data[:HEADER_SIZE] + index + data[-HEADER_SIZE:]).digest()
    assert digest in pickle.dumps(zcrecord.load_record(f"{server.url}/m.zcr"))


def test_full_verification_passes_over_all_there_is(server: Server) -> None:
    reports: list[tuple[int, int]] = []
    rec = zcrecord.load_record(f"{server.url}/m.zcr", verify="full")
    rec.verify(progress=lambda done, total: reports.append((done, total)))
    assert reports[-1][0] == reports[-1][1]
    assert all(a[0] <= b[0] for a, b in itertools.pairwise(reports))
    rec.select("module").verify()
    assert np.array_equal(rec["base"], weights()["base"])


@pytest.mark.slow
def test_bytes_between_payloads_and_damaged_payloads_are_found_as_in_a_local_file(server: Server) -> None:
    rec = local(server)
    info = rec.info("packed")
    change(server, info.offset + info.nbytes + 3, 1)
    with pytest.raises(FormatError, match=r"the gap \[0x\w+, 0x\w+\) holds bytes that are not zero"):
        zcrecord.load_record(f"{server.url}/m.zcr", verify="full")
    change(server, info.offset + info.nbytes + 3, 0)
    change(server, rec.info("large").offset + 2 * MIB, int(weights()["large"][2 * MIB]) ^ 1)
    with pytest.raises(IntegrityError, match=r"m\.zcr: tensor 'large': payload .* its digest does not match"):
        zcrecord.load_record(f"{server.url}/m.zcr", verify="full")
    with pytest.raises(IntegrityError, match=r"tensor 'large'"):
        zcrecord.load_record(f"{server.url}/m.zcr").content_digest()


def test_a_small_archive_is_kept_rather_than_fetched_again(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcrecord.remote.read_ahead._MOST", 32 * MIB)
    digest = local(server).content_digest()
    rec = zcrecord.load_record(f"{server.url}/m.zcr", expect=digest, verify="full")
    server.forget()
    assert len(list(rec.items())) == len(list(local(server)))
    assert not server.requests


def resident() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * mmap.PAGESIZE


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/self/statm is Linux's")
def test_reading_all_of_it_keeps_little_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    write_sparse(tmp_path / "m.zcr", 160 * MIB)
    digest = zcrecord.load_record(tmp_path / "m.zcr").content_digest()
    with serving(tmp_path) as server:
        before = resident()
        rec = zcrecord.load_record(f"{server.url}/m.zcr", verify="full", expect=digest)
        assert resident() - before < 80 * MIB
        before = resident()
        rec.prefetch("large.*")
        assert resident() - before > 100 * MIB, "it would be noticed"
