"""A checkpoint's pickle makes plain values alone: no other opcode, name, call or state does anything."""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zcrecord
from zcrecord import FormatError, LimitError, RecordError
from zcrecord.foreign import pickled
from zcrecord.foreign.pickled import Function, unpickle
from zcrecord.foreign.torch_types import TorchNames, TorchTensor
from zcrecord.formats import convert

MIB = 1 << 20


def run(data: bytes) -> Any:
    """Return the value in the pickle of a checkpoint that has no storages."""
    names = TorchNames(len(data), lambda *_: None)
    return unpickle(data, 0, names.find_class, names.persistent_load)[0]


def text(value: bytes) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value


def call(function: bytes, arguments: bytes) -> bytes:
    """A pickle that calls a function with what these opcodes leave as a tuple."""
    module, _, name = function.rpartition(b".")
    return b"\x80\x02c" + module + b"\n" + name + b"\n" + arguments + b"R."


HUGE = b"\x8a\x05" + (3 << 30).to_bytes(5, "little")
ORDERED = collections.OrderedDict(a=1)
MADE: dict[str, tuple[bytes, Any]] = {
    "bytes": (call(b"_codecs.encode", text("é".encode()) + text(b"latin1") + b"\x86"), b"\xe9"),
    "no bytes": (call(b"__builtin__.bytes", b")"), b""),
    "a bytearray": (call(b"builtins.bytearray", text(b"ab") + text(b"latin-1") + b"\x86"), b"ab"),
    "zeros": (call(b"builtins.bytearray", b"K\3\x85"), bytes(3)),
    "a shape": (call(b"torch.Size", b"K\2K\3\x86\x85"), (2, 3)),
    "a complex number": (call(b"builtins.complex", b"G" + bytes(8) + b"G" + bytes(8) + b"\x86"), 0j),
    "a count": (call(b"collections.Counter", b"}" + text(b"a") + b"K\2s\x85"), {"a": 2}),
    "a dict of Python 2": (call(b"collections.OrderedDict", b"](](" + text(b"a") + b"K\1ee\x85"), ORDERED),
    "text of Python 2": (b"\x80\x02U\2ab.", "ab"),
    "a dict with a state": (b"\x80\x02}}" + text(b"items") + b"K\1sb.", {}),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_calls_that_torch_writes_make_plain_values(kind: str) -> None:
    data, value = MADE[kind]
    assert run(data) == value and type(run(data)) is type(value)


TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n"
FLOATS = b"(" + text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\4tQ"


def tensor(
    offset: bytes = b"K\0", size: bytes = b"K\4\x85", stride: bytes = b"K\1\x85", storage: bytes = FLOATS
) -> bytes:
    return b"\x80\x02" + TENSOR + b"(" + storage + offset + size + stride + b"\x89NtR."


WIDE = b"\x8a\x09" + (1 << 64).to_bytes(9, "little")
REFUSED: dict[str, bytes] = {
    "a command": b"\x80\x02cposix\nsystem\n" + text(b"true") + b"\x85R.",
    "a name with dots": b"\x80\x02ctorch\nSize.__class__\n.",
    "a module that a name walks into": b"\x80\x02ctorch._utils\nos\n.",
    "a builtin": b"\x80\x02c__builtin__\neval\n" + text(b"1") + b"\x85R.",
    "an extension": b"\x80\x02\x82\x01.",
    "an instance": b"\x80\x02(ctorch\nSize\no.",
    "INST": b"\x80\x02(itorch\nSize\n.",
    "NEWOBJ of no function": b"\x80\x02K\1)\x81.",
    "NEWOBJ_EX with keywords": b"\x80\x04ctorch\nSize\n)}\x92.",
    "STACK_GLOBAL": b"\x80\x04" + text(b"posix") + text(b"system") + b"\x93.",
    "a persistent number": b"\x80\x02K\1Q.",
    "a persistent tuple of tuples": b"\x80\x02)\x85\x85\x85Q.",
    "a persistent text": b"\x80\x02Pstorage\n.",
    "a storage whose class is a number": b"\x80\x02(" + text(b"storage") + b"K\1" + text(b"0") + b"NK\4tQ.",
    "a storage of -1": b"\x80\x02" + FLOATS.replace(b"K\4tQ", b"J\xff\xff\xff\xfftQ") + b".",
    "state of a function": b"\x80\x02ctorch\nSize\n}" + text(b"call") + b"K\1sb.",
    "slots of a function": b"\x80\x02ctorch\nSize\nN}" + text(b"call") + b"K\1s\x86b.",
    "state of a tensor": tensor()[:-1] + b"N}" + text(b"offset") + b"K\1s\x86b.",
    "state of a dtype": b"\x80\x02ctorch\nfloat32\n}" + text(b"kind") + b"K\1sb.",
    "a call of a value": b"\x80\x02ctorch\nfloat32\n)R.",
    "a call with a list": b"\x80\x02ctorch\nSize\n]R.",
    "items of a tuple": b"\x80\x02)K\1a.",
    "items of bytes": MADE["bytes"][0][:-1] + b"K\1a.",
    "a key of a list": b"\x80\x02]K\0K\1s.",
    "half an item": b"\x80\x02}(K\1u.",
    "a list as a key": b"\x80\x02}]K\1s.",
    "nothing remembered": b"\x80\x02h\0.",
    "nothing on the stack": b"\x80\x02\x87.",
    "a text that is too long": b"\x80\x02X\xff\xff\xff\xffa.",
    "no end": b"\x80\x02K\1",
    "a codec that makes much": call(b"_codecs.encode", text(b"a") + text(b"rot13") + b"\x86"),
    "a set of keywords": call(b"collections.OrderedDict", text(b"ab") + b"\x85"),
    "a device with a path": call(b"torch.device", text(b"../x") + b"\x85"),
    "a negative offset": tensor(offset=b"J\xff\xff\xff\xff"),
    "a negative size": tensor(size=b"J\xff\xff\xff\xff\x85"),
    "a negative stride": tensor(offset=b"K\3", stride=b"J\xff\xff\xff\xff\x85"),
    "an offset that is true": tensor(offset=b"\x88"),
    "an end behind the storage": tensor(offset=b"K\1"),
    "a stride that overflows": tensor(size=b"K\2\x85", stride=WIDE + b"\x85"),
    "sizes that overflow": tensor(size=WIDE + b"K\0\x86", stride=b"K\1K\1\x86"),
    "more strides than sizes": tensor(stride=b"K\1K\1\x86"),
    "no storage": tensor(storage=b"K\1"),
    "a parameter of text": call(b"torch._utils._rebuild_parameter", text(b"a") + b"\x88N\x87"),
    "a type by a function of another kind": call(
        b"torch._tensor._rebuild_from_type_v2", b"(ctorch\nSize\nN)Nt"
    ),
    "a type by itself": call(
        b"torch._tensor._rebuild_from_type_v2", b"(ctorch._tensor\n_rebuild_from_type_v2\nN)Nt"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_whatever_torch_does_not_write_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises((FormatError, ValueError, LookupError, TypeError, EOFError)):
        run(REFUSED[kind])
    with zipfile.ZipFile(tmp_path / "m.pt", "w") as file:
        for name, data in (("data.pkl", REFUSED[kind]), ("version", b"3\n"), ("data/0", bytes(16))):
            file.writestr(f"m/{name}", data)
    with pytest.raises(FormatError, match=r"m\.pt: (no torch checkpoint, or a damaged one: |holds an object of )"):
        zcrecord.load_record(tmp_path / "m.pt")


def test_each_opcode_is_taken_or_refused_whatever_lies_on_the_stack() -> None:
    """No opcode raises anything that the reader of checkpoints does not turn into its error, and none gives objects."""
    plain = (int, float, str, bytes, tuple, list, dict, bool, complex, type(None), Function)
    for before in (b"", b"(", b"]", b"}", b")", b"K\1", b"](K\1", b"}(K\1K\2", b"ctorch\nSize\n)"):
        for code in range(256):
            try:
                value = run(b"\x80\x02" + before + bytes([code]) + bytes(8) + b"...")
            except (RecordError, ValueError, LookupError, TypeError, EOFError, AttributeError):
                continue
            except Exception as error:  # struct.error has no public base
                assert type(error).__name__ == "error", (before, code, error)
                continue
            assert isinstance(value, plain), (before, code, value)


ASKED = {
    "a number of bytes": call(b"builtins.bytearray", HUGE + b"\x85"),
    "a text as bytes, again and again": b"\x80\x02" + text(b"a" * MIB) + b"q\0]("
    + (b"c_codecs\nencode\nh\0" + text(b"latin1") + b"\x86R") * 100 + b"e.",
    "a dict of Python 2, again and again": b"\x80\x02](]q\1(" + (b"](" + text(b"a") + b"K\1e") * 1000 + b"e"
    + b"ccollections\nOrderedDict\nh\1\x85R" * 2000 + b"e.",
}  # fmt: skip


@pytest.mark.parametrize("kind", ASKED)
def test_what_calls_make_is_bounded_by_the_file(kind: str) -> None:
    with pytest.raises(LimitError, match=r"its pickle asks for \d+ bytes, the file has \d+; the file is malicious"):
        run(ASKED[kind])


def honest() -> dict[str, Any]:
    """A state of training, with each kind of value that torch pickles by a call."""
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(40)])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    tagged = torch.ones(2)
    tagged.tag = "with an attribute"
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state(),
        "bytes": b"abc" * 10_000, "more": bytearray(10_000), "shape": torch.Size((4096, 4096)), "complex": 1j,
        "count": collections.Counter("hello"), "device": torch.device("cuda", 1), "float": torch.float16,
        "parameter": torch.nn.Parameter(torch.ones(3)), "buffer": torch.nn.Buffer(torch.ones(1)), "tagged": tagged,
    }  # fmt: skip


@pytest.mark.parametrize("zipped", [True, False])
def test_what_training_saves_comes_as_torch_loads_it(zipped: bool, tmp_path: Path) -> None:
    torch.save(honest(), tmp_path / "m.pt", _use_new_zipfile_serialization=zipped)
    loaded = torch.load(tmp_path / "m.pt")
    zcrecord.save_record(loaded | {"more": bytes(loaded["more"])}, tmp_path / "own.zcr")
    convert(tmp_path / "m.pt", tmp_path / "m.zcr")
    own, record = zcrecord.load_record(tmp_path / "own.zcr"), zcrecord.load_record(tmp_path / "m.zcr")
    assert record.content_digest() == own.content_digest() and record["tagged"].tolist() == [1, 1]


def test_the_opcodes_that_torch_saves_are_taken(tmp_path: Path) -> None:
    out = io.BytesIO()
    torch.save(honest() | {"set": {1}, "w": 1 << 100, "n": -1, "t": (1, 2, 3, 4), "l": [1.5] * 3}, out)
    with zipfile.ZipFile(out) as opened:
        data = opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))
    found = {code.name for code, _, _ in pickletools.genops(data)}
    assert found > {"BINPERSID", "LONG1", "REDUCE", "BUILD", "TUPLE3", "APPENDS", "LONG_BINPUT"}
    assert set(run(data)) > set(honest())


def described(data: bytes) -> object:
    """Return the description of each tensor in a pickle; the class of the error for another."""
    try:
        found = run(data)
        return [(name, t.dtype, t.offset, t.shape, t.strides, t.storage.nbytes) for name, t in found.items()]
    except (RecordError, ValueError, LookupError, TypeError, EOFError, AttributeError) as error:
        return type(error)


def test_a_tensor_run_at_once_is_as_by_its_opcodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds if a byte is changed. It begins behind 256 values: numbers in the memo take four bytes."""
    out, shapes = io.BytesIO(), [(), (1,), (2, 300), (1, 2, 3), (1, 2, 1, 2, 70_000)]
    saved = {f"w{i}": torch.zeros(()).expand(shapes[i % 5]) for i in range(40)}
    torch.save(saved | {"tied": saved["w36"]}, out)
    with zipfile.ZipFile(out) as opened:
        data = opened.read(next(name for name in opened.namelist() if name.endswith("data.pkl")))
    start = data.index(b"w35")
    assert pickled._TENSOR(data, data.index(b"((", start) + 1), "a scalar is run at once, too"
    changed = [data[:i] + bytes([data[i] ^ bits]) + data[i + 1 :] for i in range(start, len(data)) for bits in (1, 255)]
    at_once = [described(each) for each in (data, *changed)]
    assert len(at_once[0]) == 41 and isinstance(run(data)["tied"], TorchTensor)  # type: ignore[arg-type]
    monkeypatch.setattr(pickled, "_TENSOR", re.compile(b"(?!)").match)
    assert [described(each) for each in (data, *changed)] == at_once


@pytest.mark.slow
def test_many_bytes_of_a_file_that_has_as_many_come_over(tmp_path: Path) -> None:
    """The bound is for what is made of little."""
    torch.save({"large": bytes(96 * MIB), "w": torch.ones(1)}, tmp_path / "m.pt")
    convert(tmp_path / "m.pt", tmp_path / "m.zcr", durable=False)
    assert len(zcrecord.load_record(tmp_path / "m.zcr").attributes["large"]) == 96 * MIB


def test_a_pickle_by_python_alone_is_read_as_far_as_torch_writes_such(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "é", (1, (2, 3))], "n": -(1 << 40), "b": {0: {}}}
    assert run(pickle.dumps(value, 2)) == value
    with pytest.raises(ValueError, match="Unsupported operand 149"):
        run(pickle.dumps(value, 4))
