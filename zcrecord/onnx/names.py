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
LEFT_OUT = -2  # in place of the id of a payload, of a tensor that is not converted
# Fields of onnx.proto: of NodeProto; AttributeProto and FunctionProto; all others.
_OUTPUT, _NODE_NAME, OPERATOR = 2, 3, 4
_NAME, _TENSOR, _LISTS, _DOMAIN, _OVERLOAD = 1, 5, (11, 23), 10, 13
_SPARSE_INITIALIZER, _VALUES, _INITIALIZATION = 15, 1, 1
GRAPH_ATTRIBUTE = "onnx.graph"  # of the module that a model is in: the model without its tensors' values
_SPARE = 1 << 20  # bytes that names of modules, and derived ones, may take beyond those of the input


@dataclass(slots=True, eq=False)
class Scope:
    """A message that holds tensors, and the texts that name it; the parts of a merged message are one scope."""

    kind: str
    parent: Scope | None
    field: int  # of the parent, in which it sits
    place: int  # among those of that field
    texts: dict[int, bytes] | None = None  # by field
    counts: dict[int, int] | None = None  # of fields by tag
    single: dict[int, Any] | None = None  # messages, by tag, that a second one may still be merged into
    own: tuple[str, ...] = ()  # its parts of names, once it was read to its end

    def keep_text(self, field: int, text: bytes) -> None:
        """Keep the text of a field for names: the first of a node's outputs, the last of any other field."""
        if self.texts is None:
            self.texts = {}
        if self.kind is not NODE or field != _OUTPUT or field not in self.texts:
            self.texts[field] = text

    def count(self, tag: int, more: int = 1) -> int:
        """Add to the number of fields with this tag; return the number before, the place of the first of them."""
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
    names = _names(tensors, input_bytes, used)
    in_main = zip(list(map(tree.split, names.main)), names.main, strict=True)  # first: these names never change
    nested = zip(map(tree.nest, names.nested), map(".".join, names.nested), strict=True)
    main = _main_graph(tensors)
    layouts: dict[tuple[DType, tuple[int, ...]], TensorLayout] = {}
    for scope, _, _, _, _, dtype, shape, payload in tensors:
        path, name = next(in_main) if scope is main else next(nested)
        if payload != LEFT_OUT:
            layout = layouts.get((dtype, shape))
            if layout is None:
                layout = layouts[dtype, shape] = TensorLayout(dtype.code, dtype.bits, shape)
            outline.put(within + path, prefix + name, layout, payload)
    return names.renamed


def entries_by_columns(tensors: Sequence[NamedTensor], input_bytes: int, graph: PayloadId) -> Entries | None:
    """Return a record's entries at once, as `name_tensors` and the graph's attribute make them; raises the same errors.

    None if a tensor is no initializer of the main graph, or a name is not split at each dot.
    """
    main = _main_graph(tensors)
    if main is None or any(tensor.scope is not main for tensor in tensors):
        return None
    entries = state_entries(_main_names(tensors), 2 * input_bytes + _SPARE)
    modules = None if entries is None else entries.module_columns
    if entries is None or modules is None or GRAPH_ATTRIBUTE in modules.names:
        return None
    ids: dict[tuple[DType, tuple[int, ...]], int] = {}
    entries.layout_ids = [ids.setdefault((tensor.dtype, tensor.shape), len(ids)) for tensor in tensors]
    entries.layouts = [TensorLayout(dtype.code, dtype.bits, shape) for dtype, shape in ids]
    entries.payloads = [tensor.payload for tensor in tensors]
    children = int((entries.parents == 0).sum() + (modules.parents == 0).sum())
    entries.attributes = [AttributeEntry(GRAPH_ATTRIBUTE, 0, children, graph)]
    return entries


def full_names(tensors: Sequence[NamedTensor], input_bytes: int) -> list[str]:
    """Return the full names that `name_tensors` gives, in the order given; raises the same errors."""
    names = _names(tensors, input_bytes, {GRAPH_ATTRIBUTE})
    main, in_main, nested = _main_graph(tensors), iter(names.main), map(".".join, names.nested)
    return [next(in_main) if tensor.scope is main else next(nested) for tensor in tensors]


def plain_name(scope: Scope, field: int, place: int, name: bytes) -> str | None:
    """Return the full name of a tensor as far as it was read, without a suffix like "~2"; None if it has none yet."""
    parent = scope.parent
    if scope.kind is SPARSE and parent is not None and parent.kind is GRAPH and not scope.own:
        values_name = name if field == _VALUES else _name_of_values(scope)
        parts = (*_prefix(parent), _lenient(values_name))
        return ".".join(_derived_parts(parts, scope, field, place, name)) if values_name else None
    if scope.kind is GRAPH and not name:
        return None
    return ".".join(_derived_parts(_prefix(scope), scope, field, place, name))


def _main_graph(tensors: Sequence[NamedTensor]) -> Scope | None:
    return next((t.scope for t in tensors if t.scope.kind is GRAPH and not _prefix(t.scope)), None)


class _Names(NamedTuple):
    """The main graph's names, the parts of all other names, and the number of these that were changed."""

    main: list[str]
    nested: list[tuple[str, ...]]
    renamed: int


def _names(tensors: Sequence[NamedTensor], input_bytes: int, used: set[str]) -> _Names:
    """Return the names of all tensors, each in the order given; adds them to `used`."""
    main = _main_graph(tensors)
    main_names = _main_names([tensor for tensor in tensors if tensor.scope is main])
    others = [tensor for tensor in tensors if tensor.scope is not main and _is_initializer(tensor)]
    has_sparse = any(tensor.scope.kind is SPARSE for tensor in others)  # which share names with the main graph's
    _check_unique([*filter(_is_initializer, tensors)] if has_sparse else others)
    used.update(main_names)
    nested: list[tuple[str, ...]] = []
    renamed, budget = 0, 8 * input_bytes + _SPARE
    counters: dict[str, int] = {}
    for tensor in tensors:
        if tensor.scope is not main:
            prefix = _prefix(tensor.scope)
            is_strict = tensor.scope.kind is GRAPH
            parts = (*prefix, _strict(tensor)) if is_strict else _derived_parts(prefix, *tensor[:4])
            budget -= sum(map(len, parts)) + len(parts)
            if budget < 0:
                raise LimitError("the names of nested tensors take more than 8 times the input; flatten the model")
            unique_parts = _unique(parts, used, counters)
            renamed += unique_parts is not parts
            nested.append(unique_parts)
    return _Names(main_names, nested, renamed)


def _main_names(tensors: Sequence[NamedTensor]) -> list[str]:
    """Return the names of the main graph's initializers; OnnxError for one that an archive cannot hold, or twice."""
    raw = [tensor.name for tensor in tensors]
    joined = b"\0".join(raw)  # decoded and checked together: a model may have 100,000
    if raw and all(raw) and joined.count(b"\0") == len(raw) - 1:
        try:
            names = joined.decode().split("\0")
        except UnicodeDecodeError:
            names = []
        if len(set(names)) == len(raw):
            return names
    _check_unique(tensors)
    return [_strict(tensor) for tensor in tensors]


def _is_initializer(tensor: NamedTensor) -> bool:
    scope = tensor.scope
    is_sparse = scope.kind is SPARSE and scope.field == _SPARSE_INITIALIZER
    return scope.kind is GRAPH or (is_sparse and tensor.field == _VALUES)


def _check_unique(initializers: Sequence[NamedTensor]) -> None:
    """Raise OnnxError if two initializers of one graph have the same name."""
    keys: set[tuple[int, bytes]] = set()
    for tensor in initializers:
        graph = tensor.scope if tensor.scope.kind is GRAPH else tensor.scope.parent
        key = id(graph), tensor.name
        if key in keys:
            name = tensor.name.decode("utf-8", "replace")
            fault = f"two initializers of one graph are called '{printable(name)}'; rename one"
            raise OnnxError(f"byte {tensor.offset:#x}: {fault}", offset=tensor.offset)
        keys.add(key)


def _strict(tensor: NamedTensor) -> str:
    """Return an initializer's name; OnnxError if an archive cannot hold it."""
    name, offset = tensor.name, tensor.offset
    fault = "no name" if not name else "a name with NUL in it" if b"\0" in name else ""
    if not fault:
        try:
            return name.decode()
        except UnicodeDecodeError:
            fault = "a name that is not UTF-8"
    raise OnnxError(f"byte {offset:#x}: an initializer has {fault} ({name[:40]!r}); name it", offset=offset)


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "replace").replace("\0", "\ufffd") or "_"


def seal(scope: Scope) -> None:
    """Free all of a message that was read to its end, but for its parts of names."""
    scope.own = _own_parts(scope)
    scope.texts = scope.counts = scope.single = None


def _prefix(scope: Scope) -> tuple[str, ...]:
    """Return the parts of names of a message and those around it, as far as they are read."""
    return () if scope.parent is None else (*_prefix(scope.parent), *(scope.own or _own_parts(scope)))


def _own_parts(scope: Scope) -> tuple[str, ...]:
    """Return the parts that a message adds to the names of tensors in it."""
    texts, parent = scope.texts or {}, scope.parent.kind if scope.parent is not None else MODEL
    if scope.kind is NODE:
        return (_lenient(texts.get(_NODE_NAME) or texts.get(_OUTPUT, b"")),)
    if scope.kind is ATTRIBUTE:
        return (_lenient(texts.get(_NAME, b"")),)
    if scope.kind is FUNCTION:
        domain = _lenient(texts[_DOMAIN]) if texts.get(_DOMAIN) else ""
        overload = f":{_lenient(texts[_OVERLOAD])}" if texts.get(_OVERLOAD) else ""
        return ("function", f"{domain}:{_lenient(texts.get(_NAME, b''))}{overload}")
    if scope.kind is TRAINING:
        return ("training_info", str(scope.place))
    if scope.kind is GRAPH and parent is TRAINING:
        return ("initialization" if scope.field == _INITIALIZATION else "algorithm",)
    if scope.kind in (GRAPH, SPARSE) and parent is ATTRIBUTE and scope.field in _LISTS:
        return (str(scope.place),)
    if scope.kind is SPARSE and parent is GRAPH:
        return (_lenient(_name_of_values(scope)),)
    return ()


def _name_of_values(sparse: Scope) -> bytes:
    name: bytes = getattr((sparse.single or {}).get(_VALUES << 3 | LEN), "name", b"")
    return name


def _derived_parts(prefix: tuple[str, ...], scope: Scope, field: int, place: int, name: bytes) -> tuple[str, ...]:
    """Return the parts of the name of a tensor in a scope of this prefix; `name` counts in a graph alone."""
    if scope.kind is SPARSE:
        return (*prefix, "values" if field == _VALUES else "indices")
    if scope.kind is ATTRIBUTE:
        return prefix if field == _TENSOR else (*prefix, str(place))
    return (*prefix, _lenient(name))


def graph_around(scope: Scope) -> str:
    """Return the `graph` of a tensor in a scope, as `graph.Initializer` has it."""
    scope = _around_constant(scope) or scope
    if scope.kind is FUNCTION:
        return "apart"
    if scope.kind is not GRAPH:
        return ""
    around: Scope | None = scope.parent
    if around is not None and around.kind is MODEL:
        return "main"
    while around is not None and around.kind not in (FUNCTION, TRAINING):
        around = around.parent
    return "inner" if around is None else "apart"


def _around_constant(attribute: Scope) -> Scope | None:
    """Return the graph or function with the Constant node whose value an attribute is; None for any other attribute.

    The operator is known if it stands in front of the attribute, as usual.
    """
    node = attribute.parent
    if attribute.kind is not ATTRIBUTE or node is None or node.kind is not NODE:
        return None
    name, operator = (attribute.texts or {}).get(_NAME), (node.texts or {}).get(OPERATOR)
    return node.parent if (name, operator) == (b"value", b"Constant") else None


def _unique(parts: tuple[str, ...], used: set[str], counters: dict[str, int]) -> tuple[str, ...]:
    """Return the parts if their full name is new, else with "~2", "~3", ... after the last; adds the name to `used`."""
    name = unique = ".".join(parts)
    count = counters.get(name, 1)
    while unique in used:
        count += 1
        unique = f"{name}~{count}"
    if unique != name:
        counters[name] = count  # or many duplicates would take quadratic time
        parts = (*parts[:-1], f"{parts[-1]}~{count}")
    used.add(unique)
    return parts


class _ModulePaths:
    """The modules of the archive, each a path of keys: a full name is that of one module at most, or of a tensor.

    Once the names of modules have used up the `room`, in characters, no module is added.
    """

    def __init__(self, tensors: set[str], room: int, depth: int) -> None:
        self._tensors = tensors
        self._room = room
        self._depth = depth  # the most keys of a path
        self._modules: dict[str, tuple[str, ...] | None] = {}

    def split(self, name: str) -> tuple[str, ...]:
        """Return the module of a tensor whose name is split at its dots; () for the record itself."""
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
        while head and (path := self._module_path(head)) is None:
            head = head.rpartition(".")[0]
        return path if head and path else ()

    def _module_path(self, name: str) -> tuple[str, ...] | None:
        """Return the path of a module, added if it is new; None if a tensor has its name, or that of one above it."""
        modules = self._modules
        if name in modules:
            return modules[name]
        head, dot, key = name.rpartition(".")
        self._room -= len(name)
        above: tuple[str, ...] | None = ()
        if dot:
            above = modules[head] if head in modules else self._module_path(head)
        modules[name] = path = None if above is None or name in self._tensors else (*above, key)
        return path

    def nest(self, parts: tuple[str, ...]) -> tuple[str, ...]:
        """Return the module of a tensor whose name has these parts, which may contain dots."""
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
