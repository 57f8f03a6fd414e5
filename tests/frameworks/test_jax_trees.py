"""A jax run saved, loaded in a new process and gone on with is the run in one go; a template gives back pytrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import records as r
from exhaustive import some
from jax import tree_util

import zcrecord
from zcrecord import MismatchError, UnsupportedError

RUN = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import zcrecord

LABELS = {"embed": "a", "layers": [{"w": "a", "b": "b"}, {"w": "b", "b": "b"}]}
OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 9))),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9),
    "partition": lambda: optax.multi_transform({"a": optax.lion(1e-2), "b": optax.set_to_zero()}, LABELS),
    "steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=3),
}


def parameters():
    draw = jax.random.normal
    keys = jax.random.split(jax.random.key(1), 3)
    return {"embed": draw(keys[0], (8, 4)), "layers": [
        {"w": draw(keys[1], (4, 4), jnp.bfloat16), "b": jnp.zeros(4)}, {"w": draw(keys[2], (4, 8)), "b": jnp.zeros(8)}]}


def loss(params, tokens):
    x = params["embed"][tokens]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return optax.softmax_cross_entropy_with_integer_labels(x, tokens).mean()


def begin(optimizer):
    params = parameters()
    return {"params": params, "opt": optimizer.init(params), "key": jax.random.key_data(jax.random.key(2)), "step": 0}


def run(name, steps, start=None):
    optimizer = OPTIMIZERS[name]()
    state = begin(optimizer)
    if start is not None:
        state = zcrecord.load_record(start).tree("jax", like=begin(optimizer))

    @jax.jit
    def step(params, opt, key):
        key, drawn = jax.random.split(jax.random.wrap_key_data(key))
        updates, opt = optimizer.update(jax.grad(loss)(params, jax.random.randint(drawn, (16,), 0, 8)), opt, params)
        return {"params": optax.apply_updates(params, updates), "opt": opt, "key": jax.random.key_data(key)}

    for _ in range(steps):
        state = step(state["params"], state["opt"], state["key"]) | {"step": state["step"] + 1}
    return state


def exact(state):
    leaves, structure = jax.tree.flatten(state)
    told = [[str(x.dtype), x.shape, hashlib.sha256(x.tobytes()).hexdigest()] for x in map(np.asarray, leaves)]
    return [str(structure), *told]


folder, *chosen = sys.argv[1:]
"""
WHOLE = "print(json.dumps({name: exact(run(name, 10)) for name in chosen}))\n"
HALF = "for name in chosen: zcrecord.save_record(run(name, 5), f'{folder}/{name}.zcr')"
REST = "print(json.dumps({name: exact(run(name, 5, f'{folder}/{name}.zcr')) for name in chosen}))"

CHOSEN = some(["partition", "adamw", "injected", "steps"], 1)


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """States after ten steps, and after five and then five more in a new process."""
    folder = tmp_path_factory.mktemp("runs")
    whole = json.loads(r.run_python(RUN + WHOLE + HALF, folder, *CHOSEN).stdout)
    return whole, json.loads(r.run_python(RUN + REST, folder, *CHOSEN).stdout), folder


@pytest.mark.exhaustive(keep=0)
@pytest.mark.parametrize("name", CHOSEN)
def test_run_that_goes_on_from_an_archive_is_the_run_in_one_go(name: str, ends: tuple[Any, Any, Path]) -> None:
    whole, rest, folder = ends
    assert rest[name] == whole[name]
    assert zcrecord.load_record(folder / f"{name}.zcr").tree()["step"] == 5


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


SAVED = {"params": PARAMS, "opt": optax.sgd(0.1, momentum=0.9).init(PARAMS), "step": 5}
DIFFERENT: dict[str, tuple[Any, str]] = {
    "no place for a value": ({k: SAVED[k] for k in ("params", "opt")}, "'step': expected no such key, found int 5"),
    "no place for an array": (SAVED | {"params": {"w": PARAMS["w"]}}, r"'params\.l\.0': .* found an array of float32"),
    "not there": (SAVED | {"more": jnp.ones(1)}, r"'more': expected an array of float32, shape \(1,\), found no such"),
    "another shape": (
        SAVED | {"params": PARAMS | {"w": jnp.ones((2, 3))}},
        r"'params\.w': expected an array of float32, shape \(2, 3\), found an array of float32, shape \(3, 2\)",
    ),
    "another optimizer": (SAVED | {"opt": optax.adam(0.1).init(PARAMS)}, r"'opt\.0\.count': expected .* no such key"),
    "a value for an array": (SAVED | {"step": jnp.zeros((), jnp.int32)}, r"'step': expected an array .* found int 5"),
    "a module for a value": (SAVED | {"opt": 1}, "'opt': expected a value as 1, found a module"),
    "too long": (SAVED | {"step": [1]}, r"'step\.0': .* found no such key"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_record_that_does_not_match_the_template_says_where(name: str) -> None:
    like, message = DIFFERENT[name]
    with pytest.raises(MismatchError, match=rf"tensor {message}"):
        r.round_trip(SAVED).tree("jax", like=like)


def test_elements_that_jax_would_narrow_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor 'best': jax would make float32 of float64"):
        r.round_trip({"best": np.float64(1)}).tree("jax")
