"""Everything that save_record accepts, or convert of torch's files, comes back equal; all else is refused by place."""

from __future__ import annotations

import argparse
import collections
import tempfile
import types
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
import torch
from digest_trees import LISTS, swapped
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord
from zcrecord import RecordError
from zcrecord.formats import convert

WORDS = st.text("ab_é\n", min_size=1, max_size=3)
INTS = st.one_of(st.integers(-20, 20), st.sampled_from([-(2**63), 2**63 - 1, 2**63, 2**64 - 1]))
WIDE = st.one_of(st.integers(), st.integers(-(2**500), 2**500), st.sampled_from([2**64, -(2**63) - 1]))
NUMBERS = ["f2", "f4", "f8", "i1", "i8", "u1", "u8", "c8", "c16", "?"]
NUMPY = st.builds(lambda kind, number: np.dtype(kind).type(number), st.sampled_from(NUMBERS), st.integers(0, 1))
PLAIN = st.one_of(
    st.none(), st.booleans(), WIDE, st.floats(), st.complex_numbers(), st.text(max_size=5), st.binary(max_size=5),
    NUMPY, st.sampled_from(["0", "-1", "torch", b"", "", [], (), {}]),
)  # fmt: skip
TORCH = st.sampled_from([torch.arange(3), torch.ones(2, 2).bfloat16(), torch.zeros(0), torch.tensor(1.5)])
HASHED = st.one_of(st.none(), st.booleans(), WIDE, st.floats(allow_nan=False), WORDS, st.tuples(WORDS, INTS))
TIMES = st.one_of(st.datetimes(), st.times()).map(lambda time: time.replace(fold=0))
STANDING = st.one_of(
    st.sets(HASHED, max_size=4), st.frozensets(HASHED, max_size=4), st.dictionaries(HASHED, INTS, max_size=3),
    st.builds(collections.deque, st.lists(HASHED, max_size=3), st.none() | st.integers(3, 9)),
    st.dictionaries(WORDS, INTS, max_size=3).map(lambda items: collections.defaultdict(int, items)),
    st.builds(lambda value: types.SimpleNamespace(a=value), HASHED),
    st.builds(lambda value: argparse.Namespace(a=value), HASHED),
    st.builds(Path, WORDS), st.dates(), TIMES, st.timedeltas(),
)  # fmt: skip
DTYPES = st.sampled_from([torch.float32, torch.device("cuda:1"), torch.Size([2, 3])])
ODD_KEYS = st.sampled_from(["", "a\0", "\ud800", True, 1.0, None, (1,), b"k", 2**64, -(2**70), "1", "a.b", np.int64(3)])
ODD = st.sampled_from([{b"a"}, range(2), object, np.dtype("f4"), "\ud800", slice(1), torch.strided])


def nested(leaves: Any, keys: Any, *, tuples: bool = True) -> Any:
    """Records of these leaves, nested in every way, under these keys."""
    inner = st.recursive(
        leaves,
        lambda x: st.one_of(
            st.lists(x, max_size=3),
            st.lists(x, max_size=3).map(tuple),
            st.dictionaries(keys, x, max_size=4),
            st.dictionaries(keys, x, max_size=3).map(collections.OrderedDict),
            st.dictionaries(keys, st.integers(0, 9), max_size=3).map(collections.Counter),
            *([st.builds(r.Pair, x, x)] if tuples else []),
        ),
        max_leaves=8,
    )
    return st.builds(lambda value: {"run": value}, inner)


def expected(value: Any) -> Any:
    """Return the value that comes back: an equal one, maybe of another class."""
    if isinstance(value, torch.Tensor):
        return value.numpy() if value.dtype != torch.bfloat16 else value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, dict) and type(value) not in (dict, collections.OrderedDict, collections.Counter):
        return value
    if isinstance(value, dict):
        return {int(k) if isinstance(k, np.integer) else k: expected(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(expected, value))
    return value


def check(got: Any, want: Any) -> None:
    """Fail unless it came back, with the types of keys."""
    if isinstance(want, dict):
        assert [(type(key), key) for key in got] == [(type(key), key) for key in want]
        for key, value in want.items():
            check(got[key], value)
    elif isinstance(want, list | tuple):
        assert (type(got), len(got)) == (type(want), len(want))
        for one, other in zip(got, want, strict=True):
            check(one, other)
    elif isinstance(want, torch.Tensor):
        assert np.asarray(got).tobytes() == want.view(torch.int16).numpy().tobytes()
    else:
        r.assert_same(got, want)


def saved(value: Any) -> zcrecord.Record | None:
    """Return the record of a value, None if it is refused with the place named."""
    try:
        return r.round_trip(value)
    except RecordError as error:
        assert error.tensor is not None or "values cannot be saved: 'run" in str(error), error
        assert "run" in str(error)
        return None


def converted(value: Any) -> zcrecord.Record | None:
    """Return the record of what torch saved, None if it is refused with the place named."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.pt"
        torch.save(value, path)
        try:
            convert(path, path.with_suffix(".zcr"))
        except RecordError as error:
            assert "tensor 'run" in str(error) or "in 'run" in str(error) or "holds an object of" in str(error), error
            return None
        return zcrecord.load_record(path.with_suffix(".zcr").read_bytes(), verify="full")


KEYS = st.one_of(WORDS, INTS)
ODD_TREES = nested(st.one_of(PLAIN, ODD), st.one_of(KEYS, ODD_KEYS))


@hypothesis.given(value=nested(st.one_of(PLAIN, TORCH, DTYPES, STANDING), KEYS))
@hypothesis.settings(max_examples=rounds(200), deadline=None)
def test_every_state_of_a_run_comes_back(value: Any) -> None:
    record = saved(value)
    assert record is not None
    check(record.tree(), expected(value))


@hypothesis.given(value=nested(st.one_of(PLAIN, TORCH, DTYPES, STANDING), KEYS, tuples=False))
@hypothesis.settings(max_examples=rounds(100), deadline=None)
def test_every_state_that_torch_saved_comes_back(value: Any) -> None:
    record = converted(value)
    assert record is not None
    check(record.tree(), expected(value))
    assert record.content_digest() == r.round_trip(value).content_digest()


@pytest.mark.parametrize("door", [saved, converted])
@hypothesis.given(value=ODD_TREES)
@hypothesis.settings(max_examples=rounds(150), deadline=None)
def test_anything_comes_back_or_is_refused_with_its_place(door: Any, value: Any) -> None:
    if (record := door(value)) is not None:
        check(record.tree(), expected(value))


def test_this_notices_a_key_that_becomes_text() -> None:
    with pytest.raises(AssertionError):
        check({"a": {"0": 1}}, {"a": {0: 1}})


@pytest.mark.parametrize(("items", "vector", "names"), LISTS.values(), ids=LISTS)
def test_lists_of_others_stay_lists(items: Any, vector: str, names: tuple[str, str], tmp_path: Path) -> None:
    """R76: no reader refuses places that are not the keys, so that items are where their places say."""
    path = tmp_path / "m.zcr"
    path.write_bytes(swapped(r.saved({"m": items, "w": np.ones(3)}), vector, *names))
    record = zcrecord.load_record(path, verify="full")
    whole = record.tree()
    assert isinstance(whole["m"], list | tuple)
    r.assert_same(record.select(None, rename={"m": "n"}).tree(), {"n": whole["m"], "w": whole["w"]})
    with zcrecord.edit(path, tmp_path / "edited.zcr") as edited:
        edited["more"] = np.ones(2)
    r.assert_same(zcrecord.load_record(tmp_path / "edited.zcr").tree(), whole | {"more": np.ones(2)})
