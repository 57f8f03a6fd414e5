"""Write an ONNX model of very many small initializers, and two nodes for each of them: a chain of Mul and Add.

Where payloads are large, bytes are what counts; here it is fields. Initializers hold 32 floats or 256, no two the same.
Their names are those of modules of ten, or nested: `model.layers.12.mlp.37.weight`, each in a module of its own.
"""

from __future__ import annotations

from typing import IO

import numpy as np

SEED = 2026
_SIZES = (32, 256)


def write_small(sink: IO[bytes], initializers: int, *, nested: bool = False) -> int:
    """Write a model with so many initializers; return the bytes of their values. Held in memory as a whole."""
    from onnx import TensorProto, helper, numpy_helper

    rng = np.random.default_rng(SEED)
    nodes, tensors, value, nbytes = [], [], "x", 0
    for i in range(initializers):
        flat = f"blocks.{i // 10}.{('weight', 'bias')[i % 2]}.{i % 10}"
        name = f"model.layers.{i // 100}.mlp.{i % 100}.weight" if nested else flat
        array = rng.random((_SIZES[i % 2] // 32, 32), np.float32)
        nbytes += array.nbytes
        tensors.append(numpy_helper.from_array(array, name))
        nodes.append(helper.make_node("Mul", [value, name], [f"m{i}"], name=f"/mul_{i}"))
        nodes.append(helper.make_node("Add", [f"m{i}", value], [f"a{i}"], name=f"/add_{i}"))
        value = f"a{i}"
    shape = [None, 32]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(value, TensorProto.FLOAT, shape)]
    graph = helper.make_graph(nodes, "small", inputs, outputs, tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    sink.write(model.SerializeToString())
    return nbytes
