"""The same trick played on zcrecord, safetensors and numpy's .npz: who answers how is told by `tools.attacks`.

Only tricks that translate are here, and what peers answer is no test of ours; our own answers are held to what
`attacks.catalogue` demands, as everywhere.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from attacks import broken, packed, tricks
from attacks.broken import HARMLESS as HARMLESS
from attacks.broken import file
from attacks.catalogue import Attack, Door
from attacks.doors import opened
from zcrecord import LimitError

DOORS: dict[str, Door] = {"load_record": opened("full")}
Maker = Callable[[], bytes]
GIB = 1 << 30


def deserialized(path: Path) -> Callable[[], object]:
    """Read all of it from bytes."""
    data = path.read_bytes()
    return lambda: safetensors.numpy.load(data)


def safe_opened(path: Path) -> Callable[[], object]:
    """Map it, and read every tensor."""

    def act() -> None:
        with safetensors.safe_open(path, "np") as found:
            for name in found.keys():  # noqa: SIM118  # it is no mapping
                found.get_tensor(name)

    return act


def numpy_loaded(path: Path) -> Callable[[], object]:
    """Read every array."""

    def act() -> None:
        with np.load(path) as found:
            for name in found.files:
                found[name]

    return act


PEERS: dict[str, dict[str, Door]] = {
    "safetensors": {"load": deserialized, "safe_open": safe_opened},
    "numpy": {"np.load": numpy_loaded},
}


def header(text: bytes, data: bytes = b"", size: int | None = None) -> Maker:
    """Return a safetensors file with this header, which may claim another size."""
    return lambda: (len(text) if size is None else size).to_bytes(8, "little") + text + data


def entry(dims: list[int], start: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": dims, "data_offsets": [start, end]}


def tensors(data: bytes = b"", /, **entries: dict[str, Any]) -> Maker:
    """Return a safetensors file of these entries."""
    return header(json.dumps(entries).encode(), data)


def npy(dims: str, data: bytes, kind: str = "|u1") -> bytes:
    """Return an .npy file."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {dims}}}".encode().ljust(118 - 1) + b"\n"
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + data


def npz(*members: tuple[str, bytes], compressed: bool = False) -> Maker:
    """Return an .npz of these members."""

    def made() -> bytes:
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as into:
            for name, data in members:
                into.writestr(zipfile.ZipInfo(name), data, into.compression)
        return out.getvalue()

    return made


def flipped(make: Maker, back: int) -> Maker:
    """Change one byte, so many before the end."""

    def made() -> bytes:
        data = bytearray(make())
        data[-back] ^= 0xFF
        return bytes(data)

    return made


def npz_flipped() -> bytes:
    data = npz(("w.npy", npy("(4,)", b"wxyz")))()
    at = data.index(b"wxyz")
    return data[:at] + b"W" + data[at + 1 :]


def bomb() -> bytes:
    return npz(("w.npy", npy(f"({GIB},)", bytes(GIB))), compressed=True)()


def many_npz() -> bytes:
    return npz(*((f"t{i}.npy", npy("(1,)", b"x")) for i in range(tricks.MANY)))()


def twice_npz() -> bytes:
    data = npz(("w.npy", npy("(4,)", b"wxyz")), ("v.npy", npy("(1,)", b"x")))()
    return data.replace(b"v.npy", b"w.npy")


FOUND = {attack.name: attack for module in (broken, tricks) for attack in module.ATTACKS}
BOMB = Attack(name="", rules=("R84",), make=file(packed.tabled_bomb, "m.zcr.zst"), error=LimitError)
SMALL = tensors(b"wxyz", w=entry([4], 0, 4))
DEEP = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TWICE = b'{"w":%b,"w":%b}' % ((json.dumps(entry([4], 0, 4)).encode(),) * 2)


def trick(name: str, ours: str, safe: Maker | None = None, numpy: Maker | None = None) -> Attack:
    """Return one of our attacks under the name of the trick, with what plays it on the others."""
    peer = {"safetensors": (safe, "m.safetensors"), "numpy": (numpy, "m.npz")}
    makers = {who: file(make, called) for who, (make, called) in peer.items() if make is not None}
    one = FOUND[ours]
    doors = frozenset(DOORS) if one.error is not None else None
    return Attack(name=name, rules=one.rules, make=one.make, error=one.error, message=one.message, doors=doors,
                  peer=makers)  # fmt: skip


def cut(make: Maker) -> Maker:
    return lambda: make()[:-1]


def followed(make: Maker) -> Maker:
    return lambda: make() + tricks.zip_file()


ATTACKS: tuple[Attack, ...] = (
    trick("index of 2 GiB and more claimed", "128 bytes that claim an index of 2 GiB", header(b"{}", size=2**63)),
    trick("100 MB of nothing for an index", "100 MB of zeros for an index", header(b" " * 99_999_990 + b"{}")),
    trick("payload of 2^56 bytes", "R56 payload: starts inside, 2^56 bytes",
          tensors(b"wxyz", w=entry([2**56], 0, 2**56)), npz(("w.npy", npy("(72057594037927936,)", b"wxyz")))),
    trick("payload that ends before it starts", "R56 payload: end wraps to 0", tensors(b"wxyz", w=entry([4], 4, 0))),
    trick("shape whose product wraps to 0", "R49 tensor: product wraps to 0",
          tensors(b"", w=entry([2**32, 2**32], 0, 0)), npz(("w.npy", npy("(4294967296, 4294967296)", b"")))),
    trick("shape larger than its payload", "R51 tensor: shape larger than payload",
          tensors(b"wxyz", w=entry([5], 0, 4)), npz(("w.npy", npy("(5,)", b"wxyz")))),
    trick("payloads that overlap", "R58 payload: into the next",
          tensors(b"wxyz", a=entry([3], 0, 3), b=entry([2], 2, 4))),
    trick("hole between payloads", "R59 payload: hole before the last",
          tensors(b"wxyz", a=entry([1], 0, 1), b=entry([1], 3, 4))),
    trick("two tensors of one name", "R32 more: one tensor again and again", header(TWICE, b"wxyz"),
          twice_npz),
    trick("empty name", "R29 span: name of a tensor: empty", tensors(b"wxyz", **{"": entry([4], 0, 4)}),
          npz((".npy", npy("(4,)", b"wxyz")))),
    trick("NUL in a name", "R29 span: name of a tensor: NUL inside", tensors(b"wxyz", **{"a\0b": entry([4], 0, 4)})),
    trick("5,000 tensors that share a payload, or are empty", "tensors of one payload",
          tensors(**{f"t{i}": entry([0], 0, 0) for i in range(tricks.MANY)}), many_npz),
    trick("nested 50,000 deep and more", "50,000 modules, each in the one before", header(DEEP)),
    trick("bytes behind the end", "archive, then zip", followed(SMALL), followed(npz(("w.npy", npy("(4,)", b"wxyz"))))),
    trick("cut off by a byte", "cut off by a byte", cut(SMALL), cut(npz(("w.npy", npy("(4,)", b"wxyz"))))),
    trick("changed byte of a payload", "R73 contents: byte of a tied tensor", flipped(SMALL, 1), npz_flipped),
    trick("bool that is 2", "R72 contents: bool of 2", tensors(b"\2", w=entry([1], 0, 1, "BOOL")),
          npz(("w.npy", npy("(1,)", b"\2", "|b1")))),
    replace(BOMB, name="128 KiB that expand to 4 GiB, or to 1 GiB", peer={"numpy": file(bomb, "m.npz")}),
)  # fmt: skip
