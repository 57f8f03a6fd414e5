"""Boxes of tensors behind a URL: their ranges alone are fetched, near ones merged; unchecked bytes are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import records as r
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.range_server import Server, serving
from zcrecord import IntegrityError
from zcrecord.codec import blocks
from zcrecord.loaders import load_into, plan_load, shard
from zcrecord.loaders.torch import TorchLoader
from zcrecord.remote.ranges import NEAR

KIB, MIB = 1 << 10, 1 << 20
LOADERS = ["cpu", "host", "read", "torch"]
WIDE = np.random.default_rng(1).integers(0, 255, (12, 4, 256 * KIB), np.uint8)  # rows of 1 MiB
NARROW = np.random.default_rng(2).integers(0, 255, (1 * KIB, 1 * KIB), np.uint8)  # rows of 1 KiB
SPLIT = np.random.default_rng(3).integers(0, 255, (8, 256 * KIB), np.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `m.zcr` of all, and `split.zcr`, a catalogue of SPLIT in two boxes of rows, and two of columns.

    Without checksums of blocks, by which more is read, and checked (`integrity/test_integrity_parts.py`).
    """
    folder = tmp_path_factory.mktemp("served")
    tree = {"wide": WIDE, "narrow": NARROW, "other": NARROW[:, :100].copy()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "LEAST", 1 << 40)
        zcrecord.save_record(tree, folder / "m.zcr", durable=False)
    splits = {"rows": boxes_along(0, 2, SPLIT.shape), "columns": boxes_along(1, 2, SPLIT.shape)}
    save_split(folder / "split.zcr", {"rows": SPLIT, "columns": 255 - SPLIT, "plain": NARROW}, splits)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with serving(folder) as state:
        yield state


def opened(server: Server, name: str = "m.zcr") -> Any:
    record = zcrecord.load_record(f"{server.url}/{name}", cache=False)
    server.forget()
    return record


def load(record: Any, way: str, *arguments: Any, **options: Any) -> dict[str, Any]:
    loaded = load_into(record, TorchLoader("cpu", readers=3) if way == "torch" else way, *arguments, **options)
    return {name: np.asarray(value) for name, value in loaded.items()}


BOXES: dict[str, tuple[Any, int]] = {
    "rows": (np.s_[3:5], 2 * MIB),
    "long columns": (np.s_[:, :, 100_000:120_000], 12 * 4 * 20_000),
    "a block": (np.s_[2:9, 1:3, :], 7 * 512 * KIB),
    "a corner": (np.s_[2:4, :2, 1000:1010], 4 * 10),
    "one axis of a rank": (shard(1, 4, 1), 3 * MIB),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", LOADERS)
@pytest.mark.parametrize("case", BOXES)
def test_a_box_of_long_rows_brings_its_bytes_and_no_others(server: Server, case: str, way: str) -> None:
    record = opened(server)
    box, nbytes = BOXES[case]
    result = load(record, way, "wide", slices={"wide": box}, max_in_flight=4 * MIB)["wide"]
    assert np.array_equal(result, WIDE[:, 1:2] if callable(box) else WIDE[box])
    assert server.sent == nbytes
    assert len(server.requests) <= 60


@pytest.mark.parametrize("way", LOADERS)
def test_a_box_of_short_rows_is_a_few_requests_and_never_more_than_its_payload(server: Server, way: str) -> None:
    record = opened(server)
    result = load(record, way, "narrow", slices={"narrow": np.s_[100:300, 3:9]})
    assert np.array_equal(result["narrow"], NARROW[100:300, 3:9])
    assert server.sent == 199 * KIB + 6, "from its first byte to its last"
    assert len(server.requests) == 1
    for most in (300_000, 64 * MIB):
        record = opened(server)
        result = load(record, way, "narrow", slices={"narrow": np.s_[:, 3:9]}, max_in_flight=most)["narrow"]
        assert np.array_equal(result, NARROW[:, 3:9])
        assert server.sent == NARROW.nbytes, "the whole payload, which is then checked"


def test_gaps_that_are_fetched_with_the_rows_are_those_of_other_requests() -> None:
    assert NEAR == 64 * KIB, "the guide names it"


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", LOADERS)
def test_boxes_of_several_tensors_share_requests(server: Server, way: str) -> None:
    record = opened(server)
    result = load(record, way, ["narrow", "other"], slices={"narrow": np.s_[1000:], "other": np.s_[:20]})
    assert np.array_equal(result["narrow"], NARROW[1000:]) and np.array_equal(result["other"], NARROW[:20, :100])
    assert len(server.requests) == 1


def test_the_plan_tells_what_no_digest_covers(server: Server, folder: Path) -> None:
    record = opened(server)
    slices: Any = {"wide": np.s_[:, :1], "narrow": np.s_[:, :9], "other": slice(0, 5)}
    assert plan_load(record).unchecked == ()
    plan = plan_load(record, slices=slices)
    assert plan.unchecked == ("wide", "other"), "of narrow all comes, and is checked"
    assert {ref.name: ref.checked for ref in plan.refs} == {"wide": False, "narrow": True, "other": False}
    assert plan_load(zcrecord.load_record(folder / "m.zcr")).unchecked == ("wide", "narrow", "other"), "no load checks"
    assert not server.requests


def test_a_load_of_unchecked_bytes_says_so(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    record = opened(server)
    with caplog.at_level(logging.INFO, "zcrecord"):
        load(record, "host", ["narrow"], slices={"narrow": slice(5)})
        load(record, "host", ["narrow"])
        load(record, "cpu", ["narrow", "wide"], slices={"wide": np.s_[:, :, :5], "narrow": slice(5)})
    messages = [entry.getMessage() for entry in caplog.records]
    assert [message.split(": ", 1)[1] for message in messages] == [
        "no digest covers parts of payloads: 1 tensor is loaded unchecked, 'narrow'",
        "no digest covers parts of payloads: 2 tensors are loaded unchecked, the first of them 'wide'",
    ]
    assert all(message.startswith(server.url) for message in messages)


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", LOADERS)
def test_damage_is_found_where_a_box_brings_all_of_its_payload(tmp_path: Path, folder: Path, way: str) -> None:
    data = bytearray((folder / "m.zcr").read_bytes())
    for name in ("narrow", "wide"):
        info = zcrecord.load_record(folder / "m.zcr").info(name)
        data[info.offset + info.nbytes - 1] ^= 1
    (tmp_path / "m.zcr").write_bytes(data)
    with serving(tmp_path) as server:
        record = opened(server)
        assert load(record, way, ["wide"], slices={"wide": np.s_[:, :2]})["wide"].shape == (12, 2, 256 * KIB)
        with pytest.raises(IntegrityError, match=r"m\.zcr: tensor 'narrow': payload .* its digest does not match"):
            load(opened(server), way, ["narrow"], slices={"narrow": np.s_[:, :5]})


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", LOADERS)
def test_a_box_of_a_split_tensor_reads_the_pieces_that_it_meets(server: Server, way: str) -> None:
    record = opened(server, "split.zcr")
    server.forget()
    result = load(record, way, ["rows"], slices={"rows": np.s_[1:3, 1000:2000]})["rows"]
    assert np.array_equal(result, SPLIT[1:3, 1000:2000])
    fetched = {request.path for request in server.requests}
    assert fetched == {"/split-00001-of-00003.zcr"}
    index = 70 * KIB  # what comes when a shard is opened
    assert server.sent < index + 2000
    server.forget()
    result = load(record, way, ["columns"], slices={"columns": np.s_[:, 130_000:131_100]})["columns"]
    assert np.array_equal(result, 255 - SPLIT[:, 130_000:131_100])
    assert server.sent < 2 * index + 8 * 1100


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", LOADERS)
def test_pieces_that_are_met_whole_are_checked(folder: Path, tmp_path: Path, way: str) -> None:
    for file in folder.glob("split*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard_path = tmp_path / "split-00001-of-00003.zcr"
    r.damage(shard_path, "piece0")
    with serving(tmp_path) as server:
        assert load(opened(server, "split.zcr"), way, ["rows"], slices={"rows": np.s_[:3]})["rows"].shape[0] == 3
        with pytest.raises(IntegrityError, match="its digest does not match"):
            load(opened(server, "split.zcr"), way, ["rows"], slices={"rows": np.s_[:6]})
        with pytest.raises(IntegrityError, match="its digest does not match"):
            load(opened(server, "split.zcr"), way, ["rows"])


@pytest.mark.parametrize("way", ["host", "read", "torch"])
def test_an_end_that_is_not_read_is_fetched_for_the_digest_and_nothing_twice(tmp_path: Path, way: str) -> None:
    value = np.random.default_rng(4).integers(0, 255, (65, 1009), np.uint8)  # its end is a batch of its own
    zcrecord.save_record({"before": NARROW, "odd": value}, tmp_path / "m.zcr", durable=False)
    with serving(tmp_path) as server:
        record = opened(server)
        result = load(record, way, "odd", slices={"odd": np.s_[:, 3:9]}, max_in_flight=100_000)["odd"]
        assert np.array_equal(result, value[:, 3:9])
        assert server.sent == value.nbytes


def test_a_shard_s_name_leads_to_no_other_folder_of_the_server(tmp_path: Path) -> None:
    """A percent sign in a name is escaped: a server takes `%2f` for a slash."""
    name = "a%2e%2e%2fb #1"
    save_split(tmp_path / f"{name}.zcr", {"x": NARROW}, {"x": boxes_along(0, 2, NARROW.shape)})
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/{quote(name)}.zcr", cache=False)
        assert np.array_equal(record["x"], NARROW)
