"""jax's arrays and pytrees are saved from their own memory; `Record.jax` gives arrays over the archive's if it can."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import records as r
from jax import tree_util
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding
from split_catalogues import boxes_along, save_split

import zcrecord
from tools.range_server import serving
from zcrecord import MismatchError
from zcrecord.dtypes import DTYPES, DType
from zcrecord.errors import IntegrityError, LimitError, TensorNotFoundError, UnsupportedError
from zcrecord.tensors import interop


def takes(kind: DType) -> bool:
    """Return True if jax has an element type; older releases lack some."""
    try:
        jax.device_put(np.zeros(1, kind.numpy))
    except (RuntimeError, TypeError, ValueError):
        return False
    return True


NUMERIC = [d for d in DTYPES if d.numpy is not None]
KINDS = [d for d in NUMERIC if takes(d)]
WIDE = [d for d in KINDS if d.bits == (128 if d.name.startswith("complex") else 64)]
NARROW = [d for d in KINDS if d not in WIDE]
MIB = 1 << 20
ONE = np.ones(4, np.float32)


def address_of(array: jax.Array) -> int:
    """Return a finished jax array's address: asking before would hold the GIL that a copy under way needs."""
    where: int = array.block_until_ready().unsafe_buffer_pointer()
    return where


def bits_of(array: r.Array, kind: DType) -> bytes:
    """Return an array's elements, without the bits of each byte that they do not use."""
    return zcrecord.PackedTensor.pack(array).packed.tobytes() if kind.packed else array.tobytes()


def opened(folder: Path, record: Any, *, mode: Any = "r", **options: Any) -> zcrecord.Record:
    zcrecord.save_record(record, folder / "model.zcr", durable=False, **options)
    return zcrecord.load_record(folder / "model.zcr", mode=mode)


SHAPES = [(), (1,), (0, 3), (7,), (3, 1, 5), (30, 100)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", NARROW, ids=lambda d: d.name)
def test_every_element_type_is_saved_and_comes_back_bit_for_bit_copied_only_if_it_is_narrow(
    kind: DType, tmp_path: Path
) -> None:
    arrays = {str(shape): r.filled(kind, shape) for shape in SHAPES}
    rec = opened(tmp_path, {name: jax.device_put(array) for name, array in arrays.items()})
    found = rec.jax()
    for name, array in arrays.items():
        r.assert_same(rec[name], array)
        assert (found[name].dtype, found[name].shape) == (kind.numpy, array.shape)
        assert bits_of(np.asarray(found[name]), kind) == bits_of(array, kind)
        if array.size:
            own = r.address(rec[name].packed if kind.packed else rec[name])
            assert (address_of(found[name]) == own) is not kind.packed
    seen = interop.as_array(array := jnp.array(arrays["(3, 1, 5)"]))
    assert kind.packed or (isinstance(seen, np.ndarray) and r.address(seen) == address_of(array))


def test_one_array_in_two_places_is_tied_and_equal_ones_are_not() -> None:
    array, narrow = jnp.ones((2, 3)), jnp.ones(4, "int4")
    rec = r.round_trip({"a": array, "b": [array], "c": jnp.ones((2, 3)), "d": narrow, "e": narrow})
    assert set(rec.info("a").tied) == {"a", "b.0"}
    assert set(rec.info("d").tied) == {"d", "e"}
    assert rec.info("c").tied == ()


@dataclasses.dataclass
class Layer:
    """A dataclass as jax knows it: fields that are data, and fields that are structure."""

    weight: Any
    bias: Any
    activation: Callable[[Any], Any] = jnp.tanh
    width: int = 3


tree_util.register_dataclass(Layer, data_fields=["weight", "bias"], meta_fields=["activation", "width"])


@tree_util.register_pytree_with_keys_class
class Keyed:
    """A class that tells jax its children by name."""

    def __init__(self, keys: list[str], children: list[Any]) -> None:
        self.keys, self.children = keys, children

    def tree_flatten_with_keys(self) -> Any:
        pairs = [(tree_util.GetAttrKey(k), c) for k, c in zip(self.keys, self.children, strict=True)]
        return pairs, tuple(self.keys)

    @classmethod
    def tree_unflatten(cls, keys: Any, children: Any) -> Keyed:
        return cls(list(keys), list(children))


@tree_util.register_pytree_node_class
@dataclasses.dataclass
class Plain:
    """A class that gives jax its children in order, without names."""

    children: tuple[Any, ...]

    def tree_flatten(self) -> Any:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Plain:
        return cls(tuple(children))


def test_registered_classes_become_modules_with_the_keys_that_jax_has_for_them() -> None:
    model = Keyed(["encoder", "none", "step"], [[Layer(jnp.ones((2, 3)), None)], None, 5])
    rec = r.round_trip({"model": model, "pair": Plain((jnp.zeros(2), {"x": jnp.ones(1)})), "empty": Keyed([], [])})
    assert list(rec) == ["model.encoder.0.weight", "pair.0", "pair.1.x"]
    assert {name.removeprefix("model."): value for name, value in rec.attributes.items()} == {
        "encoder.0.bias": None, "encoder.0.width": 3, "none": None, "step": 5,
    }  # fmt: skip
    modules = {name: module.type_name for name, module in rec.modules.items() if module.type_name}
    assert modules == {"model": "Keyed", "model.encoder.0": "Layer", "pair": "Plain", "empty": "Keyed"}


def deleted() -> jax.Array:
    array = jnp.ones(3)
    array.delete()
    return array


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (deleted, "an array that was deleted or donated has no values"),
    (lambda: jax.ShapeDtypeStruct((2,), "float32"), "a ShapeDtypeStruct is neither a tensor"),
    (lambda: jnp.zeros(2, "float8_e4m3b11fnuz"), "dtype float8_e4m3b11fnuz has no place in an archive"),
]


def test_refuses_what_has_no_values_and_says_what_to_save() -> None:
    for make, message in REFUSED:
        with pytest.raises(UnsupportedError, match=rf"tensor 'm\.x': {message}"):
            r.saved({"m": {"x": make()}})
    with pytest.raises(UnsupportedError, match="the pytree Keyed has two children with the key 'a'"):
        r.saved({"x": Keyed(["a", "a"], [ONE, ONE])})


def test_refuses_arrays_that_are_being_traced() -> None:
    @jax.jit  # type: ignore[untyped-decorator]
    def function(x: jax.Array) -> jax.Array:
        with pytest.raises(UnsupportedError, match="tensor 'x': a traced array has no values; save outside of jit"):
            r.saved({"x": x})
        return x

    function(jnp.ones(2))


# Four devices are made of one CPU, before jax is imported.
SHARDED = """
import io, os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, zcrecord
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from zcrecord import LazyTensor
from zcrecord.tensors import interop
from zcrecord.writing import flatten
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))

def spread(array, *axes):
    return jax.device_put(array, NamedSharding(mesh, P(*axes)))
"""
GATHERED = """
a, b = np.arange(64.0, dtype=np.float32).reshape(8, 8), np.arange(8).astype("int4")
arrays = {"both": spread(a, "x", "y"), "rows": spread(a, "x"), "one axis of two": spread(a, None, "y"),
          "everywhere": spread(a), "narrow": spread(b, "x"), "scalar": spread(np.float32(3)),
          "second": jax.device_put(a, jax.devices()[1])}
lazy = flatten.as_tensor(arrays["both"], "x")
assert isinstance(lazy, LazyTensor), lazy
for name, array in arrays.items():
    seen = interop.as_array(array)
    assert (np.asarray(seen) == np.asarray(array)).all(), name
arrays["tied"] = arrays["both"]
zcrecord.save_record(arrays, file := io.BytesIO())
rec = zcrecord.load_record(file.getvalue(), verify="full")
for name, array in arrays.items():
    got = rec[name].unpack() if name == "narrow" else rec[name]
    assert got.dtype == array.dtype and (got == np.asarray(array)).all(), name
assert rec.info("both").tied == ("both", "tied")
"""
ONE_AT_A_TIME = """
import tracemalloc

class Nowhere:
    def write(self, data):
        return len(data)

arrays = {str(i): spread(np.full((1024, 1024), i, np.float32), "x", "y") for i in range(8)}
zcrecord.save_record({"x": spread(np.ones((8, 8)), "x")}, Nowhere())
tracemalloc.start()
zcrecord.save_record(arrays, Nowhere())
peak = tracemalloc.get_traced_memory()[1]
kept = [np.asarray(array) for array in arrays.values()]
assert tracemalloc.get_traced_memory()[0] > 30 << 20, "all of them at once would not be noticed"
assert peak < 10 << 20, peak
"""


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("what", ["GATHERED", "ONE_AT_A_TIME"])
def test_arrays_spread_over_devices_are_gathered_one_at_a_time(what: str) -> None:
    r.run_python(SHARDED + {"GATHERED": GATHERED, "ONE_AT_A_TIME": ONE_AT_A_TIME}[what])


def test_other_strides_and_mode_c_are_copied_so_that_no_edit_reaches_an_array(tmp_path: Path) -> None:
    for array, mode in ((np.asfortranarray(np.ones((8, 16), np.float32)), "r"), (ONE, "c")):
        rec = opened(tmp_path, {"x": array}, mode=mode)
        found = rec.jax()["x"]
        assert address_of(found) != r.address(rec["x"])
        assert np.array_equal(found, array)
    rec["x"][:] = 5
    assert (found.tolist(), rec.jax()["x"].tolist()) == ([1] * 4, [5] * 4)


def test_archives_of_a_lesser_alignment_are_copied_where_it_shows(tmp_path: Path) -> None:
    rec = opened(tmp_path, {str(i): np.full(4, i, np.float32) for i in range(4)}, alignment=16)
    found = rec.jax()
    copied = {name: address_of(found[name]) != r.address(rec[name]) for name in rec}
    assert copied == {name: r.address(rec[name]) % 64 != 0 for name in rec}
    assert sum(copied.values()) == 3
    assert [array.tolist() for array in found.values()] == [[i] * 4 for i in range(4)]


def test_tied_tensors_are_one_array_and_equal_ones_are_two(tmp_path: Path) -> None:
    base = np.arange(6, dtype=np.float32)
    tree = {"a": base, "b": base, "part": base[:3], "turned": base.reshape(2, 3).T, "equal": base.copy()}
    found = opened(tmp_path, tree).jax()
    assert found["a"] is found["b"]
    assert found["equal"] is not found["a"]
    for name, array in tree.items():
        assert np.array_equal(found[name], array), name


def test_views_of_the_same_bytes_are_not_copied_out_of_proportion(tmp_path: Path) -> None:
    w = np.zeros(1 << 20, np.uint8)
    record = opened(tmp_path, {f"w{i}": w[i:] for i in range(1200)})
    shardings: tuple[Any, ...] = (None, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for one in shardings:
        with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
            record.jax(shardings=one)
    assert len(opened(tmp_path, dict.fromkeys((f"w{i}" for i in range(1200)), w)).jax()) == 1200  # one array


@pytest.mark.parametrize("kind", WIDE, ids=lambda d: d.name)
def test_64_bits_are_kept_or_refused_never_halved(kind: DType, tmp_path: Path) -> None:
    array = r.filled(kind, (5,))
    rec = opened(tmp_path, {"m": {"x": array, "y": ONE}})
    half = str(jax.device_put(np.zeros(1, kind.numpy)).dtype)
    message = rf"tensor 'm\.x': jax would make {half} of {kind.name}, unless jax\.config\.update\(\"jax_enable_x64\""
    with pytest.raises(UnsupportedError, match=message):
        rec.jax()
    assert list(rec.jax(names=lambda tensor: tensor.dtype.name != kind.name)) == ["m.y"]
    jax.config.update("jax_enable_x64", True)
    try:
        found = rec.jax()["m.x"]
        assert address_of(found) == r.address(rec["m.x"])
        assert np.asarray(found).tobytes() == array.tobytes()
        r.assert_same(r.round_trip({"x": found})["x"], array)
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("kind", [d for d in DTYPES if d not in KINDS], ids=lambda d: d.name)
def test_tensors_that_jax_has_no_type_for_come_as_the_records_views(kind: DType, tmp_path: Path) -> None:
    value = np.array(["a"]) if kind.numpy is None else zcrecord.PackedTensor.pack(r.filled(kind, (4,)))
    rec = opened(tmp_path, {"m": {"x": value, "w": ONE}})
    found = rec.jax()
    assert list(found) == ["m.x", "m.w"]
    r.assert_same(found["m.x"], value)
    assert address_of(found["m.w"]) == r.address(rec["m.w"])
    r.assert_same(rec.tree("jax", like={"m": {"x": value, "w": ONE}})["m"]["x"], value)


def test_arrays_outlive_their_record(tmp_path: Path) -> None:
    with opened(tmp_path, {"x": ONE}) as rec:
        found = rec.jax()["x"]
    del rec
    gc.collect()
    (tmp_path / "model.zcr").unlink()
    assert (found + 1).tolist() == [2] * 4


DONATED = """
import sys, warnings
import jax, zcrecord
warnings.simplefilter("ignore")  # jax may say that it cannot use what it is given
rec = zcrecord.load_record(sys.argv[1])
array = rec.jax()["x"].block_until_ready()
assert array.unsafe_buffer_pointer() == rec["x"].__array_interface__["data"][0]
print(jax.jit(lambda x: x + 1, donate_argnums=0)(array).tolist(), rec["x"].tolist())
"""


@pytest.mark.slow
def test_donating_an_array_writes_nothing_into_the_mapping(tmp_path: Path) -> None:
    opened(tmp_path, {"x": ONE})
    assert r.run_python(DONATED, tmp_path / "model.zcr").stdout.strip() == f"{[2.0] * 4} {[1.0] * 4}"


MEMORY = """
import gc, sys
import jax, zcrecord
from tools.measure import memory
kept = zcrecord.load_record(sys.argv[2]).jax()
gc.collect()
before = memory()
found = zcrecord.load_record(sys.argv[1]).jax()
jax.block_until_ready({kept})
after = memory()
print(after.private - before.private)
"""


@pytest.mark.measured
@pytest.mark.skipif(sys.platform != "linux", reason="platform: only Linux tells private from shared memory")
def test_arrays_take_no_private_memory_where_a_copy_would_be_noticed(tmp_path: Path) -> None:
    for name, each in (("large", 16 * MIB), ("small", 160)):
        record = {f"w{i}": np.full(each // 4, i, np.float32) for i in range(4)}
        zcrecord.save_record(record, tmp_path / name, durable=False)
    private = [
        int(r.run_python(MEMORY.format(kept=kept), tmp_path / "large", tmp_path / "small").stdout)
        for kept in ("found", "copies := {k: a.copy() for k, a in found.items()}")
    ]
    assert private[0] < 8 * MIB
    assert private[1] > 64 * MIB


def test_without_jax_saving_works_and_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jax", None)
    rec = opened(tmp_path, {"x": np.ones(2), "n": 1})
    message = re.escape("pip install jax, or in a checkout of zcrecord pip install '.[jax]'")
    ways: list[dict[str, Any]] = [{}, {"shardings": {}}]
    for options in ways:
        with pytest.raises(zcrecord.DependencyError, match=message):
            rec.jax(**options)


# Trees.


PARAMS = {"w": jnp.arange(6.0).reshape(3, 2), "l": [jnp.ones(2), (jnp.zeros(1, jnp.int32),)]}


@tree_util.register_pytree_with_keys_class
class Box:
    """A class that only jax knows how to take apart."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def tree_flatten_with_keys(self) -> Any:
        return [(tree_util.GetAttrKey("inside"), self.inside)], None

    @classmethod
    def tree_unflatten(cls, _: Any, children: Any) -> Any:
        return cls(*children)


class Pair(NamedTuple):
    first: Any
    second: Any


def same(found: Any, wanted: Any) -> bool:
    """Return True if two pytrees are alike, each array in every bit."""
    assert tree_util.tree_structure(found) == tree_util.tree_structure(wanted)
    return all(map(np.array_equal, tree_util.tree_leaves(found), tree_util.tree_leaves(wanted)))


def test_without_a_template_the_tree_is_nested_as_it_was_saved_and_tied_arrays_are_one() -> None:
    found = r.round_trip({"params": PARAMS, "s": {3: Pair(PARAMS["w"], 5)}, "none": None}).tree("jax")
    assert same(found, {"params": PARAMS, "s": {3: (PARAMS["w"], 5)}, "none": None})
    assert isinstance(found["params"]["w"], jax.Array) and found["params"]["w"] is found["s"][3][0]


WEIGHTS = {"w": jnp.arange(6.0).reshape(3, 2), "l": [jnp.ones(2, jnp.bfloat16)]}
OPTIMIZERS = {
    "partition": optax.multi_transform({"a": optax.lion(1e-2), "b": optax.set_to_zero()}, {"w": "a", "l": "b"}),
    "adamw": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "injected": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "steps": optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
}


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_run_that_goes_on_from_an_archive_is_the_run_in_one_go(name: str) -> None:
    optimizer = OPTIMIZERS[name]

    def run(state: Any, steps: int) -> Any:
        for _ in range(steps):
            gradients = tree_util.tree_map(jnp.sin, state["params"])
            updates, opt = optimizer.update(gradients, state["opt"], state["params"])
            state = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}
        return state

    start = {"params": WEIGHTS, "opt": optimizer.init(WEIGHTS), "step": 0}
    half = r.round_trip(run(start, 3)).tree("jax", like=start)
    assert same(run(half, 3), run(start, 6)) and half["step"] == 3


@pytest.mark.parametrize(
    "state",
    [
        Pair(PARAMS, None), [Pair(1, 2.5), Pair(Box(jnp.ones(2)), {})], {0: jnp.ones(1), -3: {"x": 2**70}},
        (optax.EmptyState(), optax.adam(1.0).init(PARAMS), [], {}), {"ints": [1, 2, 3], "more": [[4, 5], (6,)]},
        Box({"name": "text", "flag": True, "phase": 1j, "key": jax.random.key_data(jax.random.key(3))}),
    ],
    ids=["named tuple", "box", "integers", "optax", "lists", "values"],
)  # fmt: skip
def test_pytree_is_built_as_its_template_is(state: Any) -> None:
    empty = tree_util.tree_map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, state)
    assert same(r.round_trip(state).tree("jax", like=empty), state)


def test_template_may_be_shapes_alone_and_dtypes_are_those_that_were_saved() -> None:
    """An optimizer's update may widen what its init made, and what was saved is what goes on."""
    optimizer = optax.adam(1e-3)
    state = {"params": PARAMS, "opt": optimizer.init(PARAMS)}
    like = {"params": PARAMS, "opt": jax.eval_shape(optimizer.init, PARAMS)}
    assert same(r.round_trip(state).tree("jax", like=like), state)
    narrow = {"w": jax.ShapeDtypeStruct((3, 2), jnp.bfloat16)}
    assert same(r.round_trip({"w": PARAMS["w"]}).tree("jax", like=narrow), {"w": PARAMS["w"]})


SAVED = {"params": PARAMS, "opt": optax.sgd(0.1, momentum=0.9).init(PARAMS), "step": 5, "seeds": [1, 2]}
DIFFERENT: dict[str, tuple[Any, str]] = {
    "no place for a value": ({k: SAVED[k] for k in SAVED if k != "step"}, "'step': expected no such key, found int 5"),
    "no place for an array": (SAVED | {"params": {"w": PARAMS["w"]}}, r"'params\.l\.0': .* found an array of float32"),
    "not there": (SAVED | {"more": jnp.ones(1)}, r"'more': expected an array of float32, shape \(1,\), found no such"),
    "another shape": (
        SAVED | {"params": PARAMS | {"w": jnp.ones((2, 3))}},
        r"'params\.w': expected an array of float32, shape \(2, 3\), found an array of float32, shape \(3, 2\)",
    ),
    "another optimizer": (SAVED | {"opt": optax.adam(0.1).init(PARAMS)}, r"'opt\.0\.count': expected .* no such key"),
    "a value for an array": (SAVED | {"step": jnp.zeros((), jnp.int32)}, r"'step': expected an array .* found int 5"),
    "a module for a value": (SAVED | {"opt": 1}, "'opt': expected a value as 1, found a module"),
    "too long": (SAVED | {"seeds": [1, 2, 3]}, r"'seeds\.2': .* found no such key"),
    "too short": (SAVED | {"seeds": [1]}, r"'seeds': expected no such key, found list \[1, 2\]"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_record_that_does_not_match_the_template_says_where(name: str) -> None:
    like, message = DIFFERENT[name]
    with pytest.raises(MismatchError, match=rf"tensor {message}"):
        r.round_trip(SAVED).tree("jax", like=like)


def test_elements_that_jax_would_narrow_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'best': jax would make float32 of float64"):
        r.round_trip({"best": np.float64(1)}).tree("jax")


# Shardings.


# Eight devices are made of one CPU, before jax is imported.
DEVICES = """
import gc, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax, numpy as np, zcrecord
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from tools.measure import memory

line = Mesh(np.array(jax.devices()), ("x",))
grid = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
rows, columns, everywhere = (NamedSharding(line, P(*axes)) for axes in (("x",), (None, "x"), ()))
both, some = NamedSharding(grid, P("x", "y")), NamedSharding(grid, P("y"))  # `some`: each shard on four devices

def address(shard):
    return shard.data.block_until_ready().unsafe_buffer_pointer()

def is_view(shard, array):
    start = array.__array_interface__["data"][0]
    return start <= address(shard) < start + array.nbytes
"""
EQUAL = """
rec = zcrecord.load_record(sys.argv[1])
for name, sharding in {"rows": rows, "columns": columns, "both": both, "some": some, "everywhere": everywhere}.items():
    for key, array in rec.jax(["w", "half", "turned", "tied"], shardings=sharding).items():
        assert array.sharding == sharding and array.dtype == rec[key].dtype
        assert np.array_equal(np.asarray(array), rec[key]), (name, key)
        for shard in array.addressable_shards:
            assert np.array_equal(np.asarray(shard.data), rec[key][shard.index]), (name, key, shard.index)
mixed = rec.jax(shardings={"w": both, "n*": rows, "scalar": everywhere})
assert list(mixed) == list(rec)
assert mixed["w"].sharding == both and mixed["narrow"].sharding == rows
assert mixed["half"].sharding == SingleDeviceSharding(jax.devices()[0])
assert np.array_equal(np.asarray(mixed["narrow"]), rec["narrow"].unpack())
assert mixed["scalar"].item() == 3 and mixed["none"].shape == (0, 8)
like = {key: jax.ShapeDtypeStruct(rec[key].shape, np.float32) for key in rec}
like |= {"w": jax.ShapeDtypeStruct((64, 48), np.float32, sharding=both), "turned": jax.device_put(rec["w"], columns)}
found = rec.tree("jax", like=like)
assert found["w"].sharding == both and found["turned"].sharding == columns
assert found["half"].sharding == SingleDeviceSharding(jax.devices()[0])
assert np.array_equal(np.asarray(found["w"]), rec["w"]) and np.array_equal(np.asarray(found["turned"]), rec["turned"])
tied = rec.jax(["w", "tied"], shardings=both)
assert tied["w"] is tied["tied"]
"""
VIEWS = """
rec = zcrecord.load_record(sys.argv[1])
found = rec.jax(["w", "half"], shardings=rows)
assert all(is_view(s, rec[name]) for name in ("w", "half") for s in found[name].addressable_shards)
copied = rec.jax(["w"], shardings=columns)["w"].addressable_shards
assert not any(is_view(s, rec["w"]) for s in copied)
shared = rec.jax(["w"], shardings=some)["w"].addressable_shards
assert all(is_view(s, rec["w"]) for s in shared)
assert len({address(s) for s in shared}) == 2, "of each shard the same bytes for four devices"
odd = rec.jax(["odd"], shardings=rows)["odd"].addressable_shards
assert [is_view(s, rec["odd"]) for s in odd] == [True] + [False] * 7, "the others start at no multiple of 64"
own = zcrecord.load_record(sys.argv[1], mode="c")
before = own.jax(["w"], shardings=rows)["w"]
own["w"][0, 0] = -9
assert before[0, 0] == rec["w"][0, 0] and own.jax(["w"], shardings=rows)["w"][0, 0] == -9
"""
TAKEN = """
rec = zcrecord.load_record(sys.argv[2])
kept = jax.block_until_ready(rec.jax(shardings=rows))
gc.collect()
before = memory().private
found = jax.block_until_ready(zcrecord.load_record(sys.argv[1]).jax(shardings=rows))
as_views = memory().private - before
copies = jax.block_until_ready(zcrecord.load_record(sys.argv[1]).jax(shardings=columns))
assert as_views < 4 << 20, as_views
assert memory().private - before > 16 << 20, "a copy of 32 MiB, some in memory that was free, is noticed"
"""
UNEVEN = """
from zcrecord.errors import UnsupportedError
try:
    rec.jax("odd", shardings=columns)
except UnsupportedError as error:
    print(error)
"""
SPLIT = """
rec = zcrecord.load_record(sys.argv[1])
for sharding in (rows, columns, both, some, everywhere):
    for name, array in rec.jax(shardings=sharding).items():
        assert np.array_equal(np.asarray(array), rec[name]), name
found = rec.jax(["rows"], shardings=rows)["rows"]  # saved by four ranks, two devices' shards in each one's file
mapped = [np.frombuffer(rec.archive.source.file_archive(k).buffer, np.uint8) for k in range(4)]
lies_in = [[k for k in range(4) if is_view(shard, mapped[k])] for shard in found.addressable_shards]
assert lies_in == [[0], [0], [1], [1], [2], [2], [3], [3]], lies_in
"""
BASE = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = {
        "w": BASE,
        "tied": BASE,
        "half": (BASE % 100).astype("bfloat16"),
        "turned": np.asfortranarray(BASE + 1),
        "narrow": zcrecord.PackedTensor.pack((BASE % 7).astype("int4")),
        "odd": np.arange(8 * 5, dtype=np.int16).reshape(8, 5),
        "scalar": np.array(3, np.float32),
        "none": np.zeros((0, 8), np.float32),
    }
    folder = tmp_path_factory.mktemp("sharded")
    zcrecord.save_record(tree, folder / "m.zcr", durable=False)
    splits = {"rows": boxes_along(0, 4, BASE.shape), "columns": boxes_along(1, 3, BASE.shape)}
    save_split(folder / "split.zcr", {"rows": BASE, "columns": BASE + 1, "plain": BASE + 2}, splits)
    return folder / "m.zcr"


@pytest.mark.slow
def test_shards_are_views_where_they_can_be_equal_for_every_sharding_and_refused_where_they_differ(path: Path) -> None:
    told = r.run_python(DEVICES + EQUAL + VIEWS + UNEVEN, path).stdout
    assert re.search(r"tensor 'odd': its shape \(8, 5\) cannot be sharded so: .*partitioned 8 times", told), told


@pytest.mark.measured
@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("what", ["SPLIT", "TAKEN"])
def test_shards_of_split_tensors_are_views_too_and_rows_take_no_memory(what: str, path: Path, tmp_path: Path) -> None:
    if what == "SPLIT":
        r.run_python(DEVICES + SPLIT, path.with_name("split.zcr"))
        return
    for name, count in (("large", 2 * MIB), ("small", 2048)):
        record = {f"w{i}": np.full((64, count // 64), i, np.float32) for i in range(4)}
        zcrecord.save_record(record, tmp_path / name, durable=False)
    r.run_python(DEVICES + TAKEN, tmp_path / "large", tmp_path / "small")


PROCESS = """
import sys
import jax, numpy as np
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[3]))
import zcrecord
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
rank = int(sys.argv[3])
mesh = Mesh(np.array(jax.devices()), ("x",))
rec = zcrecord.load_record(sys.argv[1], cache=False)
rows, columns = (NamedSharding(mesh, P(*axes)) for axes in (("x",), (None, "x")))
first = Mesh(np.array(jax.devices()[:1]), ("x",))
found = rec.jax(shardings={"rows": rows, "columns": columns, "first": NamedSharding(first, P())})
for name in ("rows", "columns"):
    (shard,) = found[name].addressable_shards
    assert found[name].shape == (8, 1 << 18) and not found[name].is_fully_addressable
    want = np.arange(1 << 21, dtype=np.uint32).reshape(8, 1 << 18) + (name == "columns")
    assert np.array_equal(np.asarray(shard.data), want[shard.index]), name
assert len(found["first"].addressable_shards) == 1 - rank and found["first"].dtype == np.uint32
print(rec.path, "done")
"""


@pytest.mark.exhaustive(keep=0)
def test_each_of_two_processes_fetches_its_own_bytes_alone(tmp_path: Path) -> None:
    value = np.arange(1 << 21, dtype=np.uint32).reshape(8, 1 << 18)
    zcrecord.save_record({"rows": value, "columns": value + 1, "first": value + 2}, tmp_path / "m.zcr", durable=False)
    for rank in range(2):
        (tmp_path / f"{rank}").mkdir()
        (tmp_path / f"{rank}" / "m.zcr").symlink_to(tmp_path / "m.zcr")
    with socket.socket() as reserved, serving(tmp_path) as server:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as jax's server does: both have the port
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
        processes = []
        for rank in range(2):
            command = [sys.executable, "-c", PROCESS, f"{server.url}/{rank}/m.zcr", str(port), str(rank)]
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment, **pipes))
        ended = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors for _, errors in ended)
    for rank, (told, _) in enumerate(ended):
        assert told.endswith(f"/{rank}/m.zcr done\n")
        fetched = sum(request.sent for request in server.requests if request.path.startswith(f"/{rank}/"))
        # Half of the rows; all of the columns, since each block that is checked has both halves; the first's own.
        mine = value.nbytes // 2 + value.nbytes + value.nbytes * (rank == 0)
        assert mine <= fetched < mine + 130_000, "and the archive's ends"


def one_device() -> SingleDeviceSharding:
    return SingleDeviceSharding(jax.devices()[0])


def test_only_the_ranges_of_shards_are_fetched_and_whole_tensors_are_checked(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 255, (4, 300_000), np.uint8)
    zcrecord.save_record({"a": value, "b": value + 1}, tmp_path / "m.zcr", durable=False)
    data = bytearray((tmp_path / "m.zcr").read_bytes())
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/m.zcr", cache=False)
        server.forget()
        found = record.jax("b", shardings=one_device())["b"]
        assert np.array_equal(np.asarray(found), value + 1)
        assert server.sent == value.nbytes
        data[zcrecord.load_record(tmp_path / "m.zcr").info("a").offset] ^= 1
        (tmp_path / "m.zcr").write_bytes(data)
        with pytest.raises(IntegrityError, match=r"tensor 'a': payload .* its digest does not match"):
            zcrecord.load_record(f"{server.url}/m.zcr", cache=False).jax(shardings=one_device())


def test_one_device_is_a_sharding_too_and_arrays_outlive_their_record(path: Path) -> None:
    with zcrecord.load_record(path) as record:
        want = np.array(record["w"])
        found = record.jax("w", shardings={"*": one_device()})["w"]
        assert found.unsafe_buffer_pointer() == r.address(record["w"])
    assert np.array_equal(np.asarray(found), want)


def test_what_is_no_sharding_or_does_not_fit_and_unknown_names_are_refused(path: Path) -> None:
    record, spec = zcrecord.load_record(path), PartitionSpec("x")
    refused: list[tuple[Any, str]] = [
        (spec, r"shardings= takes a Sharding, .* not a P\w*; jax\.sharding\.Named"),
        ({"w": spec}, "shardings= maps 'w' to a Sharding, not a P"),
        ({3: one_device()}, "shardings= maps 3 to a Sharding"),
        ({"scalar": NamedSharding(jax.make_mesh((1,), ("x",)), spec)}, r"'scalar': its shape \(\) cannot be sharded"),
    ]
    for shardings, message in refused:
        with pytest.raises(UnsupportedError, match=message):
            record.jax(shardings=shardings)
    with pytest.raises(TensorNotFoundError, match=r"'ww': .*close names: 'w'"):
        record.jax(shardings={"ww": one_device()})
    with pytest.raises(TensorNotFoundError, match="'ww'"):
        record.jax("ww", shardings=one_device())


def test_64_bits_are_refused_by_name_and_strings_come_as_views(tmp_path: Path) -> None:
    zcrecord.save_record({"s": np.array(["a"]), "d": np.ones(3), "w": np.ones(3, np.float32)}, tmp_path / "m.zcr")
    record = zcrecord.load_record(tmp_path / "m.zcr")
    for shardings in (one_device(), {"s": one_device()}):
        found = record.jax(["w", "s"], shardings=shardings)
        assert (list(found), found["s"].strings().__next__(), found["w"].tolist()) == (["s", "w"], b"a", [1, 1, 1])
    with pytest.raises(UnsupportedError, match="tensor 'd': jax would make float32 of float64"):
        record.jax(["d", "w"], shardings=one_device())
