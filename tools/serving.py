"""What a process does that converts a model or serves it with ONNX Runtime; called through `tools.worker`.

A path that ends in .onnx goes the stock way, one that ends in .zcr by `zcrecord.onnx.session`. Input tokens are drawn
from a fixed seed, so that both ways answer the same question.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Literal

import numpy as np

from tools.measure import memory, peak_rss

__all__ = ["SEQUENCE", "convert", "first_answer", "latency", "onnx_load", "open_session", "prepare", "private_bytes"]

SEQUENCE = 16  # tokens to a request

_session: Any = None


def prepare() -> None:
    """Import what serving needs, so that it is in no figure."""
    import onnxruntime  # noqa: F401

    from zcrecord.onnx import session  # noqa: F401


def make_session(path: str, *, threads: int | None = None, memory: Literal["shared", "speed"] = "shared") -> Any:
    """Return an ONNX Runtime session over a model of either form; `memory` is for archives alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # warnings about the machine's CPU topology are no news here
    if threads is not None:
        options.intra_op_num_threads = threads
    providers = ["CPUExecutionProvider"]
    if path.endswith(".onnx"):
        return onnxruntime.InferenceSession(path, options, providers=providers)
    from zcrecord.onnx import session

    return session(path, memory=memory, sess_options=options, providers=providers)


def open_session(path: str, **options: Any) -> float:
    """Keep a session over `path` for the calls that follow; return the seconds it took to create."""
    global _session
    start = time.perf_counter()
    _session = make_session(path, **options)
    return time.perf_counter() - start


def first_answer(batch: int = 1) -> tuple[float, list[float]]:
    """Return the seconds that one request took, and some of its answer to compare with the other form's."""
    start = time.perf_counter()
    logits = _session.run(None, _request(batch))[0]
    seconds = time.perf_counter() - start
    return seconds, [float(v) for v in logits[0, -1, :16]]


def latency(batch: int = 1, repeats: int = 20) -> float:
    """Return the median seconds of `repeats` requests."""
    request = _request(batch)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        _session.run(None, request)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def private_bytes() -> int | None:
    """Return this process's anonymous memory, or None where the system does not tell."""
    now = memory()
    return None if now is None else now.private


def convert(source: str, dest: str, **options: Any) -> dict[str, Any]:
    """Convert an ONNX model to an archive; return seconds (imports left out) and the process's peak RSS."""
    from zcrecord.onnx import convert

    start = time.perf_counter()
    convert(source, dest, **options)
    return {"seconds": time.perf_counter() - start, "peak_rss": peak_rss()}


def onnx_load(source: str) -> dict[str, Any]:
    """Parse an ONNX model with `onnx.load`; return seconds (imports left out) and the process's peak RSS."""
    import onnx

    start = time.perf_counter()
    onnx.load(source)
    return {"seconds": time.perf_counter() - start, "peak_rss": peak_rss()}


def _request(batch: int) -> dict[str, Any]:
    vocabulary = _session.get_outputs()[0].shape[-1]
    return {"input_ids": np.random.default_rng(0).integers(0, vocabulary, (batch, SEQUENCE))}
