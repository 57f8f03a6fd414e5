"""Unpickles checkpoints of torch: a machine of the 33 opcodes that `torch.save` writes, which imports nothing.

Dicts, lists, tuples, texts and numbers are made here; all else is made by functions that the caller has for the names
in the pickle. A value takes at most a small multiple of its bytes in the pickle; functions see to that for theirs.

Source: Lib/pickletools.py of CPython, the opcodes; torch/_weights_only_unpickler.py of torch 2.13, their choice.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import NoneType
from typing import Any

from zcrecord.errors import LimitError, UnsupportedError

_GLOBAL = re.compile(rb"([^\n]{1,200})\n([^\n]{1,200})\n")
# A tensor as torch writes it, from behind its function and MARK to its PUT: run at once, since a checkpoint has little
# else. S are sizes or strides, N a number, G a GET, P a PUT.
_TENSOR = re.compile(
    rb"\(GGX(.)\0\0\0(\d{1,20})PG(N)tPQ(N)SS\x89G\)RPtPRP"
    .replace(b"S", rb"(N\x85|NN\x86|NNN\x87|\(N{4,64}t|\))(?:P)?")
    .replace(b"N", rb"(?:K.|M..|J.{4})").replace(b"P", rb"r(.{4})").replace(b"G", rb"(h.|j.{4})"),
    re.DOTALL,
).match  # fmt: skip
_LOOK_UPS = re.compile(rb"j(?=(.{4}))", re.DOTALL).findall  # what a LONG_BINGET may ask for, and a little more
_NUMBERS = {0x4B: "B", 0x4D: "<H", 0x4A: "<i", 0x47: ">d"}  # BININT1, BININT2, BININT, BINFLOAT
_MEMO_KEYS = [i.to_bytes(4, "little") for i in range(256)]  # numbers of BINPUT and BINGET, as LONG_BINPUT has them
_TUPLES = {0x29: 0, 0x85: 1, 0x86: 2, 0x87: 3}  # EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}  # NONE, NEWTRUE, NEWFALSE
_NUMBER_TYPES = frozenset({int, float, bool})
_HASHED = frozenset({str, float, bool, NoneType, bytes})  # types of keys with hashes that differ
_IN_KEYS = _HASHED | {int, tuple}  # types in a tuple that is a key
_WIDE = 1 << 64  # integers below it have hashes that differ
_ALIKE, _ITEMS = 100, 16  # limits: of keys with one hash, and of items in a tuple among them, at any depth

FindClass = Callable[[str, str], Any]  # as that of pickle.Unpickler: called with a module and a name


@dataclass(slots=True, eq=False)
class Function:
    """A function that a pickle may name: REDUCE calls it, and nothing else does anything with it."""

    call: Callable[..., Any]


class Stateful:
    """Base class of values that BUILD may set the state of."""

    __slots__ = ("state",)
    state: Any


def unpickle(
    data: Any, start: int, find_class: FindClass, persistent_load: Callable[[Any], Any], *, modern: bool = False
) -> tuple[Any, int]:
    """Return the value of a pickle that starts at an offset of bytes or a memoryview, and the offset behind it.

    The state of a dict, such as the versions in a `state_dict()`, is left out.

    Args:
        find_class: returns the value of a name in a module, often a `Function`.
        persistent_load: returns the value of a persistent identifier.
        modern: allow the opcodes of protocol 4.

    Raises:
        LimitError: a hundred keys with the same hash. UnsupportedError: a key that takes long to hash. ValueError,
        LookupError, TypeError or any other: the pickle is damaged. What the functions raise is raised.
    """
    stack: list[Any] = []
    marked: list[list[Any]] = []  # the stacks below each mark
    memo: dict[bytes, Any] = {}  # by the bytes of LONG_BINPUT
    looked_up = _possible_look_ups(data)
    i, hash_counts = start, Counter[int]()
    while True:  # frequent opcodes first, without a call for each
        op = data[i]
        i += 1
        if op == 0x58:  # BINUNICODE
            end = i + 4 + int.from_bytes(data[i : i + 4], "little")
            if end > len(data):
                raise ValueError("it ends too early")
            stack.append(str(data[i + 4 : end], "utf-8", "surrogatepass"))
            i = end
        elif op == 0x72:  # LONG_BINPUT
            memo[bytes(data[i : i + 4])] = stack[-1]
            i += 4
        elif op == 0x68:  # BINGET
            stack.append(memo[_MEMO_KEYS[data[i]]])
            i += 1
        elif op == 0x28:  # MARK
            match = _TENSOR(data, i) if looked_up else None
            if match is not None and len(match[4]) == match[3][0] and looked_up.isdisjoint(match.groups()):
                stack.append(_call_at_once(stack.pop(), match.groups(), memo, persistent_load))
                i = match.end()
                continue
            marked.append(stack)
            stack = []
        elif op == 0x71:  # BINPUT
            memo[_MEMO_KEYS[data[i]]] = stack[-1]
            i += 1
        elif op == 0x74:  # TUPLE
            items, stack = stack, marked.pop()
            stack.append(tuple(items))
        elif op == 0x52:  # REDUCE
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif op == 0x51:  # BINPERSID
            stack.append(persistent_load(stack.pop()))
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[bytes(data[i : i + 4])])
            i += 4
        elif op in (0x75, 0x65):  # SETITEMS, APPENDS
            items, stack = stack, marked.pop()
            _extend(stack[-1], items, keyed=op == 0x75, hash_counts=hash_counts)
        elif op == 0x2E:  # STOP
            return stack.pop(), i
        elif modern and op in (0x8C, 0x93, 0x94, 0x95):  # those that protocol 4 has more
            i = _run_protocol_4(op, data, i, stack, memo, find_class)
        else:
            i = _run_rare(op, data, i, stack, hash_counts, find_class)


def _possible_look_ups(data: Any) -> set[Any]:
    """Return the keys that may be looked up in the memo; none, so that no tensor is run at once, if they are many."""
    has_few = type(data) is bytes and data.count(b"j") < len(data) // 16
    return {*_MEMO_KEYS, *_LOOK_UPS(data)} if has_few else set()


def _call_at_once(function: Any, groups: Any, memo: dict[bytes, Any], persistent_load: Callable[[Any], Any]) -> Any:
    """Run the opcodes of a tensor that _TENSOR matched, with these groups; none of its values is looked up later."""
    word, kind, _, key, _, device, count, _, offset, sizes, _, strides, _, hooks, *_ = groups
    word, kind, device = (memo[_memo_key(opcode)] for opcode in (word, kind, device))
    storage = persistent_load((word, kind, key.decode(), device, _constant(count)))
    state = _call(memo[_memo_key(hooks)], ())
    return _call(function, (storage, _constant(offset), _constant(sizes), _constant(strides), False, state))


def _call(function: Any, arguments: Any) -> Any:
    """Call a `Function` with a tuple of arguments; ValueError for any other value."""
    if type(function) is not Function or type(arguments) is not tuple:
        raise ValueError("its pickle calls what is no function")
    return function.call(*arguments)


# The key in the memo of what an opcode gets; and the number or tuple that some opcodes make.
_memo_key = functools.lru_cache(1024)(lambda opcode: opcode[1:].ljust(4, b"\0"))
_constant = functools.lru_cache(1024)(lambda opcodes: unpickle(opcodes + b".", 0, lambda *_: None, lambda _: None)[0])


def _run_rare(op: int, data: Any, i: int, stack: list[Any], hash_counts: Counter[int], find_class: FindClass) -> int:
    """Run an opcode that neither marks nor remembers; returns the offset behind it."""
    if op in _NUMBERS:
        stack.extend(struct.unpack_from(_NUMBERS[op], data, i))
        return i + struct.calcsize(_NUMBERS[op])
    if op in _CONSTANTS:
        stack.append(_CONSTANTS[op])
    elif op in _TUPLES:
        items = [stack.pop() for _ in range(_TUPLES[op])]
        stack.append(tuple(items[::-1]))
    elif op in (0x7D, 0x5D):  # EMPTY_DICT, EMPTY_LIST
        stack.append({} if op == 0x7D else [])
    elif op == 0x61:  # APPEND
        _extend(stack[-2], [stack.pop()], keyed=False, hash_counts=hash_counts)
    elif op == 0x73:  # SETITEM
        _extend(stack[-3], [stack.pop(-2), stack.pop()], keyed=True, hash_counts=hash_counts)
    elif op == 0x62:  # BUILD
        state = stack.pop()
        if isinstance(stack[-1], Stateful):
            stack[-1].state = state
        elif not isinstance(stack[-1], dict):
            raise ValueError(f"a {type(stack[-1]).__name__} where a dict is due")
    elif op == 0x81:  # NEWOBJ
        arguments = stack.pop()
        stack.append(_call(stack.pop(), arguments))
    elif op == 0x63:  # GLOBAL
        match = _GLOBAL.match(bytes(data[i : i + 402]))
        if match is None:
            raise ValueError("its pickle has a name that is too long")
        stack.append(find_class(match[1].decode(), match[2].decode()))
        return i + match.end()
    elif op in (0x8A, 0x55):  # LONG1, SHORT_BINSTRING
        octets = bytes(data[i + 1 : i + 1 + data[i]])
        if len(octets) < data[i]:
            raise ValueError("it ends too early")
        stack.append(int.from_bytes(octets, "little", signed=True) if op == 0x8A else octets.decode())
        return i + 1 + len(octets)
    elif op != 0x80:  # PROTO
        raise ValueError(f"Unsupported operand {op}")
    return i + (op == 0x80)


def _run_protocol_4(op: int, data: Any, i: int, stack: list[Any], memo: Any, find_class: FindClass) -> int:
    """Run an opcode that protocol 2 does not have; returns the offset behind it."""
    if op == 0x8C:  # SHORT_BINUNICODE
        stack.append(str(data[i + 1 : i + 1 + data[i]], "utf-8", "surrogatepass"))
        return i + 1 + int(data[i])
    if op == 0x93:  # STACK_GLOBAL
        name, module = expect_type(str, stack.pop()), expect_type(str, stack.pop())
        stack.append(find_class(module, name))
    elif op == 0x94:  # MEMOIZE
        memo[len(memo).to_bytes(4, "little")] = stack[-1]
    return i + 8 * (op == 0x95)  # FRAME, whose size does not matter


def _extend(target: Any, items: list[Any], *, keyed: bool, hash_counts: Counter[int]) -> None:
    """Put items into a list or deque, or, if `keyed`, keys and values by turns into a dict; ValueError for others."""
    keys = items[::2] if keyed else []
    if keyed and len(items) % 2:
        raise ValueError("its pickle has a key without a value")
    if not {str}.issuperset(map(type, keys)):
        check_keys(keys, target, hash_counts)
    if keyed and isinstance(target, dict):
        target.update(zip(keys, items[1::2], strict=True))
    elif not keyed and isinstance(target, list | deque):
        target.extend(items)
    else:
        raise ValueError(f"a {type(target).__name__} where a {'dict' if keyed else 'list'} is due")


def check_keys(keys: Sequence[Any], target: Any, hash_counts: Counter[int]) -> None:
    """Check new keys of a dict, or items of a set, before they are hashed: a malicious file makes hash tables slow.

    `hash_counts` counts the hashes of keys that may be equal where the keys are not.

    Raises:
        LimitError: a hundred keys have the same hash. UnsupportedError: a key would take long to hash. ValueError: one
        is given twice.
    """
    numbers = sorted(key for key in keys if type(key) in _NUMBER_TYPES and key == key)  # without NaN
    known = target if isinstance(target, dict) else ()
    is_repeated = keys.count(None) > 1 or any(map(operator.eq, numbers, numbers[1:]))
    if is_repeated or any(type(key) in _NUMBER_TYPES and key in known for key in keys):
        raise ValueError("its pickle has a key twice")
    for key in filter(_may_collide, keys):
        hash_counts[hash(key)] += 1
        if hash_counts[hash(key)] > _ALIKE:
            raise LimitError("a hundred keys have the same hash; the file is malicious")


def parts_of(key: Any) -> Iterator[Any]:
    """Yield a value, and if it is a tuple its items, and theirs; no tuple's items beyond the first hundred."""
    pending = [key]
    while pending:
        part = pending.pop()
        yield part
        if type(part) is tuple:
            pending.extend(part[:_ALIKE])


def expect_type(kind: Any, value: Any) -> Any:
    """Return a value; ValueError unless it is of this very type."""
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} where a {kind.__name__} is due")
    return value


def _may_collide(key: Any) -> bool:
    """Return True for a key whose hash unequal ones may have; UnsupportedError if it takes long to hash."""
    kind = type(key)
    items = list(itertools.islice(parts_of(key), _ITEMS + 2)) if kind is tuple else []
    if kind is frozenset or len(items) > _ITEMS + 1 or not _IN_KEYS.issuperset(map(type, items)):
        fault = f"a key, or an item of a set, that is a set or a tuple of more than {_ITEMS} items, inner ones included"
        raise UnsupportedError(f"{fault}, or that has other items than texts and numbers; make it a text")
    return kind in (tuple, complex, timedelta) or (kind is int and not -_WIDE < key < _WIDE)
