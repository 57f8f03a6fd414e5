"""torch's tensors and modules are saved from their own memory, bit for bit, ties and all; what cannot be is refused."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from forked import run_torch

import zcrecord
from zcrecord.dtypes import DTYPES, DType, by_name
from zcrecord.errors import UnsupportedError
from zcrecord.tensors import interop

KINDS = [d for d in DTYPES if d.torch and hasattr(torch, d.torch)]


def random_tensor(kind: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bit patterns that the element type can have."""
    assert kind.torch is not None
    dtype = getattr(torch, kind.torch)
    raw = np.frombuffer(bytearray(r.filled(kind, shape).tobytes()), np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


def address_of(value: Any) -> int:
    """Return the address at which `as_array` sees element [0, ..., 0] of a tensor."""
    array = interop.as_array(value)
    assert isinstance(array, np.ndarray)
    return r.address(array)


class Tied(torch.nn.Module):  # type: ignore[misc]
    """A model as people write them: tied weights, a buffer, a view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("rows", self.embed.weight.detach()[2:5])


@pytest.mark.parametrize("kind", KINDS, ids=lambda d: d.name)
def test_every_element_type_is_seen_in_its_own_memory_and_saved_bit_for_bit(kind: DType) -> None:
    tensors = {str(shape): random_tensor(kind, shape) for shape in [(), (0, 3), (7,), (3, 1, 5), (4, 6)]}
    rec = r.round_trip(tensors)
    for name, tensor in tensors.items():
        assert (rec[name].dtype, rec[name].shape) == (kind.numpy, tensor.shape)
        assert rec[name].tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert address_of(tensor) == tensor.data_ptr()
    turned = tensor.t()[1:]
    array = interop.as_array(turned)
    assert isinstance(array, np.ndarray) and r.address(array) == turned.data_ptr()
    assert array.strides == tuple(s * tensor.itemsize for s in turned.stride())


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda t: t.permute(3, 1, 0, 2),
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "steps": lambda t: t[:, ::2, 1:, ::3],
    "expanded": lambda t: t[:1].expand(5, -1, -1, -1),
    "scalar": lambda t: t[1, 2, 3, 4],
    "parameter": torch.nn.Parameter,
    "result of autograd": lambda t: t.requires_grad_() * 1,
    "subclass": lambda t: t.as_subclass(type("Mine", (torch.Tensor,), {})),
    "inference": lambda t: torch.inference_mode()(t.clone)(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_any_layout_are_seen_where_they_lie_and_come_back_equal(name: str) -> None:
    tensor = LAYOUTS[name](torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5))
    assert address_of(tensor) == tensor.data_ptr()
    np.testing.assert_array_equal(r.round_trip({"x": tensor})["x"], tensor.detach().numpy())


def test_conjugate_and_negated_views_are_saved_as_what_they_stand_for() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert tensor.conj().is_conj() and tensor.conj().imag.is_neg()
    rec = r.round_trip({"conj": tensor.conj(), "neg": tensor.conj().imag})
    assert (rec["conj"].tolist(), rec["neg"].tolist()) == ([1 - 2j, 3 + 4j], [-2, 4])


@pytest.mark.parametrize("shape, transposed", [((2, 3), False), ((2, 3), True), ((0, 3), False)])
def test_pairs_of_float4_are_twice_as_many_elements_the_first_in_the_low_bits_uncopied(
    shape: tuple[int, int], transposed: bool
) -> None:
    raw = torch.arange(1, 1 + shape[0] * shape[1], dtype=torch.uint8).reshape(shape) * 17 - 1
    raw = raw.t() if transposed else raw
    tensor = raw.view(torch.float4_e2m1fn_x2)
    packed = r.round_trip({"x": tensor})["x"]
    assert isinstance(packed, zcrecord.PackedTensor) and packed.kind is by_name["float4_e2m1fn"]
    assert packed.shape == (*raw.shape[:-1], 2 * raw.shape[-1])
    assert packed.packed.tolist() == raw.reshape(-1).tolist()
    bits = packed.unpack().view(np.uint8)
    assert bits[..., 0::2].tolist() == (raw & 15).tolist()
    assert bits[..., 1::2].tolist() == (raw >> 4).tolist()
    seen = interop.as_array(tensor)
    assert isinstance(seen, zcrecord.PackedTensor)
    assert transposed or not raw.numel() or r.address(seen.packed) == tensor.data_ptr()


def test_a_module_is_saved_as_its_state_dict_whose_names_stay_whole_ties_and_views_included() -> None:
    model = Tied()
    rec, flat = r.round_trip(model), r.round_trip(model.state_dict())
    assert list(rec) == list(flat) == list(model.state_dict())
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(rec[name], tensor.numpy())
    assert set(rec.info("embed.weight").tied) == {"embed.weight", "head.weight", "rows"}
    assert r.address(rec["head.weight"]) == r.address(rec["embed.weight"])
    assert r.address(rec["rows"]) == r.address(rec["embed.weight"][2:])
    assert set(rec.tree()) == {"embed", "norm", "head", "rows"} and "embed.weight" in flat.tree()


def test_modules_may_stand_anywhere_in_a_record_and_equal_parameters_are_stored_once_and_not_tied() -> None:
    model = Tied()
    rec = r.round_trip({"step": 3, "models": [model, torch.nn.Linear(2, 2)], "again": model.embed.weight})
    assert rec.attributes == {"step": 3}
    assert rec.tree()["models"][0]["norm"]["weight"].shape == (4,)
    assert rec.info("again").payload == rec.info("models.0.head.weight").payload
    rec = r.round_trip({"a": torch.nn.LayerNorm(8), "b": torch.nn.LayerNorm(8)})
    assert (rec.nbytes, rec.info("a.weight").tied) == (64, ())


class Extra(torch.nn.Module):  # type: ignore[misc]
    """A module with state besides its tensors."""

    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.extra = extra
        self.lin = torch.nn.Linear(2, 2)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [None, [1, 2], {"a": 1, "t": torch.ones(2)}, torch.ones(3)], ids=repr)
def test_extra_state_of_plain_values_and_tensors_is_saved(extra: Any) -> None:
    tree = r.round_trip(torch.nn.Sequential(Extra(extra))).tree()["0"]["_extra_state"]
    if type(extra) is dict:
        r.assert_same(tree, {"a": 1, "t": np.ones(2, np.float32)})
    else:
        r.assert_same(tree, extra.numpy() if isinstance(extra, torch.Tensor) else extra)


def fake() -> torch.Tensor:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(3)


def cut_off(size: int, *, transposed: bool = False) -> torch.Tensor:
    tensor = torch.ones(1000)[10:]
    tensor = tensor.view(10, 99).t() if transposed else tensor
    tensor.untyped_storage().resize_(size)
    return tensor


class Wrapper(torch.Tensor):  # type: ignore[misc]
    """Stands for what has no memory of its own: distributed tensors, quantized ones of other packages."""

    @staticmethod
    def __new__(cls, tensor: torch.Tensor, **options: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, tensor.shape, dtype=tensor.dtype, **options)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("nobody computes with it")


class Sharded(Wrapper):
    """Stands for a DTensor."""

    def full_tensor(self) -> torch.Tensor:
        raise AssertionError("gathering is the caller's")


def masked() -> torch.Tensor:
    from torch.masked import masked_tensor

    return masked_tensor(torch.ones(2), torch.tensor([True, False]))


def batched() -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    torch.vmap(note)(torch.ones(2, 3))
    return seen[0]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: torch.empty(3, device="meta"), "a meta tensor has no values; load or initialise it"),
    "fake": (fake, "a FakeTensor has no values; save the real tensor"),
    "sparse": (lambda: torch.eye(3).to_sparse(), r"layout torch\.sparse_coo; .*\.indices\(\) and \.values\(\)"),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), r"layout torch\.sparse_csr; .*\.values\(\) and both kinds of ind"),
    "mkldnn": (lambda: torch.ones(3).to_mkldnn(), r"layout torch\._mkldnn; \.to_dense\(\) it"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8), r"save its \.int_repr\(\)"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), r"nested tensor; .*\.unbind\(\)"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        r"nested tensor; save its \.values\(\) and \.offsets\(\)",
    ),
    "masked": (masked, r"a MaskedTensor; save its \.get_data\(\) and \.get_mask\(\)"),
    "wrapper": (lambda: Wrapper(torch.ones(3)), "a Wrapper computes its values from other tensors; save those"),
    "wrapper elsewhere": (lambda: Wrapper(torch.ones(3), device="cuda"), "a Wrapper computes its values"),
    "spread": (lambda: Sharded(torch.ones(3)), r"a Sharded is spread over processes; save its \.full_tensor\(\)"),
    "uninitialized": (lambda: torch.nn.LazyLinear(3).weight, "an uninitialized parameter has no values; run the"),
    "cut off": (lambda: cut_off(3996), "its storage holds 3996 of the 4000 bytes it reaches; it was freed or resized"),
    "freed, transposed": (lambda: cut_off(0, transposed=True), "its storage holds 0 of the 4000 bytes"),
    "half complex": (lambda: torch.zeros(3, dtype=torch.complex32), r"dtype torch\.complex32 has no place in an arch"),
    "int4 without rules": (lambda: torch.zeros(3, dtype=torch.uint8).view(torch.uint4), r"dtype torch\.uint4 has no"),
    "zero": (lambda: torch._efficientzerotensor(3), "numpy cannot view this Tensor: "),
    "inside vmap": (batched, "numpy cannot view this Tensor: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_has_no_values_in_memory_and_says_what_to_save(name: str) -> None:
    make, message = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about what is experimental
        value = make()
    for record in ({"m": {"x": value}}, {"m": r.Owner({"x": value})}):
        with pytest.raises(UnsupportedError, match=rf"tensor 'm\.x': .*{message}"):
            zcrecord.save_record(record, io.BytesIO())


def test_record_writer_and_lazy_tensors_take_tensors_one_at_a_time() -> None:
    parameters = dict(Tied().named_parameters())
    with zcrecord.RecordWriter(file := io.BytesIO()) as out:
        for name, parameter in parameters.items():
            out.add(name, parameter)
        pieces = (torch.full((1, 3), i, dtype=torch.bfloat16) for i in range(4))
        out.add("lazy", zcrecord.LazyTensor(torch.bfloat16, (4, 3), pieces))
        out.add("whole", zcrecord.LazyTensor(torch.float32, (2,), lambda: torch.ones(2, requires_grad=True)))
    rec = zcrecord.load_record(file.getvalue(), verify="full")
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(rec[name], parameter.detach().numpy())
    assert rec["lazy"].astype(float)[:, 0].tolist() == [0, 1, 2, 3]
    assert rec["whole"].tolist() == [1, 1]


# A device made of Python: torch sees tensors that are not in the host's memory, and asks `_copy_from` for them.
DEVICE = """
import io, sys
import numpy as np, torch, zcrecord
from zcrecord import LazyTensor
from zcrecord.tensors import interop
from zcrecord.writing import flatten
torch.utils.backend_registration._setup_privateuseone_for_python_backend("elsewhere")

class There(torch.Tensor):
    @staticmethod
    def __new__(cls, array, shown=True):
        dtype = torch.bfloat16 if array.dtype == np.int16 else torch.from_numpy(array).dtype
        made = torch._C._acc.create_empty_tensor(array.shape, dtype)
        made.__class__ = There
        return made

    def __init__(self, array, shown=True):
        self.array, self.shown = array, shown

    def data_ptr(self):
        return self.array.ctypes.data if self.shown else 0

fetched = []

@torch.library.impl("aten::detach", "privateuseone")
def detach(tensor):
    return There(tensor.array, tensor.shown)

@torch.library.impl("aten::_copy_from", "privateuseone")
def copy_from(source, target, non_blocking=False):
    fetched.append(tuple(source.shape))
    taken = torch.from_numpy(source.array)
    return target.copy_(taken.view(target.dtype) if target.dtype is torch.bfloat16 else taken)

a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4, dtype=np.int16)
"""
FETCHES = """
there = There(a)
assert there.device.type == "elsewhere"
lazy = flatten.as_tensor(there, "x")
assert isinstance(lazy, LazyTensor) and not fetched
file = io.BytesIO()
report = zcrecord.save_record({"a": there, "b": There(b), "tied": There(a), "part": There(a[:1]), "here": a}, file)
rec = zcrecord.load_record(file.getvalue(), verify="full")
assert fetched == [(2, 3), (4,), (1, 3)], fetched
assert (rec["a"] == a).all() and (rec["tied"] == a).all() and (rec["part"] == a[:1]).all()
assert rec["b"].dtype.name == "bfloat16" and rec["b"].tobytes() == b.tobytes()
assert rec.info("a").tied == ("a", "tied"), rec.info("a")
fetched.clear()
hidden = There(a, shown=False)
zcrecord.save_record({"x": hidden, "y": There(a + 1, shown=False), "z": hidden}, file := io.BytesIO())
rec = zcrecord.load_record(file.getvalue())
assert len(fetched) == 2 and (rec["y"] == a + 1).all() and rec.info("x").tied == ("x", "z")
fetched.clear()
with zcrecord.RecordWriter(file := io.BytesIO()) as out:
    out.add("x", there)
assert (zcrecord.load_record(file.getvalue())["x"] == a).all() and len(fetched) == 1
"""
ONE_AT_A_TIME = """
MIB = 1 << 20
record = {f"w{i}": There(np.full(MIB, i, np.float32)) for i in range(24)}

class Nowhere:
    def write(self, data):
        return len(data)

from tools.measure import memory, peak_rss
zcrecord.save_record({"x": There(a)}, Nowhere())
before = memory().rss
zcrecord.save_record(record, Nowhere())
grown = peak_rss() - before
assert len(fetched) == 25
kept = [tensor.cpu() for tensor in record.values()]
assert peak_rss() - before > 80 * MIB, "all of them at once would not be noticed"
assert grown < 40 * MIB, grown  # 4 each; the allocator keeps some, now and then 24
"""


def test_tensors_of_a_device_are_fetched_when_written_and_tied_ones_once() -> None:
    run_torch(DEVICE + FETCHES)


@pytest.mark.measured
def test_tensors_of_a_device_are_in_the_hosts_memory_one_at_a_time() -> None:
    run_torch(DEVICE + ONE_AT_A_TIME)


SAVED = """
import torch, zcrecord
from tools.measure import memory, peak_rss

class Nowhere:
    def write(self, data):
        return len(data)

def model(size):
    tensor = torch.ones(size, 1024, dtype=torch.bfloat16)
    turned = torch.ones(size // 2, 1024).t()
    return {{"a": torch.nn.Parameter(tensor), "t": tensor.t(), "rows": tensor[5:], "turned": turned}}

zcrecord.save_record(model(8), Nowhere())
record = model(1 << 14)
before = memory().rss
zcrecord.save_record({record}, Nowhere())
print(peak_rss() - before)
"""


@pytest.mark.measured
def test_saving_takes_no_memory_for_tensors_that_lie_in_one_piece() -> None:
    assert int(run_torch(SAVED.format(record="record")).stdout) < 8 << 20
    copy = "{k: v.detach().clone() for k, v in record.items()}"
    assert int(run_torch(SAVED.format(record=copy)).stdout) > 60 << 20, "a copy would not be noticed"
