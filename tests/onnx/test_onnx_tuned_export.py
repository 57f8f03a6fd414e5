"""A tuned graph as a small model for other programs: full speed from one copy, and no machine answers wrong."""

from __future__ import annotations

import io
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnx.external_data_helper import _get_all_tensors
from onnx_graphs import PACKS, READS_INNER, branches, converted_in, mlp

from tools.models import convolutions, gpt, quantized
from zcrecord.cli.dispatch import main
from zcrecord.errors import IntegrityError, UnsupportedError
from zcrecord.onnx import TuneReport, convert, export, target, to_onnx, tune, verify_external
from zcrecord.onnx.external_data import ONE_COPY
from zcrecord.onnx.protobuf.rewriting import domains_of
from zcrecord.onnx.target import TuningTarget

NEEDED = {} if PACKS else {"session.disable_prepacking": "1"}  # for the graph without packed weights
INNER = pytest.mark.skipif(not READS_INNER, reason="ONNX Runtime 1.21 cannot read weights of subgraphs that it wrote")
BLOCKS = platform.machine() in ("x86_64", "AMD64")  # where convolutions are laid out in blocks
WRITERS: dict[str, Any] = {
    "gpt": gpt.write_gpt, "int8": quantized.write_quantized, "convolutions": convolutions.write_convolutions,
}  # fmt: skip


def tuned(folder: Path, kind: str, mib: int = 2) -> Path:
    """Return the archive, tuned, of a model that is left beside it as model.onnx."""
    return Path(tuning(folder, kind, mib).dest)


def tuning(folder: Path, kind: str, mib: int = 2) -> TuneReport:
    """Tune the archive of a model that is left beside it as model.onnx."""
    data = io.BytesIO()
    if kind in WRITERS:
        WRITERS[kind](data, mib)
    else:
        data.write((branches() if kind == "if" else mlp()).SerializeToString())
    return tune(converted_in(folder, data.getvalue()))


def properties(path: Path) -> dict[str, str]:
    return {p.key: p.value for p in onnx.load(path, load_external_data=False).metadata_props}


def packed(path: Path) -> int:
    """Return the number of tensors in a model that have packed forms, those of branches included."""
    model = onnx.load(path, load_external_data=False)
    return sum(any(e.key == "prepacked_0" for e in t.external_data) for t in _get_all_tensors(model))


ANSWERS = """
import sys
import numpy as np, onnxruntime as ort
def answers(path):
    global session
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feed = {}
    for each in session.get_inputs():
        shape = [n if isinstance(n, int) else 3 for n in each.shape]
        kind = each.type[7:-1]
        made = np.zeros(shape, bool) if kind == "bool" else rng.standard_normal(shape, "f4")
        feed[each.name] = rng.integers(0, 9, shape) if kind == "int64" else made
    return session.run(None, feed)[0]
"""
exec(ANSWERS, there := dict[str, Any]())
answers = there["answers"]


@pytest.mark.parametrize("kind", ["gpt", "int8", pytest.param("if", marks=INNER), "mlp"])
def test_a_tuned_model_answers_as_the_onnx_bit_for_bit_without_options(kind: str, tmp_path: Path) -> None:
    made = tuning(tmp_path, kind)
    report = to_onnx(made.dest, tmp_path / "small.onnx", external=True)
    assert report.session_options == NEEDED
    assert answers(tmp_path / "small.onnx").tobytes() == answers(tmp_path / "model.onnx").tobytes()
    target = TuningTarget.decode(properties(tmp_path / "small.onnx")["zcrecord.tuned_for"])
    assert target.onnxruntime == ort.__version__
    assert packed(tmp_path / "small.onnx") == made.packed  # what is packed is decided by the processor
    assert PACKS or not made.packed
    told = verify_external(tmp_path / "small.onnx", full=True)
    assert (told.tensors, told.archive) == (report.tensors, str(tmp_path / "model.zcr"))


@pytest.mark.slow
@pytest.mark.skipif(not BLOCKS, reason="platform: where convolutions are not laid out in blocks")
def test_convolutions_in_blocks_are_written_only_when_asked_for_and_say_for_which_machine(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = tuned(tmp_path, "convolutions")
    first = to_onnx(archive, tmp_path / "small.onnx", external=True)
    (told,) = caplog.messages
    what = r"model\.zcr: the original graph is written, not the tuned one: its operators of com\.microsoft\.nchwc .*"
    assert re.search(what + "may compute wrong answers with them; --tuned or tuned=True writes it for this one$", told)
    assert first.session_options == ONE_COPY
    assert "zcrecord.tuned_for" not in properties(tmp_path / "small.onnx")
    own = to_onnx(archive, tmp_path / "own.onnx", external=True, tuned=True)
    assert own.session_options == NEEDED
    assert "com.microsoft.nchwc" in domains_of(memoryview((tmp_path / "own.onnx").read_bytes()))
    assert TuningTarget.decode(properties(tmp_path / "own.onnx")["zcrecord.tuned_for"]).cpu
    for name in ("small.onnx", "own.onnx"):
        assert answers(tmp_path / name).tobytes() == answers(tmp_path / "model.onnx").tobytes()
    assert verify_external(tmp_path / "own.onnx", full=True).tensors == own.tensors


def test_the_original_graph_is_there_on_request_and_moved_packed_weights_are_noticed(tmp_path: Path) -> None:
    archive = tuned(tmp_path, "mlp")
    assert to_onnx(archive, tmp_path / "o.onnx", external=True, tuned=False).session_options == ONE_COPY
    original, exported = (onnx.load(tmp_path / name).graph.node for name in ("model.onnx", "o.onnx"))
    assert [(n.op_type, *n.input) for n in exported] == [(n.op_type, *n.input) for n in original]
    to_onnx(archive, tmp_path / "small.onnx", external=True)
    convert(tmp_path / "model.onnx", archive, force=True)  # the same weights, no longer tuned
    with pytest.raises(IntegrityError, match=r"model\.zcr: index checksum \w+ was expected by '.*small\.onnx', it has"):
        verify_external(tmp_path / "small.onnx")
    with pytest.raises(UnsupportedError, match="no tuned graph to write: it is not tuned; tune the archive here"):
        to_onnx(archive, tmp_path / "small.onnx", external=True, tuned=True, force=True)


def test_a_machine_that_the_archive_is_not_tuned_for_gets_the_original_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tuned(tmp_path, "mlp")
    other = TuningTarget("1.0.0", "unknown", "CPUExecutionProvider", "linux-other", (), 0)
    monkeypatch.setattr(target, "this_target", lambda *_: other)
    assert to_onnx(archive, tmp_path / "small.onnx", external=True).session_options == ONE_COPY
    what = r"model\.zcr: no tuned graph to write: made for .*, this is linux-other; tune the archive here, or leave"
    with pytest.raises(UnsupportedError, match=what):
        to_onnx(archive, tmp_path / "own.onnx", external=True, tuned=True)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert to_onnx(archive, tmp_path / "small.onnx", external=True, force=True).session_options == ONE_COPY
    with pytest.raises(UnsupportedError, match="no tuned graph to write: onnxruntime is not installed"):
        to_onnx(archive, tmp_path / "own.onnx", external=True, tuned=True)


@INNER
def test_operators_in_branches_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = branches()
    model.graph.node[0].attribute[1].g.node[0].domain = "com.microsoft.nchwc"
    assert domains_of(memoryview(model.SerializeToString())) == {"", "com.microsoft.nchwc"}
    archive = tuned(tmp_path, "if")
    monkeypatch.setattr(export, "_SAFE", set())  # the model's own operators are as safe as in the model
    assert to_onnx(archive, tmp_path / "small.onnx", external=True).session_options == NEEDED


def test_a_tuned_model_converts_without_its_packed_weights(tmp_path: Path) -> None:
    to_onnx(tuned(tmp_path, "gpt"), tmp_path / "small.onnx", external=True)
    convert(tmp_path / "small.onnx", tmp_path / "again.zcr")
    to_onnx(tmp_path / "again.zcr", tmp_path / "again.onnx", external=True)
    assert not packed(tmp_path / "again.onnx")
    assert "zcrecord.tuned_for" not in properties(tmp_path / "again.onnx")
    assert answers(tmp_path / "again.onnx").tobytes() == answers(tmp_path / "model.onnx").tobytes()


def test_the_command_line_says_that_a_tuned_model_needs_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tuned(tmp_path, "mlp")
    assert main(["to-onnx", "model.zcr", "small.onnx", "--external"]) == 0
    told = capsys.readouterr().out
    assert ("tuned: no session options are needed" in told) == PACKS
    assert ("disable_prepacking" not in told) == PACKS
    assert main(["to-onnx", "model.zcr", "small.onnx", "--external", "--no-tuned", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session_options"] == ONE_COPY
    with pytest.raises(SystemExit):
        main(["to-onnx", "model.zcr", "whole.onnx", "--tuned"])
    assert "--tuned and --no-tuned need --external" in capsys.readouterr().err


@pytest.mark.needs("qemu-x86_64")
@pytest.mark.exhaustive(keep=0)  # most of a minute in the emulator
@pytest.mark.skipif(platform.machine() != "x86_64", reason="platform: emulates another x86-64")
def test_on_a_cpu_of_other_features_a_tuned_model_answers_as_the_onnx_does_there(tmp_path: Path) -> None:
    compare = """
paths = sys.argv[1:]
for model, small in zip(paths[::2], paths[1::2]):
    try:
        print("same" if answers(model).tobytes() == answers(small).tobytes() else "other")
    except Exception:
        print("refused")
"""
    paths: list[Path] = []
    kinds = ["gpt", "int8", *(["if"] if READS_INNER else []), "convolutions"]
    for kind in kinds:
        (tmp_path / kind).mkdir()
        to_onnx(tuned(tmp_path / kind, kind), tmp_path / kind / "small.onnx", external=True, tuned=True)
        paths += [tmp_path / kind / "model.onnx", tmp_path / kind / "small.onnx"]
    run = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", ANSWERS + compare, *map(str, paths)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    *right, blocks = re.findall(r"^\w+$", done.stdout, re.MULTILINE)
    assert right == ["same"] * (len(kinds) - 1)
    avx512 = "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
    assert blocks != "same" or not avx512, "why it has to be asked for"
