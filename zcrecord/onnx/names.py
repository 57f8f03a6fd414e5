"""Names and modules of tensors in the archive, derived from the messages that contain them.

- An initializer of the main graph keeps its ONNX name exactly. The name is split at "." into modules and a key, as
  deep as no prefix of it is a tensor's name itself; it stays whole if a part would be empty, or if the names of all
  modules would take more than twice the input and 1 MiB: each is stored in full.
- All other tensors are named after the messages around them, each a module: a node by its name, else its first output,
  else "_"; an attribute by its name; "function", then domain:name[:overload]; "training_info", its number, then
  "initialization" or "algorithm". These names are not split. Under them
  - an initializer of a subgraph has its own name: `If_0.then_branch.weight`;
  - a tensor in an attribute is the attribute: `Constant_3.value`, or `Node_1.tensors_attribute.0` in a list;
  - a sparse tensor is a module with the keys "values" and "indices"; as an initializer its name is that of its values.
- A duplicate of such a name gets "~2", "~3", ... appended; initializers of the main graph never change.
- Bytes that are not UTF-8, and NUL, are an error in an initializer's name, and become U+FFFD in all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zcrecord.codec.entries import AttributeEntry, Entries, PayloadId, TensorLayout
from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.dtypes import DType
from zcrecord.errors import LimitError, OnnxError, printable
from zcrecord.onnx.protobuf.reader import LEN
from zcrecord.writing.module_tree import ModuleTreeBuilder, state_entries

MODEL, GRAPH, NODE, ATTRIBUTE = "ModelProto", "GraphProto", "NodeProto", "AttributeProto"
TENSOR, SPARSE, FUNCTION, TRAINING = "TensorProto", "SparseTensorProto", "FunctionProto", "TrainingInfoProto"
_SPARSE_INITIALIZER = 15  # field of GraphProto
LEFT_OUT = -2  # in place of the id of a payload, of a tensor that is not converted
OPERATOR = 4  # NodeProto.op_type
GRAPH_ATTRIBUTE = "onnx.graph"  # of the module that a model is in: the model without its tensors' values
_SPARE = 1 << 20  # bytes that names of modules, and derived ones, may take beyond those of the input


@dataclass(slots=True, eq=False)
class Scope:
    """A message that holds tensors, and the texts that name it; the parts of a merged message are one scope."""

    kind: str
    parent: Scope | None
    field: int  # of the parent, in which it sits
    place: int  # among those of that field
    texts: dict[int, bytes] | None = None
    counts: dict[int, int] | None = None
    single: dict[int, Any] | None = None  # messages, by tag, that a second one may still be merged into
    own: tuple[str, ...] = ()  # its parts of names, once it was read to its end

    def name(self, field: int, text: bytes) -> None:
        """Keep a text: the first of a node's outputs, the last of all others."""
        if self.texts is None:
            self.texts = {}
        if self.kind is not NODE or field != 2 or field not in self.texts:
            self.texts[field] = text

    def count(self, tag: int, more: int = 1) -> int:
        """Count fields with this tag; return their number before."""
        if self.counts is None:
            self.counts = {}
        place = self.counts.get(tag, 0)
        self.counts[tag] = place + more
        return place


class NamedTensor(NamedTuple):
    """A tensor of the model: its place there, its type and shape, and its payload in the archive."""

    scope: Scope
    field: int
    place: int
    name: bytes
    offset: int
    dtype: DType
    shape: tuple[int, ...]
    payload: int


def name_tensors(tensors: Sequence[NamedTensor], input_bytes: int, outline: ModuleTreeBuilder, module: str = "") -> int:
    """Add all tensors of a model to a module of a tree, in the order given; return the number of changed names.

    The model's size, `input_bytes`, limits the size of names. `module` is a key, "" for the tree itself.

    Raises:
        OnnxError: a graph has two initializers of one name, or one whose name is empty, contains NUL or is not UTF-8.
        LimitError: names made of deeply nested parts would take many times the input.
    """
    used: set[str] = {GRAPH_ATTRIBUTE}
    within, prefix = ((module,), f"{module}.") if module else ((), "")
    tree = _ModulePaths(used, 2 * input_bytes + _SPARE, MAX_DEPTH - len(within))
    exact, parts, renamed = _name(tensors, input_bytes, used)
    named = zip(list(map(tree.split, exact)), exact, strict=True)
    nested = zip(map(tree.nest, parts), map(".".join, parts), strict=True)  # after the main graph's
    main = _main(tensors)
    forms: dict[tuple[DType, tuple[int, ...]], TensorLayout] = {}
    for scope, _, _, _, _, dtype, shape, payload in tensors:
        above, name = next(named) if scope is main else next(nested)
        if payload != LEFT_OUT:
            form = forms.get((dtype, shape))
            if form is None:
                form = forms[dtype, shape] = TensorLayout(dtype.code, dtype.bits, shape)
            outline.put(within + above, prefix + name, form, payload)
    return renamed


def entries_by_columns(tensors: Sequence[NamedTensor], input_bytes: int, graph: PayloadId) -> Entries | None:
    """Return at once the entries that `name_tensors` and the graph's attribute make one by one; raises the same errors.

    None if a tensor is no initializer of the main graph, or a name is not split at each dot.
    """
    main = _main(tensors)
    room = 2 * input_bytes + _SPARE
    if main is None or any(f.scope is not main for f in tensors):
        return None
    entries = state_entries(_exact(tensors), room)
    modules = None if entries is None else entries.module_columns
    if entries is None or modules is None or GRAPH_ATTRIBUTE in modules.names:
        return None
    forms: dict[tuple[DType, tuple[int, ...]], int] = {}
    entries.layout_ids = [forms.setdefault((f.dtype, f.shape), len(forms)) for f in tensors]
    entries.layouts = [TensorLayout(dtype.code, dtype.bits, shape) for dtype, shape in forms]
    entries.payloads = [f.payload for f in tensors]
    children = int((entries.parents == 0).sum() + (modules.parents == 0).sum())
    entries.attributes = [AttributeEntry(GRAPH_ATTRIBUTE, 0, children, graph)]
    return entries


def full_names(tensors: Sequence[NamedTensor], input_bytes: int) -> list[str]:
    """Return the full names that `name_tensors` gives, in the order given; raises the same errors."""
    exact, parts, _ = _name(tensors, input_bytes, {GRAPH_ATTRIBUTE})
    main, names, derived = _main(tensors), iter(exact), iter(parts)
    return [next(names) if f.scope is main else ".".join(next(derived)) for f in tensors]


def plain_name(scope: Scope, field: int, place: int, name: bytes) -> str | None:
    """Return the full name of a tensor as far as it is read, without a suffix like "~2"; None without a name yet."""
    parent = scope.parent
    if scope.kind is SPARSE and parent is not None and parent.kind is GRAPH and not scope.own:
        named = name if field == 1 else _name_of_values(scope)
        return ".".join(_parts_in((*_prefix(parent), _loose(named)), scope, field, place, name)) if named else None
    if scope.kind is GRAPH and not name:
        return None
    return ".".join(_parts_in(_prefix(scope), scope, field, place, name))


def _main(tensors: Sequence[NamedTensor]) -> Scope | None:
    return next((f.scope for f in tensors if f.scope.kind is GRAPH and not _prefix(f.scope)), None)


def _name(
    tensors: Sequence[NamedTensor], input_bytes: int, used: set[str]
) -> tuple[list[str], list[tuple[str, ...]], int]:
    """Return the main graph's names, the parts of all others, and the number of changed ones; adds all to `used`."""
    main = _main(tensors)
    exact = _exact([f for f in tensors if f.scope is main])
    others = [f for f in tensors if f.scope is not main and _is_initializer(f)]
    _check_defined([*filter(_is_initializer, tensors)] if any(f.scope.kind is SPARSE for f in others) else others)
    used.update(exact)
    parts: list[tuple[str, ...]] = []
    renamed, budget = 0, 8 * input_bytes + _SPARE
    counters: dict[str, int] = {}
    for f in tensors:
        if f.scope is not main:
            above = _prefix(f.scope)
            derived = (*above, _strict(f)) if f.scope.kind is GRAPH else _parts_in(above, *f[:4])
            budget -= sum(map(len, derived)) + len(derived)
            if budget < 0:
                raise LimitError("the names of nested tensors take more than 8 times the input; flatten the model")
            unique = _unique(derived, used, counters)
            renamed += unique is not derived
            parts.append(unique)
    return exact, parts, renamed


def _exact(tensors: Sequence[NamedTensor]) -> list[str]:
    raw = [f.name for f in tensors]
    joined = b"\0".join(raw)
    if raw and all(raw) and joined.count(b"\0") == len(raw) - 1:
        try:
            names = joined.decode().split("\0")
        except UnicodeDecodeError:
            names = []
        if len(set(names)) == len(raw):
            return names
    _check_defined(tensors)
    return [_strict(f) for f in tensors]


def _is_initializer(f: NamedTensor) -> bool:
    return f.scope.kind is GRAPH or (f.scope.kind is SPARSE and f.scope.field == _SPARSE_INITIALIZER and f.field == 1)


def _check_defined(tensors: Sequence[NamedTensor]) -> None:
    defined: set[tuple[int, bytes]] = set()
    for f in tensors:
        graph = f.scope if f.scope.kind is GRAPH else f.scope.parent
        key = id(graph), f.name
        if key in defined:
            name = f.name.decode("utf-8", "replace")
            fault = f"two initializers of one graph are called '{printable(name)}'; rename one"
            raise OnnxError(f"byte {f.offset:#x}: {fault}", offset=f.offset)
        defined.add(key)


def _strict(f: NamedTensor) -> str:
    """Return an initializer's name; OnnxError if an archive cannot hold it."""
    fault = "no name" if not f.name else "a name with NUL in it" if b"\0" in f.name else ""
    if not fault:
        try:
            return f.name.decode()
        except UnicodeDecodeError:
            fault = "a name that is not UTF-8"
    raise OnnxError(f"byte {f.offset:#x}: an initializer has {fault} ({f.name[:40]!r}); name it", offset=f.offset)


def _loose(text: bytes) -> str:
    return text.decode("utf-8", "replace").replace("\0", "\ufffd") or "_"


def seal(scope: Scope) -> None:
    """Free all of a message that was read to its end, but for its parts of names."""
    scope.own = _own_path(scope)
    scope.texts = scope.counts = scope.single = None


def _prefix(scope: Scope) -> tuple[str, ...]:
    """Return the parts of names of a message and those around it, as far as they are read."""
    return () if scope.parent is None else (*_prefix(scope.parent), *(scope.own or _own_path(scope)))


def _own_path(scope: Scope) -> tuple[str, ...]:
    """Return the parts that a message adds to the names of tensors in it."""
    texts, parent = scope.texts or {}, scope.parent.kind if scope.parent is not None else MODEL
    if scope.kind is NODE:
        return (_loose(texts.get(3) or texts.get(2, b"")),)
    if scope.kind is ATTRIBUTE:
        return (_loose(texts.get(1, b"")),)
    if scope.kind is FUNCTION:
        name = _loose(texts.get(1, b""))
        domain = texts.get(10, b"")
        overload = f":{_loose(texts[13])}" if texts.get(13) else ""
        return ("function", f"{_loose(domain) if domain else ''}:{name}{overload}")
    if scope.kind is TRAINING:
        return ("training_info", str(scope.place))
    if scope.kind is GRAPH and parent is TRAINING:
        return ("initialization" if scope.field == 1 else "algorithm",)
    if scope.kind in (GRAPH, SPARSE) and parent is ATTRIBUTE and scope.field in (11, 23):
        return (str(scope.place),)
    if scope.kind is SPARSE and parent is GRAPH:
        return (_loose(_name_of_values(scope)),)
    return ()


def _name_of_values(sparse: Scope) -> bytes:
    name: bytes = getattr((sparse.single or {}).get(1 << 3 | LEN), "name", b"")
    return name


def _parts_in(above: tuple[str, ...], scope: Scope, field: int, place: int, name: bytes) -> tuple[str, ...]:
    if scope.kind is SPARSE:
        return (*above, "values" if field == 1 else "indices")
    if scope.kind is ATTRIBUTE:
        return above if field == 5 else (*above, str(place))
    return (*above, _loose(name))


def _unique(parts: tuple[str, ...], used: set[str], counters: dict[str, int]) -> tuple[str, ...]:
    """Return the parts, the last one changed so that the full name is new; adds it to `used`."""
    name = ".".join(parts)
    count = counters.get(name, 1)
    unique = name
    while unique in used:
        count += 1
        unique = f"{name}~{count}"
    if unique != name:
        counters[name] = count
        parts = (*parts[:-1], f"{parts[-1]}~{count}")
    used.add(unique)
    return parts


class _ModulePaths:
    """The modules of the archive, each a path of keys: a full name is one module, split or nested, and no tensor.

    Once the names of modules have used up the `room`, in characters, there are no new ones.
    """

    def __init__(self, tensors: set[str], room: int, depth: int) -> None:
        self._tensors = tensors
        self._room = room
        self._depth = depth  # the most keys of a path
        self._modules: dict[str, tuple[str, ...] | None] = {}

    def split(self, name: str) -> tuple[str, ...]:
        """Return the module of a tensor with a dotted name."""
        head, dot, key = name.rpartition(".")
        if not dot:
            return ()
        path = self._modules.get(head)
        if path is not None and key:
            return path
        if self._room < 0 or not key or name[0] == "." or ".." in name:
            return ()
        if len(name) > self._depth and name.count(".") >= self._depth:
            return ()
        while head and (path := self._module(head)) is None:
            head = head.rpartition(".")[0]
        return path if head and path else ()

    def _module(self, name: str) -> tuple[str, ...] | None:
        """Return the path of a module; None if it or one above it is a tensor."""
        modules = self._modules
        if name in modules:
            return modules[name]
        head, dot, key = name.rpartition(".")
        self._room -= len(name)
        above = (modules[head] if head in modules else self._module(head)) if dot else ()
        modules[name] = path = None if above is None or name in self._tensors else (*above, key)
        return path

    def nest(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the module of a tensor whose name has these parts, which are not split."""
        path: tuple[str, ...] = ()
        name = ""
        for i, part in enumerate(parts[:-1]):
            name = f"{name}.{part}" if i else part
            known = self._modules.get(name)
            self._room -= len(name) if known is None else 0
            if name in self._tensors or len(path) >= self._depth - 1 or (known is None and self._room < 0):
                break
            self._modules[name] = path = known or (*path, part)
        return path
