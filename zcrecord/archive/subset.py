"""Parts of an opened archive as archives of their own: one module, chosen tensors, other names. Copies no payload.

A part has an index made for it, over the same bytes, so that everything that works on an archive works on a part. With
tensors that are put into it, it is an index alone, for `record.edit` to write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcrecord.codec.entries import AttributeEntry, ModuleKind, PayloadId, TensorLayout, change_values, in_memory
from zcrecord.codec.index import Index
from zcrecord.codec.layout import NONE
from zcrecord.errors import TensorNotFoundError, UnsupportedError
from zcrecord.writing.module_tree import ModuleTreeBuilder, split_dotted

from . import info, unflatten
from .archive import Archive
from .name_patterns import name_test, prefix_advice, renamer

GONE: Any = object()  # in the place of an attribute's value: it is taken out

Names = str | Iterable[str] | Callable[[info.TensorInfo], bool]
Rename = Mapping[Any, str] | Callable[[str], str]  # keys: str or re.Pattern; a mapping's key type is invariant
Members = list[tuple[int, int, tuple[str, ...]]]  # 0 module, 1 tensor, 2 attribute; its number; its path
Children = dict[int, list[tuple[int, int, int]]]  # of a module: place, 0 to 2 as above, number


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The index of a part of an archive.

    Attributes:
        index: of the part alone.
        numbers: the payloads of the archive that are the part's, by their numbers there.
    """

    index: Index
    numbers: list[int]

    def of(self, archive: Archive, recipe: Callable[[Archive], tuple[Any, ...]]) -> Archive:
        """Return the part as an archive, which is pickled by a recipe."""
        part = archive.part(self.index, self.numbers)
        part.source.recipe = recipe
        return part


def module(archive: Archive, name: str) -> Archive:
    """Return one module of an archive, with everything below it, under names that start below it.

    Raises:
        TensorNotFoundError: there is no such module; lists close names, or says how tensors whose names start so are
            chosen.
    """
    archive.ensure_all()
    ix = archive.index
    if not isinstance(name, str):
        raise UnsupportedError(f"a module's name is a str, not a {type(name).__name__}")
    sized = np.flatnonzero(ix.modules["name_size"] == len(name.encode(errors="surrogatepass")))
    matches = [m for m in sized.tolist() if ix.text_of(ix.modules[m]) == name]
    if not matches:
        names = archive.names()
        why = "is a tensor and no module; record[name] gives it" if name in names else prefix_advice(name, names)
        raise TensorNotFoundError(name, lambda: map(ix.text_of, ix.modules), path=archive.path, why=why)
    return _PartBuilder(archive, matches[0]).part().of(archive, lambda _: (module, (archive, name)))


def select(archive: Archive, names: Names | None, rename: Rename | None) -> Archive:
    """Return chosen tensors of an archive, maybe under other names, with the attributes of the modules they are in.

    Raises:
        TensorNotFoundError: a name without wildcards is neither a tensor's nor a module's.
    """
    archive.ensure_all()
    names, rename = repeatable(names), dict(rename) if isinstance(rename, Mapping) else rename
    builder = _PartBuilder(archive, 0)
    if names is not None:
        builder.keep(names)
    if rename is not None:
        builder.rename(*_renaming(rename))
    return builder.part().of(archive, lambda _: (select, (archive, names, rename)))


def renamed(archive: Archive, rename: Rename) -> PartIndex:
    """Return an archive's index under other names."""
    archive.ensure_all()
    builder = _PartBuilder(archive, 0)
    builder.rename(*_renaming(rename))
    return builder.part()


def _renaming(rename: Rename) -> tuple[Callable[[str], str], str]:
    """Return a function from name to new name, and the module that the whole record goes into."""
    new = renamer(rename)
    return new, new("") if isinstance(rename, Mapping) else ""


def without(archive: Archive, names: Names) -> PartIndex:
    """Return an archive's index without the tensors, modules and attributes that names match.

    Modules that are empty then are left out, too.

    Raises:
        TensorNotFoundError: a name is none of these, or a pattern matches none.
    """
    archive.ensure_all()
    builder = _PartBuilder(archive, 0)
    builder.drop(names)
    return builder.part()


def changed(
    archive: Archive, tensors: Mapping[str, tuple[TensorLayout, int] | None], attributes: Mapping[str, Any], rows: Any
) -> PartIndex:
    """Return an archive's index with tensors and attributes replaced, added or taken out, by their full names.

    Those that are replaced keep their places; modules that are empty by then go.

    Args:
        tensors: each new one's layout and its payload's number in `rows`; None for one that is taken out.
        attributes: values, bytes among them as a PayloadId; GONE for one that is taken out.
        rows: those of the archive's payloads, in their order, then of others.

    Raises:
        NameCollisionError: a name is taken, by something of another kind.
    """
    archive.ensure_all()
    builder = _PartBuilder(archive, 0)
    builder.change(tensors, attributes, rows)
    return builder.part()


def repeatable(names: Names | None) -> Names | None:
    """Return names that can be iterated more than once: pickling a part needs them again."""
    return tuple(names) if isinstance(names, Iterable) and not isinstance(names, str) else names


def chosen_tensors(archive: Archive, names: Names) -> set[int]:
    """Return the numbers of the tensors that `select` would choose.

    Raises:
        TensorNotFoundError: a name without wildcards is neither a tensor's nor a module's.
    """
    archive.ensure_all()
    builder = _PartBuilder(archive, 0)
    builder.keep(names)
    return builder.chosen


def single_tensor(archive: Archive, i: int) -> Archive:
    """Return one tensor of an archive under its whole name, without the rest of the index."""
    row = archive.row(i)
    outline = ModuleTreeBuilder()
    numbers = [] if row.payload == NONE else [row.payload]
    form = TensorLayout(row.dtype, row.bits, archive.shape(row), archive.strides(row), row.byte_offset)
    outline.tensor((archive.index.name(i),), form, 0 if numbers else NONE)
    entries = outline.entries()
    entries.payload_rows = archive.index.payloads[numbers]
    return archive.part(in_memory(entries), numbers)


class _PartBuilder:
    """Builder of a part: chooses and renames the modules, tensors and attributes below one module."""

    def __init__(self, archive: Archive, top: int) -> None:
        self._archive = archive
        ix = archive.index
        self._top, self._last = top, int(ix.modules["end"][top])
        tensors, attributes = unflatten.below(ix, top)
        self._tensors = tensors
        self._attributes = list(unflatten.attribute_entries(ix, ix.attributes[attributes], PayloadId))
        self._names = {m: ix.text_of(ix.modules[m]) for m in range(top, self._last)}
        self._modules = set(self._names)
        self.chosen = set(tensors)
        self._shorter: set[int] = set()  # modules that lose members
        self._paths: dict[int, tuple[str, ...]] = {top: ()}
        for m in range(top + 1, self._last):
            self._paths[m] = (*self._paths[self._parent(m)], unflatten.key_of(ix, ix.modules[m]))
        self._new: Callable[[str], str] | None = None
        self._gone: set[int] = set()  # attributes
        self._tensors_put: dict[str, tuple[TensorLayout, int]] = {}  # by full name, as `_attributes_put`
        self._attributes_put: dict[str, Any] = {}
        self._rows = ix.payloads

    def _parent(self, m: int) -> int:
        return int(self._archive.index.modules["parent"][m])

    def keep(self, names: Names) -> None:
        """Keep the tensors that are chosen, and the modules that lead to them or are chosen themselves."""
        archive, ix = self._archive, self._archive.index
        chosen: set[int] = set()
        if callable(names):
            keep = names
            self.chosen = {i for i, tensor in enumerate(info.infos(archive)) if keep(tensor)}
        else:
            matches = name_test(names, archive.names, list(self._names.values()), archive.path)
            chosen = {m for m, name in self._names.items() if matches(name)}
            for m in range(self._top + 1, self._last):
                if self._parent(m) in chosen:
                    chosen.add(m)
            parents = ix.tensors["parent"]
            self.chosen = {i for i in self._tensors if int(parents[i]) in chosen or matches(ix.name(i))}
        modules = {int(ix.tensors["parent"][i]) for i in self.chosen} | chosen | {self._top}
        for m in range(self._last - 1, self._top, -1):
            if m in modules:
                modules.add(self._parent(m))
        self._modules = modules
        self._shorter = {self._parent(m) for m in self._names if m and m not in modules}
        self._shorter |= {int(ix.tensors["parent"][i]) for i in self._tensors if i not in self.chosen}

    def drop(self, names: Names) -> None:
        """Leave out the tensors, modules and attributes that are chosen."""
        archive, ix = self._archive, self._archive.index
        if callable(names):
            self._leave_out({i for i, tensor in enumerate(info.infos(archive)) if names(tensor)}, set(), set())
            return
        attributes = self._attribute_names()
        matches = name_test(names, archive.names, [*self._names.values(), *attributes], archive.path, each=True)
        modules = {m for m, name in self._names.items() if m > self._top and matches(name)}
        for m in range(self._top + 1, self._last):
            if self._parent(m) in modules:
                modules.add(m)
        parents = ix.tensors["parent"]
        tensors = {i for i in self._tensors if int(parents[i]) in modules or matches(ix.name(i))}
        self._leave_out(tensors, modules, {n for n, name in enumerate(attributes) if matches(name)})

    def change(
        self,
        tensors: Mapping[str, tuple[TensorLayout, int] | None],
        attributes: Mapping[str, Any],
        rows: Any,
    ) -> None:
        """Put tensors and attributes in, or take them out; see `changed`."""
        ix = self._archive.index
        self._rows = rows
        self._tensors_put = {name: put for name, put in tensors.items() if put is not None}
        self._attributes_put = {name: value for name, value in attributes.items() if value is not GONE}
        gone = {name for name, put in tensors.items() if put is None}
        lost = {name for name, value in attributes.items() if value is GONE}
        gone_tensors = {i for i in self._tensors if ix.name(i) in gone} if gone else set()
        names = self._attribute_names() if lost else []
        self._leave_out(gone_tensors, set(), {n for n, name in enumerate(names) if name in lost})

    def _attribute_names(self) -> list[str]:
        """Return the full names of the attributes."""
        unflatten.check_full_names(self._archive.index, self._archive.header.index_size)
        return [f"{name}.{a.key}" if (name := self._names[a.parent]) else a.key for a in self._attributes]

    def _leave_out(self, tensors: set[int], modules: set[int], attributes: set[int]) -> None:
        """Leave out tensors, whole modules and attributes, and the modules that nothing is left in."""
        rows = self._archive.index.tensors["parent"]
        self.chosen = set(self._tensors) - tensors
        self._gone = attributes
        left = dict.fromkeys(self._names, 0)
        members = [self._parent(m) for m in self._names if m > self._top and m not in modules]
        members += [int(rows[i]) for i in self.chosen]
        members += [a.parent for n, a in enumerate(self._attributes) if n not in attributes]
        for m in members:
            left[m] += 1
        self._shorter = {self._parent(m) for m in modules} | {int(rows[i]) for i in tensors}
        self._shorter |= {self._attributes[n].parent for n in attributes}
        for m in range(self._last - 1, self._top, -1):
            if m in modules or (not left[m] and m in self._shorter):
                if m not in modules:
                    left[self._parent(m)] -= 1
                    self._shorter.add(self._parent(m))
                self._modules.discard(m)

    def rename(self, new: Callable[[str], str], whole: str) -> None:
        """Rename modules, tensors and attributes, and put all of them below the module `whole` (or "").

        Names that change are split at their dots.
        """
        self._new = new
        for m, name in self._names.items():
            if m > self._top:
                self._paths[m] = self._path(self._parent(m), self._paths[m][-1], name)
            else:
                self._paths[m] = split_dotted(whole) if whole else ()

    def _path(self, parent: int, key: str, name: str) -> tuple[str, ...]:
        """Return the path of a child, after its parent's is known."""
        plain = (*self._paths[parent], key)
        if self._new is None:
            return plain
        changed = self._new(name)
        if changed == ".".join(plain):
            return plain
        if not isinstance(changed, str):
            raise UnsupportedError(f"rename= gave a {type(changed).__name__} for this name", tensor=name)
        return split_dotted(changed) if changed else ()

    def part(self) -> PartIndex:
        """Return the index of the part."""
        archive, ix = self._archive, self._archive.index
        outline, order = ModuleTreeBuilder(), []
        children = self._children()
        members = self._members(children)
        kinds, keys = self._kinds(members, children), unflatten.keys_of_lists(ix)
        for kind, number, path in members:
            if kind == 0:
                outline.module(path, *kinds[path], keys.get(self._names[number]))
            elif kind == 1:
                t = archive.row(number)
                form = TensorLayout(t.dtype, t.bits, archive.shape(t), archive.strides(t), t.byte_offset)
                put = self._tensors_put.pop(ix.name(number), None) if self._tensors_put else None
                outline.tensor(path, *(put or (form, t.payload)))
                order.append(number)
            else:
                a = self._attributes[number]
                name = f"{self._names[a.parent]}.{a.key}" if self._attributes_put and self._names[a.parent] else a.key
                outline.attribute(path, self._attributes_put.pop(name, a.value))
        order += self._add(outline)
        entries = outline.entries(order)
        entries.metadata = list(unflatten.attribute_entries(ix, ix.metadata, PayloadId))
        used = {int(p) for p in entries.payloads} | {*_blobs(entries.attributes), *_blobs(entries.metadata)}
        numbers = sorted(used - {NONE})
        new = {old: i for i, old in enumerate(numbers)} | {NONE: NONE}
        entries.payloads = [new[p] for p in entries.payloads]
        for values in (entries.attributes, entries.metadata):
            change_values(values, lambda v: PayloadId(new[v]) if isinstance(v, PayloadId) else v)
        entries.payload_rows, entries.digest_kind = self._rows[numbers], ix.digest_kind
        return PartIndex(in_memory(entries), numbers)

    def _add(self, outline: ModuleTreeBuilder) -> range:
        """Add what was put in under names that are new; return the new tensors' numbers."""
        ix = self._archive.index
        if not self._tensors_put and not self._attributes_put:
            return range(0)
        names = set(self._archive.names())
        modules = {self._names[m]: m for m in self._modules}
        # A flat record's names are keys of one module, with dots in them: so are those that join them.
        flat = {int(row["parent"]) for row in ix.tensors if "." in unflatten.key_of(ix, row)}

        def path_of(name: str) -> tuple[str, ...]:
            starts = [name[:at] for at, c in enumerate(name) if c == "."]
            above = next((start for start in reversed(starts) if start in modules), "")
            rest = name[len(above) + 1 if above else 0 :]
            whole = modules[above] in flat or any(start in names for start in starts if len(start) > len(above))
            return (*self._paths[modules[above]], *([rest] if whole else split_dotted(rest)))

        for name, (form, payload) in self._tensors_put.items():
            outline.tensor(path_of(name), form, payload)
        for name, value in self._attributes_put.items():
            outline.attribute(path_of(name), value)
        return range(len(ix.tensors), len(ix.tensors) + len(self._tensors_put))

    def _kinds(self, members: Members, children: Children) -> dict[tuple[str, ...], tuple[int, str]]:
        """Return kind and class name by path: those of the saved module, unless members joined or left it.

        A list that has lost members is a mapping too, but the outline sees to that. Integers among the keys of a
        NUMBERED module stay integers, whatever joins them.
        """
        ix = self._archive.index
        parents_at: dict[tuple[str, ...], list[int]] = {}
        for kind, number, path in members:
            if path and (kind or number != self._top):
                parents = (ix.modules["parent"], ix.tensors["parent"])
                parent = self._attributes[number].parent if kind == 2 else int(parents[kind][number])
                parents_at.setdefault(path[:-1], []).append(parent)
        out: dict[tuple[str, ...], tuple[int, str]] = {}
        for kind, number, path in members:
            if kind:
                continue
            row, mine = ix.modules[number], parents_at.get(path, [])
            was, type_name = int(row["kind"]), ix.text_of(row, "type_name")
            lacks = number in self._shorter or len(mine) < len(children[number])
            if was == ModuleKind.NUMBERED:
                out[path] = was, type_name
            elif (lacks and type_name and was == ModuleKind.TUPLE) or any(parent != number for parent in mine):
                out.setdefault(path, (int(ModuleKind.MAPPING), ""))
            else:
                out[path] = was, type_name
        return out

    def _members(self, children: Children) -> Members:
        """Return (0, module, path), (1, tensor, path), (2, attribute, path) of all that is kept, in order.

        A module whose children all have names elsewhere by now is not.
        """
        ix = self._archive.index
        members = []
        for kind, number in self._in_order(children):
            if kind == 0:
                path = self._paths[number]
            elif kind == 1:
                parent = int(ix.tensors["parent"][number])
                path = self._path(parent, unflatten.key_of(ix, ix.tensors[number]), ix.name(number))
            else:
                a = self._attributes[number]
                name = f"{self._names[a.parent]}.{a.key}" if self._names[a.parent] else a.key
                path = self._path(a.parent, a.key, name)
            members.append((kind, number, path))
        if self._new is None:
            return members
        ends = {path if kind == 0 else path[:-1] for kind, number, path in members if kind or not children[number]}
        used = {path[:depth] for path in ends for depth in range(len(path) + 1)}
        return [(kind, number, path) for kind, number, path in members if kind or path in used]

    def _children(self) -> Children:
        """Return (place, 0, module), (place, 1, tensor), (place, 2, attribute) of what is kept, by module."""
        ix = self._archive.index
        children: Children = {m: [] for m in self._modules}
        for m in self._modules:
            if m > self._top:
                children[self._parent(m)].append((int(ix.modules["place"][m]), 0, m))
        for i in self.chosen:
            children[int(ix.tensors["parent"][i])].append((int(ix.tensors["place"][i]), 1, i))
        for number, a in enumerate(self._attributes):
            if a.parent in children and number not in self._gone:
                children[a.parent].append((a.place, 2, number))
        return children

    def _in_order(self, children: Children) -> Iterator[tuple[int, int]]:
        """Yield (0, module), (1, tensor), (2, attribute) of all that is kept, in pre-order and saved order."""
        stack = [(0, 0, self._top)]
        while stack:
            _, kind, number = stack.pop()
            yield kind, number
            if kind == 0:
                stack += sorted(children[number], reverse=True)


def _blobs(attributes: list[AttributeEntry]) -> Iterator[int]:
    for a in attributes:
        for value in a.value if isinstance(a.value, list | tuple) else [a.value]:
            if isinstance(value, PayloadId):
                yield int(value)
