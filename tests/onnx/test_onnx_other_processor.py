"""An archive that was tuned on one processor answers right on another, and may be tuned for both.

Each answer is compared with one of the same processor, so nothing depends on which this machine has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from onnx_graphs import conv
from other_processors import run_on_processor

from zcrecord.onnx import convert, session, tune, tuning
from zcrecord.onnx.target import TuningTarget, this_target

PACKS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)  # earlier versions get no packed weights

# The reason why an archive's tuned part is not used, and whether the answers are those that they have to be, of the
# original graph or of the .onnx.
ANSWERS = """
from pathlib import Path
import numpy as np
import onnxruntime
from zcrecord import load_record
from zcrecord.onnx import session, tuning

def answered(onnx, archive):
    feed = {"x": np.random.default_rng(0).standard_normal((1, 3, 8, 8), dtype=np.float32)}
    plain = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    untuned = session(load_record(Path(archive).read_bytes()))  # of bytes a tuned part is never used
    made = session(archive)
    found, answer = tuning(made), made.run(None, feed)[0]
    return found.reason, np.array_equal(answer, (plain if found.used else untuned).run(None, feed)[0])
"""
THERE = """
import json, logging, sys
from zcrecord.onnx import tune
from zcrecord.onnx.target import this_target

logging.getLogger("zcrecord").setLevel("ERROR")  # of that process
before = answered(*sys.argv[1:])
tune(sys.argv[2])
print(json.dumps([this_target(onnxruntime).encode(), before, answered(*sys.argv[1:])]))
"""
exec(ANSWERS, here := dict[str, Any]())


@pytest.mark.needs("qemu-x86_64")
def test_an_archive_tuned_here_answers_right_on_another_processor_and_may_be_tuned_for_both(tmp_path: Path) -> None:
    model, archive = str(tmp_path / "model.onnx"), str(tmp_path / "model.zcr")
    Path(model).write_bytes(conv().SerializeToString())
    convert(model, archive)
    tune(archive)
    told, before, after = json.loads(run_on_processor(ANSWERS + THERE, model, archive))
    ours, theirs = this_target(ort), TuningTarget.decode(told)
    assert before == [ours.misfit(theirs), True], "blocks of channels of another size would answer wrong"
    for reason, as_the_onnx in (after, here["answered"](model, archive)):
        assert reason is None and (as_the_onnx or not PACKS)
    assert set(tuning(session(archive)).targets) == {ours.encode(), theirs.encode()}
