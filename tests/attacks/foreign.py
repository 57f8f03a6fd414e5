"""Hostile files of other formats: safetensors, .npz, GGUF and checkpoints of torch.

Most faults of these formats are held, one by one, by `tests/test_formats_*.py`; here are the tricks that cost
something: bombs, claims, code that would run. The numpy and torch that are given some of them are shown as peers.
"""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exchange import array, described, file_of, npy, npz, tensor
from zip_tricks import two_directories

from attacks import catalogue
from attacks.catalogue import Attack, Door, file
from attacks.doors import command
from attacks.names import gguf, zipped
from attacks.onnx_files import converting, old_archive, peer
from attacks.peers import numpy_loaded, safe_opened
from zcrecord import LimitError, RecordError, UnsupportedError, formats
from zcrecord.cli.dispatch import main
from zcrecord.errors import FormatError

MIB = 1 << 20
TOUCHED = "evil"  # the file that a pickle makes in the folder it is loaded in, if it runs


def converted(path: Path) -> Callable[[], object]:
    """Convert by path over an old archive, which must stay where the file is refused; and nothing may have run."""
    dest, convert = old_archive(path), converting(path, formats.convert)

    def act() -> None:
        os.chdir(path.parent)
        convert()
        assert not Path(TOUCHED).exists(), "what is in the file was run"
        assert {*os.listdir(path.parent)} == {path.name, dest.name}, "something was written beside the archive"

    return act


DOORS: dict[str, Door] = {
    "convert": converted,
    "zcrecord convert": command(main, "convert", "--force", after=lambda path: [os.fspath(path.with_name("out.zcr"))]),
}


PEERS: dict[str, dict[str, Door]] = {
    "npz": {"numpy.load": peer(lambda path: numpy_loaded(path)())},
    "pt": {"torch.load": peer(lambda path: torch.load(path, weights_only=True))},
    "safetensors": {"safe_open": peer(lambda path: safe_opened(path)())},
}


HARMLESS = file(lambda: file_of({"w": tensor(0, 2)}, b"ab"), "m.safetensors")


def attack(
    name: str, suffix: str, data: Callable[[], bytes], message: str, error: type[RecordError] | None = FormatError
) -> Attack:
    made = file(data, f"m.{suffix}")
    return catalogue.attack(f"{suffix}: {name}", "", made, error, message, peers={suffix} & PEERS.keys())


def nested_names() -> list[str]:
    """Names of 99 parts, 32 KiB each, no two with a module in common."""
    return [".".join([f"{i:04}{'a' * 320}"] * 99) for i in range(40)]


class Evil:
    """A pickle that unpickles to a call."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {TOUCHED}",)


def checkpoint(data: bytes, *, deflate: bool = False, storage: bytes = b"") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if deflate else zipfile.ZIP_STORED) as opened:
        for name, member in (("m/data.pkl", data), ("m/version", b"3\n"), ("m/data/0", storage)):
            opened.writestr(name, member)
    return out.getvalue()


def stored(
    *, offset: bytes = b"K\0", sizes: bytes = b"K\4\x85", strides: bytes = b"K\1\x85", count: bytes = b"K\4"
) -> bytes:
    """A checkpoint of one tensor, with one value of it forged; its storage has 16 bytes."""
    storage = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000N" + count + b"tQ"
    made = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + sizes + strides + b"\x89NtR"
    return checkpoint(b"\x80\x02}X\1\0\0\0w" + made + b"s.", storage=bytes(16))


def keyed(key: bytes) -> bytes:
    return checkpoint(b"\x80\x02}" + key + b"K\1s.")


def encoding() -> bytes:
    """A pickle that has torch make 1 GiB of 1 MiB: a text, encoded again and again."""
    text = b"X" + MIB.to_bytes(4, "little") + b"a" * MIB + b"q\1" + b"X\6\0\0\0latin1q\2"
    return b"\x80\x02" + text + b"c_codecs\nencode\nq\3]q\4(" + b"h\3h\1h\2\x86R" * 1024 + b"e."


def bare_claim() -> bytes:
    """A checkpoint from before zip files whose system information is of 3 GiB."""
    out = io.BytesIO()
    torch.save({"n": 1}, out, _use_new_zipfile_serialization=False)
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    assert out.getvalue().startswith(magic)
    return magic + b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\0\0\0\xc0\0\x85R."


def hidden_zeros() -> bytes:
    """A checkpoint of 96 MiB of zeros behind its pickle: deflated in torch's eyes, stored in zipfile's."""
    return two_directories(checkpoint(pickle.dumps({"n": 1}, 2) + bytes(96 * MIB), deflate=True))


def laughing() -> bytes:
    """A pickle of 100 lists, each of which has the one before ten times."""
    found: list[Any] = ["ha"]
    for _ in range(90):
        found = [found] * 10
    return pickle.dumps({"laughs": found}, 2)


def deflated(nbytes: int, header: str) -> bytes:
    out = io.BytesIO()
    with (
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as opened,
        opened.open("w.npy", "w") as member,
    ):
        member.write(npy(header))
        for _ in range(nbytes // MIB):
            member.write(bytes(MIB))
    return out.getvalue()


def lying_directory() -> bytes:
    data = bytearray(array())
    at = data.rindex(b"PK\x05\x06")
    data[at + 8 : at + 16] = b"\xff\xff\xff\xff\xf0\xff\xff\xff"
    return bytes(data)


def overlapping() -> bytes:
    data = zipped([("w.npy", npy(described("'|u1'", f"({MIB},)"), bytes(MIB)))])
    at = data.index(b"PK\x01\x02")
    end = data.rindex(b"PK\x05\x06")
    entry = data[at:end]
    entries = b"".join(entry.replace(b"w.npy", b"%05d" % i) for i in range(1000))
    tail = bytearray(data[end:])
    tail[8:12] = (1000).to_bytes(2, "little") * 2
    tail[12:16] = len(entries).to_bytes(4, "little")
    return data[:at] + entries + bytes(tail)


def slipping() -> bytes:
    """An .npz file whose members would be written outside, if anything wrote them."""
    member = npy(described(), b"ab")
    return npz(("../../evil.npy", member), ("/etc/evil.npy", member), ("C:\\evil.npy", member))


ATTACKS = (
    attack("a header of 2^63 bytes", "safetensors", lambda: file_of("{}", length=2**63), "header would have|past the"),
    attack("brackets a million deep", "safetensors", lambda: file_of('{"w":' + "[" * MIB), "expected '{', got '\\['"),
    attack("objects a million deep", "safetensors", lambda: file_of('{"w":' * (MIB // 5)), "is unknown, or there"),
    attack("a name twice", "safetensors",
           lambda: file_of('{"w":%s,"w":%s}' % ((str(tensor(0, 1)).replace("'", '"'),) * 2), b"\0"), "there twice"),
    attack("names of 99 parts", "safetensors",
           lambda: file_of({name: tensor(i, i + 1) for i, name in enumerate(nested_names())}, bytes(40)),
           "names of modules would take more than", LimitError),
    attack("names of 99 parts", "gguf", lambda: gguf(nested_names()), "names of modules would take more", LimitError),
    attack("2^60 metadata entries", "gguf", lambda: b"GGUF\3\0\0\0" + bytes(8) + (2**60).to_bytes(8, "little"),
           "metadata entries are claimed"),
    attack("lists within lists", "gguf",
           lambda: b"GGUF\3\0\0\0" + bytes(8) + (1).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"k"
           + (b"\x09\0\0\0" + b"\x09\0\0\0" + (1).to_bytes(8, "little")) * 9, "lists within a list", UnsupportedError),
    attack("64 MiB of zeros where 2 bytes are due", "npz", lambda: deflated(64 * MIB, described()), "takes 2 bytes"),
    attack("strings of 64 MiB of zeros", "npz", lambda: deflated(64 * MIB, described("'<U1'", f"({16 * MIB},)")),
           "strings take much more memory than the file", LimitError),
    attack("a directory of 4 GiB", "npz", lying_directory, "should end at"),
    attack("a thousand members that are one", "npz", overlapping, "damaged|overlap|missing|differ|there twice"),
    attack("paths for names", "npz", slipping, "", None),
    attack("a pickle that runs", "npz", lambda: npz(("w.npy", npy(described("'|O'", "(1,)"), pickle.dumps([Evil()])))),
           "an array of objects is a pickle, which may run anything", UnsupportedError),
    attack("a pickle that runs", "pt", lambda: checkpoint(pickle.dumps({"w": Evil()}, 2)),
           "holds an object of .*system, and loading that may run code"),
    attack("a bare pickle that runs", "pt", lambda: pickle.dumps({"w": Evil()}, 2), "may run code|no torch checkpoint"),
    attack("lists that stand for 10^90 items", "pt", lambda: checkpoint(laughing()), "of times|deep", LimitError),
    attack("a pickle that asks for 3 GiB", "pt",
           lambda: checkpoint(b"\x80\x02}X\1\0\0\0bcbuiltins\nbytearray\n\x8a\x05\0\0\0\xc0\0\x85Rs."),
           "its pickle asks for 3221225472 bytes", LimitError),
    attack("a pickle that encodes a text 1,000 times", "pt", lambda: checkpoint(encoding()),
           "its pickle asks for .* bytes", LimitError),
    attack("a bare pickle that asks for 3 GiB", "pt", bare_claim, "its pickle asks for .* bytes", LimitError),
    attack("a tensor behind its storage", "pt", lambda: stored(offset=b"K\1"), "a tensor ends behind its storage"),
    attack("a storage behind its member", "pt", lambda: stored(count=b"M\xff\xff"), "has 16 bytes, not those"),
    attack("a negative offset", "pt", lambda: stored(offset=b"J\xff\xff\xff\xff"), "or below 0"),
    attack("negative strides", "pt", lambda: stored(offset=b"K\3", strides=b"J\xff\xff\xff\xff\x85"), "or below 0"),
    attack("a stride of 2^64", "pt", lambda: stored(sizes=b"K\2\x85", strides=b"\x8a\x09" + bytes(8) + b"\1\x85"),
           "a tensor ends behind its storage"),
    attack("2^62 elements in 16 bytes", "pt",
           lambda: stored(sizes=b"\x8a\x08" + bytes(7) + b"\x40\x85", strides=b"K\0\x85"),
           "its tensors claim 18446744073709551616 bytes", LimitError),
    attack("a key of tuples, doubled 60 times", "pt", lambda: keyed(b")q\0" + b"h\0h\0\x86q\0" * 60),
           "a tuple of more than 16 items", UnsupportedError),
    attack("a key of tuples, 1,000,000 deep", "pt", lambda: keyed(b")" + b"\x85" * 10**6),
           "a tuple of more than 16 items", UnsupportedError),
    attack("a memo of 32 GiB", "pt", lambda: keyed(b"K\1r\xff\xff\xff\x7f"), "", None),
    attack("a text of 4 GiB", "pt", lambda: keyed(b"X\xff\xff\xff\xff"), "it ends too early"),
    attack("a function that gets a state", "pt", lambda: keyed(b"ctorch\nSize\nN}X\4\0\0\0callK\1s\x86b"), "is due"),
    attack("a name with dots", "pt", lambda: keyed(b"ctorch\nSize.__class__\n"), "an object of torch.Size.__class__"),
    attack("opcodes that make objects", "pt", lambda: keyed(b"(ctorch\nSize\no"), "Unsupported operand 111"),
    attack("64 MiB of zeros, deflated", "pt", lambda: checkpoint(bytes(64 * MIB), deflate=True), "is compressed",
           UnsupportedError),
    attack("96 MiB of zeros, deflated in the directory that torch reads", "pt", hidden_zeros,
           "its directory is at .* should end at"),
    attack("two directories", "npz", lambda: two_directories(deflated(MIB, described("'|u1'", f"({MIB},)"))),
           "its directory is at .* should end at"),
)  # fmt: skip
