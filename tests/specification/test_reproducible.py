"""The same record gives the same bytes, whatever the process, the sink, the hash seed or the memory it lay in."""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import records as r
from exhaustive import rounds
from hypothesis import strategies as st

import zcrecord

BUILD = """
import hashlib, io, sys
import numpy as np, zcrecord
base = np.arange(600, dtype=np.float32).reshape(20, 30)
tree = {f'layer.{i}': {'w': np.full((i + 1, 3), i), 'rows': base[i : i + 5], 'n': i, 's': 'text'} for i in range(15)}
tree['f'] = base.T
tree['tied'] = base
tree['equal'] = base.copy()
tree['gaps'] = base[:, ::2]
tree['large'] = np.arange(200_000)
tree['strings'] = np.array(['a', 'bc'])
tree['blob'] = b'bytes'
metadata = {k: k for k in 'zyxabc'}
"""
TO_BYTES = BUILD + "file = io.BytesIO(); zcrecord.save_record(tree, file, metadata=metadata); data = file.getvalue()\n"
DIGEST = TO_BYTES + "print(hashlib.sha256(data).hexdigest())"


def built() -> bytes:
    """Return the archive that BUILD describes, made in this process."""
    names: dict[str, Any] = {}
    exec(TO_BYTES, names)
    data: bytes = names["data"]
    return data


@pytest.mark.exhaustive(keep=1)
@pytest.mark.parametrize("seed", ["0", "1", "4711"])
def test_same_record_gives_the_same_bytes_in_another_process(seed: str) -> None:
    done = r.run_python(
        DIGEST, env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Tokyo", "PYTHONMALLOC": "malloc"}
    )
    assert done.stdout.strip() == hashlib.sha256(built()).hexdigest()


@pytest.mark.slow
@hypothesis.given(tree=r.trees(), alignment=st.sampled_from([16, 64, 4096]))
@hypothesis.settings(max_examples=rounds(50), deadline=None)
def test_archive_is_the_same_from_other_memory(tree: Any, alignment: int) -> None:
    hypothesis.assume(r.names_are_unique(tree))
    data = r.saved(tree, alignment=alignment)
    assert r.saved(tree, alignment=alignment) == data
    elsewhere = memoryview(bytes(128) + data)[128:]
    first, second = (zcrecord.load_record(source).tree() for source in (data, elsewhere))
    assert r.saved(first, alignment=alignment) == r.saved(second, alignment=alignment)


@pytest.mark.parametrize("sink", ["pipe", "file", "BytesIO"])
def test_archive_is_the_same_in_every_sink(sink: str, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(BUILD, names)
    if sink == "file":
        with open(tmp_path / "m", "w+b") as file:
            zcrecord.save_record(names["tree"], file, metadata=names["metadata"])
        assert (tmp_path / "m").read_bytes() == built()
        return
    memory = r.OneWay() if sink == "pipe" else io.BytesIO()
    zcrecord.save_record(names["tree"], memory, metadata=names["metadata"])
    assert memory.getvalue() == built()


def test_order_of_metadata_leaves_no_trace() -> None:
    orders = itertools.permutations([("b", 1), ("a", "x"), ("c", b"y")])
    assert len({r.saved({"w": np.ones(3)}, metadata=dict(order)) for order in orders}) == 1
