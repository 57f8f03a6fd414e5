"""Shared by tests of typed records: classes of every family, and comparison of their values."""

from __future__ import annotations

import dataclasses
import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Required,
    TypedDict,
    TypeVar,
)

import attrs
import numpy as np
import numpy.typing as npt
import pytest
import records as r

from zcrecord import MismatchError

F32 = npt.NDArray[np.float32]
W = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(3, np.float32)
T = TypeVar("T")
Count = NewType("Count", int)


@dataclass
class Linear:
    weight: F32
    bias: F32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    scale: npt.NDArray[Any]
    eps: float = 1e-5


class Size(NamedTuple):
    width: int
    height: int = 1


@dataclass
class MLP:
    layers: list[Linear | Norm]
    size: Size
    head: Linear | None
    named: dict[str, Linear] = field(default_factory=dict)
    shape: tuple[int, ...] = ()


@dataclass
class Deeper(MLP):
    note: str = ""


@dataclass
class Node:
    value: int
    next: Node | None = None


@dataclass
class Box(Generic[T]):
    content: T


@dataclass
class Boxes(Box[list[T]], Generic[T]):
    other: T
    third: Box[T]


@dataclass
class Derived:
    w: F32
    made: str = field(init=False)
    seed: dataclasses.InitVar[int] = 3
    kind: ClassVar[str] = "derived"

    def __post_init__(self, seed: int) -> None:
        self.made = f"from {seed}"


@dataclass
class Stubborn:
    n: int
    later: str = field(init=False)

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError("n must not be negative")


@dataclass
class NeedsSeed:
    seed: dataclasses.InitVar[int]


@dataclass(init=False)
class OwnInit:
    n: int
    names: list[str] = field(default_factory=list)

    def __init__(self, text: str) -> None:
        self.n = len(text)


@attrs.define
class Cell:
    _weight: F32
    size: int = attrs.field(alias="extent", default=4)
    units: list[int] = attrs.Factory(list)
    made: str = attrs.field(init=False, default="made")


@attrs.frozen(init=False)
class OwnCell:
    n: int

    def __init__(self, text: str) -> None:
        self.__attrs_init__(len(text))


class Options(TypedDict):
    rate: float
    note: NotRequired[str]


class Loose(TypedDict, total=False):
    rate: Required[float]
    note: str


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Everything:
    flag: bool
    n: int
    x: float
    text: str
    data: bytes
    view: memoryview
    nothing: None
    color: Color
    level: Level
    literal: Literal["a", 2]
    marked: Annotated[int, "note"]
    count: Count
    floats: list[float]
    pair: tuple[int, str]
    either: int | str
    anything: Any
    colors: tuple[Color, ...]
    texts: Sequence[str]


@dataclass
class Twin:
    weight: F32
    bias: F32 | None = None


@dataclass
class Fast:
    mode: Literal["fast"]


@dataclass
class Slow:
    mode: Literal["slow"]


@dataclass
class Left:
    next: Left | Right | None


@dataclass
class Right:
    next: Left | Right | None


@dataclass
class Unreadable:
    x: NoSuchName  # type: ignore[name-defined]  # noqa: F821


def same(a: Any, b: Any) -> bool:
    if isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and (a.dtype, a.shape, r.patterns(a)) == (b.dtype, b.shape, r.patterns(b))
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(b))
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(struct.pack("<d", a) == struct.pack("<d", b) if isinstance(b, float) else a == b)


def again(value: Any, kind: Any = None) -> Any:
    """Return a value saved and loaded as its own class, or as another."""
    return r.round_trip(value).into(kind or type(value))


def refused(value: Any, kind: Any, match: str, error: type[Exception] = MismatchError) -> None:
    with pytest.raises(error, match=match):
        again(value, kind)
