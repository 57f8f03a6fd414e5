"""Filling a hollow record takes, besides the memory to fill, one payload; with chunks into a sink, one chunk.

2 GiB of weights of a file of holes are filled in processes of their own, and their peak of resident memory is compared:
their tensors are made or read, not mapped, so that all of it is their own. Each proves that it would notice.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
from attacks import tricks

import zcrecord
from tools.bench.sparse import COUNT, write_holes
from tools.measure import begin_peak, peak_rss
from zcrecord import LimitError, SourceError
from zcrecord.hollow import hollow_of
from zcrecord.hollow.hollow_record import _fan_out

MIB = 1 << 20
LARGE = 2048 * MIB
PAYLOAD = LARGE // COUNT + 8
SMALL = 256 * MIB
LITTLE = 6 * MIB

MEASURED = """
import json, sys
import numpy as np
import zcrecord
from tools.measure import memory, peak_rss
from zcrecord.hollow import hollow_of

class Device:
    '''Counts the bytes that it is given, and keeps as many as `keeps` says.'''
    taken, kept, keeps = 0, [], 0
    def write(self, chunk):
        Device.taken += len(chunk)
        if Device.taken <= Device.keeps:
            Device.kept.append(bytes(chunk))

def arrays(hollow):
    return ((i.name, np.full(i.shape, 1, i.dtype.numpy)) for i in hollow.infos())

def chunks(hollow):
    piece = bytes(1 << 16)
    for i in hollow.infos():
        whole, rest = divmod(i.nbytes, len(piece))
        yield i.name, (piece if k < whole else piece[:rest] for k in range(whole + 1))

def device(name, info):
    return Device()

def act(path, first):
{act}

act(sys.argv[2], True)  # imports what is imported on the way, of a record that is small
before = peak_rss()
result = act(sys.argv[1], False)
print(json.dumps({{'grown': peak_rss() - before, 'taken': Device.taken, 'state': result}}))
"""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Files of holes by the bytes of their tensors."""
    folder = tmp_path_factory.mktemp("holes")
    for nbytes in (LARGE, SMALL, MIB):
        write_holes(folder / str(nbytes), nbytes)
    return {nbytes: folder / str(nbytes) for nbytes in (LARGE, SMALL, MIB)}


FILLS = {
    "file": "with open(path, 'rb') as file: hollow.stream(file)",
    "chunks": "hollow.stream(chunks(hollow))",
    "arrays": "hollow.stream(arrays(hollow))",
}


def measured(archives: dict[int, Path], fill: str, sink: str = "device", keeps: int = 0, nbytes: int = LARGE) -> Any:
    """Return how much more was resident at the most while a record was filled, and the bytes that the device got."""
    lines = (f"Device.keeps = 0 if first else {keeps}", f"hollow = hollow_of(path, sink={sink})", FILLS[fill])
    code = MEASURED.format(act="\n".join(f"    {line}" for line in (*lines, "hollow.seal()", "return hollow.state")))
    return json.loads(r.run_python(code, archives[nbytes], archives[MIB]).stdout)


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("[arrays]",))
@pytest.mark.parametrize("fill", FILLS)
def test_two_gibibytes_pass_to_a_device_in_the_memory_of_a_chunk_or_one_payload(
    fill: str, archives: dict[int, Path]
) -> None:
    found = measured(archives, fill)
    assert found["taken"] > LARGE
    assert found["state"] == "sealed"
    assert found["grown"] < LITTLE + (PAYLOAD if fill == "arrays" else 0)
    assert fill != "arrays" or found["grown"] > PAYLOAD // 2


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("[file]",))
@pytest.mark.parametrize("fill", ["file", "chunks"])
def test_one_payload_that_stays_in_memory_would_be_noticed(fill: str, archives: dict[int, Path]) -> None:
    assert measured(archives, fill, keeps=PAYLOAD + MIB)["grown"] > PAYLOAD - MIB > LITTLE


@pytest.mark.measured
@pytest.mark.parametrize("fill", FILLS)
def test_memory_of_its_own_is_filled_in_place_and_sealing_adds_nothing(fill: str, archives: dict[int, Path]) -> None:
    found = measured(archives, fill, "None", nbytes=SMALL)
    besides = SMALL // COUNT + 8 if fill == "arrays" else 0
    assert SMALL - LITTLE < found["grown"] < SMALL + besides + LITTLE


@pytest.mark.measured
def test_declaring_takes_no_memory_for_weights(archives: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILLS, "nothing", "return hollow.state")
    assert measured(archives, "nothing", "None")["grown"] < LITTLE


def test_bytes_that_many_payloads_share_are_not_taken_for_each(tmp_path: Path) -> None:
    """A MiB that 2,000 payloads name would be 2 GiB as bytes, and 2 GiB of memory to fill."""
    forged = tricks.attributes(2000, {"n": bytes(MIB)})
    forged.columns["payloads"] = np.repeat(forged.columns["payloads"], 2000)
    forged.columns["attributes"]["value"] = np.arange(2000)
    (tmp_path / "m.zcr").write_bytes(forged.seal())
    with pytest.raises(LimitError, match=r"m\.zcr: tensors that share their bytes would take 2\.1e\+09 bytes"):
        hollow_of(zcrecord.load_record(tmp_path / "m.zcr"))
    saved = r.saved({f"w{i}": np.zeros(MIB, np.uint8) for i in range(20)})
    assert len(hollow_of(saved)) == 20


def test_views_of_the_same_bytes_are_not_handed_to_a_sink_without_end() -> None:
    w = np.zeros(MIB, np.uint8)
    saved = r.saved({f"w{i}": w[i:] for i in range(1200)})
    with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
        hollow_of(saved, sink=lambda *_: bytearray())
    assert hollow_of(saved).state == "declared"  # in memory they are views of a MiB


@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells the peak from now on")
def test_memory_of_a_strided_payload_is_taken_as_its_chunks_come() -> None:
    def breaks_off() -> Iterator[memoryview]:
        yield memoryview(bytes(MIB))
        raise SourceError("broke off")

    strided: Any = SimpleNamespace(constant=SimpleNamespace(info=SimpleNamespace(strides=(1, 2))))
    claimed = 192 * MIB
    before = begin_peak()
    with pytest.raises(SourceError, match="broke off"):
        _fan_out([strided], breaks_off(), claimed)
    assert (peak_rss() or 0) - before < claimed // 3
    assert bytearray(claimed) and (peak_rss() or 0) - before > claimed // 2, "the measurement notices"
