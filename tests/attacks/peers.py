"""The same trick played on zcrecord, safetensors and numpy's .npz: who answers how is told by `tools.attacks`.

Only tricks that translate are here, and what peers answer is no test of ours; our own answers are held to what
`attacks.catalogue` demands, as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from exchange import described, file_of, npy, npz, tensor

from attacks import broken, packed, tricks
from attacks.broken import HARMLESS as HARMLESS
from attacks.catalogue import Attack, Door, attack, file
from attacks.doors import loaded
from zcrecord import LimitError

DOORS: dict[str, Door] = {"load_record": loaded(verify="full")}
Data = Callable[[], bytes]
GIB = 1 << 30


def deserialized(path: Path) -> Callable[[], object]:
    data = path.read_bytes()
    return lambda: safetensors.numpy.load(data)


def safe_opened(path: Path) -> Callable[[], object]:
    def act() -> None:
        with safetensors.safe_open(path, "np") as found:
            for name in found.keys():  # noqa: SIM118  # it is no mapping
                found.get_tensor(name)

    return act


def numpy_loaded(path: Path) -> Callable[[], object]:
    def act() -> None:
        with np.load(path) as found:
            for name in found.files:
                found[name]

    return act


PEERS: dict[str, dict[str, Door]] = {
    "safetensors": {"load": deserialized, "safe_open": safe_opened},
    "numpy": {"np.load": numpy_loaded},
}


def header(text: bytes, data: bytes = b"", size: int | None = None) -> Data:
    return lambda: file_of(text, data, size)


def tensors(data: bytes = b"", /, **entries: dict[str, Any]) -> Data:
    return lambda: file_of(entries, data)


def entry(dims: list[int], start: int, end: int, dtype: str = "U8") -> dict[str, Any]:
    return tensor(start, end, dtype, dims)


def array(shape: str, data: bytes, kind: str = "'|u1'", name: str = "w.npy", *, deflate: bool = False) -> Data:
    return lambda: npz((name, npy(described(kind, shape), data)), deflate=deflate)


def many_npz() -> bytes:
    return npz(*((f"t{i}.npy", npy(described(), b"xx")) for i in range(tricks.MANY)))


def twice_npz() -> bytes:
    return npz(("w.npy", npy(described(), b"xx")), ("v.npy", npy(described(), b"xx"))).replace(b"v.npy", b"w.npy")


def bomb() -> bytes:
    return array(f"({GIB},)", bytes(GIB), deflate=True)()


def both(change: Callable[[bytes], bytes]) -> tuple[Data, Data]:
    """Return functions that make a file of safetensors and one of numpy, and change it."""
    return lambda: change(SMALL()), lambda: change(array("(4,)", b"wxyz")())


FOUND: dict[str, Attack] = {attack.name: attack for module in (broken, tricks) for attack in module.ATTACKS}
BOMB = attack("", "R84", file(packed.tabled_bomb, "m.zcr.zst"), LimitError)
SMALL = tensors(b"wxyz", w=entry([4], 0, 4))
DEEP = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
TWICE = b'{"w":%b,"w":%b}' % ((json.dumps(entry([4], 0, 4)).encode(),) * 2)


def trick(name: str, ours: str, safe: Data | None = None, numpy: Data | None = None) -> Attack:
    """Return one of our attacks under the name of the trick, with what plays it on the others."""
    peer = {"safetensors": (safe, "m.safetensors"), "numpy": (numpy, "m.npz")}
    makers = {who: file(make, called) for who, (make, called) in peer.items() if make is not None}
    doors = frozenset(DOORS) if FOUND[ours].error is not None else None
    return replace(FOUND[ours], name=name, doors=doors, peer=makers)


ATTACKS: tuple[Attack, ...] = (
    trick("index of 2 GiB and more claimed", "128 bytes that claim an index of 2 GiB", header(b"{}", size=2**63)),
    trick("100 MB of nothing for an index", "100 MB of zeros for an index", header(b" " * 99_999_990 + b"{}")),
    trick("payload of 2^56 bytes", "R56 payload: starts inside, 2^56 bytes",
          tensors(b"wxyz", w=entry([2**56], 0, 2**56)), array("(72057594037927936,)", b"wxyz")),
    trick("payload that ends before it starts", "R56 payload: end wraps to 0", tensors(b"wxyz", w=entry([4], 4, 0))),
    trick("shape whose product wraps to 0", "R49 tensor: product wraps to 0",
          tensors(b"", w=entry([2**32, 2**32], 0, 0)), array("(4294967296, 4294967296)", b"")),
    trick("shape larger than its payload", "R51 tensor: shape larger than payload",
          tensors(b"wxyz", w=entry([5], 0, 4)), array("(5,)", b"wxyz")),
    trick("payloads that overlap", "R58 payload: into the next",
          tensors(b"wxyz", a=entry([3], 0, 3), b=entry([2], 2, 4))),
    trick("hole between payloads", "R59 payload: hole before the last",
          tensors(b"wxyz", a=entry([1], 0, 1), b=entry([1], 3, 4))),
    trick("two tensors of one name", "R32 more: one tensor again and again", header(TWICE, b"wxyz"),
          twice_npz),
    trick("empty name", "R29 span: name of a tensor: empty", tensors(b"wxyz", **{"": entry([4], 0, 4)}),
          array("(4,)", b"wxyz", name=".npy")),
    trick("NUL in a name", "R29 span: name of a tensor: NUL inside", tensors(b"wxyz", **{"a\0b": entry([4], 0, 4)})),
    trick("5,000 tensors that share a payload, or are empty", "tensors of one payload",
          tensors(**{f"t{i}": entry([0], 0, 0) for i in range(tricks.MANY)}), many_npz),
    trick("nested 50,000 deep and more", "50,000 modules, each in the one before", header(DEEP)),
    trick("bytes behind the end", "archive, then zip", *both(lambda data: data + tricks.zip_file())),
    trick("cut off by a byte", "cut off by a byte", *both(lambda data: data[:-1])),
    trick("changed byte of a payload", "R73 contents: byte of a tied tensor",
          *both(lambda data: data.replace(b"wxyz", b"Wxyz"))),
    trick("bool that is 2", "R72 contents: bool of 2", tensors(b"\2", w=entry([1], 0, 1, "BOOL")),
          array("(1,)", b"\2", "'|b1'")),
    replace(BOMB, name="128 KiB that expand to 4 GiB, or to 1 GiB", peer={"numpy": file(bomb, "m.npz")}),
)  # fmt: skip
