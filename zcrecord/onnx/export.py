"""From an archive back to ONNX: a model that holds everything, or a small one whose weights stay in the archive.

`graph` rewrites the skeleton; `archive_link` has the metadata of a model that refers to an archive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, NamedTuple

from zcrecord import dtypes
from zcrecord.archive.info import TensorInfo, child_of_type
from zcrecord.archive.payloads import Payloads
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.errors import Advice, DependencyError, RecordError, UnsupportedError, located, printable
from zcrecord.onnx.protobuf.reader import encode_field
from zcrecord.onnx.protobuf.rewriting import domains_of, encode_properties, without_properties
from zcrecord.onnx.protobuf.tensors import STRING_DATA
from zcrecord.storage.files import Binary, Progress, check_destination, open_sink, path_or_none
from zcrecord.storage.sink import Sink
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.writers import ConvertReport, conversion_report

from . import graph
from .archive_link import PROPERTIES, TUNED_FOR, ArchiveLink, digest_of, is_link, link
from .external_data import NO_PREPACKING, ONE_COPY

_STRINGS = 1 << 12  # strings encoded together
_SAFE = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}  # domains of operators that do not depend on the CPU


def to_onnx(
    source: str | os.PathLike[str] | Any,
    dest: str | os.PathLike[str] | Binary,
    *,
    module: str | None = None,
    external: bool = False,
    tuned: bool | None = None,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write the model in an archive as ONNX again; holds at most a few MiB of its values at a time.

    Its messages are those of the converted model, its values those that the record has now, in raw_data. Metadata about
    an archive that the converted model referred to are left out. `dest` is replaced in one step. Every payload's digest
    is checked.
    With `external` the values of initializers and Constant nodes stay in the archive, which `onnx.load` and ONNX
    Runtime read as external data: the archive must be a file in the folder of `dest` or below it. The model itself gets
    the values that readers expect in it: tensors of up to 127 bytes, strings, complex numbers, sparse tensors, tensors
    in other attributes, functions and training_info; also tensors that are not in C order. Its metadata_props identify
    the archive, which is read whole for that.

    Args:
        source: an archive that `convert` made: a path, that of a folder with one archive, a bytes-like, or a Record.
        dest: a path or, unless `external`, a URL or a binary file object, pipes included.
        module: of an archive of several models, the module of the one to write.
        tuned: with `external`, None writes the graph that `tune` made for this machine if it is right on all others;
            True also one with convolutions for this kind of CPU, which others may compute wrong; False none.
        force, durable, storage_options: as in `convert`.
        progress: called with bytes done and bytes in all: of the model, and before, with `external`, of the archive.

    Returns:
        `payload_bytes` counts the values in the model, `repeated_bytes` those of them that the archive holds once for
        several tensors or, with `external`, not in C order. With `session_options` ONNX Runtime copies no weight.

    Example:
        >>> from zcrecord.onnx import convert
        >>> _ = convert("model.onnx", "model.zcr")
        >>> to_onnx("model.zcr", "again.onnx").archive_bytes == os.path.getsize("model.onnx")
        True
        >>> to_onnx("model.zcr", "small.onnx", external=True).archive_bytes < 2000
        True

    Raises:
        UnsupportedError: there is no model, or several and no `module`; with `external`, `dest` or the archive is no
            plain file, or the model has keys of ours; with `tuned`, there is no graph for this machine.
            TensorNotFoundError: no such module. ExternalDataError: no model at `dest` may refer to the archive.
            LimitError: more than 2 GiB. IntegrityError: a payload is damaged. FormatError: the archive is malformed.
            DestinationExistsError, SourceError: as `save_record`.
    """
    started, dest_path = time.perf_counter(), path_or_none(dest)
    with contextlib.ExitStack() as stack:
        opened = graph.opened_model(source, module)
        record = opened.record if opened.record is source else stack.enter_context(opened.record)
        with located(path=record.archive.path):
            replaces = check_destination(record.path, dest_path, force, storage_options)
            archive_link = link(opened, dest_path) if external else None
            if archive_link is not None:
                stack.enter_context(archive_link.model.record)
            model = _ModelWriter(opened, archive_link, tuned)
            model.plan(progress)
            with open_sink(dest, durable=durable, options=storage_options, replaces=replaces) as sink:
                model.write(sink)
        return model.report(record.path, dest_path, started)


class _TunedModel(NamedTuple):
    """A model over an archive's payloads, the number of tensors that lie there, its target's text, session options."""

    data: bytes
    tensors: int
    target: str
    options: Mapping[str, str]  # with which ONNX Runtime makes no copy of a weight


def _tuned_model_to_write(archive_link: ArchiveLink, tuned: bool | None) -> _TunedModel | None:
    """Return the tuned model if `tuned` of `to_onnx` asks for it, else None; UnsupportedError if there is none."""
    record = archive_link.model.record
    if tuned is False or (tuned is None and child_of_type(record.archive, TUNED_TYPE) is None):
        return None
    from .tuned import NoTuning  # here, because most archives are not tuned

    try:
        return _tuned_model(archive_link, on_all_cpus=not tuned)
    except (NoTuning, DependencyError) as error:
        if tuned is None:
            message = "%s: the original graph is written, not the tuned one: %s"
            logging.getLogger("zcrecord").warning(message, record.path, error)
            return None
        advice = Advice("tune the archive here, or leave {} out", "tuned", True)
        raise UnsupportedError(f"no tuned graph to write: {error}", advice=advice) from error


def _tuned_model(archive_link: ArchiveLink, *, on_all_cpus: bool) -> _TunedModel:
    """Return the model that tuning made for this machine, for programs that do not compare its target with theirs.

    Checks its digests and those of all its payloads. Two things in it depend on the machine. ONNX Runtime finds packed
    weights by a hash of the bytes that it packs itself, and ignores others; before 1.32, the first to compare them,
    there are none. Weights of convolutions in blocks of channels, for operators of the domain com.microsoft.nchwc, have
    no such check: blocks of another size are refused at best, else give wrong answers. `on_all_cpus` allows only a
    graph without such operators: all others are the same on every machine.

    Source: ONNX Runtime 1.32, `nchwc_transformer.cc` and `graph_transformer_utils.cc`, for the domains of what
    optimizers add; tried with 1.21, 1.31 and 1.32 on a CPU with AVX512, and in qemu on one without.

    Raises:
        NoTuning: there is none; with the reason. DependencyError: onnxruntime is not installed.
    """
    from .runtime import compares_packed, onnxruntime_module
    from .target import this_target
    from .tuned import Interfaces, NoTuning, fitting

    opened, ort = archive_link.model, onnxruntime_module()
    archive = opened.record.archive
    try:
        target, packed = fitting(archive, opened.module, this_target(ort)), compares_packed(ort)
        target.check(archive)
        model = target.model(archive, archive_link.location, archive.offset, packed=packed)
        Interfaces(archive).check_target(target)
        target.check_payloads(archive, {*model.weights, *model.packed})
        new_domains = domains_of(memoryview(model.data)) - _SAFE - domains_of(graph.skeleton_of(opened.part))
    except RecordError as error:
        raise NoTuning(error.message) from error
    if on_all_cpus and new_domains:
        fault = f"its operators of {', '.join(sorted(new_domains))} are for this CPU, another may compute wrong answers"
        raise NoTuning(f"{fault} with them; --tuned or tuned=True writes it for this one")
    options = {} if packed else {NO_PREPACKING: "1"}
    return _TunedModel(model.data, len(model.weights), target.target.encode(), options)


def _string_fields(value: StringTensor) -> Iterator[bytes]:
    """Yield the string_data fields of a tensor, many joined at a time."""
    flat = StringTensor(value.data, (prod(value.shape),), checked=True)
    for start in range(0, len(flat), _STRINGS):
        yield b"".join(encode_field(STRING_DATA, text) for text in flat[start : start + _STRINGS].strings())


class _ModelWriter:
    """Writes one model: `plan` assembles it, `write` reads large values while they are written."""

    def __init__(self, opened: graph.OpenedModel, archive_link: ArchiveLink | None, tuned: bool | None) -> None:
        self._whole, _, self._record = opened if archive_link is None else archive_link.model
        self._link = archive_link
        self._tuned = None if archive_link is None else _tuned_model_to_write(archive_link, tuned)
        self._payloads = Payloads(self._record.archive)
        self._external: set[int] = set()  # numbers of the tensors whose values stay in the archive
        self._parts: list[Any] = []
        self._tensors: list[graph.Initializer] = []
        self._progress: Progress = lambda _done, _total: None
        self._bytes_before = 0  # of progress before writing
        self._nbytes = 0  # of the model

    def plan(self, progress: Progress | None) -> None:
        """Assemble the model, but for values read while it is written; LimitError if it is larger than 2 GiB."""
        if self._tuned is not None:
            self._parts = [self._without_link(self._tuned.data)]
        else:
            skeleton = self._without_link(graph.skeleton_of(self._record))
            model = graph.restore(self._record, self._place, skeleton=skeleton)
            self._parts, self._tensors = model.parts, model.tensors
        advice = Advice("{} leaves the weights in the archive", "external", True)
        graph.size_of(self._parts, advice if self._link is None else graph.STAY_OUT)
        self._progress = progress or self._progress
        if self._link is not None:
            payloads = self._payloads if self._whole is self._record else Payloads(self._whole.archive)
            props = self._link.properties(digest_of(payloads, self._whole, self._report_read))
            if self._tuned is not None:
                props[TUNED_FOR] = self._tuned.target
            self._parts.append(encode_properties(props))
        self._nbytes = sum(map(len, self._parts))

    def _without_link(self, model: Any) -> Any:
        """Return a ModelProto without metadata_props that `to_onnx` wrote; the converted model's own stay."""
        unlinked, removed = without_properties(model, PROPERTIES)
        if not removed or is_link(removed):
            return unlinked
        if self._link is not None:
            fault = f"the model's own metadata_props have '{printable(removed[0][0])}', which external weights need"
            raise UnsupportedError(f"{fault} to say which archive the model is for; rename it there and convert again")
        return model

    def _report_read(self, done: int, total: int) -> None:
        self._bytes_before = total
        self._progress(done, total + sum(map(len, self._parts)))

    def _place(self, tensor: graph.Initializer) -> Any:
        """Return a reference to the archive, or the values, small ones at once; the `place` of `graph.restore`."""
        info = self._payloads.infos[tensor.number]
        self._external.discard(tensor.number)
        if self._link is not None and tensor.outside and info.strides is None:
            self._external.add(tensor.number)
            return graph.encode_reference(self._link.location, info.offset, info.nbytes)
        if info.dtype is dtypes.STRING:
            nbytes = sum(map(len, _string_fields(tensor.value)))
            return graph.DeferredValues(nbytes, lambda: self._checked_strings(info, tensor.value))
        return graph.values_or_deferred(info.nbytes, lambda: self._payloads.pieces(info))

    def _checked_strings(self, info: TensorInfo, value: StringTensor) -> Iterator[bytes]:
        for _ in self._payloads.stored(info):  # checks the digest
            pass
        yield from _string_fields(value)

    def write(self, sink: Sink) -> None:
        total = self._bytes_before + self._nbytes
        graph.write_parts(self._parts, sink, lambda written: self._progress(self._bytes_before + written, total))
        self._payloads.release()

    def report(self, source: str | None, dest: str | None, started: float) -> ConvertReport:
        """Return the report of the written model."""
        inlined = [self._payloads.infos[t.number] for t in self._tensors if t.number not in self._external]
        return conversion_report(
            started,
            source=source,
            dest=dest,
            tensors=len(self._tensors) if self._tuned is None else self._tuned.tensors,
            modules=len(self._record.archive.index.modules),
            payload_bytes=sum(info.nbytes for info in inlined),
            archive_bytes=self._nbytes,
            input_bytes=self._whole.archive_nbytes,
            repeated_bytes=self._repeated_bytes(inlined),
            session_options={} if self._link is None else ONE_COPY if self._tuned is None else self._tuned.options,
        )

    def _repeated_bytes(self, inlined: list[TensorInfo]) -> int:
        """Return the bytes in the model that the archive has once for several tensors or, if linked, not in C order."""
        if self._link is not None:
            return sum(info.nbytes for info in inlined if info.strides is not None)
        place = self._record.archive.place
        sizes = [(place(info.payload), info.nbytes) for info in inlined if info.payload is not None]
        first_sizes = dict(reversed(sizes))  # of each place the first tensor's
        return sum(nbytes for _, nbytes in sizes) - sum(first_sizes.values())
