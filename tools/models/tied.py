"""Stream ONNX models of one quantized matrix with two users, as an embedding that is the output matrix too.

`write_tied` has 4 bits, for GatherBlockQuantized and, through Reshape, MatMulNBits, as Olive and onnxruntime-genai tie
them. `write_dequantized` has 8 bits, for DequantizeLinear in both branches of an If, through Reshape and Transpose.
Its scales are of blocks: of a matrix with one scale, or one for each row, ONNX Runtime 1.32 makes no session
("TransposeDQWeightsForMatMulNBits Missing required scale").
"""

from __future__ import annotations

from typing import IO

from tools.models.wire import BOOL, FLOAT, INT8, INT64, UINT8, Nodes, Weight, check_size, write_model

BLOCK = 32  # elements of a row that share a scale
WIDE, NARROW = 4096, 1024  # columns of the 4-bit and of the 8-bit matrix
OPSETS = {"": 21, "com.microsoft": 1}


def write_tied(sink: IO[bytes], mib: int) -> int:
    """Write the 4-bit model of `mib` MiB, 1 to 1900, in bounded memory; return the number of the matrix's rows."""
    check_size(mib)
    rows, blocks, g = (mib << 20) // (WIDE // 2 + 4 * WIDE // BLOCK), WIDE // BLOCK, Nodes()
    options = {"domain": "com.microsoft", "bits": 4, "block_size": BLOCK}
    shape = g.constant("shape", [rows, blocks, BLOCK // 2], INT64)
    x = g.op("GatherBlockQuantized", "shared.weight", "tokens", "shared.scales", out="x", quantize_axis=1, **options)
    parts = [g.op("Reshape", "shared.weight", shape, out="blocks"), "shared.scales"]
    g.op("MatMulNBits", x, *parts, out="y", K=WIDE, N=rows, **options)
    weights = [Weight("shared.weight", (rows, WIDE // 2), dtype=UINT8), _scales(rows, blocks)]
    value, sized = g.helper.make_tensor_value_info, ["batch", "sequence"]
    inputs, outputs = [value("tokens", INT64, sized)], [value("y", FLOAT, [*sized, rows])]
    write_model(sink, "tied", g, weights, inputs=inputs, outputs=outputs, opsets=OPSETS)
    return rows


def write_dequantized(sink: IO[bytes], mib: int) -> int:
    """Write the 8-bit model of `mib` MiB, 1 to 1900, in bounded memory; return the number of the matrix's rows."""
    check_size(mib)
    rows = (mib << 20) // (NARROW + 4 * NARROW // BLOCK) // 2 * 2
    look_up, multiply, g = Nodes(), Nodes(), Nodes()
    shape = g.constant("shape", [rows, NARROW], INT64)
    matrix = look_up.op("Reshape", "shared.weight", shape, out="lines")
    found = [look_up.op("Gather", name, "rows", out=f"some/{name}") for name in (matrix, "shared.scales")]
    look_up.op("DequantizeLinear", *found, out="found", axis=1, block_size=BLOCK)
    matrix = multiply.op("Reshape", "shared.weight", shape, out="matrix")
    turned = [multiply.op("Transpose", name, out=f"turned/{name}", perm=[1, 0]) for name in (matrix, "shared.scales")]
    floats = multiply.op("DequantizeLinear", *turned, out="floats", axis=0, block_size=BLOCK)
    multiply.op("MatMul", "x", floats, out="multiplied")
    value, make_graph = g.helper.make_tensor_value_info, g.helper.make_graph
    branches = {
        "then_branch": make_graph(look_up.nodes, "look_up", [], [value("found", FLOAT, ["batch", NARROW])]),
        "else_branch": make_graph(multiply.nodes, "multiply", [], [value("multiplied", FLOAT, ["batch", rows])]),
    }
    g.op("If", "gather", out="y", **branches)
    weights = [Weight("shared.weight", (rows // 2, 2 * NARROW), dtype=INT8), _scales(rows, NARROW // BLOCK)]
    inputs = [value("gather", BOOL, []), value("rows", INT64, ["batch"]), value("x", FLOAT, ["batch", NARROW])]
    outputs = [value("y", FLOAT, ["batch", "width"])]
    write_model(sink, "tied", g, weights, inputs=inputs, outputs=outputs, opsets=OPSETS)
    return rows


def _scales(*shape: int) -> Weight:
    return Weight("shared.scales", shape, 1e-3, center=5e-3)
