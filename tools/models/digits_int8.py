"""Quantize the digits classifier: `tests/data/digits_int8.onnx`, the QDQ form that runs in integers alone.

    python -m tools.models.digits_int8

ONNX Runtime's static quantization, calibrated on the training images that `digits` trained on: activations uint8 with
a zero point, weights int8, biases int32, one scale a tensor. Each ReLU goes into the range of the layer before it.

The weights keep to 7 bits (-64 to 64): a pair of products uint8 x int8 then fits 16 bits, so processors whose
instruction saturates there (x86 without VNNI) give the same sums as all others, a microcontroller included. With
8 bits ONNX Runtime's own answers would depend on the machine.

The same versions give the same bytes; others may round a scale differently, so the file is kept in the repository.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tools.models.digits import DATA, accuracy, split


def quantize(source: Path) -> bytes:
    """Return the quantized form of the model `source`, an ONNX file."""
    import onnx
    from onnxruntime import quantization

    class Images(quantization.CalibrationDataReader):  # type: ignore[misc]
        """The training images, all in one batch."""

        def __init__(self) -> None:
            self.batches: Iterator[dict[str, Any]] = iter([{"pixels": split()[0].astype(np.float32)}])

        def get_next(self) -> Any:
            return next(self.batches, None)

    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # it advises to preprocess, which is for shapes this graph has anyway
    try:
        with TemporaryDirectory() as folder:
            quantization.quantize_static(
                source,
                Path(folder) / "model.onnx",
                Images(),
                quant_format=quantization.QuantFormat.QDQ,
                activation_type=quantization.QuantType.QUInt8,
                weight_type=quantization.QuantType.QInt8,
                reduce_range=True,
                op_types_to_quantize=["Gemm", "Relu"],  # not the Mul before them: 17 grey values are a table
            )
            model = onnx.load(Path(folder) / "model.onnx")
    finally:
        logging.root.setLevel(level)
    model.producer_name = "zcrecord tools/models/digits_int8.py"
    model.producer_version = ""
    onnx.checker.check_model(model, full_check=True)
    return bytes(model.SerializeToString(deterministic=True))


if __name__ == "__main__":
    quantized = quantize(DATA / "digits.onnx")
    (DATA / "digits_int8.onnx").write_bytes(quantized)
    _, held_out, _, labels = split()
    print(f"{len(quantized):,} bytes; {accuracy(quantized, held_out, labels)}")
