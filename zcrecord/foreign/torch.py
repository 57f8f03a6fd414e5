"""Reads checkpoints of `torch.save`: state dicts, optimizers' states, and dicts and lists of them.

torch reads the file with `weights_only`, from a private mapping whose pages are never written. `writing.flatten` makes
arrays of tensors; `writing.sharing` decides which of them share memory.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.entries import KIND_NAMES, is_attribute
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.errors import Advice, FormatError, LimitError, RecordError, SourceError, UnsupportedError, printable
from zcrecord.frameworks.torch import import_torch
from zcrecord.tensors.strides import address
from zcrecord.writing.flatten import as_tensor, children_of, refuse_key
from zcrecord.writing.module_tree import state_path

from .numpy_types import Noted, allowed
from .pickled import claimed
from .readers import MemoryReader, Reader, as_file
from .receiver import Receiver
from .zip_files import check_alike, open_zip

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_ADVICE = re.compile(r"torch\.load|weights_only|Weights only")  # lines of advice in torch's messages
_REPEATS, _REPEATED = 1 << 16, 64  # limit of items visited again: so many, plus so many for each distinct item
_DATA = b"data.pkl"
_PICKLES = 5  # in a file from before torch 1.6: magic, version, system, the checkpoint, keys of its storages
_EXPANDED, _TIMES = 64 << 20, 4  # limit of the bytes of all tensors: so many, plus so many times the file
_ITEM_COST, _ITEM_TIMES = 900, 64  # bytes of memory of a child of a module, which may be one byte; a word takes 20


def read(reader: Reader, out: Receiver) -> int:
    """Give a checkpoint's tensors and values to `out`; returns the bytes of input. Copies no tensor in C order.

    The archive is the one that `save_record` makes of the result of `torch.load`: dicts, lists and tuples are modules,
    integer keys stay integers, names with dots stay whole. So `tree("torch")` returns an object for `load_state_dict`.
    Names are split at their dots only if the file is a single `state_dict()`, as `save_record(module)` splits them.
    Tied tensors stay tied, and views of one storage share its bytes; bytes that no tensor uses are left out. Arrays and
    scalars of numpy are read, too, if their elements are plain numbers.

    Tensors are read from the mapped file, a page at a time. A checkpoint from before torch 1.6, which is no zip file,
    cannot be mapped: torch reads it into memory, whole.

    Raises:
        FormatError: the file is not a checkpoint, is damaged, or has objects of classes that torch does not load from
            untrusted files. UnsupportedError: a key, value or tensor that archives cannot have. LimitError: a small
            file claims huge tensors. DependencyError: torch is not installed. SourceError: the file cannot be read.
    """
    torch = import_torch()
    if reader.nbytes is None or reader.path is None:
        raise UnsupportedError("torch seeks in a checkpoint, in a regular file; write it to one first")
    size, head = reader.nbytes, reader.read(HEAD)
    items = list(_StateDictWalk(torch, size).items(_load(torch, reader, head)))
    arrays = [as_tensor(f.value, ".".join(f.path)) for f in items if f.kind == "tensor"]
    _check_amount(arrays, size)
    parts = iter(out.parts(arrays))
    for f in items:
        if f.kind == "tensor":
            out.add(f.path, next(parts))
        elif f.kind == "attribute":
            out.attribute(f.path, f.value)
        else:
            out.module(f.path, f.kind, f.value)
    return size


def _load(torch: Any, reader: Reader, head: bytes) -> Any:
    """Load a checkpoint by torch; storages of a zip file are mapped."""
    zipped = head.startswith(_ZIP)
    if not head:
        raise FormatError("the file is empty, no torch checkpoint")
    if not head.startswith((_ZIP, _PICKLE)):
        if what := wrong_type(head, "a torch checkpoint", sure=True):
            raise FormatError(what)
        advice = Advice("name its format by {}", "source_format")
        raise FormatError("no torch checkpoint, which begins as a zip file or a pickle", advice=advice)
    try:
        (_check_zip if zipped else _check_pickles)(reader)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error describes a damaged file
            with allowed(torch):
                owned = isinstance(reader, MemoryReader) and not reader.memory.octets.readonly  # read, and not mapped
                source: Any = as_file(reader) if owned else reader.path
                if owned:
                    source.seek(0)
                loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=zipped and not owned)
        if reader.was_replaced():  # torch opened the path again, and what it found was not checked
            raise SourceError("was replaced while it was opened; open it again")
        return loaded
    except (MemoryError, RecordError):
        raise
    except Exception as error:  # unpickling a damaged file raises anything
        raise FormatError(_reason(error)) from error


def _check_zip(reader: Reader) -> None:
    """Refuse a zip file with compressed members, which torch reads whole into memory; `torch.save` never writes them.

    `check_alike` ensures that torch finds the same members as zipfile, but that it ignores the case of their names. A
    storage has the size of its member: torch maps as many bytes as the pickle says, those of other members included.
    """
    size, file = reader.nbytes or 0, as_file(reader)
    opened = open_zip(file, "no torch checkpoint")
    packed = next((info.filename for info in opened.infolist() if info.compress_type != zipfile.ZIP_STORED), None)
    if packed is not None:
        what = f"no torch checkpoint, or one that was packed again: '{printable(packed)}' is compressed"
        raise UnsupportedError(f"{what}; unpack it and pack it without compression, or save it anew")
    check_alike(opened, file, size)
    sizes = {_folded(info.orig_filename): info.file_size for info in opened.infolist()}
    if len(sizes) < len(opened.infolist()):
        raise FormatError("two of its members have one name, or differ by case alone; readers take one or the other")
    for info in opened.infolist():
        name = _folded(info.orig_filename)
        if name.endswith(_DATA):
            storages: list[tuple[str, int]] = []
            _check_claim(claimed(opened.read(info), storages), size)
            for key, nbytes in storages:
                member = name.removesuffix(_DATA) + b"data/" + _folded(key)
                if sizes.get(member) != nbytes:
                    what = (
                        f"its storage '{printable(key)}' has {sizes.get(member, 'no')} bytes, not those of its tensors"
                    )
                    raise FormatError(f"no torch checkpoint, or a damaged one: {what}; copy it again")


def _folded(name: str) -> bytes:
    """Return a member's name as torch compares it: letters of ASCII without their case."""
    return name.encode(errors="surrogatepass").lower()


def _check_pickles(reader: Reader) -> None:
    """Refuse a checkpoint from before torch 1.6 whose pickles ask for too much memory."""
    file = as_file(reader)
    file.seek(0)
    for _ in range(_PICKLES):
        _check_claim(claimed(file), reader.nbytes or 0)


def _check_claim(nbytes: int, size: int) -> None:
    if nbytes > _TIMES * size + _EXPANDED:
        raise LimitError(f"its pickle asks for {nbytes} bytes, the file has {size}; the file is malicious")


def _reason(error: Exception) -> str:
    """Return the first useful line of torch's message, which may fill a page."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    if match := re.search(r"GLOBAL ([\w.]*\w) (?:was|whose)", text):
        return (
            f"holds an object of {match[1]}, and loading that may run code; have whoever made the file save plain "
            "tensors, as torch.save(model.state_dict(), ...) does"
        )
    lines = [line.strip() for line in text.splitlines()]
    line = next((line for line in lines if line and not _ADVICE.search(line)), "it ends too early")
    if isinstance(error, LookupError):  # an unknown opcode of pickle, or missing values
        line = "its pickle cannot be read"
    return f"no torch checkpoint, or a damaged one: {printable(line)}; copy it again"


class _CheckpointItem(NamedTuple):
    """A tensor, an attribute, or the start of a module with its kind and class name."""

    path: tuple[str, ...]
    kind: str
    value: Any = None


_Children = Iterator[tuple[tuple[str, ...], Any]]  # of a module: paths and values


class _StateDictWalk:
    """A walk through a checkpoint, in its own order.

    A pickle may refer to one list many times, or from within itself, so that a few bytes stand for billions of items:
    repeated items are counted, and limited. So is the memory that all items take, before the archive has any.
    """

    def __init__(self, torch: Any, size: int) -> None:
        self._torch = torch
        self._met: set[int] = set()
        self._left = _REPEATS
        self._room = _EXPANDED + _ITEM_TIMES * size

    def items(self, value: Any) -> Iterator[_CheckpointItem]:
        """Yield a checkpoint's modules, each before what it holds, tensors and attributes."""
        item, children = self._module((), value)
        yield item
        open_modules = [children]  # a stack, since a generator within a generator costs time for each level
        while open_modules:
            if (child := next(open_modules[-1], None)) is None:
                open_modules.pop()
                continue
            item, below = self._item(*child)
            yield item
            if below:
                open_modules.append(below)

    def _module(self, path: tuple[str, ...], value: Any) -> tuple[_CheckpointItem, _Children]:
        name = ".".join(path)
        if isinstance(value, Mapping) and any(isinstance(key, Noted) for key in value):
            value = {key.scalar(name) if isinstance(key, Noted) else key: inner for key, inner in value.items()}
        kind, type_name, children = children_of(value, name)
        if kind is None or (not path and not isinstance(value, Mapping | list | tuple)):
            if not path:
                raise UnsupportedError(f"holds a single {type(value).__name__} without a name; save a dict of tensors")
            what = f"a {type(value).__name__} is neither a tensor nor a plain value; take it out of the checkpoint"
            raise UnsupportedError(what, tensor=name)
        if len(path) >= MAX_DEPTH:
            raise LimitError(f"nested more than {MAX_DEPTH} deep; does it contain itself?", tensor=name)
        state = value if not path and self._is_state_dict(value) else None
        return _CheckpointItem(path, KIND_NAMES[kind], type_name), self._children(path, children, state)

    def _children(self, path: tuple[str, ...], children: Iterable[tuple[str, Any]], state: Any) -> _Children:
        name = ".".join(path)
        for key, child in children:
            if not key:
                refuse_key(key, name)
            parts = state_path(key, state) if state is not None else (key,)
            self._room -= len(parts) * _ITEM_COST + len(name) + len(key)
            if self._room < 0:
                limit = f"{_EXPANDED >> 20} MiB and {_ITEM_TIMES} times the file"
                what = f"its items would take more than {limit} in memory; save many values as tensors"
                raise LimitError(what, tensor=name or None)
            yield (*path, *parts), child

    def _is_state_dict(self, value: Any) -> bool:
        """Return True if a checkpoint is only a module's `state_dict()`: tensors and extra state by name."""
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and (isinstance(child, self._torch.Tensor) or key.endswith("_extra_state"))
            for key, child in value.items()
        )

    def _item(self, path: tuple[str, ...], value: Any) -> tuple[_CheckpointItem, _Children | None]:
        name = ".".join(path)
        if isinstance(value, Noted):
            value = value.array(name)
        if isinstance(value, self._torch.Tensor | np.ndarray | np.generic):
            tensor = value.detach() if isinstance(value, self._torch.Tensor) else value
            return _CheckpointItem(path, "tensor", tensor), None
        if isinstance(value, str | bytes | list | tuple | Mapping):
            self._meet(value, name)
        value = bytes(value) if isinstance(value, bytearray) else value
        if is_attribute(value, name):
            return _CheckpointItem(path, "attribute", value), None
        return self._module(path, value)

    def _meet(self, value: Any, name: str) -> None:
        cost = len(value) + 1
        again = id(value) in self._met
        self._met.add(id(value))
        self._left += -cost if again else cost * _REPEATED
        if self._left < 0:
            raise LimitError("the same lists or texts are there millions of times; the file is malicious", tensor=name)


def _check_amount(arrays: list[Any], size: int) -> None:
    """Raise LimitError if tensors, such as expanded ones, have far more bytes than the file."""
    distinct = {}
    for array in arrays:
        plain = isinstance(array, np.ndarray)
        key = (address(array), array.shape, array.strides, array.dtype) if plain else id(array)
        distinct[key] = array.nbytes
    total = sum(distinct.values())
    if total > _TIMES * size + _EXPANDED:
        raise LimitError(f"its tensors claim {total} bytes, the file has {size}; save expanded ones .contiguous()")
