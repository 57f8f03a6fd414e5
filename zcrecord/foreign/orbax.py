"""Reads a tree that orbax saved: a folder of tensorstore's arrays, and `_METADATA`, which lists them.

Neither orbax nor jax is needed. tensorstore's limits are not ours: one array takes as much memory as it claims.

Source: orbax-checkpoint 0.12, `InternalTreeMetadata` and `get_tensorstore_spec`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import stat
from collections.abc import Callable, Collection, Iterator
from math import prod
from typing import Any, NamedTuple

from zcrecord import dtypes
from zcrecord.codec.layout import MAX_DEPTH
from zcrecord.errors import (
    FormatError,
    LimitError,
    RecordError,
    SourceError,
    UnsupportedError,
    located,
    missing_package,
    printable,
)
from zcrecord.storage.files import Identity, real_path
from zcrecord.storage.folders import belongs_to, is_plain_name
from zcrecord.storage.new_files import identity_from
from zcrecord.tensors.packed import PackedTensor
from zcrecord.tensors.strides import as_bytes

from .pickled import expect_type
from .readers import Reader
from .receiver import Receiver

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = {"Dict": "mapping", "List": "list", "Tuple": "tuple", "NamedTuple": "tuple"}
_LARGEST = 256 << 20  # bytes of metadata
_SEQUENCE = 1  # type of a key that is the number of an item
_LOOKS = 1 << 24  # limit of looks at files, besides one for each byte of the folder
_CHUNKS = 1 << 16  # limit of the chunks of all arrays, besides one for each byte of the folder
_EXPANDED, _TIMES = 64 << 20, 1 << 16  # limit of the bytes of all arrays: so many, plus so many times the folder

Keys = tuple[str, ...]  # on the path to a leaf of the tree


def read(reader: Reader, out: Receiver) -> int:
    """Give the arrays and values of a tree to `out`, by a reader of its `_METADATA`; returns the bytes of the folder.

    They are those of orbax's restore without a template, which has lists for tuples and dicts for all other nodes.
    An array is read a few rows of chunks at a time, when it is used; one that was sharded by columns as a whole.

    Raises:
        FormatError: a file is damaged. SourceError: a link leads out of the folder, or a pipe is in it.
        UnsupportedError: a value of another type. LimitError: a small folder claims huge arrays, or many chunks, or is
        nested too deep. DependencyError: tensorstore is not installed.
    """
    folder = _Folder(os.path.dirname(os.path.abspath(reader.path or "")))
    tree = _read_tree(reader, folder.path)
    arrays = _open_arrays(folder, tree)
    _check_claims(arrays.values(), folder.nbytes)
    for path, value_type in tree.value_types.items():
        for parent in (path[:depth] for depth in range(len(path))):
            if parent in tree.lists:
                out.module(parent, "list")
                tree.lists.remove(parent)
        name = ".".join(path)
        with located(tensor=name):
            if value_type in _EMPTY:
                out.module(path, _EMPTY[value_type])
            elif value_type in ("None", "string"):
                out.attribute(path, tree.texts.get(name) if value_type == "string" else None)
            elif value_type == "scalar":
                with _as_format_error("is no scalar"):
                    number = _read_array(arrays[path]).item()
                out.attribute(path, number)
            elif value_type in _ARRAYS:
                check = functools.partial(folder.check_unchanged, name)
                _put_array(path, arrays[path], tree.key_impls.get(name), check, out)
            else:
                raise UnsupportedError(f"a value of orbax's type {printable(value_type)}; save an array or a number")
    return folder.nbytes


class _Folder:
    """A tree's folder and the identities of its files when it was opened; SourceError as `_file_identities`."""

    def __init__(self, path: str) -> None:
        self.path, self._root = path, real_path(path)
        self.is_database = os.path.exists(os.path.join(path, "manifest.ocdbt"))  # OCDBT has all arrays in one
        identities = _file_identities(self._root, self._root)
        self.file_count, self.nbytes = len(identities), sum(size for _, _, size, _ in identities.values())
        self._by_array: dict[str, dict[str, Identity]] = {}  # by the folder of each; all by "" in a database
        for file, identity in identities.items():
            name = "" if self.is_database else os.path.relpath(file, self._root).partition(os.sep)[0]
            self._by_array.setdefault(name, {})[file] = identity

    def check_unchanged(self, name: str) -> None:
        """Raise SourceError if a file of an array was changed since the folder was opened."""
        place = self._root if self.is_database else os.path.join(self._root, name)
        if _file_identities(self._root, place) != self._by_array.get("" if self.is_database else name, {}):
            raise SourceError("was changed since it was opened; load it again", path=place)


class _Tree(NamedTuple):
    """Metadata of a tree; names of leaves are their keys joined by dots."""

    value_types: dict[Keys, str]  # orbax's name for the type of each leaf
    lists: set[Keys]  # paths of nodes whose children are numbered
    texts: dict[str, Any]  # by the names of leaves that are strings
    key_impls: dict[str, str]  # algorithms of typed PRNG keys, by the names of their data
    driver: str  # of tensorstore, for all arrays


def _read_tree(reader: Reader, folder: str) -> _Tree:
    """Return the metadata of the tree in a folder; FormatError, LimitError as `read`."""
    value_types, lists = dict[Keys, str](), set[Keys]()
    with _as_format_error("its metadata is not that of a tree of orbax"):
        metadata = json.loads(reader.read(_LARGEST))
        for leaf in metadata["tree_metadata"].values():
            path = tuple(str(key["key"]) for key in leaf["key_metadata"])
            if len(path) > MAX_DEPTH:
                raise LimitError(f"its metadata are nested more than {MAX_DEPTH} deep")
            lists |= {path[:i] for i, key in enumerate(leaf["key_metadata"]) if key["key_type"] == _SEQUENCE}
            value_types[path] = expect_type(str, leaf["value_metadata"]["value_type"])
        texts = expect_type(dict, _read_json(folder, "_strings.json"))
        described = _read_json(folder, "array_metadatas", "process_0").get("array_metadatas", ())
        arrays = [entry["array_metadata"] for entry in described]
        keys = [array for array in arrays if array["ext_metadata"]]
        impls = {array["param_name"]: array["ext_metadata"]["random_key_impl"] for array in keys}
        return _Tree(value_types, lists, texts, impls, "zarr3" if metadata.get("use_zarr3") else "zarr")


def _put_array(path: Keys, array: Any, key_impl: str | None, check: Callable[[], None], out: Receiver) -> None:
    """Give an array to `out`; with `key_impl` it is the data of a typed PRNG key, whose object is made around it."""
    if key_impl is not None:
        out.module(path, "object", "zcr:jax_key")
        out.attribute((*path, "impl"), key_impl)
        path = (*path, "value")
    pieces = functools.partial(_pieces, array, check)
    out.put_decoded(path, dtypes.from_numpy(array.dtype.numpy_dtype), array.shape, pieces, "decoded by tensorstore")


def _check_claims(arrays: Collection[Any], nbytes: int) -> None:
    """Raise LimitError for arrays with far more bytes or chunks than files of `nbytes` bytes may have."""
    # A chunk of which little is in an array is decoded whole, and what does not fit into memory ends the process.
    sizes = [(max(a.size, prod(a.chunk_layout.read_chunk.shape or ())), a.dtype.numpy_dtype) for a in arrays]
    claimed = sum(size * max(dtype.itemsize, 1) for size, dtype in sizes)  # characters have an itemsize of 0
    if claimed > _EXPANDED + _TIMES * nbytes:
        raise LimitError(f"{nbytes} bytes of files claim {claimed} bytes of arrays; the checkpoint is damaged")
    chunks = sum(prod(map(_ceil_div, a.shape, a.chunk_layout.read_chunk.shape or ())) for a in arrays)
    if chunks > _CHUNKS + nbytes:
        raise LimitError(f"{nbytes} bytes of files claim {chunks} chunks of arrays; the checkpoint is damaged")


def _ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def _file_identities(root: str, part: str) -> dict[str, Identity]:
    """Return the identities of all files in a part of a folder, by their paths.

    SourceError for a link out of it, by which tensorstore would read any file for a stranger, or for what is no file.
    """
    identities = {}
    for place, folders, names in os.walk(part):
        for path in (os.path.join(place, name) for name in (*folders, *names)):
            if os.path.islink(path) and not belongs_to(root, real := real_path(path)):
                fault = f"is a link to {printable(real)}, out of its folder"
                raise SourceError(f"{fault}; put the file itself there", path=path)
            try:
                status = os.stat(path)
            except OSError as error:
                raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise SourceError("not a regular file", path=path)
            if stat.S_ISREG(status.st_mode):
                identities[path] = identity_from(status)
    return identities


def _open_arrays(folder: _Folder, tree: _Tree) -> dict[Keys, Any]:
    """Return a tree's arrays as tensorstore's, by their paths, before elements are read; raises what `read` does."""
    try:
        import tensorstore
    except ImportError as error:
        raise missing_package("tensorstore", extra="orbax") from error
    arrays = {}
    for path in [path for path, value_type in tree.value_types.items() if value_type in _ARRAYS]:
        name = ".".join(path)
        if not folder.is_database and not is_plain_name(name, ""):
            raise FormatError("its name is not that of a folder beside the metadata", tensor=name)
        files = {"driver": "file", "path": f"{folder.path}/" if folder.is_database else f"{folder.path}/{name}/"}
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if folder.is_database else files
        with located(tensor=name), _as_format_error("tensorstore cannot open it"):
            arrays[path] = tensorstore.open({"driver": tree.driver, "kvstore": store}, open=True, read=True).result()
    if folder.is_database and len(arrays) * folder.file_count > _LOOKS + folder.nbytes:
        # Each array looks at all files when it is used.
        raise LimitError(f"has {folder.file_count} files for {len(arrays)} arrays of {folder.nbytes} bytes")
    return arrays


def _pieces(array: Any, check: Callable[[], None]) -> Iterator[Any]:
    """Yield an array's bytes, one row of chunks at a time; packed elements, which may end within a byte, at once.

    `check` is called before, since tensorstore would wait for a file that became a pipe, and after.
    """
    check()
    if dtypes.from_numpy(array.dtype.numpy_dtype).packed:
        yield PackedTensor.pack(_read_array(array)).packed.data
    elif not array.size or not array.rank:
        yield as_bytes(_read_array(array)).data
    else:
        count, rows = array.shape[0], array.chunk_layout.read_chunk.shape[0]
        for start in range(0, count, rows):
            yield as_bytes(_read_array(array[start : min(start + rows, count)])).data
    check()


def _read_array(array: Any) -> Any:
    with _as_format_error("tensorstore cannot read it"):
        return array.read().result()


@contextlib.contextmanager
def _as_format_error(fault: str) -> Iterator[None]:
    """Raise FormatError, which begins with `fault`, for exceptions of tensorstore or of metadata of another form."""
    try:
        yield
    except RecordError:
        raise
    except (ValueError, OSError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"{fault}: {printable(repr(error), 200)}") from error


def _read_json(*path: str) -> Any:
    """Return the content of a file of JSON, {} if it is not there."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)
    return {}
