"""ONNX Runtime sessions whose weights are filled by a loader, as OrtValues: used in place, where the loader put them.

A weight of the main graph is handed over with `SessionOptions.add_initializer`, and listed among the graph's inputs
besides: an initializer with a default that a caller may bind. So it is no constant to ONNX Runtime's optimizers. They
fuse and move what they can without its values, and do not fold, prepack, transpose or reshape it: there is one copy of
it, and no result is computed from an older one. To a constant handed over by name they do all that: its transposed
form takes its name, and the OrtValue, not transposed, its place. Results are then wrong without an error.

    session                a file in memory, used in place     right      constants are folded, or used in place
    add_external_...       an OrtValue, copied by each session right      as above
    add_initializer alone  an OrtValue, used in place          **wrong**  unless all optimizers are off
    `fill_session`         an OrtValue, used in place          right      no constants: nothing is folded

Weights of subgraphs, strings, complex numbers and packed elements, and what is small, are as `session` has them.

A function that reads part of a file into a tensor, as browsers' and devices' runtimes have them, is a loader in a few
lines, since a PayloadRef holds its arguments::

    class LoadTensor:
        device = "mine"

        def can_load(self, device, dtype):
            return dtype.bits >= 8

        def load(self, ref, dst=None):
            out = np.empty(ref.shape, ref.dtype.numpy) if dst is None else dst
            load_tensor(ref.path, ref.offset, ref.nbytes, out)
            return out

        def begin(self, plan): ...
        def finish(self): ...
        def abort(self): ...

Source: ONNX Runtime 1.31, `onnxruntime_c_api.h` (AddInitializer, AddExternalInitializers), its issue 29009 for the
copy; `ort_optimizer_api_impl.cc` (GetConstant, TransposeInitializer) for what is done to constants alone.
"""

from __future__ import annotations

import io
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zcrecord.dtypes import DType
from zcrecord.errors import MismatchError, TensorNotFoundError, UnsupportedError
from zcrecord.hollow import HollowRecord
from zcrecord.loaders import Loader, load_into
from zcrecord.onnx.protobuf.reader import LEN, OPEN_END, VARINT, ProtobufReader, Skeleton, encode_field, encode_varint
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.tensors import interop

from . import graph
from .graph import Initializer
from .runtime import make_session, onnxruntime_module

__all__ = ["fill_session"]

_IR_VERSION, _GRAPH, _INPUT, _NAME = 1, 7, 11, 1  # fields of ModelProto, GraphProto and ValueInfoProto
_HELD: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # SessionOptions -> its weights' memory
_OVERRIDABLE = 4  # the IR version from which on an initializer among the inputs is a default


def fill_session(
    source: Any,
    *,
    loader: Loader | Mapping[str, Any] | str | None = None,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    provider_options: Sequence[Any] | None = None,
) -> Any:
    """Return a plain `onnxruntime.InferenceSession` whose weights are OrtValues over what a loader loaded, uncopied.

    A weight may be bound for a run, as an input is (`session.run`, `IOBinding.bind_ortvalue_input`), in place of the
    one that was filled; `session.get_overridable_initializers()` lists them. What is computed from weights alone is
    computed in each run, so that `zcrecord.onnx.session` is faster where its weights, straight off the file, will do.

    Args:
        source: a path, bytes-like or Record made from an ONNX model, a sealed hollow one too; the session keeps it.
        loader: what brings the weights to where they are used, or a device's name; see `zcrecord.loaders`. Or, by name,
            what was loaded before: several sessions can share it. It gives OrtValues, torch tensors, or what has
            DLPack or is an array. None takes the record's own bytes. For an onnxruntime without `OrtValue.from_dlpack`,
            tensors that are not in the host's memory are copied there.
        sess_options: for one session alone; the weights become part of it. Unless its `log_severity_level` is 3,
            ONNX Runtime warns of each weight that it is no constant.
        providers, provider_options: as InferenceSession takes them. A failing one is an error, the CPU no fallback.

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: the record holds no ONNX model, or is hollow
            still; or `sess_options` are none, or another session's. MismatchError: the loader returned another shape
            or element type. TensorNotFoundError: of what was loaded before one is missing. What `load_into` and ONNX
            Runtime raise.

    Example:
        >>> from zcrecord.onnx import convert
        >>> report = convert("model.onnx", "model.zcr")
        >>> made = fill_session("model.zcr", loader="host")
        >>> made.run(None, {"pixels": np.zeros((1, 64), np.float32)})[0].shape
        (1, 10)
    """
    ort = onnxruntime_module()
    if isinstance(source, HollowRecord):
        raise UnsupportedError("a hollow record has no weights to run with; fill it, and pass what its seal() returns")
    if sess_options is not None and not isinstance(sess_options, ort.SessionOptions):
        what = f"sess_options= takes an onnxruntime.SessionOptions, not a {type(sess_options).__name__}"
        raise UnsupportedError(what)
    record = source if isinstance(source, Record) else load_record(source)
    weights = _weights(record)
    everything = record.names
    names = [everything[w.number] for w in weights]
    loaded = _loaded(record, loader, names)
    options = _options(ort) if sess_options is None else sess_options
    if options in _HELD:
        raise UnsupportedError("these sess_options have weights of another session; make new ones for each")
    held = [(_ort_value(ort, loaded[name], w, name), loaded[name]) for w, name in zip(weights, names, strict=True)]
    _HELD[options] = held  # of both, ONNX Runtime has their addresses alone, which options hand on to any session
    for weight, (value, _) in zip(weights, held, strict=True):
        options.add_initializer(weight.name, value)
    made = make_session(record, options, providers, provider_options, more=_as_inputs(record, weights))
    made._zcrecord_weights = held
    return made


def _loaded(record: Record, loader: Loader | Mapping[str, Any] | str | None, names: list[str]) -> Mapping[str, Any]:
    if loader is None:
        return record
    if not isinstance(loader, Mapping):
        chosen = set(names)
        return load_into(record, loader, lambda told: told.name in chosen)  # names are no patterns
    for name in names:
        if name not in loader:
            raise _not_given(name, loader, record.archive.path)
    return loader


def _not_given(name: str, given: Mapping[str, Any], path: str | None) -> TensorNotFoundError:
    """Return what is raised for a weight that is not among what was loaded before."""
    error = TensorNotFoundError(name, lambda: [key for key in given if isinstance(key, str)], path=path)
    close = error.message.partition("close names: ")[2]
    what = f"is a weight of the model, and not among the {len(given)} tensors given as loader="
    error.message = f"{what}; close names there: {close}" if close else what
    return error


def _options(ort: Any) -> Any:
    made = ort.SessionOptions()
    made.log_severity_level = 3  # or it warns, once for each weight, of what is done here on purpose
    return made


def _weights(record: Record) -> list[Initializer]:
    """Return the initializers of the main graph that can be OrtValues, and that no other graph has under their name."""
    found: dict[int, Initializer] = {}

    def note(met: Initializer) -> bytes:
        found[met.number] = met
        return b""  # the values are not asked for

    graph.restore(record, note)
    elsewhere = {met.name for met in found.values() if met.graph != "main"}
    return [
        met for met in found.values()
        if met.graph == "main" and not met.inside and met.name not in elsewhere and isinstance(met.value, np.ndarray)
    ]  # fmt: skip


def _ort_value(ort: Any, made: Any, weight: Initializer, name: str) -> Any:
    """Return an OrtValue over what a loader has made, or over a copy in C order where it is not.

    Raises:
        MismatchError: it has another shape or element type: its address would be used as if it had the right one.
    """
    if hasattr(ort.OrtValue, "from_dlpack") and (isinstance(made, ort.OrtValue) or _on_device(made)):
        # ONNX Runtime takes as an initializer only what does not own its memory, as nothing from DLPack does.
        value = ort.OrtValue.from_dlpack(made)
    else:
        made = made.numpy() if isinstance(made, ort.OrtValue) else made
        array = np.ascontiguousarray(interop.as_array(made)).reshape(tuple(made.shape))
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # of what has another byte order
        own = array.dtype.isbuiltin == 2  # of ml_dtypes
        if own and (code := weight.dtype.onnx) is not None and array.dtype == weight.dtype.numpy:
            array = array.view(f"u{array.itemsize}")
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, code)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(array)
    _check(value, weight, name)
    return value


def _on_device(made: Any) -> bool:
    found = getattr(made, "__dlpack_device__", None)
    return not isinstance(made, np.ndarray) and found is not None and int(found()[0]) != 1


def _check(value: Any, weight: Initializer, name: str) -> None:
    kind: DType = weight.dtype
    if value.element_type() != kind.onnx or tuple(value.shape()) != weight.value.shape:
        what = f"the loader gave {value.data_type()} of shape {tuple(value.shape())}"
        raise MismatchError(f"{what}, the model has {kind.name} of shape {weight.value.shape}", tensor=name)


def _as_inputs(record: Record, weights: Sequence[Initializer]) -> bytes:
    """Return fields of a ModelProto that make weights inputs of its graph; protobuf adds them to those it has."""
    version, there = _graph_inputs(graph.skeleton_of(record))
    inputs = b"".join(encode_field(_INPUT, _value_info(w)) for w in weights if w.name not in there)
    more = encode_field(_GRAPH, inputs)
    return more if version >= _OVERRIDABLE else more + encode_varint(_IR_VERSION << 3 | VARINT) + b"\4"


def _value_info(weight: Initializer) -> bytes:
    """Return the ValueInfoProto of a weight: its name, its element type and its shape."""
    dims = b"".join(encode_field(1, b"\x08" + encode_varint(dim)) for dim in weight.value.shape)
    code = weight.dtype.onnx
    assert code is not None, "ONNX Runtime was given such a tensor by name"
    tensor = b"\x08" + encode_varint(code) + encode_field(2, dims)
    return encode_field(_NAME, weight.name.encode()) + encode_field(2, encode_field(1, tensor))


def _graph_inputs(skeleton: memoryview) -> tuple[int, set[str]]:
    """Return the IR version of a model, and the names of its graph's inputs."""
    window = ProtobufReader(io.BytesIO(skeleton), Skeleton())
    window.drop(0)
    version, found = 0, set()
    while not window.at_end():
        _, tag, value = window.header(OPEN_END)
        if tag == _IR_VERSION << 3 | VARINT:
            version = value
        elif tag == _GRAPH << 3 | LEN:
            found |= _names(window, window.base + window.pos + value, (_INPUT, _NAME))
        elif tag & 7 != VARINT:
            window.skip(tag, value, OPEN_END)
    return version, found


def _names(window: ProtobufReader, end: int, path: tuple[int, ...]) -> set[str]:
    """Return the texts at the end of a path of fields, in the message that ends at this offset."""
    found: set[str] = set()
    while window.base + window.pos < end:
        _, tag, value = window.header(end)
        if tag != path[0] << 3 | LEN:
            if tag & 7 != VARINT:
                window.skip(tag, value, end)
        elif len(path) > 1:
            found |= _names(window, window.base + window.pos + value, path[1:])
        else:
            found.add(window.text(value).decode("utf-8", "replace"))
    return found
