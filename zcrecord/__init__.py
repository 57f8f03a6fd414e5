"""Zero-copy archives of model weights.

    import zcrecord

    zcrecord.save_record(record, "model.zcr")
    rec = zcrecord.load_record("model.zcr")
    w = rec["encoder.0.weight"]  # a read-only numpy view of the mapped file

`zcrecord.onnx` converts ONNX models; the command line is `zcrecord` and `onnx2zc`.
"""

from .describe import ArchiveLayout, ModuleInfo, TensorInfo
from .dtypes import DType
from .errors import (
    DependencyError,
    DestinationExistsError,
    ExternalDataError,
    FormatError,
    IntegrityError,
    LimitError,
    NameCollisionError,
    OnnxError,
    ProducerError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    TensorNotFoundError,
    UnsupportedError,
    VersionError,
)
from .lazy import LazyTensor
from .record import Record, load_record
from .recording import RecordWriter
from .save import save_record
from .tensors import PackedTensor, StringTensor
from .writer import SaveReport

__version__ = "0.1.0"

__all__ = [
    "ArchiveLayout",
    "DType",
    "DependencyError",
    "DestinationExistsError",
    "ExternalDataError",
    "FormatError",
    "IntegrityError",
    "LazyTensor",
    "LimitError",
    "ModuleInfo",
    "NameCollisionError",
    "OnnxError",
    "PackedTensor",
    "ProducerError",
    "Record",
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
    "load_record",
    "save_record",
]
