"""`ShardedWriter`: payloads as they come, into archives of a limited size, and a catalogue that makes one of them.

A payload lies in one shard, and so do all tensors that share it. Payloads of equal bytes lie in the shard that has the
first of them, stored once. CONVENTIONS.md tells what a catalogue holds.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from dataclasses import replace
from types import TracebackType
from typing import Any, SupportsIndex

from zcrecord.codec.entries import Entries, digest_kind
from zcrecord.codec.layout import NONE
from zcrecord.errors import UnsupportedError
from zcrecord.storage.files import Place, is_url, place_beside_shards
from zcrecord.storage.folders import is_plain_name
from zcrecord.storage.new_files import FileGroup, FileSink, Placement, put_in_place, refusals
from zcrecord.storage.scratch import folder_lock
from zcrecord.writing.catalogue import WholeRecord, WrittenShard, catalogue_tree, some_of, write_catalogue
from zcrecord.writing.writers import SaveReport, StreamWriter

from .own_shards import own_shards

__all__ = ["ShardedWriter"]


class ShardedWriter:
    """Writes payloads forward into shards, and at the end a catalogue; with one shard a plain archive instead.

    It has the methods of a `StreamWriter` that writers of records use. A context manager: nothing appears before all of
    it is written, and the catalogue appears last, so that `dest` is the old record or the new one at any time. Shards
    get names that are free (`model-00001-of-00002.zcr`, else `model~2-00001-of-00002.zcr`); those of a catalogue that
    was replaced are removed.

    Args:
        dest: the path of the catalogue.
        most: bytes of payloads in a shard; one that is larger has a shard of its own.

    Raises:
        UnsupportedError: `dest` is no path, or its name no plain one, or `most` no number of bytes. SourceError: a
        folder, a device or the like is there.
    """

    def __init__(self, dest: Any, most: Any, *, alignment: int, digest: str | None, durable: bool) -> None:
        if not isinstance(most, SupportsIndex) or isinstance(most, bool) or operator.index(most) < 1:
            raise UnsupportedError(f"max_shard_size={most!r} is not a number of bytes from 1 on")
        if hasattr(dest, "write") or is_url(os.fspath(dest) if isinstance(dest, Place) else dest):
            raise UnsupportedError("max_shard_size= is for paths: shards lie beside their catalogue")
        self._path, self._most = place_beside_shards(dest), operator.index(most)
        self._replaces = dest.replaces if isinstance(dest, Place) else None
        name = os.path.basename(self._path)
        if not is_plain_name(f"{name.removesuffix('.zcr')}-00001-of-00001.zcr", ".zcr"):
            what = "a catalogue's name, which its shards' begin with, has none of"
            raise UnsupportedError(f'{what} / \\ : * ? " < > | and no control character; rename it', path=self._path)
        self._alignment, self._digest, self._durable = alignment, digest, durable
        self._files = FileGroup(self._path, durable=durable)
        self._shards: list[tuple[StreamWriter, FileSink]] = []
        self._homes: list[tuple[int, int]] = []  # shard, and number there, of each payload
        self._known: dict[tuple[int, int], tuple[int, int]] = {}  # the first with this size and digest, likewise
        self._held = self._coming = 0  # bytes of payloads in the last shard, and of the one in progress

    def __enter__(self) -> ShardedWriter:
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(kind, error, trace)

    # Payloads.

    def store(self, source: Any) -> int:
        """Write one payload, the values of a LazyTensor or the bytes of an array or SplitSource; return its id."""
        return self._note(self._room(source.nbytes).store(source), source.nbytes)

    def begin(self, nbytes: int) -> None:
        """Start a payload of so many bytes."""
        self._coming = nbytes
        self._room(nbytes).begin(nbytes)

    def write(self, data: Any) -> None:
        """Append any bytes-like to the payload in progress."""
        self._shards[-1][0].write(data)

    def end(self) -> int:
        """Finish the payload in progress and return its id, NONE if no byte was written."""
        return self._note(self._shards[-1][0].end(), self._coming)

    def _room(self, nbytes: int) -> StreamWriter:
        """Return the writer of the shard that takes so many bytes more."""
        if not self._shards or (self._held and self._held + nbytes > self._most):
            sink = self._files.add()
            self._shards.append((StreamWriter(sink, alignment=self._alignment, digest=self._digest), sink))
            self._held = 0
        return self._shards[-1][0]

    def _note(self, number: int, nbytes: int) -> int:
        if number == NONE:
            return NONE
        here = len(self._shards) - 1
        writer, key = self._shards[here][0], self._shards[here][0].key_of(number)
        shard, first = (here, number) if key is None else self._known.setdefault(key, (here, number))
        earlier = self._shards[shard][0]
        if shard != here and all(map(operator.eq, earlier.pieces_of(first), writer.pieces_of(number))):
            writer.forget(number)
            self._homes.append((shard, earlier.repeat(first)))
        else:
            self._held += nbytes
            self._homes.append((here, number))
        return len(self._homes) - 1

    # The end.

    def finish(self, entries: Entries) -> SaveReport:
        """Write indexes and the catalogue, and make them appear; the report counts the bytes of all files."""
        if len(self._shards) > 1 and not self._shards[-1][0].payloads:  # what came last was in another already
            self._shards.pop()
            self._files.drop_last()
        if len(self._shards) < 2:
            return self._finish_one(entries)
        shards = self._finish_shards(entries)
        kind = digest_kind(self._digest)
        whole = WholeRecord(entries, shards, alignment=self._alignment, kind=kind)
        scratches, folder = self._files.finish(), os.path.dirname(self._path)
        last = FileGroup(self._path, durable=self._durable, clear=False)
        with folder_lock(folder), last:  # no other saver takes or removes these names meanwhile
            names = self._free_names()
            tree = catalogue_tree(whole, [s._replace(name=name) for s, name in zip(shards, names, strict=True)])
            catalogue = write_catalogue(tree, last.add(), kind=kind)
            places = [Placement(s, os.path.join(folder, name), ()) for s, name in zip(scratches, names, strict=True)]
            self._place(places, last.finish())
        return replace(whole.report, archive_bytes=catalogue.archive_bytes + sum(shard.nbytes for shard in shards))

    def _finish_one(self, entries: Entries) -> SaveReport:
        """Write a plain archive."""
        out = self._shards[0][0] if self._shards else self._room(0)  # a payload may be larger than a shard is to be
        entries.payloads = [NONE if p == NONE else self._homes[p][1] for p in entries.payloads]
        report = out.finish(entries)
        self._place([], self._files.finish())
        return report

    def _place(self, shards: list[Placement], written: list[str]) -> None:
        """Put shards in their places, then the one other file that was written at the path."""
        [last] = written
        files = [*shards, Placement(last, self._path, self._replaces)]
        put_in_place(files, durable=self._durable, shards_of=own_shards)

    def _finish_shards(self, entries: Entries) -> list[WrittenShard]:
        """Write each shard's index, and number the payloads of `entries` shard by shard, as those indexes do."""
        users: list[list[int]] = [[] for _ in self._shards]
        for i, payload in enumerate(entries.payloads):
            if payload != NONE:
                users[self._homes[payload][0]].append(i)
        out: list[WrittenShard] = []
        payloads = [NONE] * len(entries.payloads)
        first = 0
        for chosen, (writer, sink) in zip(users, self._shards, strict=True):
            some = some_of(entries, chosen)
            some.payloads = [self._homes[payload][1] for payload in some.payloads]
            writer.finish(some)
            for i, payload in zip(chosen, some.payloads, strict=True):
                payloads[i] = first + payload
            first += len(some.payload_rows)
            sha256 = hashlib.sha256(writer.index).digest()
            out.append(WrittenShard("", sink.position, writer.trailer, sha256, some.payload_rows))
        entries.payloads = payloads
        return out

    def _free_names(self) -> list[str]:
        """Return names for all shards, none of which is taken: the old record has some, or another save has."""
        folder, base = os.path.split(self._path)
        stem, count = base.removesuffix(".zcr"), len(self._shards)
        for turn in itertools.count(1):
            tag = f"~{turn}" if turn > 1 else ""
            names = [f"{stem}{tag}-{i:05}-of-{count:05}.zcr" for i in range(1, count + 1)]
            with refusals(self._path):
                if not any(os.path.lexists(os.path.join(folder, name)) for name in names):
                    return names
        raise AssertionError
