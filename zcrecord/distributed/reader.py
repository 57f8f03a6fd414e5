"""`ZcrStorageReader`: loads of torch.distributed.checkpoint from the archives of a checkpoint.

DCP plans which boxes of which tensors a rank needs; each is copied out of the mapping of the rank's archive that has
it, and nothing is assembled. Opening and names are `checkpoint`'s.

Source: `StorageReader` and the calls of `_load_state_dict` in torch 2.13.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import uuid
from collections import UserList
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, partial
from itertools import chain
from operator import add, mul
from typing import TYPE_CHECKING, Any, Literal

from zcrecord.errors import IntegrityError, MismatchError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.frameworks.torch import import_torch, torch_bytes, torch_dtype, torch_shape
from zcrecord.tensors.strides import c_strides

from .checkpoint import ByName, Checkpoint, PathsByName, StoredBox
from .folder import catalogue_of, is_known
from .join import FLAT, SAVE_ID
from .values import PickledValue

if TYPE_CHECKING:
    StorageReader = Any
else:
    StorageReader = object  # torch's comes after it, in `__getattr__` of the package


class ZcrStorageReader(StorageReader):  # type: ignore[misc]  # mypy takes torch for Any
    """Loads a checkpoint into a distributed state dict of any layout and number of ranks.

        dcp.load(state_dict, storage_reader=ZcrStorageReader("checkpoints/100"))

    Takes the folder of a checkpoint, its catalogue, one archive (as of a consolidated checkpoint), or a URL of one of
    these. Each rank opens the archives that have bytes for it, and copies those bytes alone, in file order; a tensor of
    another element type gets them converted, as by torch's own storages. Metadata are made for the names that are
    loaded, however many chunks the checkpoint has.

    All ranks get one checkpoint, or an error: if a save replaces it after it was opened, a rank whose archives are gone
    opens the new one, once, and ranks that have opened different ones refuse.

    Args:
        path: None if each `dcp.load` gives a `checkpoint_id`.
        verify: 'index' for checks of the files' structure; 'full' for the digests of all chunks that are read, too.
        allow_pickle: load objects that torch.save pickled by running what the file says: only from sources you trust.
            Without it they are loaded if torch's `weights_only=True` loads them, else refused.
        storage_options: for fsspec, which opens URLs.

    Raises:
        DependencyError: torch is not installed. UnsupportedError: another level of verification.

    Errors of a load, in CheckpointException: SourceError, FormatError and IntegrityError of files, UnsupportedError for
    an object that needs `allow_pickle`, MismatchError for a planner's tensor of another shape.
    """

    def __init__(
        self,
        path: Any = None,
        *,
        verify: Literal["index", "full"] = "index",
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        import_torch()
        super().__init__()
        if verify not in ("index", "full"):
            raise UnsupportedError(f"verify={verify!r} is not known; 'index' or 'full'")
        self._path, self._options = path, storage_options
        self._verifies_digests, self._allow_pickle = verify == "full", allow_pickle
        self._current: Checkpoint | None = None
        self.reset()

    @property
    def checkpoint_id(self) -> Any:
        """The folder, file or URL."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True for a URL of a kind that is known, and for a path where there is a checkpoint."""
        with contextlib.suppress(SourceError, UnsupportedError):
            return is_known(checkpoint_id) and bool(catalogue_of(checkpoint_id))
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Set the checkpoint of the next load, if one is given."""
        self._path = self._path if checkpoint_id is None else checkpoint_id
        self._current = None
        self.load_id = str(uuid.uuid4())  # for DCP's logs

    def read_metadata(self) -> Any:
        """Open the checkpoint, and return DCP's metadata of it, made for each name when it is asked for."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        if self._path is None:
            raise UnsupportedError("no checkpoint to load: ZcrStorageReader(path), or dcp.load(checkpoint_id=)")
        checkpoint = self._current = Checkpoint(self._path, self._options)
        planner_data: Any = None if checkpoint.metadata.get(FLAT) is True else PathsByName(checkpoint)
        if checkpoint.planner_bytes is not None:
            planner_data = load_object(PickledValue(checkpoint.planner_bytes), "", checkpoint.path, self._allow_pickle)
            if not self._allow_pickle:
                checkpoint.check_planner_data(planner_data)
        names: Any = _MetadataByName(checkpoint)
        meta = StorageMeta(self._path, checkpoint.metadata.get(SAVE_ID), self.load_id)
        return Metadata(names, planner_data=planner_data, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Open the archives that have bytes for this rank; afterwards a save may remove them."""
        checkpoint = self._checkpoint()
        try:
            reads = list(self._boxes(checkpoint, plan))
            checkpoint.open_files(box for _, box in reads)
        except (SourceNotFoundError, IntegrityError):
            if (newer := checkpoint.newer()) is None:
                raise
            reads = list(self._boxes(newer, plan))
            newer.open_files(box for _, box in reads)
            self._current = checkpoint = newer
        self._planned, self._reads = _PlannedItems(plan.items), reads
        return dataclasses.replace(plan, items=self._planned, storage_data=checkpoint.identity)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are; SourceError if ranks have opened different checkpoints."""
        if len({plan.storage_data for plan in plans}) > 1:
            reason = "was replaced while ranks were opening it, so that they have different ones; load it again"
            raise SourceError(reason, path=self._checkpoint().path)
        return plans

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Copy pieces of tensors into the planner's, file by file, and give it the values; return a done future."""
        from torch.distributed.checkpoint.planner import LoadItemType
        from torch.futures import Future

        torch, checkpoint = import_torch(), self._checkpoint()
        items, reads = self._planned, self._reads
        if not items.came_back_as(plan.items):
            items, reads = plan.items, list(self._boxes(checkpoint, plan))
        view_of_box = _box_reader(torch, checkpoint, verify=self._verifies_digests)
        with torch.no_grad():  # so that a DTensor gives its local part as it is
            for item, box in sorted(reads, key=lambda read: checkpoint.place(read[1])):
                self._copy(planner, item, view_of_box(box, item.storage_offsets, item.lengths))
        set_value = _value_setter(torch, planner)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                set_value(item, load_object(checkpoint.value(name), name, checkpoint.path, self._allow_pickle))
        self._current = None  # the last reference to its mappings
        done: Any = Future()
        done.set_result(None)
        return done

    def _copy(self, planner: Any, item: Any, source: Any) -> None:
        """Copy a saved box to the tensor that the planner has for an item; MismatchError if their shapes differ."""
        target = planner.resolve_tensor(item).detach()
        if target.shape != source.shape:
            expected = f"planned to load a box of shape {tuple(source.shape)}"
            fault = f"{expected}, got a tensor of {tuple(target.shape)} from the planner"
            raise MismatchError(fault, path=self._checkpoint().path, tensor=item.storage_index.fqn)
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _boxes(self, checkpoint: Checkpoint, plan: Any) -> Iterator[tuple[Any, StoredBox]]:
        """Yield the plan's items of tensors, each with its piece; SourceError if it was planned for other pieces."""
        for item in plan.items:
            name, origin = item.storage_index.fqn, item.storage_index.offset
            if origin is None:  # a value
                continue
            tensor, hint = checkpoint.tensors.get(name), item.storage_index.index or 0
            pieces = [] if tensor is None else checkpoint.pieces(tensor)
            likely_first = chain(pieces[hint : hint + 1], pieces)  # a search through all would be quadratic
            box = next((box for box in likely_first if box.origin == tuple(origin)), None)
            ends = map(add, item.storage_offsets, item.lengths)
            if box is None or any(end > size for end, size in zip(ends, box.extent, strict=True)):
                reason = "the checkpoint was replaced by one of other chunks while it was being loaded; load it again"
                raise SourceError(reason, path=checkpoint.path, tensor=name)
            yield item, box

    def _checkpoint(self) -> Checkpoint:
        """Return the opened checkpoint of this load; UnsupportedError before `read_metadata`."""
        if self._current is None:
            raise UnsupportedError("read_metadata() comes before plans and data")
        return self._current


class _PlannedItems(UserList[Any]):
    """The items of a plan, which DCP sends to the first rank and back: unpickled only if a planner looks at them."""

    def __init__(self, items: Any = ()) -> None:
        if isinstance(items, bytes):  # from `__reduce__`
            self._pickled = items
        else:
            self.data = list(items)

    @cached_property
    def data(self) -> Any:  # type: ignore[override]
        return pickle.loads(self._pickled)  # noqa: S301  # a rank of this job sent it; DCP unpickles all such

    def __reduce__(self) -> tuple[Any, ...]:
        if "data" in self.__dict__:
            self._pickled = pickle.dumps(self.data)
        return type(self), (self._pickled,)

    def came_back_as(self, items: Any) -> bool:
        """Return True if `items` are these, pickled, and nothing has unpickled them since."""
        is_unread = isinstance(items, _PlannedItems) and "data" not in items.__dict__
        return is_unread and items._pickled == self.__dict__.get("_pickled")


def _box_reader(torch: Any, checkpoint: Checkpoint, *, verify: bool) -> Callable[[StoredBox, Any, Any], Any]:
    """Return a function that returns a box within a piece, by its first index and size, as a view of the mapping."""
    locate = cache(partial(checkpoint.locate, verify=verify))  # a tensor with strides is copied once, not for each item
    tensors: dict[Any, tuple[Any, Any]] = {}  # by memory and type: memory, tensor over it; views of it are made faster

    def view_of_box(box: StoredBox, offsets: Any, lengths: Any) -> Any:
        kind, bits, _ = checkpoint.type_of(box.tensor)
        dtype, strides = torch_dtype(torch, kind, bits), c_strides(torch_shape(kind, bits, box.extent))
        octets, start = locate(box)
        if start % dtype.itemsize:
            octets, start = octets[start:], 0
        if (key := (id(octets), dtype)) not in tensors:
            whole_elements = octets[: len(octets) // dtype.itemsize * dtype.itemsize]
            tensors[key] = octets, torch_bytes(torch, whole_elements).view(dtype)
        first_element = start // dtype.itemsize + sum(map(mul, offsets, strides))
        return tensors[key][1].as_strided(lengths, strides, first_element)

    return view_of_box


def _value_setter(torch: Any, planner: Any) -> Callable[[Any, Any], None]:
    """Return a function that hands a planner the value of an item.

    Planners unpickle without limits: they are given a pickle that is made here, never the file's. DCP's own planner
    gets values without a pickle, which would take most of the time of a load with thousands of values.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    def set_by_pickle(item: Any, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)

    is_default = isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
    if not is_default or not planner.flatten_state_dict:
        return set_by_pickle
    try:
        from torch.distributed.checkpoint._traverse import set_element
    except ImportError:  # it is for torch's own use, and may move
        return set_by_pickle
    return lambda item, value: set_element(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)


class _MetadataByName(ByName):
    """DCP's metadata of each name, made when it is asked for: the chunks of a tensor may be many."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from torch.distributed.checkpoint import metadata  # once: `_metadata_of` is called for thousands of names

        super().__init__(checkpoint)
        self._torch, self._classes = import_torch(), metadata
        self._metadata: dict[str, Any] = {}
        self._properties: dict[Any, Any] = {}  # by element type; nobody writes to them

    def __getitem__(self, name: str) -> Any:
        if name not in self._metadata:
            self._metadata[name] = self._metadata_of(name)
        return self._metadata[name]

    def _metadata_of(self, name: str) -> Any:
        """Return DCP's metadata of a tensor or a value; KeyError for a name that the checkpoint does not have."""
        checkpoint, classes, torch_size = self._checkpoint, self._classes, self._torch.Size
        tensor = checkpoint.tensors.get(name)
        if tensor is None:
            if name not in checkpoint.values:
                raise KeyError(name)
            return classes.BytesStorageMetadata()
        kind, bits, shape = checkpoint.type_of(tensor)
        dtype = torch_dtype(self._torch, kind, bits)
        if dtype not in self._properties:
            self._properties[dtype] = classes.TensorProperties(dtype=dtype)
        size = torch_size(torch_shape(kind, bits, shape))
        is_packed = bits < 8  # such tensors are not split
        chunks = [
            classes.ChunkStorageMetadata(torch_size(box.origin), size if is_packed else torch_size(box.extent))
            for box in checkpoint.pieces(tensor)
        ]
        return classes.TensorStorageMetadata(self._properties[dtype], size, chunks)


def load_object(value: Any, name: str, path: str | None, allow_pickle: bool) -> Any:
    """Return a value, unpickled if it is a PickledValue; UnsupportedError if torch does not load it so."""
    if not isinstance(value, PickledValue):
        return value
    torch = import_torch()
    try:
        return torch.load(io.BytesIO(value.data), weights_only=not allow_pickle, map_location="cpu")
    except Exception as error:  # of many kinds
        reason = "torch's weights_only=True does not load it; if you trust its source, allow_pickle=True runs its code"
        if allow_pickle:
            reason = f"torch does not load it: {str(error).partition(chr(10))[0]}"
        raise UnsupportedError(f"is a pickled object, and {reason}", path=path, tensor=name or None) from error
