"""Memory that a checkpoint's pickle asks for, summed before torch unpickles it.

torch lets a pickle call a few functions (`weights_only`). Some make large results of small arguments: `bytearray(n)` of
a number, `_codecs.encode` of one text many times. The size of each result is estimated from the arguments, by a walk
over the opcodes that executes none of them.

Source: the opcodes as `pickletools` has them; the functions that torch 2.13 allows (torch/_weights_only_unpickler.py).
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Iterable
from typing import Any

from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.errors import LimitError

_ITEM = 16  # bytes, at least, of an item in a container
_VIEWS, _COPIES = ("_rebuild_", "Parameter"), "_rebuild_device_"  # prefixes of functions: no copies, but for one
_MODULES = ("torch", "builtins", "__builtin__", "collections", "_codecs")  # of the functions that torch calls
_REFUSED = "refused"  # stands for any other function
_LONGEST = 64  # characters of a function's name
_VISITED = 1 << 22  # items of a tuple, each time that it stands in another
_LEAVES = {code.name for code in pickletools.opcodes if not code.stack_before} - {"GLOBAL", "MARK", "PROTO", "FRAME"}
_GROWS = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}  # values that each opcode adds to the container below them
_GROWS_BY_MARK = {"APPENDS", "SETITEMS", "ADDITEMS"}
_ELEMENT_SIZES = {  # of torch's classes of storages
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}


class _Value:
    """A value on the stack: its size in bytes, the size of a shallow copy, and its items or number if known."""

    __slots__ = ("depth", "items", "name", "number", "size", "visited")

    def __init__(self, size: int, *, number: int | None = None, name: str = "", items: Iterable[_Value] = ()) -> None:
        """Raise LimitError for a tuple that takes too long to hash: its items are visited again wherever they stand."""
        self.size, self.number, self.name, self.items = size, number, name, tuple(items)
        self.depth: int = 1 + max((item.depth for item in self.items), default=0)
        self.visited: int = 1 + sum(item.visited for item in self.items)
        if self.depth > MAX_DEPTH or self.visited > _VISITED:
            raise LimitError(f"tuples nested over {MAX_DEPTH} deep, or of millions of items; the file is malicious")


def claimed(pickle: Any, storages: list[tuple[str, int]] | None = None) -> int:
    """Return the number of bytes that the calls in a pickle make; a file is read to the pickle's end.

    `storages` gets the key of each storage that the pickle names, and the bytes that it should have; "" and -1 for one
    that is named in another way than torch does.

    Example:
        >>> claimed(b"\\x80\\x02cbuiltins\\nbytearray\\nM\\xff\\xff\\x85R.")
        65535

    Raises:
        ValueError or any other: the pickle is damaged.
    """
    total = 0
    stack: list[_Value | None] = []  # None is a mark
    memo: dict[int, _Value] = {}
    argument: Any
    for code, argument, _ in pickletools.genops(pickle):
        name = code.name
        if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if argument is None else int(argument)] = _value(stack[-1])
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[int(argument)])
        elif name in _LEAVES:
            stack.append(_leaf(argument))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = _value(stack.pop()), _value(stack.pop())
            made = _made(function.name, arguments)
            total += 0 if function.name.startswith(_VIEWS) and not function.name.startswith(_COPIES) else made
            stack.append(_Value(made))
        elif name == "BINPERSID":
            named = _storage(_value(stack.pop()).items)
            stack.append(_Value(_ITEM))
            if storages is not None:
                storages.append(named)
        elif name == "MARK":
            stack.append(None)
        elif name in _GROWS or name in _GROWS_BY_MARK:
            more = len(_popped(stack)) if name in _GROWS_BY_MARK else len([stack.pop() for _ in range(_GROWS[name])])
            _value(stack[-1]).size += _ITEM * more
        else:
            _pass(code, argument, stack)
    return total


def _value(entry: _Value | None) -> _Value:
    if entry is None:
        raise ValueError("a mark where a value is due")
    return entry


def _popped(stack: list[_Value | None]) -> list[_Value]:
    """Pop the values above the last mark, and the mark."""
    items: list[_Value] = []
    while (item := stack.pop()) is not None:
        items.append(item)
    return items[::-1]


def _leaf(argument: Any) -> _Value:
    """Return the value of an opcode that takes none from the stack."""
    if isinstance(argument, int):
        return _Value(_ITEM, number=int(argument))
    if isinstance(argument, str | bytes | bytearray):
        return _Value(len(argument), name=str(argument[:_LONGEST]))
    return _Value(0)


def _pass(code: Any, argument: Any, stack: list[_Value | None]) -> None:
    """Apply any other opcode to the stack."""
    items: list[_Value] = []
    for kind in reversed(code.stack_before):
        if kind.name == "stackslice":
            items = _popped(stack)
        elif kind.name != "mark":
            items.insert(0, _value(stack.pop()))
    for kind in code.stack_after:
        if kind.name == "mark":
            stack.append(None)
        elif code.name in ("GLOBAL", "INST"):
            stack.append(_function(*argument.split(" ", 1)))
        elif code.name == "STACK_GLOBAL":
            stack.append(_function(items[0].name, items[1].name))
        elif code.name == "DUP":
            stack.append(items[0])
        else:
            stack.append(_Value(_ITEM * len(items), items=items if code.name.startswith("TUPLE") else ()))


def _function(module: str, name: str) -> _Value:
    """Return a function. Those of other modules make no memory: torch refuses them, or calls those of `numpy_types`."""
    return _Value(0, name=name if module.partition(".")[0] in _MODULES else _REFUSED)


def _storage(items: tuple[_Value, ...]) -> tuple[str, int]:
    """Return key and size of a storage: ('storage', class, key, device, number of elements)."""
    if len(items) == 5 and (number := items[4].number) is not None and len(items[2].name) < _LONGEST:  # a whole key
        size = _ELEMENT_SIZES.get(items[1].name.removesuffix("Storage"))
        return ("", -1) if size is None else (items[2].name, size * number)
    return "", -1


def _made(function: str, arguments: _Value) -> int:
    """Return the bytes of a function's result: those of its arguments, or a number among them."""
    if function.startswith("_rebuild_tensor"):
        return 4 * _count(arguments.items[2:3])  # storage, offset, shape; an element has 1 to 16 bytes
    numbers = 0 if function in ("device", "complex", "Size", _REFUSED) else _count(arguments.items)
    return sum(item.size for item in arguments.items if item.number is None) + numbers


def _count(items: Iterable[_Value]) -> int:
    """Return the product of all numbers among values, and in tuples among them; 0 if there is none."""
    numbers = [n for item in items for n in ([item.number] if item.number is not None else _numbers(item.items))]
    return int(math.prod(min(abs(n), 1 << 64) or 1 for n in numbers[:64])) if numbers else 0


def _numbers(items: Iterable[_Value]) -> list[int]:
    return [item.number for item in items if item.number is not None]
