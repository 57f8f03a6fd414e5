"""A loader at a hollow record's constants: which are loaded together, and into which memory; digests checked after.

What a loader does is `loaders`'s, which constants are missing `ledger`'s, what becomes of them `hollow`'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import Any

import numpy as np

from zcrecord.archive import subset
from zcrecord.archive.archive import Archive
from zcrecord.codec.layout import MAX_ARCHIVE_SIZE
from zcrecord.errors import RecordError, UnsupportedError
from zcrecord.loaders import Loader, load_into, plan_load
from zcrecord.loaders.load import loader_of
from zcrecord.loaders.mapped import MappedLoader
from zcrecord.loaders.plan import MAX_IN_FLIGHT
from zcrecord.storage.files import Progress
from zcrecord.tensors.strides import as_bytes

from .skeleton import Shell
from .state import Ledger
from .writer import ConstantWriter

__all__ = ["Bringer"]


class Bringer:
    """One filling by a loader: of memory, if `place` gives that of a payload, or else of what `begin` opens."""

    def __init__(
        self,
        shell: Shell,
        ledger: Ledger,
        begin: Callable[[str], ConstantWriter],
        place: Callable[[int], memoryview] | None,
    ) -> None:
        self._shell, self._ledger, self._begin, self._place = shell, ledger, begin, place

    def fill(
        self, archive: Archive, loader: Loader | str, *, progress: Progress | None, cancel: Any, verify_digests: bool
    ) -> None:
        """Have a loader bring what is missing, out of the very archive; see `HollowRecord.fill_by`."""
        chosen = loader_of(loader)
        if self._place is not None and isinstance(chosen, MappedLoader):
            what = (
                "views of the archive fill no memory of their own; fill by 'host' or 'read', or use the record itself"
            )
            raise UnsupportedError(what, path=archive.path)
        ledger = self._ledger
        names = [c.name for c in dict.fromkeys(ledger.names[n] for n in ledger.missing())]
        done, total = 0, ledger.nbytes(filled=False) - ledger.nbytes(filled=True)

        def tell(arrived: int, _: int | None) -> None:
            if progress is not None:
                progress(min(done + arrived, total), total)

        watch: Any = tell if progress is None or callable(progress) else progress  # which load_into refuses
        checked = verify_digests and archive.mode == "r"  # edits of a private copy are what is wanted of it
        for batch in self._batches(names):
            alone = len(batch) == 1
            part = subset.alone(archive, archive.find(batch[0])) if alone else _chosen(archive, set(batch))
            self._load(part, chosen, batch, checked, progress=watch, cancel=cancel)
            done += sum(ledger.names[name].nbytes for name in batch)

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        """Yield what is loaded together: with a sink what may be in memory besides. Views of one payload go alone."""
        ledger = self._ledger
        batch: list[str] = []
        room = MAX_IN_FLIGHT if self._place is None else MAX_ARCHIVE_SIZE
        for name in names:
            info = ledger.names[name].info
            if info.payload is None or len(ledger.by_payload[info.payload]) > 1:
                continue
            room -= info.nbytes
            if batch and room < 0:
                yield batch
                batch, room = [], MAX_IN_FLIGHT - info.nbytes
            batch.append(name)
        if batch:
            yield batch
        shared = (n for n in names if len(ledger.by_payload[ledger.names[n].info.payload or 0]) > 1)
        yield from ([name] for name in shared if not ledger.is_filled(ledger.names[name]))

    def _load(self, archive: Archive, loader: Loader, names: list[str], checked: bool, **options: Any) -> None:
        """Have constants loaded, into their memory if they have any; `archive` has them and no others."""
        with contextlib.ExitStack() as stack:
            writers = {name: stack.enter_context(self._begin(name)) for name in names}
            rooms = self._rooms(archive)
            loaded = load_into(archive, loader, dst=rooms, raw=True, **options)
            for name, writer in writers.items():
                made = loaded.pop(name)
                if checked and self._place is None:
                    self._check(writer, made)  # before it is passed on
                if name in rooms and _lies_in(made, rooms[name]):
                    writer.skip()
                else:
                    writer.take(made if writer.constant.typed else memoryview(made))
                if checked and self._place is not None:
                    self._check(writer, None)
                writer.close()  # what is right counts, whatever comes after

    def _rooms(self, archive: Archive) -> dict[str, Any]:
        """Return the memory of each tensor's bytes, as they lie in the payload."""
        rooms: dict[str, Any] = {}
        if self._place is None:
            return rooms
        for name, (ref, _) in plan_load(archive, raw=True).targets.items():
            constant = self._ledger.names[name]
            number = constant.info.payload
            # What strides pick is read with what lies between, which may be filled already.
            apart = constant.info.strides is not None and len(self._ledger.by_payload.get(number or 0, ())) > 1
            if number is not None and not apart:
                start = ref.offset - archive.offset - self._shell.offset(number)
                rooms[name] = np.frombuffer(self._place(number)[start : start + ref.nbytes], np.uint8)
        return rooms

    def _check(self, writer: ConstantWriter, made: Any) -> None:
        """Raise IntegrityError where all of a payload came, to memory that can be looked at, and is another's."""
        constant = writer.constant
        number = constant.info.payload
        if number is None or not constant.whole:
            return
        if self._place is not None:
            octets = self._place(number)
        else:
            array = _as_stored(made, constant.info.strides)
            if array is None:
                return
            octets = as_bytes(array).data
        try:
            self._shell.check(number, octets)
        except RecordError as error:
            raise error.located(tensor=constant.name) from None


def _chosen(archive: Archive, names: Set[str]) -> Archive:
    """Return some tensors of an archive; names are no patterns here, whatever characters they have."""
    return subset.select(archive, lambda told: told.name in names, None)


def _as_stored(made: Any, strides: tuple[int, ...] | None) -> np.ndarray[Any, Any] | None:
    """Return a tensor with its axes as its payload has them; None where it is not the host's, or lies otherwise."""
    array = getattr(made, "packed", made)
    if not isinstance(array, np.ndarray) or strides is None:
        return array if isinstance(array, np.ndarray) else None
    if array.strides != tuple(s * array.itemsize for s in strides):
        return None
    upright = array[tuple(slice(None, None, -1 if s < 0 else 1) for s in strides)]
    return upright.transpose(np.argsort([-abs(s) for s in strides], kind="stable"))


def _lies_in(loaded: Any, room: Any) -> bool:
    """Return whether a loader has put a tensor where it was told to."""
    array = getattr(loaded, "packed", loaded)
    return isinstance(array, np.ndarray) and np.may_share_memory(array, room)
