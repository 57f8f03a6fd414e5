"""The constants of a hollow record and their fill state, which threads may share."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import info
from zcrecord.archive.archive import Archive
from zcrecord.archive.info import TensorInfo
from zcrecord.errors import FillError, TensorNotFoundError, printable
from zcrecord.tensors.strides import is_dense

State = Literal["declared", "filling", "filled", "sealed", "aborted"]

_SHOWN = 10  # names in an error


@dataclass(frozen=True, slots=True, eq=False)
class HollowConstant:
    """Tied tensors, the same elements of one payload: they are filled together, once."""

    info: TensorInfo  # of the first tensor
    names: tuple[str, ...]  # of all, in saved order
    byte_offset: int  # of element [0, ..., 0] in the payload
    covers_payload: bool  # no byte of the payload is left out

    @property
    def name(self) -> str:
        """The full name of the first tensor."""
        return self.info.name

    @property
    def nbytes(self) -> int:
        """The number of bytes to fill, in C order."""
        return self.info.nbytes

    @property
    def is_typed(self) -> bool:
        """True if its elements are known: neither strings nor a type of a later version."""
        return self.info.dtype.bits > 0 and self.info.dtype.name in dtypes.by_name

    @property
    def native(self) -> np.dtype[Any] | None:
        """The numpy dtype of its elements in the payload; None for strings, packed and unknown elements."""
        return self.info.dtype.numpy if self.info.bits >= 8 and self.is_typed else None

    def view(self, payload: Any) -> np.ndarray[Any, Any]:
        """Return the constant's elements as a strided array over the bytes of its payload; copies nothing."""
        dtype = self.native or np.dtype((np.void, self.info.bits // 8))
        strides = tuple(stride * dtype.itemsize for stride in self.info.strides or ())
        return np.ndarray(self.info.shape, dtype, payload, self.byte_offset, strides)


class FillState:
    """The state of constants: each is begun, then filled or released; at the end the record is sealed or aborted."""

    def __init__(self, archive: Archive, path: str | None, *, in_memory: bool) -> None:
        """Start with no constant filled; `in_memory`, filling a whole payload fills all in it. `path` is for errors."""
        self._path, self._in_memory = path, in_memory
        by_name: dict[str, HollowConstant] = {}
        self.by_payload: dict[int, list[HollowConstant]] = {}
        for constant in _constants_of(archive):
            by_name |= dict.fromkeys(constant.names, constant)
            if constant.info.payload is not None:
                self.by_payload.setdefault(constant.info.payload, []).append(constant)
        self.constants = {name: by_name[name] for name in archive.names()}  # in saved order
        self._lock = threading.RLock()  # a forgotten writer may be collected while it is held, and release its constant
        self._begun: set[HollowConstant] = set()
        self._results: dict[HollowConstant, Any] = {}
        self._filled_as: set[str] = set()  # the names that constants were filled by
        self._ended: State | None = None

    @property
    def state(self) -> State:
        """The state of the whole record."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            if all(map(self.is_filled, self.constants.values())):
                return "filled"
            return "filling" if self._results or self._begun else "declared"

    def missing(self) -> list[str]:
        """Return the names of tensors that are not filled, in saved order."""
        with self._lock:
            return [name for name, constant in self.constants.items() if not self.is_filled(constant)]

    def is_filled(self, constant: HollowConstant) -> bool:
        """Return True if a constant needs no more bytes."""
        return constant in self._results or not constant.nbytes or self._ended == "sealed"

    def is_tied(self, name: str) -> bool:
        """Return True if a tensor was filled under another name."""
        with self._lock:
            return self.constants.get(name) in self._results and name not in self._filled_as

    def nbytes(self, *, filled: bool) -> int:
        """Return the number of bytes of all constants, or with `filled` of the filled ones."""
        with self._lock:
            return sum(c.nbytes for c in {*self.constants.values()} if not filled or self.is_filled(c))

    def sharing(self, constant: HollowConstant) -> list[HollowConstant]:
        """Return the constants that lie in the same payload, this one included; none for an empty one."""
        return [] if constant.info.payload is None else self.by_payload[constant.info.payload]

    def begin(self, name: str, together: Collection[HollowConstant] = ()) -> HollowConstant:
        """Reserve the constant of a tensor; its bytes may overlap reserved ones of `together` alone.

        Raises:
            TensorNotFoundError: no tensor has that name. FillError: the constant is filled, another writer has reserved
            it or some of its bytes, or the record is sealed or aborted.
        """
        constant = self.constants.get(name) if isinstance(name, str) else None
        if constant is None:
            raise TensorNotFoundError(str(name), lambda: self.constants, path=self._path)
        with self._lock:
            self.check_open(name)
            if constant in self._results:
                also = "" if name in self._filled_as else ", with a tensor whose bytes it shares"
                raise FillError(f"is filled already{also}; each constant is filled once", path=self._path, tensor=name)
            others = self.sharing(constant) if self._in_memory else ()
            overlapping = [c for c in others if (c.covers_payload or constant.covers_payload) and c not in together]
            if not self._begun.isdisjoint((constant, *overlapping)):
                raise FillError("is being filled by another writer", path=self._path, tensor=name)
            self._begun.add(constant)
        return constant

    def check_open(self, name: str | None = None) -> None:
        """Raise FillError if the record is sealed or aborted."""
        with self._lock:
            if self._ended is not None:
                end = "is sealed" if self._ended == "sealed" else "was aborted"
                raise FillError(f"the hollow record {end}; make another", path=self._path, tensor=name)

    def release(self, constant: HollowConstant) -> None:
        """Free a constant that was not filled, so that it can be begun again."""
        with self._lock:
            self._begun.discard(constant)

    def finish(self, constant: HollowConstant, name: str, result: Any) -> None:
        """Count a constant as filled under a name, with its target's result; FillError if the record has ended."""
        with self._lock:
            self._begun.discard(constant)
            self.check_open(constant.name)
            if constant.nbytes:
                self._results[constant] = result
                self._filled_as.add(name)
            if self._in_memory and constant.covers_payload:
                for other in self.sharing(constant):  # their bytes are there, too
                    self._results.setdefault(other, None)

    def seal(self) -> dict[str, Any]:
        """End the filling; returns the result for each tensor, in saved order. FillError if one is not filled."""
        with self._lock:
            self.check_open()
            if missing := self.missing():
                shown = ", ".join(f"'{printable(name)}'" for name in missing[:_SHOWN])
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                message = f"{len(missing)} of {len(self.constants)} tensors are missing: {shown}{more}"
                raise FillError(f"{message}; fill them first", path=self._path)
            if self._begun:
                name = min(c.name for c in list(self._begun))  # a copy: a forgotten writer may release its constant
                raise FillError("is still being filled; close its writer", path=self._path, tensor=name)
            self._ended = "sealed"
            results, self._results = self._results, {}
        return {name: results.get(constant) for name, constant in self.constants.items()}

    def abort(self) -> bool:
        """End the filling without a result; returns False if it had ended already."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended, self._results = "aborted", {}
            return True


def _constants_of(archive: Archive) -> list[HollowConstant]:
    """Return the constants of an archive; tensors that are the same elements of one payload make one."""
    byte_offsets = archive.index.tensors["byte_offset"].tolist()
    infos = list(info.infos(archive))
    groups: dict[Any, list[int]] = {}  # rows of tensors
    for row, tensor in enumerate(infos):
        elements = tensor.payload, byte_offsets[row], tensor.dtype.code, tensor.bits, tensor.shape, tensor.strides
        groups.setdefault(row if tensor.payload is None else elements, []).append(row)  # empty tensors are not tied
    constants = []
    for rows in groups.values():
        first, names = infos[rows[0]], tuple(infos[row].name for row in rows)
        byte_offset = 0 if first.payload is None else byte_offsets[rows[0]]
        constants.append(HollowConstant(first, names, byte_offset, _covers_payload(first, archive)))
    return constants


def _covers_payload(tensor: TensorInfo, archive: Archive) -> bool:
    """Return True if a tensor's elements fill its payload; False if it has none."""
    if tensor.payload is None or tensor.nbytes != int(archive.index.payloads["nbytes"][tensor.payload]):
        return False
    return tensor.strides is None or is_dense(tensor.shape, map(abs, tensor.strides))
