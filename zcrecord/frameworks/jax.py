"""An archive's tensors as jax's: over the archive's own memory where jax can use it, copied where it cannot.

==============  ======================================================================================================
CPU             over the mapping, uncopied: elements of whole bytes, in C order, at an address that is a multiple of
                64, as archives have them unless `alignment=` was less; all else, and mode "c", is copied
device          one copy, on the device
==============  ======================================================================================================

Arrays that are sharded over devices are left to `loaders.jax`.

A pytree (named tuples, optimizer states, other classes that jax knows) is built like a template; the values are the
record's, found by the keys on the way to each leaf, under which the tree was saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.payloads import check_views
from zcrecord.archive.subset import Names
from zcrecord.codec import conventions
from zcrecord.codec.entries import ModuleKind
from zcrecord.errors import MismatchError, RecordError, missing_package, printable
from zcrecord.tensors.interop import path_key

from .elements import beside_views, unsupported_elements
from .torch import shared_payloads

__all__ = ["ElementCheck", "beside_jax_views", "import_jax", "jax_arrays", "like_template"]

Array = np.ndarray[Any, np.dtype[Any]]

_ADVICE = "make the template of what was saved, such as optimizer.init(params)"


def jax_arrays(archive: Archive, names: Names | None = None) -> dict[str, Any]:
    """Return jax arrays by name, in saved order, on jax's default device; tied ones are one and the same array.

    On the CPU an array lies on the archive's own memory, and keeps it, where jax can use it: elements of whole bytes,
    in C order, at an address that is a multiple of 64. Everything else is copied once: other strides, elements narrower
    than a byte, archives saved with `alignment=16` or 32 as it falls, all of a record of mode "c" (its memory may be
    edited, jax's never), and whatever goes to another device. Donating an uncopied array to a jitted function is safe:
    jax does not write to memory that is not its own. Tensors that jax has no type for, such as strings, come as the
    record's own views: a StringTensor or a PackedTensor.

    Args:
        archive: an opened archive.
        names: a name, a pattern, several, or a function of a TensorInfo; see `Record.select`.

    Raises:
        DependencyError: jax is not installed. TensorNotFoundError: a name without wildcards is not there.
        UnsupportedError: jax would make 32 bits of a tensor's 64, unless `jax_enable_x64` is set; or leave it out with
        `names`. LimitError: different views of the same bytes, each by itself, would take out of all proportion.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> zcrecord.load_record("model.zcr").jax()["w"].sum().item()
        6.0
    """
    jax = import_jax()

    def made(archive: Archive) -> dict[str, Any]:
        return dict(zip(archive.names(), _JaxArrays(jax, archive).arrays(), strict=True))

    return beside_jax_views(archive, names, made)


def beside_jax_views(
    archive: Archive, names: Names | None, make: Callable[[Archive], dict[str, Any]]
) -> dict[str, Any]:
    """Return tensors by name: those that jax has a type for made by `make`, the others as views of the record."""
    jax = import_jax()

    @functools.cache
    def known(dtype: np.dtype[Any] | None) -> bool:
        try:
            return dtype is not None and jax.device_put(np.zeros(1, dtype)) is not None
        except (TypeError, ValueError, RuntimeError):
            return False

    return beside_views(archive, names, lambda kind, _bits, _shape: known(kind.numpy), make)


def import_jax() -> Any:
    """Return jax.

    Raises:
        DependencyError: it is not installed.
    """
    try:
        import jax
    except ImportError as error:
        raise missing_package("jax", extra="jax") from error
    return jax


class _JaxArrays:
    """One call of `jax_arrays`."""

    def __init__(self, jax: Any, archive: Archive) -> None:
        self._archive = archive
        self._put: Callable[[Array], Any] = jax.device_put if archive.mode == "r" else _copied(jax)
        self._check = ElementCheck(jax, archive)

    def arrays(self) -> Iterator[Any]:
        """Yield every array, in saved order."""
        archive = self._archive
        shared = shared_payloads(archive)
        rows = archive.index.tensors
        tied: dict[Any, Any] = {}
        for i, (number, view) in enumerate(zip(rows["payload"].tolist(), archive.views(), strict=True)):
            if number not in shared:
                yield self._array(i, view)
                continue
            row = archive.row(i)
            key = number, row.byte_offset, row.dtype, archive.shape(row), archive.strides(row)
            if key not in tied:
                tied[key] = self._array(i, view)
            yield tied[key]

    def _array(self, i: int, view: Any) -> Any:
        return self._put(self._check(i, view))


class ElementCheck:
    """Gives what jax takes for tensors, after checking that it keeps their elements as they are."""

    def __init__(self, jax: Any, archive: Archive) -> None:
        """Raise LimitError if copies of an archive's different views would come to far more than it has."""
        check_views(archive)
        self._jax, self._archive = jax, archive
        self._known: set[Any] = set()

    def __call__(self, i: int, view: Any) -> Array:
        """Return a view of tensor i, or of a part of it, as an array; narrow elements are unpacked.

        Raises:
            UnsupportedError: jax would make 32 bits of 64.
        """
        if view.dtype not in self._known:
            self._check(i, view.dtype)
        return view if isinstance(view, np.ndarray) else view.unpack()

    def dtype_of(self, i: int) -> np.dtype[Any]:
        """Return the type of tensor i's elements; raises UnsupportedError, as for a view of it."""
        dtype = dtypes.by_code[self._archive.row(i).dtype].numpy
        assert dtype is not None, "jax has it"
        if dtype not in self._known:
            self._check(i, dtype)
        return dtype

    def _check(self, i: int, dtype: np.dtype[Any]) -> None:
        """Raise unless jax keeps elements of this type as they are."""
        found = self._jax.device_put(np.zeros(1, dtype)).dtype
        if found != dtype:
            what = f'jax would make {found} of {dtype}, unless jax.config.update("jax_enable_x64", True) comes first'
            error = unsupported_elements(dtype.name, what)
            raise error.located(path=self._archive.path, tensor=self._archive.index.name(i))
        self._known.add(dtype)


def _copied(jax: Any) -> Callable[[Array], Any]:
    return lambda view: jax.numpy.array(view, copy=True)


class _Branch(NamedTuple):
    """A saved module: its items by their keys as text, and whether it is an object of a class."""

    items: dict[str, Any]
    is_object: bool


class _Leaf(NamedTuple):
    """A tensor or attribute, which the template may have a place for."""

    value: Any
    is_tensor: bool


def like_template(archive: Archive, tensors: Sequence[Any], like: Any) -> Any:
    """Return a pytree of the structure of `like`, each leaf the tensor or attribute that was saved at its place."""
    tree_util = import_jax().tree_util
    leaves, structure = tree_util.tree_flatten_with_path(like)
    root = unflatten.unflatten(archive.index, 0, lambda i: _Leaf(tensors[i], True), archive.payload, _made)
    used: set[int] = set()
    try:
        values = [_found(root, path, leaf, used) for path, leaf in leaves]
        for where, left in _left(root, "", used):
            what = f"expected no such key, found {_told(left)}: like= has no place for it"
            raise MismatchError(f"{what}; {_ADVICE}", tensor=where)
    except RecordError as error:
        raise error.located(path=archive.path) from error.__cause__
    return tree_util.tree_unflatten(structure, values)


def _made(kind: int, type_name: str, items: list[tuple[str, Any]]) -> Any:
    children = {key: value if isinstance(value, _Branch | _Leaf) else _Leaf(value, False) for key, value in items}
    if kind == ModuleKind.OBJECT:
        value = conventions.value_of_object(type_name, [(key, child.value) for key, child in _leaves_of(children)])
        if value is not conventions.ABSENT:
            return _Leaf(value, False)
    return _Branch(children, kind == ModuleKind.OBJECT)


def _leaves_of(children: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the items of a module all of whose children are leaves, none of any other."""
    return list(children.items()) if all(isinstance(child, _Leaf) for child in children.values()) else []


def _found(root: _Branch, path: Sequence[Any], leaf: Any, used: set[int]) -> Any:
    """Return the value that the record has at a leaf's place."""
    here: Any = root
    keys = [str(path_key(step)) for step in path]
    for depth, key in enumerate(keys):
        inner = here.items.get(key) if isinstance(here, _Branch) else _item(here, key, used)
        if inner is None:
            where = ".".join(keys[: depth + 1])
            raise MismatchError(f"expected {_wanted(leaf)}, found no such key; {_ADVICE}", tensor=where)
        here = inner
    is_array = hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    fits = isinstance(here, _Leaf) and (here.is_tensor or not is_array)
    if fits and here.is_tensor and is_array:
        fits = tuple(leaf.shape) == tuple(here.value.shape)  # an optimizer's dtypes may not be those of its init
    if not fits:
        raise MismatchError(f"expected {_wanted(leaf)}, found {_told(here)}; {_ADVICE}", tensor=".".join(keys) or None)
    used.add(id(here))
    return here.value


def _item(here: Any, key: str, used: set[int]) -> Any:
    """Return one item of a list or tuple that is an attribute; None if there is none."""
    if not isinstance(here, _Leaf) or not isinstance(here.value, list | tuple) or not key.isdecimal():
        return None
    used.add(id(here))
    return _Leaf(here.value[int(key)], False) if int(key) < len(here.value) else None


def _left(here: Any, where: str, used: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield values that no leaf of the template took; None and empty lists are structure, as plain fields are."""
    for key, child in here.items.items():
        name = f"{where}.{key}" if where else key
        if isinstance(child, _Branch):
            yield from _left(child, name, used)
        elif id(child) not in used and (child.is_tensor or not (here.is_object or child.value in (None, [], ()))):
            yield name, child


def _wanted(leaf: Any) -> str:
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return f"an array of {leaf.dtype}, shape {tuple(leaf.shape)}"
    return f"a value as {printable(repr(leaf), 60)}"


def _told(found: Any) -> str:
    if isinstance(found, _Branch):
        return "a module"
    if found.is_tensor:
        return f"an array of {found.value.dtype}, shape {tuple(found.value.shape)}"
    value = found.value
    return "None" if value is None else f"{type(value).__name__} {printable(repr(value), 60)}"
