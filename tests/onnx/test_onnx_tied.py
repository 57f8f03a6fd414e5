"""A quantized matrix with two users is in the archive once, each session takes it from there, and answers are equal."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
import onnx_models as m
import onnxruntime as ort
import pytest
from onnx_graphs import PACKS, assert_same, converted_in, plain

from tools.models.tied import NARROW, write_dequantized, write_tied
from zcrecord.onnx import runtime, session, tune, tuning

pytestmark = pytest.mark.skipif(not PACKS, reason="platform: earlier versions have not all of the operators")

Write = Callable[[IO[bytes], int], int]
FEEDS: dict[Write, list[dict[str, np.ndarray]]] = {
    write_tied: [{"tokens": np.array([[3, 5], [7, 0]])}],
    write_dequantized: [
        {"gather": np.array(gather), "rows": np.array([3, 5]), "x": np.ones((2, NARROW), np.float32)}
        for gather in (False, True)
    ],
}


@pytest.mark.parametrize("write", FEEDS)
def test_a_quantized_matrix_of_two_operators_is_handed_over_once_and_answers_are_equal(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, create = io.BytesIO(), runtime._create
    write(model, 1)
    path = converted_in(tmp_path, model.getvalue())
    given: list[onnx.ModelProto] = []

    def noting(ort: Any, model: bytes, *more: Any) -> ort.InferenceSession:
        given.append(onnx.load_from_string(model))
        return create(ort, model, *more)

    monkeypatch.setattr(runtime, "_create", noting)
    for tuned in (False, True):
        if tuned:
            tune(path, durable=False)
            given.clear()
        made, original = session(path), plain(path.with_suffix(".onnx"), shared=not tuned)
        assert tuning(made).used is tuned
        tensors = [t for model in given for t in m.every_tensor(model)]
        assert all(len(t.raw_data) < 128 for t in tensors), "no weight is in the model"
        entries = [{e.key: e.value for e in t.external_data} for t in tensors]
        places = {each["offset"] for each in entries if int(each.get("length", 0)) > 1 << 19}
        # For the product in a branch ONNX Runtime makes unsigned bytes of signed ones: once, in the archive.
        assert len(places) == (2 if tuned and write is write_dequantized else 1)
        for feed in FEEDS[write]:
            assert_same(made.run(None, feed), original.run(None, feed))
