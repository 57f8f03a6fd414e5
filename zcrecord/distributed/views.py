"""`load_views`: a state dict over the mapping of a checkpoint, for models on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from operator import attrgetter
from typing import Any

from zcrecord.archive.archive import Archive
from zcrecord.errors import IntegrityError, MismatchError, SourceError, TensorNotFoundError
from zcrecord.frameworks.torch import import_torch, torch_bytes, torch_dtype, torch_shape
from zcrecord.loaders.boxes import Bounds, overlap

from .checkpoint import Checkpoint, StoredBox
from .reader import load_object


def load_views(
    path: Any,
    like: Mapping[str, Any],
    *,
    writable: bool = True,
    allow_pickle: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a state dict like another one, its tensors over the mapping of a checkpoint: nothing is read or copied.

    For a model on the meta device: `model.load_state_dict(load_views(path, state), assign=True)`. A DTensor comes as a
    DTensor of the same mesh and placements. Its local part, or a whole tensor, is a view where it lies in one chunk of
    the checkpoint, contiguous there: as it was saved, or rows of it. Otherwise it is put together in new memory, and so
    is what is for another device than the CPU. Pages of views are read when they are first touched.

    As with `Record.torch`, views lie on a private mapping, so that an optimizer's steps change no file, tensors that
    were tied when they were saved are tied, and the mapping lives as long as any. `like` is not changed.

    Args:
        path: the checkpoint: its folder, its catalogue, one archive, or a URL of one of these.
        like: nested mappings and lists of tensors and DTensors, on the meta device or any, and of values, which are
            replaced by those of the checkpoint. Names are paths joined by dots, as DCP makes them.
        writable: False gives views over the read-only mapping. **Any in-place write then ends the process.**
        allow_pickle, storage_options: as of `ZcrStorageReader`.

    Raises:
        DependencyError: torch is not installed. TensorNotFoundError: the checkpoint lacks a name. MismatchError: a
        tensor has another shape or element type. SourceError: no checkpoint is there, or it cannot be read.
        FormatError, LimitError: a file is no valid archive. UnsupportedError: an object needs `allow_pickle`.

    Example:
        >>> import torch, zcrecord, zcrecord.distributed
        >>> _ = zcrecord.save_record({"w": torch.ones(2, 3)}, "checkpoint.zcr")
        >>> model = torch.nn.ParameterDict({"w": torch.empty(2, 3, device="meta")})
        >>> zcrecord.distributed.load_views("checkpoint.zcr", model.state_dict())["w"].sum()
        tensor(6.)
    """
    torch = import_torch()
    checkpoint = Checkpoint(path, storage_options)
    try:
        views: dict[str, Any] = _Views(torch, checkpoint, writable, allow_pickle).value(like)
    except (SourceError, IntegrityError):
        if (newer := checkpoint.newer()) is None:  # a save may have removed archives of the one that it replaced
            raise
        views = _Views(torch, newer, writable, allow_pickle).value(like)
    return views


_spec_of = attrgetter("_spec")  # by which torch's operations make a DTensor; from_local would work out another for each
_Box = tuple[tuple[int, ...], tuple[int, ...]]  # first index and size


class _Views:
    """One call of `load_views`: makes views of a checkpoint's tensors, over one mapping."""

    def __init__(self, torch: Any, checkpoint: Checkpoint, writable: bool, allow_pickle: bool) -> None:
        self._torch, self._checkpoint, self._allow_pickle = torch, checkpoint, allow_pickle
        self._archive: Archive = checkpoint.archive.private() if writable else checkpoint.archive
        self._local_boxes: dict[Any, _Box | None] = {}  # by layout of a DTensor
        self._bases: dict[tuple[int, ...], Any] = {}  # by file and payload, so that tied tensors share a storage

    def value(self, like: Any, path: tuple[str, ...] = ()) -> Any:
        """Return the checkpoint's value at a path, in the structure of `like`, a state dict or a part of one."""
        if isinstance(like, self._torch.Tensor):
            return self._tensor(like, ".".join(path))
        if isinstance(like, Mapping):
            return {key: self.value(item, (*path, str(key))) for key, item in like.items()}
        if isinstance(like, list) and any(map(self._is_node, like)):
            return [self.value(item, (*path, str(i))) for i, item in enumerate(like)]
        name = ".".join(path)
        self._lookup(self._checkpoint.values, name)
        return load_object(self._checkpoint.value(name), name, self._checkpoint.path, self._allow_pickle)

    def _lookup(self, by_name: Mapping[str, Any], name: str) -> Any:
        """Return the item of a mapping by its name; TensorNotFoundError if it has none."""
        if name not in by_name:
            raise TensorNotFoundError(name, lambda: by_name, path=self._checkpoint.path)
        return by_name[name]

    def _is_node(self, value: Any) -> bool:
        """Return True for an item that makes DCP give a list's items names of their own: a tensor, mapping or node."""
        has_nodes = isinstance(value, list) and any(map(self._is_node, value))
        return has_nodes or isinstance(value, self._torch.Tensor | Mapping)

    def _tensor(self, like: Any, name: str) -> Any:
        """Return a saved tensor in the form of `like`: plain, or a DTensor with this rank's part (`like` if none)."""
        torch, checkpoint = self._torch, self._checkpoint
        i = self._lookup(checkpoint.tensors, name)
        kind, bits, elements = checkpoint.type_of(i)
        dtype, shape = torch_dtype(torch, kind, bits), torch_shape(kind, bits, elements)
        if (dtype, shape) != (like.dtype, tuple(like.shape)):
            expected = f"{like.dtype} of shape {tuple(like.shape)}"
            message = f"is {dtype} of shape {shape} in the checkpoint, and {expected} in `like`"
            raise MismatchError(f"{message}; make the model as it was saved", path=checkpoint.path, tensor=name)
        if not hasattr(like, "device_mesh"):
            device = torch.device("cpu") if like.is_meta else like.device
            return self._box(i, (0,) * len(shape), shape).to(device)
        if (local_box := self._local_box(like)) is None:
            return like
        local = self._box(i, *local_box)
        if (device_type := like.device_mesh.device_type) != "cpu":
            local = local.to(torch.device(device_type, torch.get_device_module(device_type).current_device()))
        return type(like)(local, _spec_of(like), requires_grad=False)

    def _local_box(self, like: Any) -> _Box | None:
        """Return the box of a DTensor that this rank has, or None; cached by layout, since torch takes long for it."""
        key = like.shape, like.placements, like.device_mesh
        if key not in self._local_boxes:
            chunks = [] if like.device_mesh.get_coordinate() is None else like.__create_chunk_list__()
            self._local_boxes[key] = next(((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks), None)
        return self._local_boxes[key]

    def _box(self, i: int, origin: tuple[int, ...], extent: tuple[int, ...]) -> Any:
        """Return a box of tensor `i`, in torch's elements: a view if it is contiguous in one piece, else new memory."""
        kind, bits, _ = self._checkpoint.type_of(i)
        dtype = torch_dtype(self._torch, kind, bits)
        pieces = [] if 0 in extent else self._checkpoint.pieces(i)
        for piece in pieces:
            if piece.origin == origin and torch_shape(kind, bits, piece.extent) == extent:  # as it was saved
                return self._piece(piece, dtype, extent).detach()
        box = tuple((start, start + size) for start, size in zip(origin, extent, strict=True))
        parts = []
        for piece in pieces:
            shape = torch_shape(kind, bits, piece.extent)  # packed elements are not split, and torch counts pairs
            if (bounds := overlap(box, piece.origin, shape)) is not None:
                in_box, in_piece = bounds
                parts.append((in_box, _slice(self._piece(piece, dtype, shape), in_piece)))
        if len(parts) == 1:
            [(_, view)] = parts
            return view.detach() if view.is_contiguous() else view.contiguous()
        joined = self._torch.empty(extent, dtype=dtype, device="cpu")
        for in_box, part in parts:
            _slice(joined, in_box).copy_(part)
        return joined

    def _piece(self, box: StoredBox, dtype: Any, shape: tuple[int, ...]) -> Any:
        """Return a whole piece as a view of this type and shape; views of one piece share a storage."""
        # Of a payload that several tensors see differently, as in an archive of views, each has a base of its own.
        row = self._checkpoint.row(box.tensor)
        key = *self._checkpoint.place(box), row.byte_offset, row.dims, row.strides
        if key not in self._bases:
            octets, start = self._checkpoint.locate(box, self._archive)
            self._bases[key] = torch_bytes(self._torch, octets[start : start + prod(shape) * dtype.itemsize])
        return self._bases[key].view(dtype).view(shape)


def _slice(tensor: Any, bounds: Bounds) -> Any:
    return tensor[tuple(slice(*ends) for ends in bounds)]
