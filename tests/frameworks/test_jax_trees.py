"""A template gives back pytrees as they were saved; without one the tree is nested."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import records as r
from jax import tree_util

from zcrecord import MismatchError, UnsupportedError

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
