"""ONNX models as archives: converted in one pass, run by ONNX Runtime straight off the file, and given back.

`convert`, `to_onnx` and `scan`, which reads a model without converting it, need no package besides zcrecord's own;
`session` and `fill_session` need onnxruntime, which is imported when they are called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from zcrecord.onnx.lazy.mapping import OnnxTensorInfo, OnnxTensors, scan
from zcrecord.writing.writers import ConvertReport

from .convert import convert

if TYPE_CHECKING:
    from .archive_link import ExternalReport, verify_external
    from .export import to_onnx
    from .runtime import Tuning, session, tuning
    from .session_fill import fill_session
    from .tuner import TuneReport, tune, untune

__all__ = [
    "ConvertReport", "ExternalReport", "OnnxTensorInfo", "OnnxTensors", "TuneReport", "Tuning", "convert",
    "fill_session", "scan", "session", "to_onnx", "tune", "tuning", "untune", "verify_external",
]  # fmt: skip

# Name -> module to import it from on its first use.
_LAZY = {
    "ExternalReport": "archive_link", "TuneReport": "tuner", "Tuning": "runtime", "fill_session": "session_fill",
    "session": "runtime", "to_onnx": "export", "tune": "tuner", "tuning": "runtime", "untune": "tuner",
    "verify_external": "archive_link",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
