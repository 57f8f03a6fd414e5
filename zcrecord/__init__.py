"""Zero-copy archives of model weights.

    import zcrecord

    zcrecord.save_record(record, "model.zcr")
    rec = zcrecord.load_record("model.zcr")
    w = rec["encoder.0.weight"]  # a read-only numpy view of the mapped file

`zcrecord.onnx` converts ONNX models; the command line is `zcrecord` and `onnx2zc`.
"""

from typing import TYPE_CHECKING, Any

from zcrecord.dtypes import DType
from zcrecord.errors import (
    DependencyError,
    DestinationExistsError,
    ExternalDataError,
    FillError,
    FormatError,
    IntegrityError,
    LimitError,
    LoadCancelledError,
    MismatchError,
    NameCollisionError,
    OnnxError,
    PipeClosedError,
    ProducerError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    TensorNotFoundError,
    UnsupportedError,
    VersionError,
)
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.tensors.packed import PackedTensor, StringTensor

if TYPE_CHECKING:
    from zcrecord.archive.info import ArchiveLayout, ModuleInfo, TensorInfo
    from zcrecord.record.edit import EditReport, RecordEditor, edit
    from zcrecord.record.indexing import index
    from zcrecord.record.record_writer import RecordWriter
    from zcrecord.record.save import save_record
    from zcrecord.tensors.lazy import LazyTensor
    from zcrecord.writing.writers import SaveReport

__version__ = "1.0.0"

__all__ = [
    "ArchiveLayout",
    "DType",
    "DependencyError",
    "DestinationExistsError",
    "EditReport",
    "ExternalDataError",
    "FillError",
    "FormatError",
    "IntegrityError",
    "LazyTensor",
    "LimitError",
    "LoadCancelledError",
    "MismatchError",
    "ModuleInfo",
    "NameCollisionError",
    "OnnxError",
    "PackedTensor",
    "PipeClosedError",
    "ProducerError",
    "Record",
    "RecordEditor",
    "RecordError",
    "RecordWriter",
    "SaveReport",
    "SourceError",
    "SourceNotFoundError",
    "StringTensor",
    "TensorInfo",
    "TensorNotFoundError",
    "UnsupportedError",
    "VersionError",
    "edit",
    "index",
    "load_record",
    "save_record",
]

# Name -> module to import it from on its first use: a program that loads does not wait for the others.
_LAZY = {
    "ArchiveLayout": "archive.info",
    "EditReport": "record.edit",
    "LazyTensor": "tensors.lazy",
    "ModuleInfo": "archive.info",
    "RecordEditor": "record.edit",
    "RecordWriter": "record.record_writer",
    "SaveReport": "writing.writers",
    "TensorInfo": "archive.info",
    "edit": "record.edit",
    "index": "record.indexing",
    "save_record": "record.save",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f".{_LAZY[name]}", __name__), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
