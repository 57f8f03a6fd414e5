"""The tuned graph of an archive as a model for other programs, which do not compare its target with their machine.

Two things in it depend on the machine. ONNX Runtime finds packed weights by a hash of the bytes that it packs itself,
and ignores others. Weights of convolutions in blocks of channels, for operators of the domain com.microsoft.nchwc, have
no such check: blocks of another size are refused at best, else give wrong answers. So a graph with such operators is
for its target alone. All other operators are the same on every machine.

Source: ONNX Runtime 1.32, `nchwc_transformer.cc` and `graph_transformer_utils.cc`, for the domains of what optimizers
add; tried with 1.21, 1.31 and 1.32 on a CPU with AVX512, and in qemu on one without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from zcrecord.errors import RecordError
from zcrecord.onnx.protobuf.rewriting import domains_of

from . import graph
from .archive_link import ArchiveLink
from .external_data import NO_PREPACKING
from .runtime import compares_packed, onnxruntime_module
from .target import this_target
from .tuned import Interfaces, NoTuning, fitting

_SAFE = {"", "ai.onnx", "ai.onnx.ml", "com.microsoft"}  # whose operators do not depend on the CPU


class ExportedGraph(NamedTuple):
    """A model over an archive's payloads, the number of tensors that lie there, its target's text, session options."""

    data: bytes
    tensors: int
    target: str
    options: Mapping[str, str]  # with which ONNX Runtime makes no copy of a weight


def tuned_graph(link: ArchiveLink, *, anywhere: bool) -> ExportedGraph:
    """Return the graph that an archive has for this machine; its digests and those of all its payloads are checked.

    Before ONNX Runtime 1.32, the first to compare packed forms, it has none. `anywhere` allows only a graph with which
    every machine computes right answers.

    Raises:
        NoTuning: there is none; with the reason. DependencyError: onnxruntime is not installed.
    """
    archive = link.model.record.archive
    ort = onnxruntime_module()
    try:
        target, packed = fitting(archive, link.model.module, this_target(ort)), compares_packed(ort)
        target.check(archive)
        model = target.model(archive, link.location, archive.offset, packed=packed)
        Interfaces(archive).check(target)
        target.check_payloads(archive, {*model.weights, *model.packed})
        added = domains_of(memoryview(model.data)) - _SAFE - domains_of(graph.skeleton_of(link.model.part))
    except RecordError as error:
        raise NoTuning(error.message) from error
    if anywhere and added:
        what = f"its operators of {', '.join(sorted(added))} are for this CPU, another may compute wrong answers"
        raise NoTuning(f"{what} with them; --tuned or tuned=True writes it for this one")
    options = {} if packed else {NO_PREPACKING: "1"}
    return ExportedGraph(model.data, len(model.weights), target.target.encode(), options)
