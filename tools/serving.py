"""Work of a process that converts a model or serves it with ONNX Runtime; called through `tools.worker`.

A path that ends in .onnx goes the stock way, one that ends in .zcr by `zcrecord.onnx.session`. Inputs are drawn from a
fixed seed, as the model of `tools.models` declares them, so that both ways answer the same question.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tools.measure import peak_rss

SEQUENCE = 16  # tokens to a request

_session: Any = None


def prepare() -> None:
    """Import what serving needs, so that it is in no figure."""
    import onnxruntime  # noqa: F401

    from zcrecord.archive import info  # noqa: F401
    from zcrecord.onnx import fill_session, session, tuned, tuner  # noqa: F401


def make_session(
    path: str,
    *,
    threads: int | None = None,
    memory: Literal["shared", "speed"] = "shared",
    prefetch: bool = False,
    loader: str | None = None,
    providers: Sequence[str] = ("CPUExecutionProvider",),
) -> Any:
    """Return an ONNX Runtime session over a model of either form.

    `memory` and `prefetch` are for archives alone, and so is `loader`, which has `fill_session` load the weights.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # warnings about the machine's CPU topology are no news here
    if threads is not None:
        options.intra_op_num_threads = threads
    if path.endswith(".onnx"):
        return onnxruntime.InferenceSession(path, options, providers=list(providers))
    from zcrecord import load_record
    from zcrecord.onnx import fill_session, session

    record = load_record(path)
    if prefetch:
        record.prefetch()
    logger = logging.getLogger("zcrecord")
    before = logger.level
    logger.setLevel(logging.ERROR)  # it warns of an archive that is not tuned: so on purpose
    try:
        if loader is not None:
            return fill_session(record, loader=loader, sess_options=options, providers=providers)
        return session(record, memory=memory, sess_options=options, providers=providers)
    finally:
        logger.setLevel(before)


def open_session(path: str, **options: Any) -> float:
    """Keep a session over `path` for the calls that follow; return the seconds it took to create."""
    global _session
    start = time.perf_counter()
    _session = make_session(path, **options)
    return time.perf_counter() - start


def providers() -> list[str]:
    """Return the providers that the session has, the one that it prefers first."""
    return list(_session.get_providers())


def first_answer(
    batch: int = 1, *, condition: bool = True, given: Mapping[str, Any] | None = None
) -> tuple[float, list[float]]:
    """Return the seconds that one request took, and some of its answer to compare with the other form's.

    `condition` is what goes into an input of truth values: which branch an If takes. `given` has the shape of an input
    of floats that the model does not declare, or the values of one of integers, by name.
    """
    start = time.perf_counter()
    answer = _session.run(None, request_for(_session, batch, condition, given))[0]
    seconds = time.perf_counter() - start
    return seconds, [float(v) for v in answer[0].reshape(-1, answer.shape[-1])[-1, :16]]


def answer_digest(batch: int = 1) -> str:
    return hashlib.sha256(_session.run(None, request_for(_session, batch))[0].tobytes()).hexdigest()


def latency(batch: int = 1, repeats: int = 20) -> float:
    request = request_for(_session, batch)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        _session.run(None, request)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def imported_rss() -> int | None:
    """Return the peak of this process's resident size once what converts is imported, and nothing else done."""
    import zcrecord.cli.dispatch
    import zcrecord.onnx  # noqa: F401

    return peak_rss()


def convert(source: str, dest: str, **options: Any) -> dict[str, Any]:
    """Convert an ONNX model to an archive; return what `_timed` does."""
    import zcrecord._schema.tables  # noqa: F401  # otherwise imported when the index is written
    from zcrecord.onnx import convert

    return _timed(lambda: convert(source, dest, **options))


def tune(source: str, dest: str) -> dict[str, Any]:
    """Write an archive that is tuned for this machine and the ONNX Runtime of this process.

    Returns what `_timed` does, and the bytes of its largest weight.
    """
    from zcrecord import load_record
    from zcrecord.onnx import tune

    figures = _timed(lambda: tune(source, dest))
    return {**figures, "largest": max(info.nbytes for info in load_record(source).infos())}


def onnx_load(source: str) -> dict[str, Any]:
    import onnx

    return _timed(lambda: onnx.load(source))


def onnx_to_arrays(source: str) -> dict[str, Any]:
    """Make an array of every initializer, with `onnx` alone; return what `_timed` does."""
    import onnx
    from onnx import numpy_helper

    return _timed(lambda: [numpy_helper.to_array(t) for t in onnx.load(source).graph.initializer])


def onnx_ir_load(source: str) -> dict[str, Any]:
    import onnx_ir

    return _timed(lambda: onnx_ir.load(source))


def onnx_to_safetensors(source: str, dest: str) -> dict[str, Any]:
    """Save every initializer with safetensors, the graph left aside; return what `_timed` does."""
    import onnx
    import safetensors.numpy
    from onnx import numpy_helper

    def save() -> None:
        tensors = {t.name: numpy_helper.to_array(t) for t in onnx.load(source).graph.initializer}
        safetensors.numpy.save_file(tensors, dest)

    return _timed(save)


def _timed(work: Callable[[], object]) -> dict[str, Any]:
    """Return the seconds that `work` takes, and the peak of the resident size before (imports) and after it."""
    imported = peak_rss()
    start = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - start, "imported_rss": imported, "peak_rss": peak_rss()}


def request_for(
    session: Any, batch: int, condition: bool = True, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a value for each input of a session: floats of deviation 1, a `mask` that hides nothing, truth values.

    Integers are tokens: below the size of the answer's last axis, or below 100 where the model does not declare it.
    """
    rng = np.random.default_rng(0)
    sizes = {"batch": batch, "sequence": SEQUENCE}
    last = session.get_outputs()[0].shape[-1]
    request: dict[str, Any] = {}
    for wanted in session.get_inputs():
        shape = [sizes.get(size, size) for size in wanted.shape]
        if given and wanted.name in given:
            own = given[wanted.name]
            request[wanted.name] = rng.random(own, np.float32) if "float" in wanted.type else np.array(own)
        elif wanted.name == "mask":
            request[wanted.name] = np.ones(shape, np.int64)
        elif wanted.type == "tensor(int64)":
            request[wanted.name] = rng.integers(0, last if isinstance(last, int) else 100, shape)
        elif wanted.type == "tensor(bool)":
            request[wanted.name] = np.full(shape, condition)
        else:
            request[wanted.name] = rng.standard_normal(shape, np.float32)
    return request
