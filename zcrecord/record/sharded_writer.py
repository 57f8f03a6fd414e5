"""`ShardedWriter`: payloads as they come, into archives of a limited size, and a catalogue of them.

A payload, and so all tensors that share it, lies in one shard. Equal payloads lie in the shard of the first one, stored
once. CONVENTIONS.md describes catalogues.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, SupportsIndex

import numpy as np

from zcrecord.codec.digests import digest_of
from zcrecord.codec.entries import Entries, digest_kind
from zcrecord.codec.layout import NONE
from zcrecord.errors import UnsupportedError
from zcrecord.storage.files import Place, is_url, place_beside_shards
from zcrecord.storage.folders import is_plain_name
from zcrecord.storage.new_files import FileGroup, FileSink, Placement, put_in_place, refusals
from zcrecord.storage.scratch import folder_lock
from zcrecord.tensors.strides import as_bytes
from zcrecord.writing.catalogue import WholeRecord, WrittenShard, catalogue_tree, select_tensors, write_catalogue
from zcrecord.writing.equal import EqualPayloads
from zcrecord.writing.writers import SaveReport, StreamWriter

from .own_shards import own_shards

_BATCH = 1 << 19  # bytes of small arrays that are hashed and then written together: a cache holds them


class ShardedWriter:
    """Writer of payloads into shards and, at the end, a catalogue; of a single shard, a plain archive.

    Has the methods of a `StreamWriter` that writers of records use, within a `with` block of its `files`. The shards
    appear when all are written, and the catalogue last, so `dest` is always the old record or the new one. Shards get
    free names (`model-00001-of-00002.zcr`, else `model~2-00001-of-00002.zcr`); a replaced catalogue's are removed.

    Args:
        dest: the path of the catalogue.
        most: bytes of payloads in a shard; a larger payload has a shard of its own.
    """

    def __init__(self, dest: Any, most: Any, *, alignment: int, digest: str | None, durable: bool) -> None:
        if not isinstance(most, SupportsIndex) or isinstance(most, bool) or operator.index(most) < 1:
            raise UnsupportedError(f"max_shard_size={most!r} is not a number of bytes from 1 on, such as 5 << 30")
        if hasattr(dest, "write") or is_url(os.fspath(dest) if isinstance(dest, Place) else dest):
            raise UnsupportedError("max_shard_size= is for paths: shards lie beside their catalogue")
        self._path, self._most = place_beside_shards(dest), operator.index(most)
        self._replaces = dest.replaces if isinstance(dest, Place) else None
        name = os.path.basename(self._path)
        if not is_plain_name(f"{name.removesuffix('.zcr')}-00001-of-00001.zcr", ".zcr"):
            rule = "a catalogue's name, with which those of its shards begin, may not have"
            raise UnsupportedError(f'{rule} / \\ : * ? " < > | or a control character; rename it', path=self._path)
        self._alignment, self._digest, self._durable = alignment, digest, durable
        self.files = FileGroup(self._path, durable=durable)
        self._shards: list[tuple[StreamWriter, FileSink]] = []
        self._places: list[tuple[int, int]] = []  # of each payload: its shard, and its number there
        self._equal = EqualPayloads[tuple[int, int]]()  # places
        self._shard_nbytes = self._payload_nbytes = 0  # of payloads in the last shard, and of the one in progress

    def store(self, source: Any) -> int:
        """Write one payload, the values of a LazyTensor or the bytes of an array or SplitSource; return its id."""
        return self._place_payload(self._shard_for(source.nbytes).store(source), source.nbytes)

    def store_next(self, sources: Sequence[Any], start: int) -> list[int]:
        """Write the source `start` of a plan, or several small arrays from it on that fit the shard; return the ids."""
        writer, new = self._shard_for(sources[start].nbytes), list[memoryview]()
        room = min(_BATCH, self._most - self._shard_nbytes) if digest_kind(self._digest) else 0
        for number in range(start, len(sources)):
            source = sources[number]
            if not isinstance(source, np.ndarray) or source.nbytes > room:
                break
            octets = as_bytes(source).data
            place = len(self._shards) - 1, writer.payloads + len(new)
            if self._equal.first((len(octets), digest_of(octets)), place, lambda _: True) != place:
                break
            self._places.append(place)
            new.append(octets)
            room -= len(octets)
        if not new:
            return [self.store(sources[start])]
        writer.add_all(new)
        self._shard_nbytes += sum(map(len, new))
        return list(range(len(self._places) - len(new), len(self._places)))

    def begin(self, nbytes: int) -> None:
        """Start a payload of `nbytes` bytes."""
        self._payload_nbytes = nbytes
        self._shard_for(nbytes).begin(nbytes)

    def write(self, data: Any) -> None:
        """Append any bytes-like to the payload in progress."""
        self._shards[-1][0].write(data)

    def end(self) -> int:
        """Finish the payload in progress and return its id, NONE if no byte was written."""
        return self._place_payload(self._shards[-1][0].end(), self._payload_nbytes)

    def _shard_for(self, nbytes: int) -> StreamWriter:
        """Return the writer of the last shard; of a new one if a payload of `nbytes` bytes does not fit into that."""
        if not self._shards or (self._shard_nbytes and self._shard_nbytes + nbytes > self._most):
            sink = self.files.add()
            self._shards.append((StreamWriter(sink, alignment=self._alignment, digest=self._digest), sink))
            self._shard_nbytes = 0
        return self._shards[-1][0]

    def _place_payload(self, number: int, nbytes: int) -> int:
        """Return the id of the last shard's newest payload; it is removed again if another shard has an equal one."""
        if number == NONE:
            return NONE
        last, writer = len(self._shards) - 1, self._shards[-1][0]

        def is_equal(place: tuple[int, int]) -> bool:
            shard, first = place
            pieces = self._shards[shard][0].pieces_of(first), writer.pieces_of(number)
            return shard != last and all(map(operator.eq, *pieces))

        key, place = writer.key_of(number), (last, number)
        shard, first = place if key is None else self._equal.first(key, place, is_equal)
        if shard == last:
            self._shard_nbytes += nbytes
        else:
            writer.forget(number)
            place = shard, self._shards[shard][0].repeat(first)
        self._places.append(place)
        return len(self._places) - 1

    def finish(self, entries: Entries) -> SaveReport:
        """Write indexes and the catalogue, and make them appear; the report counts the bytes of all files."""
        if len(self._shards) > 1 and not self._shards[-1][0].payloads:  # all were equal to some in other shards
            self._shards.pop()
            self.files.drop_last()
        if len(self._shards) < 2:
            return self._finish_plain(entries)
        shards = self._finish_shards(entries)
        kind = digest_kind(self._digest)
        whole = WholeRecord(entries, shards, alignment=self._alignment, kind=kind)
        scratches, folder = self.files.finish(), os.path.dirname(self._path)
        catalogue_file = FileGroup(self._path, durable=self._durable, clear=False)
        with folder_lock(folder), catalogue_file:  # so that no other saver takes or removes these names
            names = self._free_shard_names()
            tree = catalogue_tree(whole, [s._replace(name=name) for s, name in zip(shards, names, strict=True)])
            catalogue = write_catalogue(tree, catalogue_file.add(), kind=kind)
            files = [Placement(s, os.path.join(folder, name), ()) for s, name in zip(scratches, names, strict=True)]
            self._put_in_place(files, catalogue_file.finish())
        return replace(whole.report, archive_bytes=catalogue.archive_bytes + sum(shard.nbytes for shard in shards))

    def _finish_plain(self, entries: Entries) -> SaveReport:
        writer = self._shards[0][0] if self._shards else self._shard_for(0)
        entries.payloads = [NONE if p == NONE else self._places[p][1] for p in entries.payloads]
        report = writer.finish(entries)
        self._put_in_place([], self.files.finish())
        return report

    def _put_in_place(self, shards: list[Placement], scratches: list[str]) -> None:
        [last] = scratches
        files = [*shards, Placement(last, self._path, self._replaces)]
        put_in_place(files, durable=self._durable, shards_of=own_shards)

    def _finish_shards(self, entries: Entries) -> list[WrittenShard]:
        """Write each shard's index, and number the payloads of `entries` by shards; the results have no names yet."""
        tensors: list[list[int]] = [[] for _ in self._shards]  # their numbers, for each shard
        for number, payload in enumerate(entries.payloads):
            if payload != NONE:
                tensors[self._places[payload][0]].append(number)
        shards: list[WrittenShard] = []
        payloads = [NONE] * len(entries.payloads)
        first = 0  # number of the shard's first payload in the whole record
        for numbers, (writer, sink) in zip(tensors, self._shards, strict=True):
            part = select_tensors(entries, numbers)
            part.payloads = [self._places[payload][1] for payload in part.payloads]
            writer.finish(part)
            for number, payload in zip(numbers, part.payloads, strict=True):
                payloads[number] = first + payload
            first += len(part.payload_rows)
            sha256 = hashlib.sha256(writer.index).digest()
            shards.append(WrittenShard("", sink.position, writer.trailer, sha256, part.payload_rows))
        entries.payloads = payloads
        return shards

    def _free_shard_names(self) -> list[str]:
        """Return a name for each shard, of the first set of names of which none is taken."""
        folder, base = os.path.split(self._path)
        stem, count = base.removesuffix(".zcr"), len(self._shards)
        for turn in itertools.count(1):
            tag = f"~{turn}" if turn > 1 else ""
            names = [f"{stem}{tag}-{i:05}-of-{count:05}.zcr" for i in range(1, count + 1)]
            with refusals(self._path):
                if not any(os.path.lexists(os.path.join(folder, name)) for name in names):
                    return names
        raise AssertionError
