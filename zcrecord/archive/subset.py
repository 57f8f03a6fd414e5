"""Parts of an opened archive as archives of their own: one module, chosen tensors, other names. Copies no payload.

A part has an index of its own over the same bytes, so that everything that works on an archive works on a part. If
tensors are put into it, it is an index alone, for `record.edit` to write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from zcrecord.codec.entries import Entries, ModuleKind, PayloadId, TensorLayout, index_in_memory
from zcrecord.codec.index import Index
from zcrecord.codec.layout import NONE
from zcrecord.errors import TensorNotFoundError, UnsupportedError
from zcrecord.writing.module_tree import ModuleTreeBuilder, split_dotted

from . import info, unflatten
from .archive import Archive
from .name_patterns import name_test, prefix_advice, renamer
from .unflatten import ATTRIBUTE, MODULE, TENSOR

GONE: Any = object()  # instead of an attribute's value: it is taken out

Names = str | Iterable[str] | Callable[[info.TensorInfo], bool]
Rename = Mapping[Any, str] | Callable[[str], str]  # keys: str or re.Pattern; a mapping's key type is invariant
Member = tuple[int, int]  # a child's kind, as of `unflatten.children`, and its number
Path = tuple[str, ...]  # the keys of a member and of the modules around it, from the outside in
Children = dict[int, list[tuple[int, int, int]]]  # by module: place, kind and number of its children, in any order


@dataclass(frozen=True, slots=True)
class PartIndex:
    """The index of a part of an archive, and the part's payloads by their numbers in the archive."""

    index: Index
    numbers: list[int]

    def opened(self, archive: Archive, recipe: Callable[[Archive], tuple[Any, ...]]) -> Archive:
        """Return the part as an archive over the same payloads; `recipe` returns what its `__reduce__` does."""
        part = archive.part(self.index, self.numbers)
        part.source.recipe = recipe
        return part


def module(archive: Archive, name: str) -> Archive:
    """Return a module and all below it as an archive, with names from there; TensorNotFoundError if there is none."""
    archive.ensure_all()
    ix = archive.index
    if not isinstance(name, str):
        raise UnsupportedError(f"a module's name is a str, not a {type(name).__name__}")
    same_size = np.flatnonzero(ix.modules["name_size"] == len(name.encode(errors="surrogatepass")))
    matches = [m for m in same_size.tolist() if ix.text_of(ix.modules[m]) == name]
    if not matches:
        names = archive.names()
        why = "is a tensor and no module; record[name] gives it" if name in names else prefix_advice(name, names)
        raise TensorNotFoundError(name, lambda: map(ix.text_of, ix.modules[1:]), path=archive.path, why=why)
    return PartBuilder(archive, matches[0]).part().opened(archive, lambda _: (module, (archive, name)))


def select(archive: Archive, names: Names | None, rename: Rename | None) -> Archive:
    """Return the part of an archive that `names` chooses (None: all), renamed by `rename`; see `Record.select`."""
    # Copies: pickling the part needs both again.
    if isinstance(names, Iterable) and not isinstance(names, str):
        names = tuple(names)
    rename = dict(rename) if isinstance(rename, Mapping) else rename
    builder = PartBuilder(archive)
    if names is not None:
        builder.keep(names)
    if rename is not None:
        builder.rename(rename)
    return builder.part().opened(archive, lambda _: (select, (archive, names, rename)))


def single_tensor(archive: Archive, i: int) -> Archive:
    """Return an archive of tensor i alone, whose key is its whole name; faster than `select`, for large indexes."""
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
        """Start with all that is below module `top`, after checking the index."""
        archive.ensure_all()
        self._archive, self._top = archive, top
        ix = archive.index
        _, own = unflatten.below(ix, top)
        self._attributes = dict(enumerate(unflatten.attribute_entries(ix, ix.attributes[own], PayloadId), own.start))
        # Parent, place and key; modules first, each behind the one that it is in.
        self._members: dict[Member, tuple[int, int, str]] = {c[:2]: c[2:] for c in unflatten.children(ix, top)}
        self._kept = set(self._members)
        self._sizes = Counter(parent for parent, _, _ in self._members.values())  # by module, of all its children
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
        """Return the full name of a module, tensor or attribute in the archive."""
        kind, number = member
        if kind == TENSOR:
            return self._archive.index.name(number)
        if kind == MODULE:
            return self._names[number]
        parent, _, key = self._members[member]
        return f"{self._names[parent]}.{key}" if self._names[parent] else key

    def _attribute_names(self) -> dict[Member, str]:
        """Return the full names of all attributes; LimitError if they take far more bytes than the index."""
        unflatten.check_full_names(self._archive.index, self._archive.header.index_size)
        return {(ATTRIBUTE, n): self._full_name((ATTRIBUTE, n)) for n in self._attributes}

    def _members_by_test(self, test: Callable[[info.TensorInfo], bool]) -> set[Member]:
        """Return the tensors for whose description a function returns True."""
        return {(TENSOR, i) for i, tensor in enumerate(info.infos(self._archive)) if test(tensor)}

    def _matching(self, matches: Callable[[str], bool], modules: Iterable[int]) -> set[Member]:
        """Return the modules among `modules` whose names match, all below them, and the tensors whose names match."""
        matching = {(MODULE, m) for m in modules if matches(self._names[m])}
        for member, (parent, _, _) in self._members.items():
            if (MODULE, parent) in matching or (member[0] == TENSOR and matches(self._full_name(member))):
                matching.add(member)
        return matching

    def keep(self, names: Names) -> Self:
        """Keep the tensors and modules that `names` chooses, the modules around them, and the attributes of those."""
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
        """Leave out the tensors, modules and attributes that `names` chooses, and modules that become empty."""
        if callable(names):
            return self._leave_out(self._members_by_test(names))
        attributes = self._attribute_names()
        known = [*self._names.values(), *attributes.values()]
        matches = name_test(names, self._archive.names, known, self._archive.path, each=True)
        matching_attributes = {member for member, name in attributes.items() if matches(name)}
        return self._leave_out(self._matching(matches, self._below) | matching_attributes)

    def change(
        self, tensors: Mapping[str, tuple[TensorLayout, int] | None], attributes: Mapping[str, Any], rows: Any
    ) -> Self:
        """Replace, add or take out tensors and attributes by full name, and modules that become empty.

        A tensor is its layout and its payload's number in `rows`, the archive's payload entries and then new ones, or
        None to take it out; an attribute is its value, bytes as a PayloadId, or GONE.
        """
        self._rows, ix = rows, self._archive.index
        self._new_tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        self._new_attributes = {name: value for name, value in attributes.items() if value is not GONE}
        old_tensors = tensors.keys() - self._new_tensors.keys()
        old_attributes = attributes.keys() - self._new_attributes.keys()
        names = self._attribute_names() if old_attributes else {}
        members = {member for member, name in names.items() if name in old_attributes}
        if old_tensors:
            members |= {(TENSOR, i) for kind, i in self._members if kind == TENSOR and ix.name(i) in old_tensors}
        return self._leave_out(members)

    def _leave_out(self, members: set[Member]) -> Self:
        """Leave out members, and modules of which no member is left; those that were empty in the archive stay."""
        self._kept -= members
        remaining = Counter(self._members[member][0] for member in self._kept)
        for m in reversed(self._below):
            if (MODULE, m) in self._kept and self._sizes[m] and not remaining[m]:
                self._kept.discard((MODULE, m))
                remaining[self._members[MODULE, m][0]] -= 1
        return self

    def rename(self, rename: Rename) -> Self:
        """Rename modules, tensors and attributes; the key "" of a mapping puts all of them into a module."""
        self._new_name = renamer(rename)
        top_name = self._new_name("") if isinstance(rename, Mapping) else ""
        self._set_paths(split_dotted(top_name) if top_name else ())
        return self

    def _set_paths(self, top: Path) -> None:
        """Compute the paths of all modules in the part; `top` is that of the module it was made of."""
        self._paths: dict[int, Path] = {self._top: top}
        for m in self._below:
            self._paths[m] = self._path((MODULE, m))

    def _path(self, member: Member) -> Path:
        """Return the path of a member in the part, renamed; that of its module must be known."""
        parent, _, key = self._members[member]
        plain = (*self._paths[parent], key)
        if self._new_name is None:
            return plain
        name = self._full_name(member)
        new_name = self._new_name(name)
        if new_name == ".".join(plain):  # the key may have dots: it is not split
            return plain
        if not isinstance(new_name, str):
            raise UnsupportedError(f"rename= gave a {type(new_name).__name__} for this name; return a str", tensor=name)
        return split_dotted(new_name) if new_name else ()

    def part(self) -> PartIndex:
        """Return the index of the part; the builder is used up."""
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
                replaced = self._new_tensors.pop(ix.name(number), None) if self._new_tensors else None
                layout, payload = replaced or (archive.tensor_layout(row), row.payload)
                outline.tensor(path, layout, payload)
                order.append(number)
            else:
                name = self._full_name((kind, number)) if self._new_attributes else ""
                outline.attribute(path, self._new_attributes.pop(name, self._attributes[number].value))
        order += self._add_new(outline)
        return self._part_index(outline.entries(order))

    def _part_index(self, entries: Entries) -> PartIndex:
        """Return the part of these entries, with the payloads that they use, renumbered; metadata are the archive's."""
        ix = self._archive.index
        entries.metadata = unflatten.metadata_entries(ix, PayloadId)
        used = {payload for entry in (*entries.attributes, *entries.metadata) for payload in map(int, entry.payloads())}
        numbers = sorted((used | {*map(int, entries.payloads)}) - {NONE})
        new = {old: i for i, old in enumerate(numbers)} | {NONE: NONE}
        entries.payloads = [new[payload] for payload in entries.payloads]
        entries.change_values(lambda value: PayloadId(new[value]) if isinstance(value, PayloadId) else value)
        entries.payload_rows, entries.digest_kind = self._rows[numbers], ix.digest_kind
        return PartIndex(index_in_memory(entries), numbers)

    def _add_new(self, outline: ModuleTreeBuilder) -> range:
        """Add those new tensors and attributes that replace none; return the tensors' numbers, after all others."""
        ix = self._archive.index
        if not self._new_tensors and not self._new_attributes:
            return range(0)
        names = set(self._archive.names())
        modules = {self._names[m]: m for kind, m in (*self._kept, (MODULE, self._top)) if kind == MODULE}
        # A flat record's names are keys of one module, with dots in them: so are those that join them.
        flat = {parent for (kind, _), (parent, _, key) in self._members.items() if kind == TENSOR and "." in key}

        def path_of(name: str) -> Path:
            prefixes = [name[:dot] for dot, character in enumerate(name) if character == "."]
            module_name = next((prefix for prefix in reversed(prefixes) if prefix in modules), "")
            key = name[len(module_name) + 1 if module_name else 0 :]
            is_below_tensor = any(prefix in names for prefix in prefixes if len(prefix) > len(module_name))
            keys = (key,) if modules[module_name] in flat or is_below_tensor else split_dotted(key)
            return (*self._paths[modules[module_name]], *keys)

        for name, (layout, payload) in self._new_tensors.items():
            outline.tensor(path_of(name), layout, payload)
        for name, value in self._new_attributes.items():
            outline.attribute(path_of(name), value)
        return range(len(ix.tensors), len(ix.tensors) + len(self._new_tensors))

    def _kinds(self, members: list[tuple[Member, Path]], children: Children) -> dict[Path, tuple[int, str]]:
        """Return kind and type name of the part's modules by path: the saved ones, unless members joined or left.

        A plain list that lost members stays a list here: the outline makes it a mapping. A NUMBERED module stays one.
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
            saved_kind, type_name = saved
            lost_some = len(children[number]) < self._sizes[number] or len(parents) < len(children[number])
            got_others, is_named_tuple = any(p != number for p in parents), saved_kind == ModuleKind.TUPLE and type_name
            if saved_kind != ModuleKind.NUMBERED and (got_others or (lost_some and is_named_tuple)):
                out.setdefault(path, (int(ModuleKind.MAPPING), ""))
            else:
                out[path] = saved
        return out

    def _in_pre_order(self, children: Children) -> list[tuple[Member, Path]]:
        """Return the kept members with their paths, in pre-order, without modules whose members all moved elsewhere."""
        members: list[tuple[Member, Path]] = []
        stack = [(0, MODULE, self._top)]
        while stack:
            _, kind, number = stack.pop()
            members.append(((kind, number), self._paths[number] if kind == MODULE else self._path((kind, number))))
            if kind == MODULE:
                stack += sorted(children[number], reverse=True)
        if self._new_name is None:
            return members
        # Modules of attributes and tensors, or empty already in the archive; those around them are used, too.
        ends = {path if kind == MODULE else path[:-1] for (kind, n), path in members if kind or not children[n]}
        used = {path[:depth] for path in ends for depth in range(len(path) + 1)}
        return [(member, path) for member, path in members if member[0] != MODULE or path in used]
