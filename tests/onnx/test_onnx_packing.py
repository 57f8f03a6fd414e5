"""Tuning packs weights a few at a time: the same packed forms as of the whole graph, whatever the model's size."""

from __future__ import annotations

import io
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_graphs import (
    DIGITS,
    PACKS,
    READS_INNER,
    assert_same,
    branches,
    conv,
    converted_in,
    floats,
    graph_model,
    mlp,
    plain,
    request,
    value,
)
from processes import ROOT, output

import zcrecord
from tools.models import convolutions, gpt, quantized
from zcrecord.errors import OnnxError, SourceError
from zcrecord.onnx import packing, runtime, session, tune, tuned_graph, tuning
from zcrecord.onnx.protobuf.rewriting import rewrite_tensors, tensors_of
from zcrecord.onnx.tuned import read_tuned

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
PACKING = pytest.mark.skipif(not PACKS, reason="earlier versions get no packed weights")
WRITERS = {"gpt": gpt.write_gpt, "convolutions": convolutions.write_convolutions, "int8": quantized.write_quantized}


def written(kind: str) -> bytes:
    model = io.BytesIO()
    WRITERS[kind](model, 2)
    return model.getvalue()


def shared() -> onnx.ModelProto:
    """A weight of two products, of which one is transposed; a folded one, and one that callers may override."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Transpose", ["w"], ["t"], perm=[1, 0]),
        helper.make_node("Relu", ["a"], ["r"]),
        helper.make_node("Gemm", ["r", "w", "b"], ["g"], transB=1),
        helper.make_node("Add", ["g", "t"], ["s"]),
        helper.make_node("MatMul", ["s", "given"], ["y"]),
    ]
    inputs = [value("x", 64, 64), value("given", 64, 64)]
    return graph_model(
        nodes, inputs, [value("y", 64, 64)], {"w": floats(64, 64), "b": floats(64), "given": floats(64, 64)}
    )


def loop() -> onnx.ModelProto:
    """A loop whose body has a weight of its own and one of the graph around it, in an If."""

    def scalar(name: str, kind: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, [])

    product = helper.make_node("MatMul", ["m", "outer"], ["p"])
    then = helper.make_graph([product], "then", [], [value("p")])
    other = helper.make_graph([helper.make_node("Relu", ["m"], ["q"])], "else", [], [value("q")])
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["v", "own"], ["m"]),
            helper.make_node("If", ["c"], ["out"], then_branch=then, else_branch=other),
            helper.make_node("Identity", ["c"], ["again"]),
        ],
        "body",
        [scalar("i", TensorProto.INT64), scalar("c", TensorProto.BOOL), value("v", 4, 64)],
        [scalar("again", TensorProto.BOOL), value("out", 4, 64)],
        [onnx.numpy_helper.from_array(floats(64, 64), "own")],
    )
    node = helper.make_node("Loop", ["n", "yes", "x"], ["y"], body=body)
    inits = {"n": np.array(2), "yes": np.array(True), "outer": floats(64, 64)}
    return graph_model([node], [value("x", 4, 64)], [value("y", 4, 64)], inits)


MODELS: dict[str, Callable[[], Any]] = {
    **{kind: partial(written, kind) for kind in WRITERS},
    "digits": DIGITS.read_bytes, "mlp": mlp, "conv": conv, "branches": branches, "shared": shared, "loop": loop,
}  # fmt: skip
if not READS_INNER:
    del MODELS["branches"], MODELS["loop"]


def forms(path: Path) -> dict[str, list[tuple[bytes, str]]]:
    """The packed forms of an archive's tuned graph by their keys: bytes and padded size of each buffer."""
    archive = zcrecord.load_record(path).archive
    (target,) = read_tuned(archive).targets  # type: ignore[union-attr]
    inner: list[Any] = []
    rewrite_tensors(archive.payload(target.graph), lambda t, _: inner.append(t))
    out = {}
    for tensor in (*inner, *tensors_of(archive.payload(target.initializers))):
        for entry, packed in tensor.entries.items():
            if entry != "zcrecord":
                key, *places = packed.split("|")
                assert key not in out
                pairs = (place.split(";") for place in places)
                out[key] = [
                    (bytes(archive.payload(target.payloads[int(n)])) if n else b"", padded) for n, padded in pairs
                ]
    return out


@PACKING
@pytest.mark.parametrize("kind", MODELS)
def test_nodes_alone_give_the_packed_forms_of_the_whole_graph(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted_in(tmp_path, MODELS[kind]())
    ways: list[tuple[bool, bool]] = []  # new weights are in the graph, the whole graph is packed
    too_many: list[bool] = []
    optimise = runtime.optimise

    def noted(record: Any, dest: str, weights: str | None, threads: int | None, packed: bool) -> None:
        ways.append((weights is None, packed))
        if weights is None and too_many:
            raise OnnxError("new weights are more than a graph holds")
        optimise(record, dest, weights, threads, packed)

    def refuse(*_: Any) -> None:
        raise OnnxError("refused")

    monkeypatch.setattr(tuned_graph, "optimise", noted)
    monkeypatch.setattr(tuned_graph, "_FEW", 0)
    planned: list[int] = []
    alone = tune(path, tmp_path / "alone.zcr", planned=planned.append)
    assert alone.archive_bytes <= planned[0] < 1.1 * alone.archive_bytes + (1 << 16)
    kernels = kind == "conv"
    assert ways == [(not kernels, False)], "no node is refused, or the whole graph would be packed unnoticed"
    too_many.append(True)
    tune(path, tmp_path / "beside.zcr")
    monkeypatch.setattr(packing.WeightPacker, "__init__", refuse)
    whole = tune(path, tmp_path / "whole.zcr")
    assert ways[-2:] == [(False, False), (False, True)]
    assert forms(tmp_path / "alone.zcr") == forms(tmp_path / "beside.zcr") == forms(tmp_path / "whole.zcr")
    assert alone.packed or kind == "conv"
    facts = "weights", "packed", "packed_bytes", "content_digest_before"
    assert [getattr(alone, fact) for fact in facts] == [getattr(whole, fact) for fact in facts]
    original, made = plain(path.with_suffix(".onnx")), session(tmp_path / "alone.zcr")
    assert tuning(made).used
    given = request(original)
    assert_same(made.run(None, given), original.run(None, given))


MEMORY = """
import os, sys
from tools.measure import private_peak
from zcrecord.errors import OnnxError
from zcrecord.onnx import packing, tune
def refuse(*_):
    raise OnnxError("refused")
packing._TOGETHER = 4 << 20
if sys.argv[3] == "whole":
    packing.WeightPacker.__init__ = refuse
tune(sys.argv[2], durable=False)
with private_peak(os.getpid()) as peak:
    tune(sys.argv[1], durable=False)
print(peak())
"""


@PACKING
@LINUX
@pytest.mark.measured
def test_private_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Of 24 matrices of 4 MiB, one packed by each of two threads; it is noticed if all are packed at once."""
    size, count = 1024, 24
    nodes = [helper.make_node("MatMul", [f"v{i}", f"w{i}"], [f"v{i + 1}"]) for i in range(count)]
    paths = []
    for n in (size, 64):
        (tmp_path / str(n)).mkdir()
        weights = {f"w{i}": np.full((n, n), i, "f4") for i in range(count)}
        paths.append(
            converted_in(
                tmp_path / str(n), graph_model(nodes, [value("v0", 1, n)], [value(f"v{count}", 1, n)], weights)
            )
        )
    peaks = {way: int(output(sys.executable, "-c", MEMORY, *paths, way, cwd=ROOT)) for way in ("whole", "alone")}
    assert peaks["whole"] > count * size * size * 4
    assert peaks["alone"] < peaks["whole"] / 2


Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize("spare", [-1, pytest.param(4096, marks=PACKING)])
def test_a_disk_without_room_is_told_before_the_copy_or_before_the_tuned_part(
    spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = converted_in(tmp_path, mlp())
    before, free = path.read_bytes(), path.stat().st_size + spare
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 1 << 40, free))
    write = "storage.files.open_sink" if spare < 0 else "onnx.tuned_graph.PayloadPool.put"
    monkeypatch.setattr(f"zcrecord.{write}", lambda *_, **__: pytest.fail("a byte could be written"))
    what = rf"out\.zcr: needs up to \d+ bytes on the disk, {free} are free in '.*{tmp_path.name}'; make room there"
    with pytest.raises(SourceError, match=what) as caught:
        tune(path, tmp_path / "out.zcr")
    assert caught.value.errno == 28 and path.read_bytes() == before
    place = f"'{re.escape(gettempdir())}', among temporary files; set TMPDIR to a folder on another disk"
    what = rf"^memory://full/m\.zcr: needs up to \d+ bytes on the disk, {free} are free in {place}"
    with pytest.raises(SourceError, match=what) as caught:
        tune(path, "memory://full/m.zcr")
    assert caught.value.errno == 28
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.zcr"]


@pytest.mark.parametrize("verify", [False, True])
def test_progress_counts_the_whole_work_and_the_planned_size_suffices(tmp_path: Path, verify: bool) -> None:
    path = converted_in(tmp_path, mlp())
    calls: list[tuple[int, int | None]] = []
    planned: list[int] = []
    tune(path, verify=verify, progress=lambda *call: calls.append(call), planned=planned.append)
    (total,) = {total for _, total in calls}
    done = [n for n, _ in calls]
    assert done == sorted(done) and (done[0], done[-1]) == (0, total)
    assert len(set(done)) > 6
    assert path.stat().st_size <= planned[0] < path.stat().st_size + 5 * 4096
    assert total == (2 + verify) * planned[0]


@PACKING
def test_a_full_disk_while_weights_are_packed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = converted_in(tmp_path, written("gpt"))
    before = path.read_bytes()
    monkeypatch.setattr(packing, "_TOGETHER", 1 << 17)
    put, count = tuned_graph.PayloadPool.put, iter(range(100))

    def full(*args: Any, **more: Any) -> Any:
        if next(count) == 5:
            raise SourceError("cannot write: No space left on device", path=str(path))
        return put(*args, **more)

    monkeypatch.setattr(tuned_graph.PayloadPool, "put", full)
    with pytest.raises(SourceError, match="No space left on device"):
        tune(path)
    assert path.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.zcr"]
