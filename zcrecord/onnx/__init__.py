"""ONNX models as archives: converted in one pass, run by ONNX Runtime straight off the file, and given back.

`convert`, `to_onnx` and `scan`, which reads a model without converting it, need no package besides zcrecord's own;
`session` and `fill_session` need onnxruntime, which is imported when they are called.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .convert import ConvertReport, convert
from .listing import OnnxTensorInfo, OnnxTensors, scan

if TYPE_CHECKING:
    from .export import to_onnx
    from .filling import fill_session
    from .linked import ExternalReport, verify_external
    from .runtime import session

__all__ = [
    "ConvertReport", "ExternalReport", "OnnxTensorInfo", "OnnxTensors", "convert", "fill_session", "scan", "session",
    "to_onnx", "verify_external",
]  # fmt: skip

# What is imported when it is first asked for.
_LATER = {
    "ExternalReport": "linked", "fill_session": "filling", "session": "runtime", "to_onnx": "export",
    "verify_external": "linked",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f".{_LATER[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
