"""Reads checkpoints of `torch.save`: state dicts, optimizers' states, and dicts and lists of them.

torch is not needed: `pickled` runs the pickle, `torch_types` has what torch's names in it stand for, and tensors are
views of the file. `writing.sharing` decides which of them share memory.
"""

from __future__ import annotations

import datetime
import itertools
import os
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sized
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord.codec.entries import KIND_NAMES, encodable, is_attribute
from zcrecord.codec.file_types import HEAD, wrong_type
from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.errors import Advice, FormatError, LimitError, RecordError, UnsupportedError, located, printable
from zcrecord.storage.memory import Memory, map_file
from zcrecord.writing.flatten import children_of, refuse_key
from zcrecord.writing.module_tree import state_path

from .numpy_types import PickledArray
from .pickled import parts_of, unpickle
from .readers import MemoryReader, Reader
from .receiver import Form, Receiver
from .torch_folders import METADATA, Checkpoint, put_chunks, read_folder
from .torch_types import Namespace, TorchNames, TorchStorage, TorchTensor, TorchValue, itemsize
from .zip_files import STORED, Member, zip_members

_Members = dict[bytes, Member]  # by the names in lower case, as torch compares them

_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
_WRONG = "no torch checkpoint"
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001  # the first two pickles in a file from before torch 1.6
_VERSIONS = 10  # of torch's zip files; a later one may have other rules
_MODULES = (
    dict, list, tuple, int, complex, set, frozenset, deque, Path, datetime.date, datetime.time, datetime.timedelta,
)  # fmt: skip
_FREE_REPEATS, _REPEATS_PER_ITEM = 1 << 16, 64  # visits of items seen before: so many, and more for each item
_EXPANDED, _TIMES = 64 << 20, 4  # limit of the bytes of all tensors: so many, plus so many times the file
_ITEM_COST, _ITEM_TIMES = 900, 64  # bytes of memory of a child of a module, which may be one byte; a word takes 20


def read(reader: Reader, out: Receiver) -> int:
    """Give a checkpoint's tensors and values to `out`; returns the bytes of input. Copies no tensor in C order.

    The archive is the one that `save_record` makes of the result of `torch.load`: dicts, lists and tuples are modules,
    integer keys stay integers, names with dots stay whole. So `tree("torch")` returns an object for `load_state_dict`.
    Names are split at their dots only if the file is a single `state_dict()`, as `save_record(module)` splits them.
    Tied tensors stay tied, and views of one storage share its bytes; bytes that no tensor uses are left out. Arrays and
    scalars of numpy are read, too, if their elements are plain numbers. Checkpoints from before torch 1.6, which are
    not zip files, are read alike.

    Tensors are views of the mapped file. Those of a big-endian machine are copied.

    Raises:
        FormatError: the file is not a checkpoint, is damaged, or has objects of classes that torch does not load from
            untrusted files. UnsupportedError: a key, value or tensor that archives cannot have. LimitError: a small
            file claims huge tensors. SourceError: the file cannot be read.
    """
    if reader.nbytes is None or (reader.path is None and not isinstance(reader, MemoryReader)):
        raise UnsupportedError("a checkpoint is read from a regular file, which can be mapped; write it to one first")
    if not isinstance(reader, MemoryReader):
        reader = MemoryReader(map_file(str(reader.path), least=0))
    checkpoint = _load(reader)
    size = reader.nbytes + sum(file.nbytes for file in checkpoint.readers)
    has_ranges = not (out.reads or checkpoint.readers)  # tensors can be ranges of this one file
    if not (has_ranges and _is_state_dict(checkpoint.value) and _put_state(checkpoint.value, reader, out)):
        items = _StateDictWalk(checkpoint.value, size).items
        tensors = [item.value for item in items if item.kind == "tensor"]
        _check_amount(tensors, size)
        described = [t for t in tensors if isinstance(t, TorchTensor)] if has_ranges else []
        users = Counter(id(t.storage) for t in described)
        ranges = {id(t) for t in described if t.is_plain and users[id(t.storage)] == 1}
        _put_items(items, ranges, checkpoint, reader, out)
    return size


def _put_items(
    items: list[_CheckpointItem], ranges: set[int], checkpoint: Checkpoint, reader: MemoryReader, out: Receiver
) -> None:
    """Give items to `out`: tensors whose `id` is in `ranges` as ranges of the file, others by chunks or as arrays."""
    chunks = checkpoint.chunks
    others = (i for i in items if i.kind == "tensor" and id(i.value) not in ranges and id(i.value) not in chunks)
    parts = iter(out.parts(map(_array, others), reader))
    for path, kind, value in items:
        if kind == "attribute":
            out.attribute(path, value)
        elif kind != "tensor":
            out.module(path, kind, value)
        elif id(value) in ranges:
            out.put_range(path, value.kind, value.shape, reader, value.start, value.nbytes)
        elif id(value) in chunks:
            put_chunks(path, value, chunks[id(value)], out)
        else:
            out.add(path, next(parts))


def _put_state(state: dict[str, Any], reader: MemoryReader, out: Receiver) -> bool:
    """Give all tensors of a `state_dict()` at once; return False if they have to be given, and checked, one by one."""
    tensors, forms, names = list(state.values()), dict[Form, int](), "".join(state)
    if "\0" in names or not encodable(names):
        return False
    are_plain = all(type(t) is TorchTensor and t.is_plain for t in tensors)
    ranges = [(t.start, t.nbytes) for t in tensors] if are_plain else []
    are_too_many = len(tensors) * _ITEM_COST > _EXPANDED + _ITEM_TIMES * reader.nbytes
    if not ranges or are_too_many or len(set(ranges)) > len({id(t.storage) for t in tensors}):
        return False
    form_ids = np.array([forms.setdefault((t.kind, t.shape), len(forms)) for t in tensors], np.intp)
    starts, sizes = np.array(ranges, np.uint64).T
    return out.put_state(list(state), list(forms), form_ids, [(reader, starts, sizes)])


def _load(reader: MemoryReader) -> Checkpoint:
    """Return the content of a checkpoint, or of the folder beside a `.metadata`; FormatError and others as `read`."""
    octets = reader.memory.octets.toreadonly()
    head = bytes(octets[:HEAD])
    if not head:
        raise FormatError("the file is empty, no torch checkpoint")
    if not head.startswith((_ZIP, _PICKLE)):
        if fault := wrong_type(head, "a torch checkpoint", sure=True):
            raise FormatError(fault)
        advice = Advice("name its format by {}", "source_format")
        raise FormatError("no torch checkpoint, which begins as a zip file or a pickle", advice=advice)
    try:
        if os.path.basename(reader.path or "") == METADATA:
            return read_folder(reader, lambda part, whole: _load_zipped(MemoryReader(Memory(part)), part, whole))
        value = _load_zipped(reader, octets) if head.startswith(_ZIP) else _load_bare(reader, octets)
    except (MemoryError, RecordError):
        raise
    except Exception as error:  # a damaged pickle raises anything
        line = str(error) if type(error) is ValueError else "its pickle cannot be read"
        raise FormatError(f"{_WRONG}, or a damaged one: {printable(line)}; copy it again") from error
    return Checkpoint(value, {}, [])


def stored_members(reader: MemoryReader) -> tuple[_Members, int]:
    """Return a zip file's members by lower-case name, and its directory's offset; RecordError unless all are stored."""
    all_members, directory = zip_members(reader, _WRONG)
    for member in all_members:
        if member.method != STORED or member.encrypted:
            state = "encrypted" if member.method == STORED else "compressed"
            name = printable(member.name.decode(errors="replace"))
            fault = f"{_WRONG}, or one that was packed again: '{name}' is {state}"
            raise UnsupportedError(f"{fault}; unpack it and pack it without compression, or save it anew")
    members = {member.name.lower(): member for member in all_members}
    if len(members) < len(all_members):
        raise FormatError("two of its members have one name, or differ by case alone; save it anew")
    return members, directory


def _load_zipped(reader: MemoryReader, octets: memoryview, whole: TorchNames | None = None) -> Any:
    """Return the value in a zip file, which may be part of a `whole`; sets its reader's `described` and `sums`."""
    members, directory = stored_members(reader)
    root = next(iter(members), b"").partition(b"/")[0]

    def read(name: bytes, limit: int) -> bytes | None:
        member = members.get(root + b"/" + name)
        return None if member is None else bytes(octets[member.start :][: min(member.nbytes, limit)])

    def place(key: str, storage: TorchStorage) -> None:
        member = members[root + b"/data/" + key.encode()]
        if storage.nbytes != member.nbytes:
            raise ValueError(f"its storage '{printable(key)}' has {member.nbytes} bytes, not those of its tensors")
        storage.octets, storage.start, storage.in_file = octets, member.start, True
        if order == b"big":
            storage.swap()

    pickle, order, version = read(b"data.pkl", len(octets)), read(b"byteorder", 9), read(b"version", 9)
    if pickle is None or members[root + b"/data.pkl"].crc not in (0, zlib.crc32(pickle)):
        raise ValueError("its data.pkl is " + ("missing" if pickle is None else "damaged"))
    if version is None or not version.strip().isdigit() or int(version) > _VERSIONS:
        raise ValueError("its version is " + ("missing" if version is None else printable(repr(version))))
    if order not in (None, b"little", b"big"):
        raise ValueError(f"its byte order is {printable(repr(order))}")
    names = TorchNames(len(octets), place, whole)
    value, _ = unpickle(pickle, 0, names.find_class, names.persistent_load)
    reader.described = directory, len(octets)
    # A CRC-32 of 0 stands for none: torch can be told to compute none.
    reader.sums = lambda: (member.checksum(octets) for member in members.values() if member.crc)
    return value


def _load_bare(reader: MemoryReader, octets: memoryview) -> Any:
    """Return the value in a checkpoint from before torch 1.6; ValueError or any other for a damaged one.

    Magic, version, system, the value and the keys of the storages are a pickle each; then the storages follow, each
    behind its number of elements. `reader` is then `described` by the pickles.
    """
    names, pickles, position = TorchNames(len(octets), lambda *_: None), [], 0
    for expected in (_MAGIC, _PROTOCOL, None, None, None):
        value, position = unpickle(octets, position, names.find_class, names.persistent_load)
        if expected is not None and value != expected:
            raise ValueError(f"it has {expected} nowhere")
        pickles.append(value)
    *_, state, keys = pickles
    reader.described = 0, position
    for key in keys:
        storage = names.storages[key] if type(key) is str else None
        if storage is None:
            raise ValueError("the key of a storage that no tensor has")
        count, storage.start = int.from_bytes(octets[position : position + 8], "little"), position + 8
        position += 8 + storage.nbytes
        if count * itemsize(storage.dtype) != storage.nbytes or position > len(octets):
            raise ValueError("a storage ends too early, or has another size than its tensors")
        storage.octets, storage.in_file = octets, True
    return state


def _array(item: _CheckpointItem) -> Any:
    """Return the array of a tensor of torch; numpy's as it is. Errors name the tensor."""
    if not isinstance(item.value, TorchTensor):
        return item.value
    with located(tensor=".".join(item.path)):
        return item.value.array()


class _CheckpointItem(NamedTuple):
    """A tensor, an attribute, or the start of a module with its kind and class name."""

    path: tuple[str, ...]
    kind: str
    value: Any = None


class _StateDictWalk:
    """A walk through a checkpoint; `items` has its modules, each before what it holds, tensors and attributes.

    A pickle may refer to one list many times, or from within itself, so that a few bytes stand for billions of items:
    repeated items are counted, and limited. So is the memory that all items take, before the archive has any.
    """

    def __init__(self, value: Any, size: int) -> None:
        """Walk through a `value` from a file of `size` bytes; LimitError, UnsupportedError, FormatError."""
        self.items: list[_CheckpointItem] = []
        self._visited: dict[int, Any] = {}  # by id; kept, so that no other object gets an id
        self._visits_left = _FREE_REPEATS
        self._memory_left = _EXPANDED + _ITEM_TIMES * size
        if not isinstance(value, dict | list | tuple):
            kind_name = "Tensor" if isinstance(value, TorchTensor | TorchValue) else type(value).__name__
            raise UnsupportedError(f"holds a single {kind_name} without a name; save a dict of tensors")
        self._add_module((), "", value)

    def _add_module(self, path: tuple[str, ...], name: str, value: Any, *, is_repeated: bool = False) -> None:
        """Add a module and all in it; keys of a whole checkpoint that is a `state_dict()` are split at their dots."""
        state = value if not path and _is_state_dict(value) else None
        kind, type_name, children = self._module(path, name, value)
        self.items.append(_CheckpointItem(path, kind, type_name if path or kind == "object" else ""))
        for key, child in children:
            if type(key) is not str or not key:
                refuse_key(key, name)
            parts = state_path(key, state) if state is not None else (key,)
            self._memory_left -= len(parts) * _ITEM_COST + len(name) + len(key)
            if self._memory_left < 0:
                limit = f"{_EXPANDED >> 20} MiB and {_ITEM_TIMES} times the file"
                fault = f"its items would take more than {limit} in memory; save many values as tensors"
                raise LimitError(fault, tensor=name or None)
            self._add((*path, *parts), child, is_repeated=is_repeated)

    def _module(self, path: tuple[str, ...], name: str, value: Any) -> tuple[str, str, Iterable[tuple[str, Any]]]:
        """Return kind, class name and children of the module that a value becomes; RecordError if it is none."""
        if isinstance(value, TorchValue) and value.kind.startswith("zcr:"):
            return "object", value.kind, [("value", value.text)]
        if len(path) >= MAX_DEPTH:
            raise LimitError(f"nested more than {MAX_DEPTH} deep; does it contain itself?", tensor=name)
        if isinstance(value, Namespace):
            if type(value.state) is not dict:
                raise FormatError("a namespace without names; copy the file again", tensor=name)
            return "object", value.type_name, value.state.items()
        if not isinstance(value, _MODULES):
            fault = f"a {type(value).__name__} is neither a tensor nor a plain value; take it out of the checkpoint"
            raise UnsupportedError(value.text if isinstance(value, TorchValue) else fault, tensor=name)
        if isinstance(value, set | frozenset):  # sorted below: long texts, in many tuples, would be compared often
            for part in itertools.chain.from_iterable(map(parts_of, value)):
                self._count_visit(part, name)
        if isinstance(value, dict) and any(isinstance(key, PickledArray) for key in value):
            value = {key.scalar(name) if isinstance(key, PickledArray) else key: inner for key, inner in value.items()}
        kind, type_name, children = children_of(value, name)
        assert kind is not None, "the types above have one"
        return KIND_NAMES[kind], type_name, children

    def _add(self, path: tuple[str, ...], value: Any, *, is_repeated: bool) -> None:
        """Add a value as a tensor, an attribute, or a module with all in it; all in a repeated one is repeated."""
        if type(value) is TorchTensor:
            self.items.append(_CheckpointItem(path, "tensor", value))
            return
        name = ".".join(path)
        # Lists that are made of a dict's keys and values are new at each visit.
        is_repeated = self._count_visit(value, name, is_repeated=is_repeated)
        if type(value) is PickledArray:
            self.items.append(_CheckpointItem(path, "tensor", value.array(name)))
        elif is_attribute(value, name):
            self.items.append(_CheckpointItem(path, "attribute", value))
        else:
            self._add_module(path, name, value, is_repeated=is_repeated)

    def _count_visit(self, value: Any, name: str, *, is_repeated: bool = False) -> bool:
        """Count a text or container, met at a `name`; return True if it was met before. LimitError if met too often."""
        is_repeated = is_repeated or id(value) in self._visited
        if isinstance(value, Sized):
            self._visits_left += (len(value) + 1) * (-1 if is_repeated else _REPEATS_PER_ITEM)
            self._visited[id(value)] = value
        if self._visits_left < 0:
            raise LimitError("the same lists or texts are there millions of times; save copies of them", tensor=name)
        return is_repeated


def _is_state_dict(value: Any) -> bool:
    """Return True if a checkpoint is only a module's `state_dict()`: tensors and extra state by name."""
    return isinstance(value, dict) and all(
        type(key) is str and (type(child) is TorchTensor or key.endswith("_extra_state"))
        for key, child in value.items()
    )


def _check_amount(tensors: list[Any], size: int) -> None:
    """Raise LimitError if tensors, such as expanded ones, have far more bytes than the file; tied ones count once."""
    limit, distinct = _TIMES * size + _EXPANDED, dict[Any, int]()
    if sum(t.nbytes for t in tensors) <= limit:
        return
    for t in tensors:
        is_torch = isinstance(t, TorchTensor)
        key = (id(t.storage), t.offset, t.shape, t.strides, t.dtype) if is_torch else id(t)
        distinct[key] = t.nbytes
    total = sum(distinct.values())
    if total > limit:
        raise LimitError(f"its tensors claim {total} bytes, the file has {size}; save expanded ones .contiguous()")
