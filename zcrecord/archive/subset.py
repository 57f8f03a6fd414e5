"""Parts of an opened archive as archives of their own: one module, chosen tensors, other names. Copies no payload.

A part has an index of its own over the same bytes, so that everything that works on an archive works on a part. If
tensors are put into it, it is an index alone, for `record.edit` to write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from zcrecord.codec.entries import AttributeEntry, Entries, ModuleKind, PayloadId, TensorLayout, index_in_memory
from zcrecord.codec.index import Index
from zcrecord.codec.layout import NONE
from zcrecord.errors import TensorNotFoundError, UnsupportedError
from zcrecord.writing.module_tree import ModuleTreeBuilder, split_dotted

from . import info, unflatten
from .archive import Archive
from .name_patterns import name_test, prefix_advice, renamer
from .unflatten import ATTRIBUTE, MODULE, TENSOR

GONE: Any = object()  # in the place of an attribute's value: it is taken out

Names = str | Iterable[str] | Callable[[info.TensorInfo], bool]
Rename = Mapping[Any, str] | Callable[[str], str]  # keys: str or re.Pattern; a mapping's key type is invariant
Member = tuple[int, int]  # its kind, as of `unflatten.children`, and its number
Path = tuple[str, ...]
Children = dict[int, list[tuple[int, int, int]]]  # of a module: place and Member, in any order


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The index of a part of an archive, and the part's payloads by their numbers in the archive."""

    index: Index
    numbers: list[int]

    def opened(self, archive: Archive, recipe: Callable[[Archive], tuple[Any, ...]]) -> Archive:
        """Return the part as an archive, which is pickled by a recipe."""
        part = archive.part(self.index, self.numbers)
        part.source.recipe = recipe
        return part


def module(archive: Archive, name: str) -> Archive:
    """Return one module of an archive, with everything below it, under names that start below it."""
    archive.ensure_all()
    ix = archive.index
    if not isinstance(name, str):
        raise UnsupportedError(f"a module's name is a str, not a {type(name).__name__}")
    sized = np.flatnonzero(ix.modules["name_size"] == len(name.encode(errors="surrogatepass")))
    matches = [m for m in sized.tolist() if ix.text_of(ix.modules[m]) == name]
    if not matches:
        names = archive.names()
        why = "is a tensor and no module; record[name] gives it" if name in names else prefix_advice(name, names)
        raise TensorNotFoundError(name, lambda: map(ix.text_of, ix.modules[1:]), path=archive.path, why=why)
    return PartBuilder(archive, matches[0]).part().opened(archive, lambda _: (module, (archive, name)))


def select(archive: Archive, names: Names | None, rename: Rename | None) -> Archive:
    """Return chosen tensors of an archive, maybe under other names, with the attributes of the modules they are in."""
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = tuple(names)  # pickling the part needs them again
    rename = dict(rename) if isinstance(rename, Mapping) else rename
    builder = PartBuilder(archive)
    if names is not None:
        builder.keep(names)
    if rename is not None:
        builder.rename(rename)
    return builder.part().opened(archive, lambda _: (select, (archive, names, rename)))


def single_tensor(archive: Archive, i: int) -> Archive:
    """Return one tensor of an archive under its whole name, without the rest of the index."""
    row = archive.row(i)
    outline = ModuleTreeBuilder()
    numbers = [] if row.payload == NONE else [row.payload]
    outline.tensor((archive.index.name(i),), archive.tensor_layout(row), 0 if numbers else NONE)
    entries = outline.entries()
    entries.payload_rows = archive.index.payloads[numbers]
    return archive.part(index_in_memory(entries), numbers)


class PartBuilder:
    """Builder of a part: chooses, changes and renames the modules, tensors and attributes below one module."""

    def __init__(self, archive: Archive, top: int = 0) -> None:
        archive.ensure_all()
        self._archive, self._top = archive, top
        ix = archive.index
        own = unflatten.below(ix, top)[1]
        self._attributes = dict(enumerate(unflatten.attribute_entries(ix, ix.attributes[own], PayloadId), own.start))
        # Parent, place and key; modules first, each behind the one that it is in.
        self._members: dict[Member, tuple[int, int, str]] = {c[:2]: c[2:] for c in unflatten.children(ix, top)}
        self._kept = set(self._members)
        self._sizes = Counter(parent for parent, _, _ in self._members.values())  # of modules, before any is left out
        self._below = range(top + 1, int(ix.modules["end"][top]))
        self._names = {m: ix.text_of(ix.modules[m]) for m in (top, *self._below)}
        self._new_name: Callable[[str], str] | None = None
        self._set_paths(())
        self._new_tensors: dict[str, tuple[TensorLayout, int]] = {}  # by full name, as `_new_attributes`
        self._new_attributes: dict[str, Any] = {}
        self._rows = ix.payloads

    @property
    def chosen(self) -> set[int]:
        """The numbers of the tensors that are kept."""
        return {number for kind, number in self._kept if kind == TENSOR}

    def _full_name(self, member: Member) -> str:
        kind, number = member
        if kind == TENSOR:
            return self._archive.index.name(number)
        if kind == MODULE:
            return self._names[number]
        parent, _, key = self._members[member]
        return f"{self._names[parent]}.{key}" if self._names[parent] else key

    def _attribute_names(self) -> dict[Member, str]:
        unflatten.check_full_names(self._archive.index, self._archive.header.index_size)
        return {(ATTRIBUTE, n): self._full_name((ATTRIBUTE, n)) for n in self._attributes}

    def _members_by_test(self, test: Callable[[info.TensorInfo], bool]) -> set[Member]:
        return {(TENSOR, i) for i, tensor in enumerate(info.infos(self._archive)) if test(tensor)}

    def _matching(self, matches: Callable[[str], bool], modules: Iterable[int]) -> set[Member]:
        """Return those modules that match, with all below them, and the tensors that match."""
        matching = {(MODULE, m) for m in modules if matches(self._names[m])}
        for member, (parent, _, _) in self._members.items():
            if (MODULE, parent) in matching or (member[0] == TENSOR and matches(self._full_name(member))):
                matching.add(member)
        return matching

    def keep(self, names: Names) -> Self:
        """Keep the tensors that are chosen, and the modules that lead to them or are chosen themselves."""
        if callable(names):
            members = self._members_by_test(names)
        else:
            matches = name_test(names, self._archive.names, list(self._names.values()), self._archive.path)
            members = self._matching(matches, self._names)
        for member in reversed(self._members):
            if member in members:
                members.add((MODULE, self._members[member][0]))
        members.add((MODULE, self._top))
        self._kept = {
            member
            for member, (parent, _, _) in self._members.items()
            if member in members or (member[0] == ATTRIBUTE and (MODULE, parent) in members)
        }
        return self

    def drop(self, names: Names) -> Self:
        """Leave out the tensors, modules and attributes that are chosen, and modules empty by that."""
        if callable(names):
            return self._leave_out(self._members_by_test(names))
        attributes = self._attribute_names()
        known = [*self._names.values(), *attributes.values()]
        matches = name_test(names, self._archive.names, known, self._archive.path, each=True)
        matching = {member for member, name in attributes.items() if matches(name)}
        return self._leave_out(self._matching(matches, self._below) | matching)

    def change(
        self, tensors: Mapping[str, tuple[TensorLayout, int] | None], attributes: Mapping[str, Any], rows: Any
    ) -> Self:
        """Replace, add or take out tensors and attributes by full name; modules that become empty go.

        Args:
            tensors: each new one's layout and its payload's number in `rows`; None for one that is taken out.
            attributes: values, bytes among them as a PayloadId; GONE for one that is taken out.
            rows: those of the archive's payloads, in their order, then of others.
        """
        self._rows = rows
        self._new_tensors = {name: put for name, put in tensors.items() if put is not None}
        self._new_attributes = {name: value for name, value in attributes.items() if value is not GONE}
        no_tensors = tensors.keys() - self._new_tensors.keys()
        no_values = attributes.keys() - self._new_attributes.keys()
        members = {m for m, name in self._attribute_names().items() if name in no_values} if no_values else set()
        if no_tensors:
            members |= {m for m in self._members if m[0] == TENSOR and self._full_name(m) in no_tensors}
        return self._leave_out(members)

    def _leave_out(self, members: set[Member]) -> Self:
        """Leave out members, and the modules that have none left."""
        self._kept -= members
        remaining = Counter(self._members[member][0] for member in self._kept)
        for m in reversed(self._below):
            if (MODULE, m) in self._kept and self._sizes[m] and not remaining[m]:
                self._kept.discard((MODULE, m))
                remaining[self._members[MODULE, m][0]] -= 1
        return self

    def rename(self, rename: Rename) -> Self:
        """Rename modules, tensors and attributes; a mapping's "" puts all of them into a module."""
        self._new_name = new = renamer(rename)
        whole = new("") if isinstance(rename, Mapping) else ""
        self._set_paths(split_dotted(whole) if whole else ())
        return self

    def _set_paths(self, top: Path) -> None:
        """Set the path of each module, below that of the part itself."""
        self._paths: dict[int, Path] = {self._top: top}
        for m in self._below:
            self._paths[m] = self._path((MODULE, m))

    def _path(self, member: Member) -> Path:
        """Return the path of a member, after its module's is known."""
        parent, _, key = self._members[member]
        plain = (*self._paths[parent], key)
        if self._new_name is None or (changed := self._new_name(name := self._full_name(member))) == ".".join(plain):
            return plain
        if not isinstance(changed, str):
            raise UnsupportedError(f"rename= gave a {type(changed).__name__} for this name; return a str", tensor=name)
        return split_dotted(changed) if changed else ()

    def part(self) -> PartIndex:
        """Return the index of the part."""
        archive, ix = self._archive, self._archive.index
        outline, order = ModuleTreeBuilder(), []
        children: Children = {m: [] for kind, m in (*self._kept, (MODULE, self._top)) if kind == MODULE}
        for kind, number in self._kept:
            parent, place, _ = self._members[kind, number]
            children[parent].append((place, kind, number))
        members = self._in_pre_order(children)
        kinds, keys = self._kinds(members, children), unflatten.keys_of_lists(ix)
        for (kind, number), path in members:
            if kind == MODULE:
                outline.module(path, *kinds[path], keys.get(self._names[number]))
            elif kind == TENSOR:
                row = archive.row(number)
                put = self._new_tensors.pop(ix.name(number), None) if self._new_tensors else None
                outline.tensor(path, *(put or (archive.tensor_layout(row), row.payload)))
                order.append(number)
            else:
                name = self._full_name((kind, number)) if self._new_attributes else ""
                outline.attribute(path, self._new_attributes.pop(name, self._attributes[number].value))
        order += self._add(outline)
        return self._part_index(outline.entries(order))

    def _part_index(self, entries: Entries) -> PartIndex:
        """Return an index of entries, with the payloads that these use, renumbered."""
        ix = self._archive.index
        entries.metadata = unflatten.metadata_entries(ix, PayloadId)
        used = {int(p) for p in entries.payloads} | {*_blobs(entries.attributes), *_blobs(entries.metadata)}
        numbers = sorted(used - {NONE})
        new = {old: i for i, old in enumerate(numbers)} | {NONE: NONE}
        entries.payloads = [new[p] for p in entries.payloads]
        entries.change_values(lambda v: PayloadId(new[v]) if isinstance(v, PayloadId) else v)
        entries.payload_rows, entries.digest_kind = self._rows[numbers], ix.digest_kind
        return PartIndex(index_in_memory(entries), numbers)

    def _add(self, outline: ModuleTreeBuilder) -> range:
        """Add new tensors and attributes, whose names are not in the archive; return the tensors' numbers."""
        ix = self._archive.index
        if not self._new_tensors and not self._new_attributes:
            return range(0)
        names = set(self._archive.names())
        modules = {self._names[m]: m for kind, m in (*self._kept, (MODULE, self._top)) if kind == MODULE}
        # A flat record's names are keys of one module, with dots in them: so are those that join them.
        flat = {parent for (kind, _), (parent, _, key) in self._members.items() if kind == TENSOR and "." in key}

        def path_of(name: str) -> Path:
            starts = [name[:at] for at, c in enumerate(name) if c == "."]
            above = next((start for start in reversed(starts) if start in modules), "")
            rest = name[len(above) + 1 if above else 0 :]
            whole = modules[above] in flat or any(start in names for start in starts if len(start) > len(above))
            return (*self._paths[modules[above]], *([rest] if whole else split_dotted(rest)))

        for name, (form, payload) in self._new_tensors.items():
            outline.tensor(path_of(name), form, payload)
        for name, value in self._new_attributes.items():
            outline.attribute(path_of(name), value)
        return range(len(ix.tensors), len(ix.tensors) + len(self._new_tensors))

    def _kinds(self, members: list[tuple[Member, Path]], children: Children) -> dict[Path, tuple[int, str]]:
        """Return kind and class name by path: those of the saved module, unless members joined or left it.

        A list that lost members becomes a mapping in the outline; a NUMBERED module stays one, whatever joins it.
        """
        rows = self._archive.index.modules
        parents_at: dict[Path, list[int]] = {}
        for member, path in members:
            if path and member != (MODULE, self._top):
                parents_at.setdefault(path[:-1], []).append(self._members[member][0])
        out: dict[Path, tuple[int, str]] = {}
        for (kind, number), path in members:
            if kind != MODULE:
                continue
            parents = parents_at.get(path, [])
            saved = int(rows[number]["kind"]), self._archive.index.text_of(rows[number], "type_name")
            lacks = len(children[number]) < self._sizes[number] or len(parents) < len(children[number])
            changed = (lacks and saved[1] and saved[0] == ModuleKind.TUPLE) or any(p != number for p in parents)
            if changed and saved[0] != ModuleKind.NUMBERED:
                out.setdefault(path, (int(ModuleKind.MAPPING), ""))
            else:
                out[path] = saved
        return out

    def _in_pre_order(self, children: Children) -> list[tuple[Member, Path]]:
        """Return the kept members with their paths, in pre-order; not modules whose children all moved elsewhere."""
        members: list[tuple[Member, Path]] = []
        stack = [(0, MODULE, self._top)]
        while stack:
            _, kind, number = stack.pop()
            members.append(((kind, number), self._paths[number] if kind == MODULE else self._path((kind, number))))
            if kind == MODULE:
                stack += sorted(children[number], reverse=True)
        if self._new_name is None:
            return members
        ends = {path if kind == MODULE else path[:-1] for (kind, n), path in members if kind or not children[n]}
        used = {path[:depth] for path in ends for depth in range(len(path) + 1)}
        return [(member, path) for member, path in members if member[0] or path in used]


def _blobs(attributes: list[AttributeEntry]) -> Iterator[int]:
    for a in attributes:
        for value in a.value if isinstance(a.value, list | tuple) else [a.value]:
            if isinstance(value, PayloadId):
                yield int(value)
