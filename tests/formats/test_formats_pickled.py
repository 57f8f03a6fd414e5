"""Memory of the calls in a checkpoint's pickle is added up before torch runs them; honest ones stay below the bound."""

from __future__ import annotations

import collections
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zcrecord
from zcrecord import LimitError
from zcrecord.foreign.pickled import claimed
from zcrecord.formats import convert

MIB = 1 << 20


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


def call(function: bytes, arguments: bytes) -> bytes:
    """A pickle that calls a function with what these opcodes leave as a tuple."""
    module, _, name = function.rpartition(b".")
    return b"\x80\x02c" + module + b"\n" + name + b"\n" + arguments + b"R."


NUMBER = b"\x8a\x05" + (3 << 30).to_bytes(5, "little")
FEW = b"\x8a\x02\xe8\x03"  # 1,000
LIST = b"](" + b"K\1" * 1000 + b"e"
ASKED: dict[str, tuple[bytes, int]] = {
    "a number of bytes": (call(b"builtins.bytearray", NUMBER + b"\x85"), 3 << 30),
    "a text as bytes": (call(b"_codecs.encode", text(b"a" * 1000) + text(b"latin1") + b"\x86"), 1006),
    "a set of a list": (call(b"builtins.set", LIST + b"\x85"), 16_000),
    "a count of a list": (call(b"collections.Counter", LIST + b"\x85"), 16_000),
    "a tensor of a shape": (call(b"torch.FloatTensor", FEW + FEW + b"\x86"), 1_000_000),
    "a storage": (call(b"torch.FloatStorage", NUMBER + b"\x85"), 3 << 30),
    "a shape": (call(b"torch.Size", FEW + FEW + b"\x86\x85"), 32),
    "a list that grew after it was remembered": (
        b"\x80\x02cbuiltins\nset\n]q\0(" + b"K\1" * 1000 + b"e0h\0\x85R.", 16_000,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ASKED)
def test_what_a_call_makes_is_told_by_its_arguments(kind: str) -> None:
    pickle, nbytes = ASKED[kind]
    assert claimed(pickle) == claimed(io.BytesIO(pickle)) == nbytes


def honest() -> dict[str, Any]:
    """A state of training, with each kind of value that torch pickles by a call."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(40)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
        "bytes": b"abc" * 10_000, "more": bytearray(10_000), "set": set(range(5000)), "shape": torch.Size((4096, 4096)),
        "complex": 1j, "count": collections.Counter("hello"), "device": torch.device("cuda", 1),
        "sparse": torch.eye(50).to_sparse(), "parameter": torch.nn.Parameter(torch.ones(3)), "float": torch.float16,
    }  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_saves_asks_for_less_than_the_file_has(zipped: bool) -> None:
    out = io.BytesIO()
    torch.save(honest(), out, _use_new_zipfile_serialization=zipped)
    size = out.tell()
    out.seek(0)
    if zipped:
        with zipfile.ZipFile(out) as opened:
            pickles = [next(opened.read(name) for name in opened.namelist() if name.endswith("data.pkl"))]
        assert claimed(pickles[0]) < size
    else:
        assert sum(claimed(out) for _ in range(5)) < size


@pytest.mark.slow
def test_many_bytes_of_a_file_that_has_as_many_come_over(tmp_path: Path) -> None:
    """The bound is for what is made of little."""
    torch.save({"large": bytes(96 * MIB), "w": torch.ones(1)}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "m.zcr", durable=False)
    assert len(zcrecord.load_record(tmp_path / "m.zcr").attributes["large"]) == 96 * MIB


def test_a_claim_in_a_member_of_another_case_is_seen(tmp_path: Path) -> None:
    """torch finds data.pkl whatever the case of its name is."""
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        file.writestr("m/DATA.pkl", ASKED["a number of bytes"][0])
        file.writestr("m/version", b"3\n")
    with pytest.raises(LimitError, match=r"m\.pt: its pickle asks for 3221225472 bytes, the file has \d+; the file is"):
        convert(tmp_path / "m.pt", tmp_path / "m.zcr")
