"""Rules on the payloads' bytes: digests, zeros between, pad bits, bools, ends of strings. Checked by `full`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from forge import Forge
from malformed import LEVELS, Case, cases, refused, rich, saved
from malformed_contents import CASES, STRINGS, flipped

import zcrecord
from zcrecord import FormatError, IntegrityError, PackedTensor
from zcrecord.archive.archive import Verify


def forged(case: Case) -> bytes:
    archive = rich()
    case.change(archive)
    return archive.seal()


@cases(CASES)
def test_full_finds_what_is_wrong_with_payloads(case: Case) -> None:
    data = forged(case)
    refused(case, lambda: zcrecord.load_record(data, verify="full"))
    refused(case, zcrecord.load_record(data).verify)
    refused(case, zcrecord.load_record(data, verify="touch").verify)


@cases(case for case in CASES if case not in STRINGS)
def test_index_gives_what_only_full_finds(case: Case) -> None:
    assert len(list(zcrecord.load_record(forged(case)).values())) == 13


@pytest.mark.parametrize("level", ["touch", "index"])
@cases(STRINGS)
def test_no_end_of_a_string_is_used_unchecked(case: Case, level: Verify) -> None:
    record = zcrecord.load_record(forged(case), verify=level)
    refused(case, lambda: record["s"])
    refused(case, lambda: record.get("s"))
    refused(case, lambda: list(record.values()))
    refused(case, record.tree)
    assert record["w"].shape == (2, 3)


@pytest.mark.parametrize(("kind", "count"), [("uint4", 4), ("uint2", 8)])
def test_narrow_elements_may_end_where_a_byte_does(kind: str, count: int) -> None:
    """R70."""
    data = saved({"q": PackedTensor(np.array([255, 255], np.uint8), kind, (count,))})
    assert zcrecord.load_record(data, verify="full")["q"].unpack().tolist() == [(1 << 16 // count) - 1] * count


def test_bools_are_checked_whatever_their_strides() -> None:
    """R72."""
    flags = np.zeros((3, 4), bool)
    archive = Forge(saved({"b": flags.T}))
    archive.payload[7] = 3
    archive.digest()
    with pytest.raises(FormatError, match=r"^tensor 'b': a bool is neither 0 nor 1$"):
        zcrecord.load_record(archive.seal(), verify="full")


@pytest.mark.parametrize("wrong", [0, 3])
def test_a_payload_of_bools_is_one_throughout(wrong: int) -> None:
    """R72: also where no bool reaches, or each of a million views would have to be looked at."""
    archive = Forge(saved({"n": (numbers := np.ones(8, np.uint8)), "b": numbers[1:].view(bool)}))
    assert len(archive.columns["payloads"]) == 1
    archive.payload[wrong] = 2
    archive.digest()
    with pytest.raises(FormatError, match=r"^tensor 'b': a bool is neither 0 nor 1$"):
        zcrecord.load_record(archive.seal(), verify="full")


def test_without_digests_bytes_may_be_any() -> None:
    """R73."""
    archive = Forge(saved({"w": np.ones(4, np.uint8)}, digest="none"))
    archive.payload[0] = 7
    assert zcrecord.load_record(archive.seal(), verify="full")["w"].tolist() == [7, 1, 1, 1]


def gaps(alignment: int, *, front: bool) -> list[tuple[int, int]]:
    """Return the ranges between header, index, payloads and trailer of an archive of two payloads."""
    f = Forge(two(alignment), front=front)
    data = f.seal()
    end = np.frombuffer(data[-64:], "<u8")
    index_offset, index_size, start, size = (int(word) for word in end[3:7])
    first, second = (
        (start + int(r["offset"]), start + int(r["offset"]) + int(r["nbytes"])) for r in f.columns["payloads"]
    )
    regions = [(0, 64), first, second, (index_offset, index_offset + index_size), (size - 64, size)]
    edges = [at for region in sorted(regions) for at in region]
    return [(a, b) for a, b in zip(edges[1::2], edges[2::2], strict=False) if a < b]


def two(alignment: int) -> bytes:
    return saved({"a": np.ones(3, np.uint8), "b": np.ones(5, np.uint8)}, alignment=alignment)


@pytest.mark.parametrize("front", [True, False], ids=["front", "back"])
@pytest.mark.parametrize("alignment", [64, 1024])
def test_full_finds_a_byte_in_every_gap(alignment: int, front: bool) -> None:
    """R74."""
    data = Forge(two(alignment), front=front).seal()
    found = gaps(alignment, front=front)
    assert len(found) >= 2
    for lo, hi in found:
        for at in {lo, (lo + hi) // 2, hi - 1}:
            changed = bytearray(data)
            changed[at] = 1
            assert len(zcrecord.load_record(bytes(changed))) == 2
            with pytest.raises(
                FormatError, match=rf"^the gap \[{lo:#x}, {hi:#x}\) holds bytes that are not zero$"
            ) as caught:
                zcrecord.load_record(bytes(changed), verify="full")
            assert caught.value.offset == lo


def test_every_byte_outside_header_index_and_trailer_is_a_payload_or_a_gap() -> None:
    """R73, R74: no change of one byte anywhere passes `full` unnoticed."""
    data = Forge(two(64), front=False).seal()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 16
        with pytest.raises(FormatError):
            zcrecord.load_record(bytes(changed), verify="full")


def test_error_found_later_names_the_file_too(tmp_path: Path) -> None:
    """R73."""
    archive = rich()
    flipped("w")(archive)
    path = tmp_path / "model.zcr"
    path.write_bytes(archive.seal())
    with zcrecord.load_record(path) as record, pytest.raises(IntegrityError, match=r"model\.zcr: tensor 'w': payload "):
        record.verify()
    with pytest.raises(IntegrityError, match=r"model\.zcr: tensor 'w': payload ") as caught:
        zcrecord.load_record(path, verify="full")
    assert caught.value.path == str(path)


def test_index_error_comes_before_any_payload_is_read() -> None:
    archive = rich()
    archive.payload[:] = b"\xff" * len(archive.payload)
    archive.set("tensors", "w", rank=65)
    for level in LEVELS[1:]:
        with pytest.raises(zcrecord.LimitError, match="rank 65"):
            zcrecord.load_record(archive.seal(), verify=level)
