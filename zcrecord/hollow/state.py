"""Which constants a hollow record has, and which of them are begun and filled; threads may ask and tell.

What a constant is, is `constants`'s; where its bytes go is left to `hollow`.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, Literal

from zcrecord.archive import info
from zcrecord.archive.archive import Archive
from zcrecord.archive.info import TensorInfo
from zcrecord.codec.layout import NONE
from zcrecord.errors import FillError, TensorNotFoundError, printable
from zcrecord.tensors.strides import is_dense

from .targets import Constant

__all__ = ["Ledger", "State"]

State = Literal["declared", "filling", "filled", "sealed", "aborted"]

_SHOWN = 10  # names in an error


class Ledger:
    """The constants of an archive: each is begun, then filled or given back; at last all of it is sealed or given up.

    `names` and `by_payload` say which constants there are; they never change.
    """

    def __init__(self, archive: Archive, path: str | None, *, whole: bool) -> None:
        """`whole`: who fills all of a payload fills every constant that lies in it."""
        self.names: dict[str, Constant] = {}
        self.by_payload: dict[int, list[Constant]] = {}
        self._path, self._whole = path, whole
        self._list(archive)
        self._lock = threading.RLock()  # a forgotten writer may be collected while it is held, and give back
        self._begun: set[Constant] = set()
        self._results: dict[Constant, Any] = {}
        self._told: set[str] = set()  # names under which constants were filled
        self._ended: State | None = None

    def _list(self, archive: Archive) -> None:
        rows = archive.index.tensors
        groups: dict[Any, tuple[TensorInfo, list[str], int]] = {}
        for i, told in enumerate(info.infos(archive)):
            number, offset = int(rows["payload"][i]), int(rows["byte_offset"][i])
            same = number, offset, told.dtype.code, told.bits, told.shape, told.strides
            key = same if number != NONE else i
            groups.setdefault(key, (told, [], offset))[1].append(told.name)
        constants: dict[str, Constant] = {}
        for told, names, offset in groups.values():
            whole = told.payload is not None and told.nbytes == int(archive.index.payloads["nbytes"][told.payload])
            whole = whole and (told.strides is None or is_dense(told.shape, map(abs, told.strides)))
            constant = Constant(told, tuple(names), offset, whole)
            constants |= dict.fromkeys(names, constant)
            if told.payload is not None:
                self.by_payload.setdefault(told.payload, []).append(constant)
        self.names = {name: constants[name] for name in archive.names()}

    def find(self, name: object) -> Constant:
        """Return the constant of a tensor; TensorNotFoundError lists close names."""
        found = self.names.get(name) if isinstance(name, str) else None
        if found is None:
            raise TensorNotFoundError(str(name), lambda: self.names, path=self._path)
        return found

    @property
    def state(self) -> State:
        """How far it is."""
        with self._lock:
            if self._ended is not None:
                return self._ended
            if all(map(self._is_filled, self.names.values())):
                return "filled"
            return "filling" if self._results or self._begun else "declared"

    def missing(self) -> list[str]:
        """Return the names of tensors that are not filled, in saved order."""
        with self._lock:
            return self._missing()

    def _missing(self) -> list[str]:
        return [name for name, constant in self.names.items() if not self._is_filled(constant)]

    def _is_filled(self, constant: Constant) -> bool:
        return constant in self._results or not constant.nbytes or self._ended == "sealed"

    def is_filled(self, constant: Constant) -> bool:
        """Return whether nothing more is due."""
        with self._lock:
            return self._is_filled(constant)

    def is_tied(self, name: str) -> bool:
        """Return whether a tensor was filled under another name."""
        constant = self.names.get(name)
        with self._lock:
            return constant in self._results and name not in self._told

    def nbytes(self, *, filled: bool) -> int:
        """Return how many bytes are due in all, or have come."""
        with self._lock:
            return sum(c.nbytes for c in {*self.names.values()} if not filled or self._is_filled(c))

    def begin(self, constant: Constant, name: str, beside: Collection[Constant] = ()) -> None:
        """Take a constant, which nobody else can then; nor, meanwhile, what shares its bytes, but for `beside`.

        Raises:
            FillError: it is filled, somebody is at it, or all is over.
        """
        with self._lock:
            self._check_open(name)
            if constant in self._results:
                also = "" if name in self._told else ", with a tensor whose bytes it shares"
                raise FillError(f"is filled already{also}; each constant is filled once", path=self._path, tensor=name)
            others = self.by_payload.get(constant.info.payload, []) if constant.info.payload is not None else []
            sharing = [c for c in others if self._whole and (c.whole or constant.whole) and c not in beside]
            if not self._begun.isdisjoint((constant, *sharing)):
                raise FillError("is being filled by somebody else", path=self._path, tensor=name)
            self._begun.add(constant)

    def check_open(self) -> None:
        """Raise FillError if all is over."""
        with self._lock:
            self._check_open(None)

    def _check_open(self, name: str | None) -> None:
        if self._ended is not None:
            how = "is sealed" if self._ended == "sealed" else "was given up"
            raise FillError(f"the hollow record {how}; make another", path=self._path, tensor=name)

    def give_back(self, constant: Constant) -> None:
        """Let others take a constant, after it failed."""
        with self._lock:
            self._begun.discard(constant)

    def note(self, constant: Constant, name: str, result: Any) -> None:
        """Take a constant as filled, under that name; FillError if all is over."""
        with self._lock:
            self._begun.discard(constant)
            self._check_open(constant.name)
            if not constant.nbytes:
                return
            self._results[constant] = result
            self._told.add(name)
            if self._whole and constant.whole and constant.info.payload is not None:
                for other in self.by_payload[constant.info.payload]:
                    self._results.setdefault(other, None)

    def seal(self) -> dict[str, Any]:
        """Return what stands for each tensor, in saved order.

        Raises:
            FillError: something is missing, or all is over.
        """
        with self._lock:
            self._check_open(None)
            if missing := self._missing():
                shown = ", ".join(f"'{printable(name)}'" for name in missing[:_SHOWN])
                more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
                what = f"{len(missing)} of {len(self.names)} tensors are missing: {shown}{more}"
                raise FillError(f"{what}; fill them first", path=self._path)
            if self._begun:
                name = min(c.name for c in list(self._begun))
                raise FillError("is being filled still; close its writer", path=self._path, tensor=name)
            self._ended = "sealed"
            results, self._results = self._results, {}
        return {name: results.get(constant) for name, constant in self.names.items()}

    def abort(self) -> bool:
        """Give all of it up, unless it is over; returns whether it was not."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended, self._results = "aborted", {}
            return True
