"""ONNX models as archives: converted in one pass, and run by ONNX Runtime straight off the file.

`convert` needs no package besides zcrecord's own; `session` needs onnxruntime, which is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .convert import ConvertReport, convert

if TYPE_CHECKING:
    from .runtime import session

__all__ = ["ConvertReport", "convert", "session"]


def __getattr__(name: str) -> Any:
    if name != "session":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .runtime import session

    globals()[name] = session
    return session


def __dir__() -> list[str]:
    return sorted(__all__)
