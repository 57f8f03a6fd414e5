"""Stream an ONNX model whose If has one square matrix of any size in both branches, in bounded memory.

Where `gather` is true, rows of the matrix are looked up; else the other input is multiplied with its transpose, as an
embedding that is the output matrix too would be. The matrix is an initializer of the graph around the branches, once.
By default ONNX Runtime copies it for each branch (onnxruntime issue 20709).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import IO

from tools.models.wire import BOOL, FLOAT, INT64, Nodes, Weight, check_size, write_model

MULTIPLE = 64  # of the matrix's side


@dataclass(frozen=True, slots=True)
class BranchesShape:
    """The side of the square matrix."""

    side: int

    def __str__(self) -> str:
        return f"one matrix of {self.side} by {self.side} in two branches"


def plan(mib: int) -> BranchesShape:
    """Return the largest shape of at most `mib` MiB whose side is a multiple of 64."""
    check_size(mib)
    return BranchesShape(math.isqrt(mib << 18) // MULTIPLE * MULTIPLE)


def write_branches(sink: IO[bytes], mib: int) -> BranchesShape:
    """Write the model of `mib` MiB, 1 to 1900, to `sink`, which need not seek; holds one chunk of 4 MiB."""
    shape = plan(mib)
    gather, multiply, graph = Nodes(), Nodes(), Nodes()
    gather.op("Gather", "shared.weight", "rows", out="gathered", axis=0)
    turned = multiply.op("Transpose", "shared.weight", out="turned", perm=[1, 0])
    multiply.op("MatMul", "x", turned, out="multiplied")
    value, make_graph = graph.helper.make_tensor_value_info, graph.helper.make_graph
    sized = ["batch", shape.side]
    branches = {
        "then_branch": make_graph(gather.nodes, "gather", [], [value("gathered", FLOAT, sized)]),
        "else_branch": make_graph(multiply.nodes, "multiply", [], [value("multiplied", FLOAT, sized)]),
    }
    graph.op("If", "gather", out="y", **branches)
    weight = Weight("shared.weight", (shape.side, shape.side), math.sqrt(3 / shape.side))
    inputs = [value("gather", BOOL, []), value("rows", INT64, ["batch"]), value("x", FLOAT, sized)]
    write_model(sink, "branches", graph, [weight], inputs=inputs, outputs=[value("y", FLOAT, sized)])
    return shape
