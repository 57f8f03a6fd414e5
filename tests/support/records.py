"""Shared by tests of save_record and load_record: records to save, and comparison with the loaded ones."""

from __future__ import annotations

import dataclasses
import io
import math
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from processes import ROOT as ROOT
from processes import run_python as run_python

import zcrecord
from zcrecord import PackedTensor, StringTensor
from zcrecord.dtypes import DTYPES, DType

Array = npt.NDArray[Any]
NUMERIC = [d for d in DTYPES if d.numpy is not None]
WHOLE = [d for d in NUMERIC if not d.packed]  # at least a byte an element
PACKED = [d for d in NUMERIC if d.packed]
SWAPPABLE = [d for d in WHOLE if d.bits > 8]  # they have two byte orders
ALIGNMENTS = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]


@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any


class Pair(NamedTuple):
    first: Any
    second: Any


class Owner:
    """Anything with `state_dict()`."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state


def saved(record: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    zcrecord.save_record(record, file, **options)
    return file.getvalue()


def round_trip(record: Any, **options: Any) -> zcrecord.Record:
    return zcrecord.load_record(saved(record, **options), verify="full")


def address(array: Array) -> int:
    where: int = array.__array_interface__["data"][0]
    return where


def filled(kind: DType, shape: tuple[int, ...], seed: int = 0) -> Array:
    """Return an array of random bit patterns that the element type can have."""
    assert kind.numpy is not None
    count = math.prod(shape)
    raw = np.random.default_rng(seed).integers(0, 256, count * kind.numpy.itemsize, np.uint8)
    if kind.name == "bool":
        raw &= np.uint8(1)
    if kind.packed:
        raw &= np.uint8((1 << kind.bits) - 1)
        if kind.name.startswith("int"):  # ml_dtypes keeps these sign-extended
            sign = np.uint8(1 << (kind.bits - 1))
            raw = (raw ^ sign) - sign
    return raw.view(kind.numpy).reshape(shape)


def patterns(array: Array) -> bytes:
    """Return an array's elements as little-endian bytes in C order: equal exactly if every bit is."""
    if array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big"):
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.tobytes()


def assert_same(got: Any, want: Any, where: str = "record") -> None:
    """Fail unless `got`, of a loaded tree, is what saving `want` promises to give back: types, order and every bit."""
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        want = {f.name: getattr(want, f.name) for f in dataclasses.fields(want)}
    if isinstance(want, Mapping):
        assert type(got) is dict, where
        assert list(got) == list(want), where
        for key, value in want.items():
            assert_same(got[key], value, f"{where}[{key!r}]")
    elif isinstance(want, list | tuple):
        assert type(got) is (list if isinstance(want, list) else tuple), where
        assert len(got) == len(want), where
        for i, value in enumerate(want):
            assert_same(got[i], value, f"{where}[{i}]")
    elif isinstance(want, np.ndarray | PackedTensor | StringTensor):
        _assert_same_tensor(got, want, where)
    else:
        _assert_same_value(got, want, where)


def _assert_same_tensor(got: Any, want: Any, where: str) -> None:
    assert tuple(got.shape) == tuple(want.shape), where
    if isinstance(want, StringTensor):
        assert isinstance(got, StringTensor), where
        assert list(got.strings()) == list(want.strings()), where
    elif isinstance(want, PackedTensor):
        assert isinstance(got, PackedTensor), where
        assert (got.kind, got.packed.tobytes()) == (want.kind, want.packed.tobytes()), where
    elif want.dtype.kind == "U":
        assert isinstance(got, StringTensor), where
        assert got.unpack().tolist() == want.tolist(), where
    else:
        if isinstance(got, PackedTensor):
            assert got.nbytes == math.ceil(math.prod(want.shape) * got.kind.bits / 8), where
            got = got.unpack()
        assert got.dtype == (want.dtype if want.dtype.isnative else want.dtype.newbyteorder("<")), where
        assert patterns(got) == patterns(want), where


def _assert_same_value(got: Any, want: Any, where: str) -> None:
    if isinstance(want, bytes):
        assert isinstance(got, memoryview), where
        assert got.readonly, where
        assert bytes(got) == want, where
    elif isinstance(want, float):
        assert type(got) is float, where
        assert struct.pack("<d", got) == struct.pack("<d", want), where
    elif isinstance(want, complex):
        assert type(got) is complex, where
        assert struct.pack("<2d", got.real, got.imag) == struct.pack("<2d", want.real, want.imag), where
    else:
        assert type(got) is type(want), where
        assert got == want, where


KEYS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(codec="utf-8"), max_size=20),
    st.binary(max_size=20),
)
ATTRIBUTES = st.one_of(SCALARS, st.lists(SCALARS, max_size=4), st.lists(SCALARS, max_size=4).map(tuple))


@st.composite
def arrays(draw: st.DrawFn, kinds: list[DType] = NUMERIC) -> Array:
    """Arrays of any element type and shape, in either byte order."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4).map(tuple))
    array = filled(draw(st.sampled_from(kinds)), shape, draw(st.integers(0, 1 << 32)))
    if array.dtype in [d.numpy for d in SWAPPABLE] and draw(st.integers(0, 7)) == 0:
        return array.astype(array.dtype.newbyteorder(">"))
    return array


@st.composite
def views(draw: st.DrawFn, base: Array) -> Array:
    """Views of an array: rows, steps of either sign, axes or bytes in another order, other types, broadcasts."""
    view = base
    for _ in range(draw(st.integers(0, 2))):
        how = draw(st.sampled_from(["slice", "permute", "ravel", "new axis", "broadcast", "swap", "bytes"]))
        if how == "slice":
            rows: list[Any] = [draw(st.slices(n)) if n else slice(None) for n in view.shape]
            view = view[(*rows, ...)]  # without the dots, rank 0 would give a scalar
        elif how == "permute":
            view = view.transpose(draw(st.permutations(range(view.ndim))))
        elif how == "ravel":
            view = view.reshape(-1)
        elif how == "new axis":
            view = view[..., None]
        elif how == "swap":
            view = view.view(view.dtype.newbyteorder()) if view.dtype.name in [d.name for d in SWAPPABLE] else view
        elif how == "bytes":
            view = view.view(np.uint8) if view.ndim and view.flags.c_contiguous else view
        else:
            view = np.broadcast_to(view, (draw(st.integers(0, 3)), *view.shape))
    return view


@st.composite
def tensors(draw: st.DrawFn, pool: list[Array]) -> Any:
    """Tensors of every class; many of them the same array as another, or a view of the same base."""
    how = draw(st.sampled_from(["tie", "view", "view", "packed", "strings", "text"]))
    if how == "packed":
        return PackedTensor.pack(draw(arrays(PACKED)))
    if how in ("strings", "text"):
        strings = draw(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9), max_size=5))
        return StringTensor.from_strings(strings) if how == "strings" else np.array(strings, np.str_)
    base = draw(st.sampled_from(pool))
    return base if how == "tie" else draw(views(base))


@st.composite
def trees(draw: st.DrawFn) -> Any:
    """Records nested in every way that a record can be."""
    pool = draw(st.lists(arrays(), min_size=1, max_size=3))
    leaves = st.one_of(tensors(pool), ATTRIBUTES)
    inner = st.recursive(
        leaves,
        lambda x: st.one_of(
            st.lists(x, max_size=4),
            st.lists(x, max_size=4).map(tuple),
            st.dictionaries(KEYS, x, max_size=4),
            st.builds(Layer, x, x),
            st.builds(Pair, x, x),
        ),
        max_leaves=12,
    )
    return draw(st.dictionaries(KEYS, inner, max_size=5))


def full_names(tree: Any) -> Iterator[tuple[str, str]]:
    """Yield 'module' or 'leaf', and the full name, of everything below the record itself."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        tree = dict(zip(tree._fields, tree, strict=True))
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
    for key, value in items:
        inner = isinstance(value, Mapping | list | tuple) or dataclasses.is_dataclass(value)
        yield ("module" if inner else "leaf"), str(key)
        if inner:
            yield from ((kind, f"{key}.{name}") for kind, name in full_names(value))


def names_are_unique(tree: Any) -> bool:
    """Return True if no dots in keys make two items of a tree share a full name."""
    found = list(full_names(tree))
    return len(set(found)) == len(found)


class OneWay(io.BytesIO):
    """A file object that cannot be rewound, as a pipe."""

    def seekable(self) -> bool:
        return False


def run_in_threads(work: Callable[[], object], count: int) -> None:
    """Call `work` in so many threads at once, and wait for all."""
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def repetitive(count: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield records, and metadata for each, whose names, texts and lists come to far more than 16 times their index.

    They would if every text and list were stored once.
    """
    deep: dict[str, Any] = {"n": "deep" * 50}
    for _ in range(98):
        deep = {"k" * 50: deep, "n": "deep" * 50, "same": ["deep" * 50]}
    kind = dataclasses.make_dataclass("Long" * 500, ["n"])
    yield {"texts": ["x" * 200] * count}, {}
    yield {f"k{i}": ["x" * 60] * 30 for i in range(count // 20)}, {f"k{i}": ("x" * 60,) * 30 for i in range(50)}
    yield {f"k{i}": [2**63] * 60 for i in range(count // 20)}, {f"k{i}": [2**63] * 60 for i in range(50)}
    yield {f"k{i}": "x" * 3000 for i in range(count // 20)}, {f"k{i}": "x" * 3000 for i in range(50)}
    yield [{"x" * 3000: "x" * 3000} for _ in range(count // 20)], {"x" * 3000: "x" * 3000}
    yield [kind(i) for i in range(count // 20)], {}
    yield [deep] * -(-count // 2000), {}
    yield {"w": np.ones(3), "names": ["v"] * count, "empty": [""] * count, "none": [None] * count}, {}


def edited_with_a_longer_index(path: Path) -> bytes:
    """Return an archive whose index ends in zeros, as an edit leaves it where payloads stay on their blocks."""
    zcrecord.save_record({f"t{i}": np.full(30_000, i) for i in range(5)}, path)
    with zcrecord.edit(path) as model:
        model.metadata["text"] = "x" * 300
    data = path.read_bytes()
    assert not any(data[zcrecord.load_record(data).layout.payload_offset - 64 :][:64])
    return data


ONE = np.ones(2, np.float32)


def damage(path: Path, at: int | str | bytes | None) -> None:
    """Change a byte of a file: of a tensor's payload, by its name; of bytes like these; or at a place."""
    octets = bytearray(path.read_bytes())
    place = zcrecord.load_record(path).info(at).offset if isinstance(at, str) else at
    octets[octets.index(place) if isinstance(place, bytes) else place or 0] ^= 1
    path.write_bytes(octets)


def nested(depth: int) -> dict[str, Any]:
    record: dict[str, Any] = {"w": ONE}
    for _ in range(depth - 1):
        record = {"m": record}
    return record
