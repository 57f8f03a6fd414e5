"""Parts of payloads are checked as they are read, by the checksums of their blocks, and no more is read for it."""

from __future__ import annotations

import functools
import io
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exhaustive import some
from records import ROOT
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.range_server import serving
from zcrecord import IntegrityError
from zcrecord.archive import damage
from zcrecord.archive.archive import Archive
from zcrecord.codec import blocks
from zcrecord.codec.blocks import NAME, BlockTable
from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import AttributeEntry, ValueType, WordList
from zcrecord.codec.layout import NONE
from zcrecord.formats import convert
from zcrecord.loaders import load_into, plan_load, shard
from zcrecord.loaders.plan import plan_files
from zcrecord.storage.files import open_sink
from zcrecord.tensors.lazy import LazyTensor
from zcrecord.writing import flatten, writers
from zcrecord.writing.sharing import plan_sharing

MIB = 1 << 20
RNG = np.random.default_rng(5)
WIDE = RNG.integers(0, 255, (9 * 1024 + 1, 1000), np.uint8)  # 8.8 MiB: nine blocks, the last one short
TREE = {"wide": WIDE, "small": RNG.integers(0, 255, (300, 1000), np.uint8)}


def table(record: Any) -> BlockTable:
    return BlockTable(record.archive.index)


def known(archive: Archive) -> dict[tuple[int, int], bytes]:
    """The checksums of all payloads, from the file that each lies in."""
    pieces = [piece for n in range(len(archive.index.payloads)) for piece in archive.source.pieces(n)]
    found = ((piece.source.digest(piece.number), piece.nbytes, piece.source.sums(piece.number)) for piece in pieces)
    return {(digest or 0, nbytes): sums.sums.tobytes() for digest, nbytes, sums in found if sums is not None}


def streamed(path: Any) -> None:
    with zcrecord.RecordWriter(path, durable=False) as out:
        for name, array in TREE.items():
            with out.tensor(name, array.dtype, array.shape) as opened:
                for start in range(0, array.nbytes, 300_001):
                    opened.write(array.reshape(-1)[start : start + 300_001])


def through_pipe(path: Path) -> None:
    class Pipe(io.RawIOBase):
        written = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.written += data
            return len(memoryview(data))

    streamed(pipe := Pipe())
    path.write_bytes(pipe.written)


def edited(path: Path, lazy: bool = False) -> None:
    zcrecord.save_record({"old": WIDE, "small": TREE["small"]}, path, durable=False)
    with zcrecord.edit(path, durable=False) as model:
        model.rename("old", "wide")
        model["new"] = LazyTensor("uint8", WIDE.shape, lambda: [255 - WIDE]) if lazy else 255 - WIDE
    with zcrecord.edit(path, durable=False) as model:
        del model["new"]


def on_base(path: Path) -> None:
    zcrecord.save_record({"wide": WIDE}, path.with_name("base.zcr"), durable=False)
    zcrecord.save_record(TREE, path, base=path.with_name("base.zcr"), durable=False)


def indexed(path: Path) -> None:
    convert(path.with_name("saved.zcr"), path.with_name("model.safetensors"))
    zcrecord.index(path.with_name("model.safetensors"), path)


WAYS: dict[str, Callable[[Path], object]] = {
    "saved": lambda path: zcrecord.save_record(TREE, path, durable=False),
    "streamed": streamed,
    "into a pipe": through_pipe,
    "sharded": lambda path: zcrecord.save_record(TREE, path, max_shard_size=9 * MIB, durable=False),
    "edited": edited,
    "edited, lazy": functools.partial(edited, lazy=True),
    "on a base": on_base,
    "an index": indexed,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_writer_makes_the_same_checksums_outside_of_the_content(way: str, tmp_path: Path) -> None:
    WAYS["saved"](tmp_path / "saved.zcr")
    WAYS[way](tmp_path / "m.zcr")
    saved, record = (zcrecord.load_record(tmp_path / name) for name in ("saved.zcr", "m.zcr"))
    expected = known(saved.archive)
    assert [len(sums) for sums in expected.values()] == [9 * 8, 8]
    if way in ("sharded", "on a base"):  # `small` lies in a file of less than 8 MiB, which has none
        del expected[list(expected)[1]]
    assert known(record.archive) == expected
    assert NAME not in record.metadata
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST", 1 << 40)
        zcrecord.save_record(TREE, tmp_path / "old.zcr", durable=False)
    old = zcrecord.load_record(tmp_path / "old.zcr")
    assert not table(old).block
    assert old.content_digest() == record.content_digest()


def test_an_item_of_a_user_or_of_a_file_that_was_converted_is_replaced(tmp_path: Path) -> None:
    """A release that does not know checksums of blocks copies them to files of other formats, as any metadata."""
    zcrecord.save_record(TREE, tmp_path / "m.zcr", metadata={NAME: [1, 2], "mine": 3}, durable=False)
    record = zcrecord.load_record(tmp_path / "m.zcr")
    assert table(record).block == MIB
    assert record.metadata == {"mine": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `m.zcr` of TREE, and `split.zcr`, with `wide` in two boxes of columns, each with checksums."""
    folder = tmp_path_factory.mktemp("blocks")
    zcrecord.save_record(TREE, folder / "m.zcr", durable=False)
    split = {"wide": np.concatenate([WIDE, WIDE[::-1]], axis=1)}
    save_split(folder / "split.zcr", split, {"wide": boxes_along(1, 2, split["wide"].shape)})
    return folder


@contextmanager
def opened(folder: Path, name: str, remote: bool) -> Iterator[Any]:
    if not remote:
        yield zcrecord.load_record(folder / name), None
        return
    with serving(folder) as server:
        record = zcrecord.load_record(f"{server.url}/{name}", cache=False)
        server.forget()
        yield record, server


BOXES: dict[str, Any] = {
    "rows": np.s_[2000:4000],
    "columns": np.s_[:, 100:110],
    "a corner": np.s_[3:5, 7:900],
    "a rank's rows": shard(1, 4, uneven=True),
    "whole": np.s_[:],
}


def whole_file(folder: Path, name: str) -> tuple[Path, int]:
    """The file with a payload of WIDE's size, and that payload's offset there."""
    for path in sorted(folder.glob("*.zcr")):
        archive = zcrecord.load_record(path).archive
        if archive.source.piece_table() is not None:
            continue
        sizes, offsets = (archive.index.payloads[field].tolist() for field in ("nbytes", "offset"))
        if path.name.startswith(name) and WIDE.nbytes in sizes:
            return path, archive.header.payload_offset + offsets[sizes.index(WIDE.nbytes)]
    raise AssertionError(name)


@functools.cache
def blocks_of(number: int) -> set[int]:
    """The numbers of the blocks that a box meets."""
    box, read = list(BOXES.values())[number], np.zeros(WIDE.shape, bool)
    read[box(len(WIDE)) if callable(box) else box] = True
    return set((np.flatnonzero(read) // MIB).tolist())


@pytest.mark.parametrize("name", ["m", "split"])
@pytest.mark.parametrize("loader", ["host", "read", "remote host", "remote read", "remote cpu"])
def test_each_flipped_bit_of_a_part_is_noticed_and_none_elsewhere(
    folder: Path, tmp_path: Path, name: str, loader: str
) -> None:
    """An error if the box meets the block with the bit, and no other is read; 10,000 bits under --all."""
    way, remote = loader.rpartition(" ")[2], loader.startswith("remote")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path, start = whole_file(tmp_path, name)
    noticed, bits = 0, np.random.default_rng(7).integers(0, WIDE.nbytes, 334 if remote else 2000)
    for n, at in enumerate(some(bits.tolist(), 10)):
        box = list(BOXES.values())[n % len(BOXES)]
        met = at // MIB in blocks_of(n % len(BOXES))
        bad: Any = pytest.raises(IntegrityError, match="the file is damaged") if met else nullcontext()
        with (
            flipped(path, start + at, 1 << n % 8),
            opened(tmp_path, f"{name}.zcr", remote) as (record, _),
            bad as caught,
        ):
            load_into(record, way, "wide", slices={"wide": box})
        assert not met or caught.value.tensor == "wide"
        noticed += met
    assert noticed >= 4


@contextmanager
def flipped(path: Path, at: int, bits: int) -> Iterator[None]:
    """Flip bits of a byte of a file, and flip them back."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            octet = file.read(1)[0]
            file.seek(at)
            file.write(bytes([octet ^ bits]))

    flip()
    yield
    flip()


def test_what_is_read_is_planned_as_checked(folder: Path) -> None:
    for name in ("m.zcr", "split.zcr"):
        for remote in (False, True):
            with opened(folder, name, remote) as (record, _):
                for box in BOXES.values():
                    plans = plan_files(record.archive, None, slices={"wide": box}, max_in_flight=MIB, raw=False)
                    assert [plan.unchecked for plan in plans] == [()] * len(plans)


@pytest.mark.parametrize("way", ["host", "read", "cpu"])
def test_one_rank_of_four_fetches_its_blocks_and_no_others(folder: Path, way: str) -> None:
    with opened(folder, "m.zcr", remote=True) as (record, server):
        rows = load_into(record, way, "wide", slices={"wide": shard(1, 4, uneven=True)})["wide"]
        assert np.array_equal(rows, WIDE[2305 : 2 * 2305])
        assert server.sent == 3 * MIB, "it has 2.2 of 8.8 MiB, in three blocks"


def test_verify_names_the_blocks_that_are_damaged(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path, start = whole_file(tmp_path, "m")
    with flipped(path, start + 2 * MIB, 1), flipped(path, start + 4 * MIB - 1, 1), flipped(path, start + 8 * MIB, 128):
        found = damage.find(zcrecord.load_record(path).archive)
    assert [(d.offset - start, d.nbytes, d.tensors) for d in found] == [
        (2 * MIB, 2 * MIB, ("wide",)), (8 * MIB, WIDE.nbytes - 8 * MIB, ("wide",))
    ]  # fmt: skip


def test_blocks_of_another_size_are_those_of_the_kit() -> None:
    data = bytearray((ROOT / "tests/conformance/valid/blocks.zcr").read_bytes())
    start = zcrecord.load_record(bytes(data)).info("large").offset
    data[start + 4097] ^= 1
    record = zcrecord.load_record(data)
    assert [(d.offset - start, d.nbytes) for d in damage.find(record.archive)] == [(4096, 4)]
    assert len(load_into(record, "host", "large", slices={"large": np.s_[4000:4096]})["large"]) == 96
    with pytest.raises(IntegrityError, match="'large': bytes"):
        load_into(record, "host", "large", slices={"large": np.s_[4000:4097]})


def forged(words: Any, *, plain: bool = False) -> bytes:
    """An archive of TREE whose metadata have this item."""
    file, flat = io.BytesIO(), flatten.flatten(TREE)
    value = words if plain else WordList(int(ValueType.UINT), np.array(words, np.uint64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "add_blocks", lambda _, __: flat.metadata.append(AttributeEntry(NAME, NONE, 0, value)))
        with open_sink(file) as sink:
            writers.write_plan(sink, flat, plan_sharing(flat.values), alignment=64, kind=1)
    return file.getvalue()


def right() -> list[int]:
    file = io.BytesIO()
    zcrecord.save_record(TREE, file)
    record = zcrecord.load_record(file.getvalue())
    ix = record.archive.index
    row = ix.metadata[blocks.is_blocks(ix, ix.metadata)][0]
    start, count = int(row["value"]) & NONE, int(row["value"]) >> 32
    return [int(word) for word in ix.words[start : start + count]]


WRONG: dict[str, Callable[[list[int]], Any]] = {
    "none": lambda w: [],
    "one word": lambda w: w[:1],
    "too few": lambda w: w[:-1],
    "too many": lambda w: [*w, 0],
    "blocks of 0": lambda w: [0, *w[1:]],
    "blocks of 3 MiB": lambda w: [3 * MIB, *w[1:]],
    "tiny blocks": lambda w: [1, *w[1:]],
    "huge blocks": lambda w: [1 << 40, *w[1:]],
    "other blocks": lambda w: [2 * MIB, *w[1:]],
    "far too many payloads": lambda w: [w[0], (1 << 64) - 1, *w[2:]],
    "another count": lambda w: [w[0], 2, *w[2:]],
    "a size of 0": lambda w: [w[0], 1, w[2], 0, *w[4:]],
    "a size that wraps": lambda w: [w[0], 1, w[2], (1 << 64) - 1, *w[4:]],
    "twice": lambda w: [w[0], 2, w[2], w[2], w[3], w[3], *w[4:], *w[4:]],
    "texts": lambda w: ["a", "b"],
    "a number": lambda w: 5,
}


@pytest.mark.parametrize("case", WRONG)
def test_an_item_of_another_form_is_none(case: str) -> None:
    words = WRONG[case](right())
    data = forged(words, plain=case in ("texts", "a number"))
    record = zcrecord.load_record(data, verify="full")
    assert not table(record).block
    assert not table(zcrecord.load_record(data, verify="touch")).block
    assert plan_load(record).unchecked == ("wide", "small")


def test_wrong_checksums_of_the_right_form_are_one_error_and_others_mean_nothing() -> None:
    words, small = right(), TREE["small"].tobytes()
    in_blocks = [digest_of(small[at : at + 4096]) for at in range(0, len(small), 4096)]
    sliced: Any = {"wide": np.s_[:9], "small": np.s_[:9]}
    for changed, bad in (
        (words, None),
        ([4096, 1, digest_of(small), len(small), *in_blocks], None),
        ([4096, 1, digest_of(small), len(small), *in_blocks[::-1]], "small"),
        ([*words[:4], *words[:3:-1]], "wide"),
    ):
        record = zcrecord.load_record(forged(changed))
        assert plan_load(record).unchecked == (("wide",) if changed[0] == 4096 else ())
        record.verify()  # the payloads are sound
        with nullcontext() if bad is None else pytest.raises(IntegrityError, match=f"'{bad}': bytes .* does not match"):
            load_into(record, "host", slices=sliced)
    words[2] ^= 1  # of a payload that is not there, as where a writer that does not know them copied them
    record = zcrecord.load_record(forged(words))
    record.verify()
    assert plan_load(record).unchecked == ("wide",), "the other is one block"


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="platform: only POSIX reads by position")
def test_a_huge_block_is_read_once_for_all_parts_of_a_payload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest, reads, real = digest_of(WIDE.tobytes()), list[int](), os.preadv

    def counted(*arguments: Any) -> int:
        reads.append(real(*arguments))
        return reads[-1]

    (tmp_path / "m.zcr").write_bytes(forged([1 << 30, 1, digest, WIDE.nbytes, digest]))
    record = zcrecord.load_record(tmp_path / "m.zcr")
    monkeypatch.setattr("zcrecord.storage.memory.os.preadv", counted)
    monkeypatch.setattr("zcrecord.loaders.boxes._BLOCK", MIB)
    found = load_into(record, "read", "wide", slices={"wide": np.s_[:, :9]})["wide"]
    assert (found == WIDE[:, :9]).all()
    assert sum(reads) < 1.1 * WIDE.nbytes, "the block is checked in the mapping"


def test_a_huge_item_costs_little() -> None:
    words = np.arange(2_000_000, dtype=np.uint64)
    words[0], words[1] = 4096, 700_000
    words[700_002:1_400_002] = 1
    data = forged(words[:2_100_002].tolist())
    record = zcrecord.load_record(data)
    tracemalloc.start()
    assert not table(record).block
    assert record.metadata == {}
    assert tracemalloc.get_traced_memory()[1] < 2 * len(words) * 8
    tracemalloc.stop()
