"""The wire scanner reads what protobuf allows, in any order and form, and refuses what it does not, saying where.

Fields that are there twice, in other wire types or with long tags are in `tests/formats/test_formats_agreement.py`.
"""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import onnx
import onnx_models as m
import pytest
from exhaustive import some
from onnx import TensorProto, helper, numpy_helper
from onnx_models import field, restored, varint, wire_model
from onnx_scans import converted, refused

from zcrecord.errors import LimitError, OnnxError
from zcrecord.onnx import convert, graph
from zcrecord.onnx.protobuf import reader

FLOATS = np.arange(1, 7, dtype="<f4")
DIMS = field(1, 2) + field(1, 3)
FLOAT = field(2, TensorProto.FLOAT)
NAME = field(8, b"w")
RAW = field(9, FLOATS.tobytes())


def one(code: int) -> bytes:
    """The fields of a tensor with one element of this type, without its value."""
    return field(1, 1) + field(2, code) + NAME


def check(t: bytes, name: str = "w", tail: bytes = b"") -> np.ndarray:
    """Convert a hand-made initializer, compare it with what onnx reads, and return it."""
    data = wire_model(t) + tail
    record = converted(data)
    assert record.names == (name,)
    theirs = onnx.ModelProto.FromString(data).graph.initializer[0]
    m.assert_equal(record[name], theirs)
    return m.stored(record[name])


# What is legal.


def typed(number: int, code: int, values: list[int], single: Callable[[int], bytes], wire: int = 0) -> Iterator[bytes]:
    """Yield a tensor with its values one by one, packed, in two runs, and mixed; each before and after the rest."""
    head, ones = field(1, len(values)) + field(2, code) + NAME, [single(v) for v in values]
    alone = [varint(number << 3 | wire) + one for one in ones]
    runs = field(number, ones[:1]) + field(number, ones[1:])
    for form in (b"".join(alone), field(number, ones), runs, alone[0] + field(number, ones[1:-1]) + alone[-1]):
        yield from (head + form, form + head)


def fixed(size: int) -> Callable[[int], bytes]:
    return lambda value: value.to_bytes(size, "little")


LEGAL: dict[str, Iterable[bytes]] = {
    "any order": map(b"".join, itertools.permutations([DIMS, FLOAT, NAME, RAW])),
    "raw_data before its type": (
        field(9, numpy_helper.from_array(np.array([1, 0, 1], helper.tensor_dtype_to_np_dtype(code))).raw_data)
        + NAME + field(2, code) + field(1, 3)
        for code in (TensorProto.FLOAT16, TensorProto.INT64, TensorProto.BOOL, TensorProto.INT4, TensorProto.UINT2)
    ),
    "empty runs": [DIMS + FLOAT + field(4, b"") + field(7, b"") + NAME + RAW,
                   DIMS + FLOAT + field(4, b"") + field(4, FLOATS.tobytes()) + NAME],
    "no elements": [*(field(1, 0) + field(1, 3) + FLOAT + NAME + v for v in (b"", field(9, b""), field(4, b""))),
                    field(1, 0) + field(2, TensorProto.STRING) + NAME],
    "int64": typed(7, TensorProto.INT64, [0, 127, 128, -1, 2**62, -(2**63)], varint),
    "int32": typed(5, TensorProto.INT32, [5, -7, 2**31 - 1], varint),
    "int8": typed(5, TensorProto.INT8, [5, -7, 127], varint),
    "bool": typed(5, TensorProto.BOOL, [1, 0, 1], varint),
    "uint64": typed(11, TensorProto.UINT64, [5, 0, 2**64 - 1], varint),
    "uint32": typed(11, TensorProto.UINT32, [5, 0, 2**32 - 1], varint),
    "float32": typed(4, TensorProto.FLOAT, [0x3FC00000, 0xC0000000, 0x7F800000, 0], fixed(4), 5),
    "float64": typed(10, TensorProto.DOUBLE, [0x3FF8 << 48, 0x7FF0 << 48, 0], fixed(8), 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", LEGAL)
def test_what_is_legal_is_read_as_onnx_reads_it(kind: str) -> None:
    for form in LEGAL[kind]:
        check(form)


def test_many_single_elements_stop_where_their_tensor_ends() -> None:
    values = [7, -1, 300] * 2000
    one = field(1, len(values)) + field(2, TensorProto.INT64) + field(8, b"a")
    one += b"".join(field(7, v) for v in values)
    two = field(1, 1) + field(2, TensorProto.INT64) + field(8, b"b") + field(7, 5)
    record = converted(wire_model(one, two))
    assert record["a"].tolist() == values
    assert record["b"].tolist() == [5]
    floats = field(1, 3) + FLOAT + field(8, b"a") + b"\x25\0\0\x80\x3f" * 3
    record = converted(field(7, field(5, floats)) + b"\x25\0\0\x80\x3f" * 2)  # unknown to ModelProto
    assert record["a"].tolist() == [1, 1, 1]


def test_varints_may_be_longer_than_they_need_be() -> None:
    long = varint(5 << 3 | 2, 4)  # a tag of four bytes
    data = field(7, long + varint(len(DIMS + FLOAT + NAME + RAW), 5) + DIMS + FLOAT + NAME + RAW)
    assert onnx.ModelProto.FromString(data).graph.initializer[0].name == "w"
    assert (converted(data)["w"] == FLOATS.reshape(2, 3)).all()
    check(field(1, 2) + varint(8) + varint(3, 9) + FLOAT + NAME + RAW)
    values = varint(3, 7) + varint(0, 2) + varint(-1) + varint(1)
    assert check(field(1, 4) + field(2, TensorProto.INT64) + field(7, values) + NAME).tolist() == [3, 0, -1, 1]


def test_a_graph_given_twice_is_merged() -> None:
    one, two = DIMS + FLOAT + field(8, b"a") + RAW, DIMS + FLOAT + field(8, b"b") + RAW
    data = field(7, field(5, one) + field(2, b"g")) + field(1, 9) + field(7, field(5, two))
    record = converted(data)
    assert record.names == ("a", "b")
    assert restored(record) == onnx.ModelProto.FromString(data)


def test_a_message_without_tensors_keeps_a_length_that_is_longer_than_it_need_be() -> None:
    node = field(2, b"y") + field(4, b"Relu")
    graph_ = b"\x0a" + bytes([len(node) | 128, 128, 0]) + node
    data = b"\x3a" + bytes([len(graph_) | 128, 128, 128, 0]) + graph_
    assert converted(data).attributes["onnx.graph"] == data


def attribute(*fields: bytes) -> bytes:
    """A model with one Constant node, whose attribute has these fields."""
    return wire_model(graph=field(1, [field(2, b"c"), field(5, [field(1, b"value"), *fields])]))


def test_a_tensor_given_twice_in_an_attribute_is_merged() -> None:
    start, rest = field(4, FLOATS[:2].tobytes()), field(4, FLOATS[2:].tobytes())
    for cut in ([DIMS + FLOAT, NAME + RAW], [RAW, DIMS + FLOAT], [b"", DIMS + FLOAT + RAW], [DIMS + FLOAT + RAW, b""],
                [field(1, 2), FLOAT, field(1, 3), RAW], [FLOAT + start, DIMS + rest],
                [FLOAT + field(9, FLOATS[:1].tobytes()), field(1, 1)]):  # fmt: skip
        data = attribute(*(field(5, part) for part in cut))
        theirs = onnx.ModelProto.FromString(data)
        record = converted(data)
        m.assert_equal(record["c.value"], theirs.graph.node[0].attribute[0].t)
        assert m.normal(restored(record)) == m.normal(theirs)


def test_unknown_fields_and_groups_are_skipped_and_kept() -> None:
    group = varint(100 << 3 | 3) + field(1, b"xx") + varint(9 << 3 | 3) + varint(9 << 3 | 4) + varint(100 << 3 | 4)
    odd = field(1000, 7) + field(1001, b"abc") + varint(1002 << 3 | 1) + bytes(8) + varint(1003 << 3 | 5) + bytes(4)
    data = wire_model(DIMS + odd + group + FLOAT + NAME + RAW, graph=group + odd) + group + odd
    record = converted(data)
    assert (record["w"] == FLOATS.reshape(2, 3)).all()
    assert b"".join(graph.restore(record).parts) == data


def test_names_of_nodes_may_come_after_their_tensors() -> None:
    t = DIMS + FLOAT + RAW
    node = field(5, field(5, t) + field(1, b"value")) + field(2, b"out") + field(3, b"late")
    function = field(7, node) + field(10, b"dom") + field(1, b"fun") + field(13, b"v2")
    record = converted(wire_model(graph=field(1, node)) + field(25, function))
    assert record.names == ("late.value", "function.dom:fun:v2.late.value")


def test_a_stream_may_hand_out_one_byte_at_a_time_and_needs_no_more_than_read() -> None:
    class Reader:
        def __init__(self, data: bytes) -> None:
            self.read = io.BytesIO(data).read

    tensors = numpy_helper.from_array(np.arange(300), "w"), numpy_helper.from_array(np.ones(3), "v")
    data = m.model_of(*tensors).SerializeToString()
    archives = []
    for source in (io.BytesIO(data), m.Forward(data, 1), Reader(data)):
        out = io.BytesIO()
        convert(source, out)  # type: ignore[arg-type]
        archives.append(out.getvalue())
    assert archives[0] == archives[1] == archives[2]


def test_a_window_of_200_bytes_gives_the_same_archives(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [path.read_bytes() for path in some(m.packaged_models(), 60)]
    wide = [m.converted(data) for data in models]
    monkeypatch.setattr(reader, "WINDOW", 200)
    for data, record in zip(models, wide, strict=True):
        assert m.converted(data).content_digest() == record.content_digest()
        assert restored(record) == m.normal(onnx.ModelProto.FromString(data))


# What is malformed, or refused.


def test_truncation_at_every_byte_is_an_error_or_a_correct_result() -> None:
    model = m.model_of(
        numpy_helper.from_array(np.arange(6.0), "a.w"),
        helper.make_tensor("b", TensorProto.INT64, [2], [-1, 300]),
        helper.make_tensor("s", TensorProto.STRING, [1], [b"x"]),
        nodes=[helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.arange(4)))],
    )
    data = model.SerializeToString()
    whole = {name: m.stored(value).tolist() for name, value in converted(data).items()}
    for cut in range(len(data)):
        try:
            record = m.converted(data[:cut])
        except OnnxError as error:
            assert re.match(r"byte 0x|empty|no graph|tensor '", str(error))
        else:
            assert {name: m.stored(value).tolist() for name, value in record.items()} == whole


@pytest.mark.parametrize("data, message", [
    (b"", "empty, not an ONNX model"),
    (b"\x08\x09", "no graph"),
    (b"PK\x03\x04" + bytes(60), "this is a zip file"),
    (b"<!DOCTYPE html>" + bytes(60), "this is a web page, not an ONNX model"),
    (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer, not an ONNX model; fetch the file itself"),
    (b"\x89ZCR\r\n\x1a\n" + bytes(60), "this is a zcrecord archive, not an ONNX model"),
])  # fmt: skip
def test_other_files_are_told_apart(data: bytes, message: str) -> None:
    refused(data, message)


@pytest.mark.parametrize("data, message", [
    (field(7, b"\x2a\x7fxx"), "field 5 reaches past the end of the message it is in"),
    (field(7, b"\x00\x00"), "a field with number 0"),
    (field(7, b"\x2e\x00"), "field 5 has wire type 6, which does not exist"),
    (field(7, b"\x2c"), "the end of group 5, which was never started"),
    (field(7, b"\x2b\x34"), "group 5 ends as group 6"),
    (field(7, b"\x2b\x08\x01"), "group 5 never ends"),
    (field(7, b"\x08" + b"\x80" * 10 + b"\x01"), "a varint of more than 10 bytes"),
    (field(7, b"\xff\xff\xff\xff\x7f\x00"), "a tag of more than 32 bits"),
    (b"\x3a" + varint(2**31), "claims 2147483648 bytes, more than protobuf's 2 GiB"),
    (b"\x3a\x05\x0a", "a node|the stream ends inside a field|inside"),
    (field(7, field(1, b"\x2a\x05\x0a")), "field 5 reaches past the end of the message it is in"),
    (field(7, field(1, field(5, b"\x0a\x05"))), "field 1 reaches past the end of the message it is in"),
])  # fmt: skip
def test_malformed_messages_are_refused_with_the_offset(data: bytes, message: str) -> None:
    error = refused(data, message)
    assert str(error).startswith("byte 0x")
    assert "the model is truncated or damaged, copy or export it again" in str(error)
    with pytest.raises(Exception, match=r"(?i)pars|decod|corrupt|truncat|varint|2GB|wire"):
        onnx.ModelProto.FromString(data)  # protobuf refuses it too


@pytest.mark.parametrize("t, message", [
    (DIMS + FLOAT + NAME + RAW + RAW, "tensor 'w': byte 0x[0-9a-f]+: raw_data twice; values come in one field, once"),
    (DIMS + FLOAT + NAME + RAW + field(4, FLOATS.tobytes()), "float_data besides raw_data"),
    (DIMS + FLOAT + NAME + field(7, varint(1) * 6), "float32 keeps its values in raw_data or float_data, got int64_d"),
    (DIMS + field(7, varint(1) * 6) + FLOAT + NAME, "float32 keeps its values in raw_data or float_data, got int64_d"),
    (one(TensorProto.STRING) + field(9, b"x"), "string keeps its values in string_data, got raw_data"),
    (DIMS + NAME + RAW, "no data_type"),
    (DIMS + field(2, 99) + NAME + RAW, "data_type 99 is not known here; export the model again, or upgrade zcrecord"),
    (DIMS + field(2, -1) + NAME + RAW, "data_type 4294967295 is not known here"),
    (DIMS + FLOAT + NAME + field(9, FLOATS[1:].tobytes()), r"float32 of shape \[2, 3\] takes 24 bytes, got 20 in raw"),
    (DIMS + FLOAT + NAME, "takes 24 bytes, got 0 in no value field"),
    (DIMS + FLOAT + NAME + field(4, FLOATS[1:].tobytes()), "takes 24 bytes, got 20 in float_data"),
    (DIMS + FLOAT + NAME + field(4, FLOATS.tobytes()[:-1]), "float_data of 23 bytes, not a multiple of 4"),
    (field(1, 2) + field(2, TensorProto.STRING) + NAME + field(6, b"x"), "takes 2 strings, got 1 in string_data"),
    (field(1, -2) + FLOAT + NAME + RAW, r"a negative dimension in \[-2\]"),
    (DIMS + FLOAT + NAME + field(3, field(1, 0)), "it is one segment of a tensor, which is not supported"),
    (DIMS + FLOAT + NAME + field(14, 2), "data_location 2 is neither DEFAULT nor EXTERNAL"),
    (one(TensorProto.INT8) + field(5, varint(128)), "int32_data holds 128, out of range for int8"),
    (one(TensorProto.FLOAT16) + field(5, varint(65536)), "holds 65536, out of range for float16"),
    (one(TensorProto.INT4) + field(5, 256), "int32_data holds 256, out of range for int4"),
    (one(TensorProto.UINT32) + field(11, varint(2**32)), "uint64_data holds 4294967296, out of range for uint32"),
    (one(TensorProto.INT64) + field(7, b"\x80"), "int64_data ends inside a varint"),
    (field(5, b"\x80") + one(TensorProto.INT8), "int32_data ends inside a varint"),
    (field(5, b"\x81") + field(5, 1) + one(TensorProto.INT8), "int32_data ends inside a varint"),
    (one(TensorProto.INT64) + field(7, b"\x80" * 11 + b"\x01"), "a varint of more than 10 bytes"),
    (field(5, varint(-1)) + field(5, b"\x01" + b"\x80" * 10 + b"\x01") + one(TensorProto.INT32),
     "byte 0x15: int32_data holds a varint of more than 10 bytes"),
    (field(9, b"\x02") + field(2, TensorProto.BOOL) + field(1, 1) + NAME, "bools other than 0 and 1 before the data_"),
    (field(13, [field(1, b"location"), field(2, b"x")]) * 2 + FLOAT + NAME, "external_data key 'location' twice"),
    (field(1, b"\x80") + FLOAT + NAME + RAW, "dims end inside a varint"),
])  # fmt: skip
def test_malformed_tensors_are_refused_with_the_offset(t: bytes, message: str) -> None:
    assert "byte 0x" in str(refused(wire_model(t), message))


def test_values_may_not_be_split_around_those_of_another_tensor() -> None:
    part = FLOAT + field(4, FLOATS[:2].tobytes())
    other = field(10, DIMS + FLOAT + RAW)
    data = attribute(field(5, DIMS + part), other, field(5, field(4, FLOATS[2:].tobytes())))
    refused(data, "values in two places, with those of another tensor in between")


def test_shape_and_type_may_not_change_after_packed_values() -> None:
    first = field(2, TensorProto.INT4) + field(9, b"\x21")
    refused(attribute(field(5, first), field(10, DIMS + FLOAT + RAW), field(5, field(1, 2))), "change after the values")


def test_rank_65_is_refused() -> None:
    ones = field(1, 1) * 64
    assert check(ones + FLOAT + NAME + field(9, bytes(4))).shape == (1,) * 64
    refused(wire_model(ones + field(1, 1) + FLOAT + NAME + field(9, bytes(4))), "more than 64 dimensions")
    refused(wire_model(field(1, b"\x01" * 65) + FLOAT + NAME + field(9, bytes(4))), "more than 64 dimensions")


def test_shapes_beyond_what_an_archive_holds_are_refused() -> None:
    refused(wire_model(field(1, 0) + field(1, 2**60) + FLOAT + NAME), r"more than 2\^56 bytes", LimitError)


def test_nesting_is_limited_as_protobuf_limits_it() -> None:
    tensor, nodes = field(5, FLOAT + NAME + field(9, bytes(4))), field(1, field(2, b"x")) * 20

    def nested(depth: int, inner: bytes = tensor) -> bytes:
        for _ in range(depth):
            inner = field(1, field(3, b"n") + field(5, field(1, b"a") + field(6, inner)))
        return field(7, inner)

    assert len(converted(nested(32))) == len(list(m.every_tensor(onnx.ModelProto.FromString(nested(32))))) == 1
    for data in (nested(33), nested(34), nested(5000), nested(33, nodes)):
        refused(data, "nested more than 100 deep; flatten the model")
        with pytest.raises(Exception, match=r"(?i)pars|decod"):
            onnx.ModelProto.FromString(data)
    group = varint(100 << 3 | 3) * 101 + varint(100 << 3 | 4) * 101
    refused(wire_model() + group, "nested more than 100 deep")


def test_typed_values_before_their_data_type_are_held_up_to_a_bound() -> None:
    head = field(1, 1 << 20) + field(2, TensorProto.INT8) + NAME
    assert len(check(field(5, bytes(1 << 20)) + head)) == 1 << 20
    for early in (field(5, bytes((1 << 20) + 1)), field(5, bytes(1 << 20)) + field(5, 1)):
        refused(wire_model(early + head), "more than 1048576 bytes of int32_data before the data_type")


def test_a_name_longer_than_64_kib_is_refused() -> None:
    check(DIMS + FLOAT + field(8, b"n" * 65536) + RAW, "n" * 65536)
    refused(wire_model(DIMS + FLOAT + field(8, b"n" * 65537) + RAW), "a name of 65537 bytes, more than 65536")
    refused(wire_model(graph=field(1, field(2, b"n" * 65537))), "a name of 65537 bytes, more than 65536")
