"""ONNX to an archive in one forward pass: values stream through, the rest of the model becomes its skeleton.

The archive has the model's tensors, under the names that `names` gives them, and the skeleton as the bytes attribute
"onnx.graph" of the record: the ModelProto byte for byte, but each TensorProto keeps only what describes it and gets
data_location EXTERNAL and one external_data entry, "zcrecord" -> the tensor's number in the archive. `graph` undoes
that. Nothing of the time, the host or a version enters the bytes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zcrecord import writer
from zcrecord.converting import ConvertReport, check_destination, open_source, path_or_none, peak_rss, what_it_is
from zcrecord.dtypes import by_onnx
from zcrecord.entries import Entries, PayloadId
from zcrecord.errors import ExternalDataError, OnnxError, RecordError
from zcrecord.layout import ALIGNMENT, NONE
from zcrecord.sink import open_sink

from . import external
from .names import GRAPH_ATTRIBUTE, Found, name_tensors
from .scanner import Scanner
from .schema import Scope, Tensor, Tensors
from .values import RAW_DATA, STRING, Payloads, Values
from .wire import Binary, Skeleton, Window

__all__ = ["STUB_KEY", "ConvertReport", "convert"]

STUB_KEY = b"zcrecord"
# TensorProto.data_location = EXTERNAL, external_data { key, value } up to a value of so many digits.
_STUBS = [b"\x70\x01\x6a%c\x0a%c%s\x12%c" % (len(STUB_KEY) + n + 4, len(STUB_KEY), STUB_KEY, n) for n in range(20)]


def convert(
    source: str | os.PathLike[str] | Binary,
    dest: str | os.PathLike[str] | Binary,
    *,
    alignment: int = ALIGNMENT,
    force: bool = False,
    durable: bool = True,
    allow_links: bool = False,
    progress: Callable[[int, int | None], None] | None = None,
) -> ConvertReport:
    """Write an ONNX model as an archive; reads `source` once, forward, and never holds a payload.

    Both may be paths or binary file objects, pipes included. A path at `dest` holds the old file or the whole new one
    at any time, and is replaced only with `force`. `progress` is called with the bytes read so far and, for a regular
    file, how many there are; external data counts on top. `durable` and `alignment` are those of `save_record`.

    Example:
        >>> report = convert("model.onnx", "model.zcr")
        >>> report.tensors > 0, report.payload_bytes < report.archive_bytes
        (True, True)

    Raises:
        OnnxError: not a valid model, or one that uses what is not supported; with the offset. ExternalDataError: its
            external data breaks a rule. DestinationExistsError: `dest` exists and `force` was not given, or is the
            source. SourceError: the file system refused.
    """
    started = time.perf_counter()
    source_path, dest_path = path_or_none(source), path_or_none(dest)
    check_destination(source_path, dest_path, force)
    with contextlib.ExitStack() as stack:
        stream, total, folder = source, None, None
        if source_path is not None:
            stream, total = open_source(source_path)
            stack.enter_context(stream)
            folder = external.Folder(Path(source_path).absolute().parent, allow_links=allow_links)
            stack.enter_context(folder)
        report = None if progress is None else lambda done: progress(done, total)
        with open_sink(dest, durable=durable) as sink:
            out = writer.StreamWriter(sink, alignment=alignment)
            try:
                entries, input_bytes, renamed = _stream(stream, out, folder, report)
            except RecordError as error:
                raise error.located(path=source_path) from error.__cause__
            saved = out.finish(entries)
    return ConvertReport(
        source=source_path,
        dest=dest_path,
        tensors=saved.tensors,
        modules=len(entries.modules),
        renamed=renamed,
        payload_bytes=saved.payload_bytes,
        archive_bytes=saved.archive_bytes,
        input_bytes=input_bytes,
        shared_bytes=saved.deduplicated,
        seconds=time.perf_counter() - started,
        peak_rss=peak_rss(),
    )


def _stream(
    stream: Any, out: writer.StreamWriter, folder: external.Folder | None, report: Callable[[int], None] | None
) -> tuple[Entries, int, int]:
    """Write all payloads, the skeleton last; return the entries, the bytes read and how many names had to change."""
    window, skeleton = _start(stream, report)
    store = _Store(window, out, folder, report)
    Scanner(window, store.values, store).scan()
    input_bytes = window.base + window.limit + (folder.nbytes if folder is not None else 0)
    outline, renamed = name_tensors(store.found, input_bytes)
    store.found.clear()
    outline.attribute((GRAPH_ATTRIBUTE,), _write_skeleton(out, skeleton))
    return outline.entries(), input_bytes, renamed


def _start(stream: Binary, report: Callable[[int], None] | None) -> tuple[Window, Skeleton]:
    """Return a window on the stream; say so at once if it starts like something else."""
    skeleton = Skeleton()
    window = Window(stream, skeleton, report)
    window.fill(32)
    head = bytes(window.view[: window.limit][:32])
    if not head:
        raise OnnxError("empty, not an ONNX model")
    if what := what_it_is(head):
        raise OnnxError(f"{what}, not an ONNX model", offset=0)
    return window, skeleton


class _Store(Tensors):
    """Numbers the tensors of a scan in order of appearance and stores the values of each as a payload."""

    def __init__(
        self, window: Window, out: Payloads, folder: external.Folder | None, report: Callable[[int], None] | None
    ) -> None:
        self.values = Values(window, out)
        self.found: list[Any] = []
        self._out = out
        self._folder = folder
        self._report = report
        self._window = window

    def whole(self, scope: Scope, field: int, place: int, offset: int, name: bytes, code: int, dims: list[int],
              data: memoryview) -> bytes:  # fmt: skip
        out = self._out
        payload = NONE
        if len(data):
            self.values.close_open()
            out.begin(len(data))
            out.write(data)
            payload = out.end()
        found = self.found
        found.append(Found(scope, field, place, name, offset, by_onnx[code], tuple(dims), payload))
        return stub(len(found) - 1)

    def start(self, t: Tensor) -> None:
        t.index = len(self.found)
        self.found.append(None)

    def stub(self, t: Tensor, skeleton: Skeleton) -> None:
        skeleton.tail += stub(t.index)

    def finish(self, t: Tensor) -> None:
        try:
            if t.external:
                self._load(t)
            shape = self.values.finish(t)
        except RecordError as error:
            raise error.located(tensor=t.label or None, offset=t.offset) from error.__cause__
        kind = by_onnx[t.data_type]
        self.found[t.index] = Found(t.scope, t.field, t.place, t.name, t.offset, kind, shape, t.payload)

    def _load(self, t: Tensor) -> None:
        """Copy the values of a tensor from its file."""
        if t.source and (t.source != RAW_DATA or t.nbytes):
            raise OnnxError("has external data and values of its own; it may have one of them")
        if t.data_type == STRING:
            raise ExternalDataError("strings cannot be external data")
        need = t.expected()
        if t.dtype is None or need < 0:
            return  # `finish` says what is wrong with it
        reference = external.parse(t.entries or {}, need)
        if not need:
            return
        if self._folder is None:
            what = "lies beside the model, and a stream has no folder; convert the file itself"
            raise ExternalDataError(f"external data '{reference.location}' {what}")
        for chunk in self._folder.read(reference):
            self.values.write(t, chunk, need)
            if self._report is not None:
                self._report(self._window.base + self._window.pos + self._folder.nbytes)


def stub(index: int) -> bytes:
    """Return the fields that stand for the values of the tensor with this number."""
    digits = b"%d" % index
    return _STUBS[len(digits)] + digits


def _write_skeleton(out: writer.StreamWriter, skeleton: Skeleton) -> PayloadId:
    out.begin(len(skeleton))
    for part in skeleton.finish():
        out.write(part)
    return PayloadId(out.end())
