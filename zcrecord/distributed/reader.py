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
from functools import cached_property
from itertools import chain
from operator import mul
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
    """Loads a checkpoint into a distributed state dict, of whatever layout and number of ranks.

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
        self._full, self._allow_pickle = verify == "full", allow_pickle
        self._opened: Checkpoint | None = None
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
        self._opened = None
        self.load_id = str(uuid.uuid4())  # for DCP's logs

    def read_metadata(self) -> Any:
        """Open the checkpoint, and return DCP's metadata of it, made for each name when it is asked for."""
        from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

        if self._path is None:
            raise UnsupportedError("no checkpoint to load: ZcrStorageReader(path), or dcp.load(checkpoint_id=)")
        opened = self._opened = Checkpoint(self._path, self._options)
        planner_data: Any = None if opened.metadata.get(FLAT) is True else PathsByName(opened)
        if opened.planner_bytes is not None:
            planner_data = load_object(PickledValue(opened.planner_bytes), "", opened.path, self._allow_pickle)
            if not self._allow_pickle:
                opened.check_planner_data(planner_data)
        names: Any = _MetadataByName(opened)
        meta = StorageMeta(self._path, opened.metadata.get(SAVE_ID), self.load_id)
        return Metadata(names, planner_data=planner_data, storage_meta=meta)

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Open the archives that have bytes for this rank; afterwards a save may remove them."""
        opened = self._checkpoint()
        try:
            reads = list(self._boxes(opened, plan))
            opened.open_files(box for _, box in reads)
        except (SourceNotFoundError, IntegrityError):
            if (newer := opened.newer()) is None:
                raise
            reads = list(self._boxes(newer, plan))
            newer.open_files(box for _, box in reads)
            self._opened = opened = newer
        self._planned, self._reads = _PlannedItems(plan.items), reads
        return dataclasses.replace(plan, items=self._planned, storage_data=opened.identity)

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

        torch, opened = import_torch(), self._checkpoint()
        items, reads = self._planned, self._reads
        if not items.came_back_as(plan.items):
            items, reads = plan.items, list(self._boxes(opened, plan))
        read = _box_reader(torch, opened, self._full)
        with torch.no_grad():  # so that a DTensor gives its local part as it is
            for item, box in sorted(reads, key=lambda pair: opened.place(pair[1])):
                self._copy(planner, item, read(box, item.storage_offsets, item.lengths))
        put = _value_setter(torch, planner)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                name = item.storage_index.fqn
                put(item, load_object(opened.value(name), name, opened.path, self._allow_pickle))
        self._opened = None  # mappings go with it
        done: Any = Future()
        done.set_result(None)
        return done

    def _copy(self, planner: Any, item: Any, source: Any) -> None:
        target = planner.resolve_tensor(item).detach()
        if target.shape != source.shape:
            shapes = f"a box of shape {tuple(source.shape)}, got a tensor of {tuple(target.shape)}"
            fault = f"planned to load {shapes} from the planner"
            raise MismatchError(fault, path=self._checkpoint().path, tensor=item.storage_index.fqn)
        target.copy_(source)
        planner.commit_tensor(item, target)

    def _boxes(self, opened: Checkpoint, plan: Any) -> Iterator[tuple[Any, StoredBox]]:
        """Yield the plan's items of tensors, each with its piece; SourceError if it was planned for another one."""
        for item in plan.items:
            if (origin := item.storage_index.offset) is None:
                continue
            name, origin = item.storage_index.fqn, tuple(origin)
            i = opened.tensors.get(name)
            pieces, hint = [] if i is None else opened.pieces(i), item.storage_index.index or 0
            box = next((box for box in chain(pieces[hint : hint + 1], pieces) if box.origin == origin), None)
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            if box is None or any(a + n > size for (a, n), size in zip(ends, box.extent, strict=True)):
                reason = "the checkpoint was replaced by one of other chunks while it was being loaded; load it again"
                raise SourceError(reason, path=opened.path, tensor=name)
            yield item, box

    def _checkpoint(self) -> Checkpoint:
        if self._opened is None:
            raise UnsupportedError("read_metadata() comes before plans and data")
        return self._opened


class _PlannedItems(UserList[Any]):
    """The items of a plan, which DCP sends to the first rank and back: unpickled only if a planner looks at them."""

    def __init__(self, items: Any = ()) -> None:
        if isinstance(items, bytes):
            self._sent = items
        else:
            self.data = list(items)

    @cached_property
    def data(self) -> Any:  # type: ignore[override]
        return pickle.loads(self._sent)  # noqa: S301  # a rank of this job sent it; DCP unpickles all such

    def __reduce__(self) -> tuple[Any, ...]:
        if "data" in self.__dict__:
            self._sent = pickle.dumps(self.data)
        return type(self), (self._sent,)

    def came_back_as(self, items: Any) -> bool:
        """Return True if these were sent, and nobody has looked at them."""
        unread = isinstance(items, _PlannedItems) and "data" not in items.__dict__
        return unread and items._sent == self.__dict__.get("_sent")


def _box_reader(torch: Any, opened: Checkpoint, verify: bool) -> Callable[[StoredBox, Any, Any], Any]:
    """Return a function for a box of a piece, uncopied: a view of one tensor over each file for each element type."""
    files: dict[Any, tuple[Any, Any]] = {}  # a file's memory, and a tensor over it

    def read(box: StoredBox, offsets: Any, lengths: Any) -> Any:
        kind, bits, _ = opened.type_of(box.tensor)
        dtype, strides = torch_dtype(torch, kind, bits), c_strides(torch_shape(kind, bits, box.extent))
        octets, start = opened.locate(box, verify=verify)
        if start % dtype.itemsize:
            octets, start = octets[start:], 0
        if (key := (id(octets), dtype)) not in files:
            whole = octets[: len(octets) // dtype.itemsize * dtype.itemsize]
            files[key] = octets, torch_bytes(torch, whole).view(dtype)
        return files[key][1].as_strided(lengths, strides, start // dtype.itemsize + sum(map(mul, offsets, strides)))

    return read


def _value_setter(torch: Any, planner: Any) -> Callable[[Any, Any], None]:
    """Return a function that hands a planner the value of an item.

    Planners unpickle without limits: they are given a pickle that is made here, never the file's. DCP's own planner
    gets values without one, which would be most of the time of a load with thousands of values.
    """
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    def pickled(item: Any, value: Any) -> None:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        planner.load_bytes(item, buffer)

    own = isinstance(planner, DefaultLoadPlanner) and type(planner).load_bytes is DefaultLoadPlanner.load_bytes
    if not own or not planner.flatten_state_dict:
        return pickled
    try:
        from torch.distributed.checkpoint._traverse import set_element
    except ImportError:  # it is for torch's own use, and may move
        return pickled
    return lambda item, value: set_element(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)


class _MetadataByName(ByName):
    """DCP's metadata of each name, made when it is asked for: the chunks of a tensor may be many."""

    def __init__(self, opened: Checkpoint) -> None:
        from torch.distributed.checkpoint import metadata  # once: `_metadata_of` is called for thousands of names

        super().__init__(opened)
        self._torch, self._kinds = import_torch(), metadata
        self._made: dict[str, Any] = {}
        self._properties: dict[Any, Any] = {}  # by element type; nobody writes to them

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = self._metadata_of(name)
        return self._made[name]

    def _metadata_of(self, name: str) -> Any:
        """Return DCP's metadata of a tensor or a value; KeyError for a name that the checkpoint does not have."""
        opened, kinds, size_of = self._opened, self._kinds, self._torch.Size
        i = opened.tensors.get(name)
        if i is None:
            if name not in opened.values:
                raise KeyError(name)
            return kinds.BytesStorageMetadata()
        kind, bits, shape = opened.type_of(i)
        dtype = torch_dtype(self._torch, kind, bits)
        if dtype not in self._properties:
            self._properties[dtype] = kinds.TensorProperties(dtype=dtype)
        size = size_of(torch_shape(kind, bits, shape))
        whole = bits < 8  # packed tensors are not split
        chunks = [
            kinds.ChunkStorageMetadata(size_of(box.origin), size if whole else size_of(box.extent))
            for box in opened.pieces(i)
        ]
        return kinds.TensorStorageMetadata(self._properties[dtype], size, chunks)


def load_object(value: Any, name: str, path: str | None, allow_pickle: bool) -> Any:
    """Return a value; a PickledValue is unpickled, by torch's weights_only or, with `allow_pickle`, without limits."""
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
