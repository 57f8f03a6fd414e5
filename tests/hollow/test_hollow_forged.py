"""Hollow records take no other weights than those of the record they are of, whatever is tried."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collisions import colliding
from forge import Forge
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.range_server import serving
from zcrecord.errors import IntegrityError, RecordError
from zcrecord.hollow import hollow_of

W, V = np.arange(400.0), np.arange(400.0) * 2
OTHERS = np.full(400, 666.0).tobytes()
WRONG = "a payload's digest does not match"
SINKS: dict[str, Any] = {"memory": None, "sink": lambda _name, info: bytearray(info.nbytes)}
sinks = pytest.mark.parametrize("sink", SINKS)
devices = pytest.mark.parametrize("device", ["host", "read"])


def forged(data: bytes, evil: bytes) -> bytes:
    """Return an archive with other weights than W."""
    assert data.count(W.tobytes()) == 1
    return data.replace(W.tobytes(), evil)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", ["record", "part", "pickled", "pickled record"])
def test_hollow_record_of_a_checked_catalogue_takes_no_weights_of_the_same_64_bits(
    how: str, split: bool, tmp_path: Path
) -> None:
    whole, path = tmp_path / "whole.zcr", tmp_path / "m.zcr"
    tree = {"a": {"w": W.reshape(20, 20)}, "b": {"v": V}}
    zcrecord.save_record(tree, whole, durable=False, digest="none" if split else "xxh3")
    if split:
        save_split(path, tree, {"a.w": boxes_along(1, 3, (20, 20))})
    else:
        zcrecord.save_record(tree, path, max_shard_size=3300, durable=False)
    genuine = whole.read_bytes()
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/m.zcr", expect=zcrecord.load_record(whole).content_digest())
        assert record.archive.source.file_names
        source = pickle.loads(pickle.dumps(record)) if how == "pickled record" else record
        hollow = hollow_of(source.select("a.*") if how == "part" else source)
        if how == "pickled":
            hollow = pickle.loads(pickle.dumps(hollow))
        with pytest.raises(IntegrityError, match=WRONG):
            hollow.stream(io.BytesIO(forged(genuine, colliding(W.tobytes(), OTHERS))))
        assert "a.w" in hollow.missing()
        hollow.stream(io.BytesIO(genuine))
        assert hollow.seal()["a.w"].tobytes() == W.tobytes()


def views(base_strides: list[int] | None = None) -> bytes:
    """Return an archive of two halves of a payload, and of a whole that is saved with strides or without."""
    x = W.reshape(20, 20)
    out = io.BytesIO()
    zcrecord.save_record({"l": x[:, :10], "base": x, "r": x[:, 10:]}, out)
    if base_strides is None:
        return out.getvalue()
    forge = Forge(out.getvalue())
    forge.set("tensors", "base", dims=forge.add("dims", [20, 10]), strides=forge.add("strides", base_strides))
    return bytes(forge.seal())


@sinks
@devices
@pytest.mark.parametrize("names", [["l", "r"], ["l"], ["l", "base"]])
@pytest.mark.parametrize("strides", [None, [20, 1]])
def test_parts_of_payloads_are_compared_with_the_digest_of_the_whole(
    strides: list[int] | None, names: list[str], device: str, sink: str, tmp_path: Path
) -> None:
    genuine = views(strides)
    (tmp_path / "evil.zcr").write_bytes(forged(genuine, OTHERS))
    part = zcrecord.load_record(genuine).select(names)
    hollow = hollow_of(part, sink=SINKS[sink])
    for source in (forged(genuine, OTHERS), tmp_path / "evil.zcr"):
        with pytest.raises(IntegrityError, match=f"tensor '(l|base)': {WRONG}"):
            hollow.fill_by(device, source)
        assert hollow.missing() == list(part)
    seen: list[tuple[int, int | None]] = []
    with pytest.raises(RecordError, match="cancelled after"):
        hollow.fill_by(device, genuine, cancel=lambda: True)
    hollow.fill_by(device, genuine, progress=lambda done, total: seen.append((done, total)))
    assert all(total == hollow.nbytes for _, total in seen) and seen[-1][0] >= W.nbytes // 2
    sealed = hollow.seal()
    for name, value in part.items():
        assert (sealed[name].tobytes() if sink == "memory" else bytes(sealed[name])) == value.tobytes()


def test_parts_of_a_checked_archive_behind_a_url_are_those_that_were_expected(tmp_path: Path) -> None:
    genuine = views([20, 1])
    (tmp_path / "m.zcr").write_bytes(genuine)
    evil = forged(genuine, colliding(W.tobytes(), OTHERS))
    with serving(tmp_path) as server:
        expected = zcrecord.load_record(genuine).content_digest()
        record = zcrecord.load_record(f"{server.url}/m.zcr", expect=expected, cache=False)
        hollow = pickle.loads(pickle.dumps(record.hollow()))
        (tmp_path / "m.zcr").write_bytes(evil)
        for source in (None, evil):
            with pytest.raises(IntegrityError, match="digest does not match"):
                hollow.fill_by("read", source)


@sinks
@devices
def test_split_tensor_is_filled_by_a_loader(device: str, sink: str, tmp_path: Path) -> None:
    tree = {"w": W.reshape(20, 20), "v": V}
    save_split(tmp_path / "m.zcr", tree, {"w": boxes_along(1, 3, (20, 20))})
    hollow = hollow_of(tmp_path / "m.zcr", sink=SINKS[sink])
    hollow.fill_by(device)
    sealed = hollow.seal()
    assert {name: bytes(sealed[name]) for name in sealed} == {name: value.tobytes() for name, value in tree.items()}
