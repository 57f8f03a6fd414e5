"""An archive that was tuned on one processor answers right on another, and may be tuned for both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from other_processors import run_on_processor

from tools.models.convolutions import write_convolutions
from zcrecord.onnx import convert, session, tune, tuning

PACKS = tuple(map(int, ort.__version__.split(".")[:2])) >= (1, 32)  # earlier versions get no packed weights

ELSEWHERE = """
import json, logging, sys
import numpy as np
import onnxruntime
from zcrecord.onnx import session, tune, tuning

logging.getLogger("zcrecord").setLevel("ERROR")
onnx, archive, image, answers = sys.argv[1:]
feed = {"image": np.load(image)}
misfit = session(archive)
tune(archive)
fitting = session(archive)
plain = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
np.save(answers, [made.run(None, feed)[0] for made in (misfit, fitting, plain)])
print(json.dumps([tuning(misfit).reason, tuning(fitting).reason]))
"""


@pytest.mark.needs("qemu-x86_64")
def test_an_archive_tuned_here_answers_right_on_another_processor_and_may_be_tuned_for_both(tmp_path: Path) -> None:
    model, archive, image, answers = (
        str(tmp_path / n) for n in ("model.onnx", "model.zcr", "image.npy", "answers.npy")
    )
    with open(model, "wb") as file:
        write_convolutions(file, 1)
    convert(model, archive)
    tune(archive)
    feed = {"image": np.random.default_rng(0).standard_normal((1, 3, 112, 112), dtype=np.float32)}
    np.save(image, feed["image"])
    here = ort.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, feed)[0]

    before, after = json.loads(run_on_processor(ELSEWHERE, model, archive, image, answers))
    assert before.startswith("the CPU lacks avx, avx2"), "blocks of channels of another size would answer wrong"
    assert after is None
    misfit, fitting, plain = np.load(answers)
    for there in (misfit, fitting, plain):
        np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-3)
    if PACKS:
        np.testing.assert_array_equal(fitting, plain)

    made = session(archive)
    assert tuning(made).used
    assert len(tuning(made).targets) == 2
    np.testing.assert_allclose(made.run(None, feed)[0], here, rtol=0 if PACKS else 1e-3, atol=0 if PACKS else 1e-3)
