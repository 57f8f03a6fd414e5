"""Compares a tuned graph's answers with the model's, on inputs generated for the model's shapes."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from zcrecord.errors import UnsupportedError, printable

_SIZES = 1, 2, 32  # of open dimensions, tried in this order
_TYPES = {"tensor(float)": "f4", "tensor(double)": "f8", "tensor(float16)": "f2", "tensor(string)": "O"}
_CLOSE = 1e-3  # of the largest value: without packed weights ONNX Runtime rounds in another order


def same_answers(model: Any, tuned: Any, path: str, *, exact: bool) -> bool:
    """Return True if two sessions give the same answers; log a warning if the model runs on no generated inputs.

    Outputs that differ between two runs of the model, such as random numbers, are not compared. `path` is that of the
    archive, for messages; `exact` compares bit for bit.

    Raises:
        UnsupportedError: the tuned graph gives other answers, or does not run.
    """
    reason = ""
    for size in _SIZES:
        try:
            feed = _generated_inputs(model, size)
            expected = model.run(None, feed)
        except Exception as error:  # those of ONNX Runtime have no common class
            reason = printable(str(error))
            continue
        try:
            answers = tuned.run(None, feed)
        except Exception as error:
            fault = f"cannot be tuned: the tuned graph does not run: {printable(str(error))}"
            raise UnsupportedError(fault, path=path) from error
        are_alike = [_is_alike(a, b, exact) for a, b in zip(expected, answers, strict=True)]
        if not all(are_alike):
            repeated = model.run(None, feed)
            for output, is_alike, a, b in zip(model.get_outputs(), are_alike, expected, repeated, strict=True):
                if not is_alike and _is_alike(a, b, exact):
                    fault = f"the tuned graph gives other values of the output '{printable(output.name, 60)}'"
                    raise UnsupportedError(f"cannot be tuned: {fault} than the model", path=path)
        return True
    message = "%s: the tuned graph's answers are not compared: the model runs on no inputs generated for it: %s"
    logging.getLogger("zcrecord").warning(message, path, reason)
    return False


def _generated_inputs(session: Any, size: int) -> dict[str, Any]:
    """Return an array for each input by name: random floats, else ones or "a"; open dimensions become `size`."""
    rng, feed = np.random.default_rng(0), {}
    for value in session.get_inputs():
        if not value.type.startswith("tensor("):
            raise UnsupportedError(f"no input of type {value.type} can be generated")
        shape = [n if isinstance(n, int) and n >= 0 else size for n in value.shape]
        dtype = np.dtype(_TYPES.get(value.type) or value.type[len("tensor(") : -1])
        constant = "a" if dtype.kind == "O" else 1
        values = rng.standard_normal(shape) if dtype.kind == "f" else np.full(shape, constant)
        feed[value.name] = values.astype(dtype)
    return feed


def _is_alike(expected: Any, answer: Any, exact: bool) -> bool:
    """Return True if two values of an output, arrays or lists of them, are equal or, unless `exact`, close."""
    if isinstance(expected, list):
        pairs = zip(expected, answer, strict=False)
        return len(expected) == len(answer) and all(_is_alike(a, b, exact) for a, b in pairs)
    a, b = np.asarray(expected), np.asarray(answer)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype.kind not in "fc":
        return not exact or bool(np.array_equal(a, b))  # a rounding error may have moved an index
    tolerance = 0 if exact else _CLOSE * float(np.abs(a[np.isfinite(a)]).max(initial=0))
    return bool(np.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True))
