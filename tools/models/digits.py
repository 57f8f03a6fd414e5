"""Train a small classifier on scikit-learn's digits and export it: `tests/data/digits.onnx` and its held-out images.

    python -m tools.models.digits

The data are 1,797 real 8x8 images of handwritten digits, a fifth of which is held out by a fixed, stratified split and
written to `digits_heldout.npz` as uint8. The network is 64-64-32-10 with ReLU; the initializers are named as PyTorch
would name them, and the weights lie as PyTorch stores them, (outputs, inputs).

Training starts from a fixed seed on one thread: run again on one machine with the same versions it gives the same
bytes. Another BLAS rounds differently, so elsewhere the weights may differ in their last bits; hence the files are kept
in the repository and nothing depends on making them again.

Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
doi:10.24432/C50P49, CC BY 4.0, as `sklearn.datasets.load_digits` carries it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
SEED = 2026
HELD_OUT = 360
LAYERS = ("features.0", "features.2", "classifier")  # the odd numbers are the ReLUs between them
OPSET = 17
IR_VERSION = 8
FLOAT = 1  # onnx.TensorProto.DataType


def split() -> tuple[Any, Any, Any, Any]:
    """Return training images, held-out images (both uint8, n x 64), training labels, held-out labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images, labels = digits.data.astype(np.uint8), digits.target.astype(np.uint8)
    parts = train_test_split(images, labels, test_size=HELD_OUT, random_state=SEED, stratify=labels)
    return parts[0], parts[1], parts[2], parts[3]


def train(images: Any, labels: Any) -> list[tuple[Any, Any]]:
    """Return (weight, bias) of each layer, float32, weights (inputs, outputs) as scikit-learn keeps them."""
    from sklearn.neural_network import MLPClassifier
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    network = MLPClassifier((64, 32), alpha=1e-3, batch_size=64, max_iter=60, random_state=SEED, n_iter_no_change=60)
    # One thread: how many of them share a sum must not decide its last bit.
    with threadpool_limits(limits=1), catch_warnings():
        simplefilter("ignore")  # it stops at max_iter on purpose, and scikit-learn warns about that
        network.fit(images.astype(np.float32) / np.float32(16), labels)
    pairs = zip(network.coefs_, network.intercepts_, strict=True)
    return [(w.astype(np.float32), b.astype(np.float32)) for w, b in pairs]


def export(layers: list[tuple[Any, Any]]) -> Any:
    """Return the ModelProto: `pixels` (batch, 64) float32 from 0 to 16 in, `logits` (batch, 10) out."""
    from onnx import checker, helper, numpy_helper

    nodes = [helper.make_node("Mul", ["pixels", "scale"], ["scaled"], name="/scale/Mul")]
    initializers = [numpy_helper.from_array(np.array(1 / 16, np.float32), "scale")]
    value = "scaled"
    for name, (weight, bias) in zip(LAYERS, layers, strict=True):
        out = "logits" if name == LAYERS[-1] else f"{name}/out"
        inputs = [value, f"{name}.weight", f"{name}.bias"]
        nodes.append(helper.make_node("Gemm", inputs, [out], name=f"/{name}/Gemm", transB=1))
        initializers.append(numpy_helper.from_array(np.ascontiguousarray(weight.T), f"{name}.weight"))
        initializers.append(numpy_helper.from_array(bias, f"{name}.bias"))
        if name != LAYERS[-1]:
            value = f"{name}/relu"
            nodes.append(helper.make_node("Relu", [out], [value], name=f"/{name}/Relu"))
    graph = helper.make_graph(
        nodes,
        "digits",
        [helper.make_tensor_value_info("pixels", FLOAT, ["batch", 64])],
        [helper.make_tensor_value_info("logits", FLOAT, ["batch", 10])],
        initializers,
    )
    opsets = [helper.make_opsetid("", OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="zcrecord tools/models/digits.py")
    model.ir_version = IR_VERSION  # of that opset's time, so that older runtimes load it too
    checker.check_model(model, full_check=True)
    return model


def accuracy(model: bytes, images: Any, labels: Any) -> str:
    """Return how well a model does on held-out images."""
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    logits = session.run(None, {"pixels": images.astype(np.float32)})[0]
    return f"accuracy {float((logits.argmax(axis=1) == labels).mean()):.1%} on {len(images)} held-out images"


if __name__ == "__main__":
    seen, held_out, seen_labels, held_out_labels = split()
    trained = export(train(seen, seen_labels)).SerializeToString(deterministic=True)
    (DATA / "digits.onnx").write_bytes(trained)
    # Not savez_compressed: its bytes would depend on the version of zlib.
    np.savez(DATA / "digits_heldout.npz", images=held_out.reshape(-1, 8, 8), labels=held_out_labels)
    print(accuracy(trained, held_out, held_out_labels))
