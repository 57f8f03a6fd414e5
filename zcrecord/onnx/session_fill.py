"""ONNX Runtime sessions whose weights a loader fills, as OrtValues that are used in place.

A weight of the main graph is passed by `SessionOptions.add_initializer`, and listed among the graph's inputs: so it is
a default that a caller may override, and no constant to ONNX Runtime's optimizers. They fuse and move nodes without its
value, and do not fold, prepack, transpose or reshape it. A constant that is passed by name they do transform: its
transposed form gets its name, and the OrtValue, not transposed, its place. Results are then wrong without an error.

    session                a file in memory, used in place     right      constants are folded, or used in place
    add_external_...       an OrtValue, copied by each session right      as above
    add_initializer alone  an OrtValue, used in place          **wrong**  unless all optimizers are off
    `fill_session`         an OrtValue, used in place          right      no constants: nothing is folded

Weights of subgraphs, strings, complex numbers, packed elements and small weights are passed as by `session`.

Source: ONNX Runtime 1.31, `onnxruntime_c_api.h` (AddInitializer, AddExternalInitializers), its issue 29009 for the
copy; `ort_optimizer_api_impl.cc` (GetConstant, TransposeInitializer) for the transformations of constants.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zcrecord.errors import MismatchError, TensorNotFoundError, UnsupportedError
from zcrecord.hollow import HollowRecord
from zcrecord.loaders import Loader, load_into
from zcrecord.onnx.protobuf.interfaces import OVERRIDABLE, interface_of
from zcrecord.onnx.protobuf.reader import VARINT, encode_field, encode_varint
from zcrecord.record.record import Record
from zcrecord.tensors import interop

from . import graph
from .graph import Initializer
from .runtime import make_session, model_errors, onnxruntime_module

_IR_VERSION, _GRAPH, _INPUT, _NAME = 1, 7, 11, 1  # fields of ModelProto, GraphProto and ValueInfoProto
_DLPACK_CPU = 1  # kDLCPU
_WEIGHTS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # SessionOptions -> its weights' memory


def fill_session(
    source: Any,
    *,
    module: str | None = None,
    loader: Loader | Mapping[str, Any] | str | None = None,
    sess_options: Any = None,
    providers: Sequence[Any] | None = None,
    provider_options: Sequence[Any] | None = None,
) -> Any:
    """Return a plain `onnxruntime.InferenceSession` whose weights are OrtValues over a loader's tensors, uncopied.

    A run may bind another tensor in place of a weight, as an input (`session.run`, `IOBinding.bind_ortvalue_input`);
    `session.get_overridable_initializers()` lists the weights. Each run computes the nodes that depend on weights
    alone, so use `zcrecord.onnx.session`, which is faster, unless the weights have to be loaded.

    Args:
        source: a path, bytes-like or Record made from an ONNX model, a sealed hollow one too; the session keeps it.
        module: of an archive of several models, the module of this one; names are those below it.
        loader: a loader for the weights, or a device's name; see `zcrecord.loaders`. Or a mapping from names to tensors
            that were loaded before: several sessions can share it. Tensors are OrtValues, torch tensors, arrays, or
            support DLPack. None takes the record's own bytes. With an onnxruntime without `OrtValue.from_dlpack`,
            tensors outside the host's memory are copied there.
        sess_options: for one session alone; the weights become part of it. Unless its `log_severity_level` is 3,
            ONNX Runtime warns of each weight that it is no constant.
        providers, provider_options: as InferenceSession takes them. A failing provider is an error; there is no
            fallback to the CPU.

    Raises:
        DependencyError: onnxruntime is not installed. UnsupportedError: the record holds no ONNX model, or is still
            hollow; or `sess_options` is no SessionOptions, or another session's. MismatchError: the loader returned
            another shape or element type. TensorNotFoundError: the mapping lacks a weight. RecordError: as `load_into`.
            OnnxError: ONNX Runtime refuses the model, the options or the providers.

    Example:
        >>> from zcrecord.onnx import convert
        >>> report = convert("model.onnx", "model.zcr")
        >>> made = fill_session("model.zcr", loader="host")
        >>> made.run(None, {"pixels": np.zeros((1, 64), np.float32)})[0].shape
        (1, 10)
    """
    ort = onnxruntime_module()
    if isinstance(source, HollowRecord):
        raise UnsupportedError("a hollow record has no weights; fill it, and pass the record that seal() returns")
    if sess_options is not None and not isinstance(sess_options, ort.SessionOptions):
        fault = f"sess_options= takes an onnxruntime.SessionOptions, not a {type(sess_options).__name__}"
        raise UnsupportedError(fault)
    record = graph.opened_model(source, module).part
    weights, every_name = _weights(record), record.names
    names = [every_name[w.number] for w in weights]
    loaded = _load_weights(record, loader, names)
    options = ort.SessionOptions() if sess_options is None else sess_options
    if sess_options is None:
        options.log_severity_level = 3  # or it warns for each weight that it is no constant, which is intended here
    if options in _WEIGHTS:
        raise UnsupportedError("these sess_options have weights of another session; make new ones for each")
    pairs = [(_ort_value(ort, loaded[name], w, name), loaded[name]) for w, name in zip(weights, names, strict=True)]
    _WEIGHTS[options] = pairs  # ONNX Runtime keeps addresses alone, and options pass them on to any session
    with model_errors(record):
        for weight, (value, _) in zip(weights, pairs, strict=True):
            options.add_initializer(weight.name, value)
    session = make_session(record, options, providers, provider_options, skeleton=_with_inputs(record, weights))
    session._zcrecord_weights = pairs
    return session


def _load_weights(
    record: Record, loader: Loader | Mapping[str, Any] | str | None, names: list[str]
) -> Mapping[str, Any]:
    """Return the weights of these names: the record itself, those that a loader made, or a mapping."""
    if loader is None:
        return record
    if not isinstance(loader, Mapping):
        chosen = set(names)
        return load_into(record, loader, lambda info: info.name in chosen)  # names are no patterns
    if missing := [name for name in names if name not in loader]:
        names_given = [key for key in loader if isinstance(key, str)]
        error = TensorNotFoundError(missing[0], lambda: names_given, path=record.archive.path)
        close = error.message.partition("close names: ")[2]
        fault = f"is a weight of the model, and not among the {len(loader)} tensors given as loader="
        error.message = f"{fault}; close names there: {close}" if close else fault
        raise error
    return loader


def _weights(record: Record) -> list[Initializer]:
    """Return the initializers of the main graph that can be OrtValues and whose names no other graph uses."""
    tensors = graph.restore(record, lambda _: b"").tensors  # the values are not needed
    others = {i.name for i in tensors if i.graph != "main" or not i.in_graph}
    passed_by_name = (i for i in tensors if i.graph == "main" and i.in_graph and not i.inside and i.name not in others)
    return [i for i in passed_by_name if isinstance(i.value, np.ndarray)]


def _ort_value(ort: Any, tensor: Any, weight: Initializer, name: str) -> Any:
    """Return a loader's tensor as an OrtValue; one that is not in C order, or in another byte order, is copied.

    Raises:
        MismatchError: its type or shape is not that of `weight`.
    """
    kind = weight.dtype
    if hasattr(ort.OrtValue, "from_dlpack") and (isinstance(tensor, ort.OrtValue) or _is_on_device(tensor)):
        # ONNX Runtime takes as initializers only OrtValues that do not own their memory, as those from DLPack.
        value = ort.OrtValue.from_dlpack(tensor)
    else:
        tensor = tensor.numpy() if isinstance(tensor, ort.OrtValue) else tensor
        array = np.ascontiguousarray(interop.as_array(tensor)).reshape(tuple(tensor.shape))
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # if it has another byte order
        if array.dtype.isbuiltin == 2 and array.dtype == kind.numpy:  # of ml_dtypes
            value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(f"u{array.itemsize}"), kind.onnx)
        else:
            value = ort.OrtValue.ortvalue_from_numpy(array)
    if value.element_type() != kind.onnx or tuple(value.shape()) != weight.value.shape:
        fault = f"the loader gave {value.data_type()} of shape {tuple(value.shape())}"
        raise MismatchError(f"{fault}, the model has {kind.name} of shape {weight.value.shape}", tensor=name)
    return value


def _is_on_device(tensor: Any) -> bool:
    """Return True if a tensor that supports DLPack is not in the host's memory."""
    device = getattr(tensor, "__dlpack_device__", None)
    if isinstance(tensor, np.ndarray) or device is None:
        return False
    device_type, _ = device()
    return int(device_type) != _DLPACK_CPU


def _with_inputs(record: Record, weights: Sequence[Initializer]) -> bytes:
    """Return the skeleton of a model with weights among the inputs of its graph."""
    skeleton = graph.skeleton_of(record)
    interface = interface_of(skeleton)
    own_inputs = dict(interface.inputs)
    inputs = b"".join(encode_field(_INPUT, _value_info(w)) for w in weights if w.name not in own_inputs)
    version = encode_varint(_IR_VERSION << 3 | VARINT) + encode_varint(max(interface.version, OVERRIDABLE))
    return b"".join([skeleton, encode_field(_GRAPH, inputs), version])


def _value_info(weight: Initializer) -> bytes:
    """Encode a weight's ValueInfoProto."""
    dims = b"".join(encode_field(1, b"\x08" + encode_varint(dim)) for dim in weight.value.shape)
    code = weight.dtype.onnx
    assert code is not None, "tensors of an ONNX model have element types of ONNX"
    tensor = b"\x08" + encode_varint(code) + encode_field(2, dims)
    return encode_field(_NAME, weight.name.encode()) + encode_field(2, encode_field(1, tensor))
