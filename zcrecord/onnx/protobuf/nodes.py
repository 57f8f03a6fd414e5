"""Nodes that hold neither tensor nor graph, which is most of them: recognised many at a time, passed as they are.

Those that lie side by side in the window are walked in step, one field each per round, so that a model of 20,000
nodes takes some hundred numpy calls. What is not of the commonest shape is looked at alone, and only that way is
anything refused. The others are left to `scanner`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from .reader import FIXED32, FIXED64, LEN, VARINT, ProtobufReader
from .schema import ATTRIBUTE, CHILDREN

__all__ = ["is_plain", "plain_runs"]

Array = npt.NDArray[Any]
_ATTRIBUTE = 5 << 3 | LEN  # NodeProto.attribute
_HOLDING = frozenset(CHILDREN[ATTRIBUTE])
_FEW = 16  # nodes; for fewer, looking at each is quicker
_MANY = 1 << 14
_ROUNDS = 200  # fields of a node

# First byte of a field, when its tag and its varint take one byte each, to the bytes before what it holds; 0 otherwise.
_BEFORE = {VARINT: 2, FIXED64: 9, LEN: 2, FIXED32: 5}
_STEP = np.array([_BEFORE.get(tag & 7, 0) if 8 <= tag < 128 else 0 for tag in range(256)])
_INNER_STEP = np.array([0 if tag in _HOLDING else step for tag, step in enumerate(_STEP)])  # in an attribute
_SIZED = np.array([8 <= tag < 128 and tag & 7 == LEN for tag in range(256)])
_VARINTS = np.array([8 <= tag < 128 and tag & 7 == VARINT for tag in range(256)])
_SHORT_LEN = bytes(_SIZED)
_TYPE = 0xA0  # with a 1, the tag of AttributeProto.type, which every attribute has; its varint takes one byte


def plain_runs(window: ProtobufReader, tag: int, end: int) -> tuple[dict[int, int], int]:
    """Return runs of plain nodes next in the window, offset -> end; and the offset up to which nodes were looked at.

    `end` is the offset at which their message ends, `tag` that of their field, one byte.
    """
    buffer, at, limit = window.buffer, window.pos, min(window.limit, end - window.base)
    starts: list[int] = []
    ends: list[int] = []
    while at < limit and buffer[at] == tag:
        nbytes, start = buffer[at + 1], at + 2
        if nbytes > 127:
            nbytes, start = nbytes & 127 | buffer[start] << 7, start + 1
        if nbytes > 16383 or start + nbytes > limit or len(starts) == _MANY:  # three bytes of length, or cut off
            break
        at = start + nbytes
        starts.append(start)
        ends.append(at)
    looked = window.base + max(at, window.pos + 1)
    if len(starts) < _FEW:
        return {}, looked
    plain = _plain(np.frombuffer(window.view, np.uint8), np.array(starts), np.array(ends))
    edges = np.flatnonzero(np.diff(plain, prepend=False, append=False)).tolist()
    bounds = [window.base + window.pos, *(window.base + e for e in ends)]
    return {bounds[a]: bounds[b] for a, b in zip(edges[0::2], edges[1::2], strict=True)}, looked


def _plain(data: Array, starts: Array, ends: Array) -> npt.NDArray[np.bool_]:
    """Return for each node, in [start, end) of `data`, whether it certainly is plain and well formed."""
    plain = np.zeros(len(starts), bool)
    which = np.arange(len(starts))
    at, stop = starts, ends  # stop: of the attribute a node is in, otherwise of the node
    inside = np.zeros(len(starts), bool)  # an attribute
    for _ in range(_ROUNDS):
        leaving = inside & (at == stop)
        stop = np.where(leaving, ends[which], stop)
        inside &= ~leaving
        plain[which[~inside & (at == stop)]] = True
        on = at < stop
        which, at, stop, inside = which[on], at[on], stop[on], inside[on]
        if len(which) < _FEW:
            break
        at, stop, inside, good = _advance(data, at, stop, inside)
        which, at, stop, inside = which[good], at[good], stop[good], inside[good]
    return plain


def _advance(data: Array, at: Array, stop: Array, inside: Array) -> tuple[Array, Array, Array, Array]:
    """Pass one field of each node, or step into an attribute; return the new places, and which nodes go on."""
    tag, first, second = data.take(at), data.take(at + 1), data.take(at + 2)
    step = np.where(inside, _INNER_STEP.take(tag), _STEP.take(tag))
    sized = _SIZED.take(tag)
    wide = sized & (first > 127)
    length = np.where(sized, first & 127, 0) + np.where(wide, second.astype(np.int64) << 7, 0)
    good = (step > 0) & ~(wide & (second > 127)) & ~(_VARINTS.take(tag) & (first > 127))
    typed = inside & (tag == _TYPE) & (first == 1) & (second < 128)
    body = at + np.where(typed, 3, step + wide)
    entering = ~inside & (tag == _ATTRIBUTE)
    past = body + length
    good = (good | typed) & (past <= stop)
    return np.where(entering, body, past), np.where(entering, past, stop), inside | entering, good


def is_plain(window: ProtobufReader, end: int) -> bool:
    """Return whether the NodeProto from the window's position to `end`, all in the window, has no tensor or graph."""
    buffer, short, pos = window.buffer, _SHORT_LEN, window.pos
    while pos < end:
        tag = buffer[pos]
        if tag == _ATTRIBUTE:
            nbytes, pos = window.length(pos + 1)
            if pos + nbytes > end:
                raise window.fail("an attribute reaches past the end of its node", pos)
            if not _is_plain_attribute(window, pos, pos + nbytes):
                return False
            pos += nbytes
        elif short[tag] and buffer[pos + 1] < 128:
            pos += 2 + buffer[pos + 1]
        else:
            tag, pos = _pass_field(window, pos, end)
            if tag == _ATTRIBUTE:
                return False  # with a tag longer than it need be: the thorough way reads it
    if pos != end:
        raise window.fail("a node ends inside a field", pos)
    return True


def _is_plain_attribute(window: ProtobufReader, pos: int, end: int) -> bool:
    buffer, short = window.buffer, _SHORT_LEN
    while pos < end:
        tag = buffer[pos]
        if tag in _HOLDING:
            return False
        if short[tag] and buffer[pos + 1] < 128:
            pos += 2 + buffer[pos + 1]
        else:
            tag, pos = _pass_field(window, pos, end)
            if tag in _HOLDING:
                return False
    if pos != end:
        raise window.fail("an attribute ends inside a field", pos)
    return True


def _pass_field(window: ProtobufReader, pos: int, end: int) -> tuple[int, int]:
    """Return the tag of the field at `pos`, and where it ends: at most at `end`."""
    here, window.pos = window.pos, pos
    try:
        _, tag, value = window.header(window.base + end)
        window.skip(tag, value, window.base + end)
        return tag, window.pos
    finally:
        window.pos = here
