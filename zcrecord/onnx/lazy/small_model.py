"""A small model over a model's own files: the graph, and references to the values where they lie.

The model is read once more, without its large values. Finding tensors is left to `locate`, filling a skeleton to
`graph`, the rules for references to `external_data`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zcrecord.codec.layout import MAX_ALIGNMENT
from zcrecord.dtypes import STRING
from zcrecord.errors import Advice, LimitError, SourceError, UnsupportedError, located
from zcrecord.onnx.external_data import ONE_COPY, location_from
from zcrecord.onnx.graph import Initializer, encode_reference, filled, size_of, values_or_deferred, write_parts
from zcrecord.onnx.names import name_tensors
from zcrecord.onnx.protobuf.reader import Skeleton, encode_field
from zcrecord.onnx.protobuf.tensors import STRING_DATA
from zcrecord.storage.files import check_destination, is_url, open_sink, path_of
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.module_tree import ModuleTreeBuilder
from zcrecord.writing.writers import ConvertReport, conversion_report

from .locate import LocatedTensor, ModelFiles, find_tensors, is_as_stored, read


def write_small_model(
    source: str,
    names: Sequence[str],
    files: ModelFiles,
    entries: Sequence[LocatedTensor],
    dest: Any,
    *,
    alignment: int,
    force: bool,
    durable: bool,
) -> ConvertReport:
    """Write a small model over a scanned one, whose tensors are `entries` by `names`; see `OnnxTensors.to_onnx`."""
    started = time.perf_counter()
    if hasattr(dest, "write") or is_url(dest):
        fault = "a small model refers to its files from the folder it lies in, and a stream or URL has none"
        raise UnsupportedError(f"{fault}; name a path")
    if not isinstance(alignment, int) or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise LimitError(f"alignment {alignment!r} is not a power of two from 1 to {MAX_ALIGNMENT}")
    path = path_of(dest)
    new = check_destination(source, path, force)
    if os.path.exists(path) and not os.path.isfile(path):
        raise UnsupportedError("a small model is a regular file in a folder; name one", path=path)
    model = _SmallModel(names, files, entries, path, alignment)
    parts = model.parts()
    with open_sink(path, durable=durable, replaces=new) as sink:
        write_parts(parts, sink)
        written = sink.position
    return conversion_report(
        started,
        source=source,
        dest=path,
        tensors=len(entries),
        modules=model.modules,
        payload_bytes=model.inlined,
        archive_bytes=written,
        input_bytes=model.input_bytes,
        session_options=ONE_COPY,
    )


@dataclass(slots=True)
class _SmallModel:
    """Assembles a small model; counts modules of names, bytes of values in it, and bytes of the original."""

    names: Sequence[str]
    files: ModelFiles
    entries: Sequence[LocatedTensor]
    dest: str
    alignment: int
    locations: dict[str, str] = field(default_factory=dict)  # by path
    modules: int = 0
    inlined: int = 0
    input_bytes: int = 0

    def parts(self) -> list[Any]:
        """Return the model as parts in order, each bytes-like or `DeferredValues`."""
        original, skeleton = self.files.file_of(None), Skeleton()
        original.check_current()
        tensors, entries = find_tensors(original, skeleton)
        if entries != self.entries:
            raise SourceError("was changed since it was scanned; scan it again", path=original.path)
        for path in {self.files.path_of(e.reference) for e in entries}:
            check_destination(path, self.dest, force=True)  # never replaces weights
        outline = ModuleTreeBuilder()
        name_tensors(tensors, original.nbytes, outline)
        self.modules = len(outline.entries().modules)
        self.input_bytes = original.nbytes + sum(e.nbytes for e in entries if e.reference is not None)
        parts = filled(b"".join(skeleton.finish()), [(e.dtype, e) for e in entries], self._values)
        size_of(parts, Advice("convert the model, and export the archive with {}", "external", True))
        return parts

    def _values(self, tensor: Initializer) -> Any:
        """Return a reference to a tensor's values, or the values themselves, as `place` of `graph.filled`."""
        entry: LocatedTensor = tensor.value
        with located(tensor=self.names[tensor.number]):
            if tensor.outside and entry.offset % self.alignment == 0 and is_as_stored(self.files, entry):
                return encode_reference(self._location(entry), entry.offset, entry.nbytes)
            if entry.dtype is STRING:
                texts = StringTensor(read(self.files, entry, mmap=False), entry.shape).strings()
                fields = b"".join(encode_field(STRING_DATA, text) for text in texts)
                self.inlined += len(fields)
                return fields
            self.inlined += entry.nbytes
            return values_or_deferred(entry.nbytes, lambda: (read(self.files, entry, mmap=False).data,))

    def _location(self, entry: LocatedTensor) -> str:
        """Return the path, relative to the small model, of a tensor's file, which is checked the first time."""
        file = self.files.file_of(entry.reference)
        if file.path not in self.locations:
            file.check_current()
            self.locations[file.path] = location_from(self.dest, file.path)
        return self.locations[file.path]
