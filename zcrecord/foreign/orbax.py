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
from typing import Any

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

from .pickled import exactly
from .readers import Reader
from .receiver import Receiver

_ARRAYS = ("jax.Array", "np.ndarray", "scalar")
_EMPTY = {"Dict": "mapping", "List": "list", "Tuple": "tuple", "NamedTuple": "tuple"}
_LARGEST = 256 << 20  # bytes of metadata
_SEQUENCE = 1  # type of a key that is the number of an item
_LOOKS = 1 << 24  # limit of looks at files, besides one for each byte of the folder
_CHUNKS = 1 << 16  # limit of the chunks of all arrays, besides one for each byte of the folder
_EXPANDED, _TIMES = 64 << 20, 1 << 16  # limit of the bytes of all arrays: so many, plus so many times the folder


def read(reader: Reader, out: Receiver) -> int:
    """Give the arrays and values of a tree to `out`, by a reader of its `_METADATA`; returns the bytes of the folder.

    They are those of orbax's restore without a template, which has lists for tuples and dicts for all other nodes.
    In memory are rows of chunks at a time: of an array that was sharded by columns all of it.

    Raises:
        FormatError: a file is damaged. SourceError: a link leads out of the folder, or a pipe is in it.
        UnsupportedError: a value of another type. LimitError: a small folder claims huge arrays, or many chunks, or is
        nested too deep. DependencyError: tensorstore is not installed.
    """
    folder, leaves, lists = os.path.dirname(os.path.abspath(reader.path or "")), {}, set[tuple[str, ...]]()
    root, together = real_path(folder), os.path.exists(os.path.join(folder, "manifest.ocdbt"))  # all arrays in one
    files, parts = _files(root, root), dict[str, dict[str, Identity]]()  # all, and those in the folder of each array
    for file, identity in files.items():
        part = root if together else os.path.join(root, os.path.relpath(file, root).partition(os.sep)[0])
        parts.setdefault(part, {})[file] = identity
    nbytes = sum(identity[2] for identity in files.values())
    with _faults("its metadata is not that of a tree of orbax"):
        tree = json.loads(reader.read(_LARGEST))
        for leaf in tree["tree_metadata"].values():
            path = tuple(str(key["key"]) for key in leaf["key_metadata"])
            if len(path) > MAX_DEPTH:
                raise LimitError(f"its metadata are nested more than {MAX_DEPTH} deep")
            lists |= {path[:i] for i, key in enumerate(leaf["key_metadata"]) if key["key_type"] == _SEQUENCE}
            leaves[path] = exactly(str, leaf["value_metadata"]["value_type"])
        texts, described = exactly(dict, _json(folder, "_strings.json")), _json(folder, "array_metadatas", "process_0")
        about = [array["array_metadata"] for array in described.get("array_metadatas", ())]
        impls = {one["param_name"]: one["ext_metadata"]["random_key_impl"] for one in about if one["ext_metadata"]}
    driver = "zarr3" if tree.get("use_zarr3") else "zarr"
    arrays = _opened(folder, driver, [path for path in leaves if leaves[path] in _ARRAYS], together)
    _check_claims(arrays.values(), nbytes)
    if together and len(arrays) * len(files) > _LOOKS + nbytes:  # each array looks at all files when it is used
        raise LimitError(f"has {len(files)} files for {len(arrays)} arrays of {nbytes} bytes; it is damaged")
    for path, kind in leaves.items():
        for above in (path[:i] for i in range(len(path)) if path[:i] in lists):
            out.module(above, "list")
            lists.remove(above)
        with located(tensor=(name := ".".join(path))):
            if kind in _EMPTY:
                out.module(path, _EMPTY[kind])
            elif kind in ("None", "string"):
                out.attribute(path, texts.get(name) if kind == "string" else None)
            elif kind == "scalar":
                with _faults("is no scalar"):
                    number = _values(arrays[path]).item()
                out.attribute(path, number)
            elif kind not in _ARRAYS:
                raise UnsupportedError(f"a value of orbax's type {printable(kind)}; save it as an array or a number")
            else:
                if name in impls:  # the data of typed PRNG keys
                    out.module(path, "object", "zcr:jax_key")
                    out.attribute((*path, "impl"), impls[name])
                where, array = (*path, "value") if name in impls else path, arrays[path]
                part = root if together else os.path.join(root, name)
                check = functools.partial(_check_unchanged, parts.get(part, {}), root, part)
                element, pieces = dtypes.from_numpy(array.dtype.numpy_dtype), functools.partial(_pieces, array, check)
                out.put_decoded(where, element, array.shape, pieces, "decoded by tensorstore")
    return nbytes


def _check_claims(arrays: Collection[Any], nbytes: int) -> None:
    """Raise LimitError for arrays with far more bytes or chunks than files of `nbytes` bytes may have."""
    # A chunk of which little is in an array is decoded whole, and what does not fit into memory ends the process.
    sizes = [(max(a.size, prod(a.chunk_layout.read_chunk.shape or ())), a.dtype.numpy_dtype) for a in arrays]
    claimed = sum(size * max(dtype.itemsize, 1) for size, dtype in sizes)  # characters have an itemsize of 0
    if claimed > _EXPANDED + _TIMES * nbytes:
        raise LimitError(f"{nbytes} bytes of files claim {claimed} bytes of arrays; the checkpoint is damaged")
    chunks = sum(prod(map(_over, a.shape, a.chunk_layout.read_chunk.shape or ())) for a in arrays)
    if chunks > _CHUNKS + nbytes:
        raise LimitError(f"{nbytes} bytes of files claim {chunks} chunks of arrays; the checkpoint is damaged")


def _over(n: int, size: int) -> int:
    return -(-n // size)


def _files(root: str, part: str) -> dict[str, Identity]:
    """Return the identities of all files in a part of a folder; SourceError for a link out of it, or what is no file.

    Else a stranger's folder could have any file read: tensorstore follows links.
    """
    files = {}
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
                files[path] = identity_from(status)
    return files


def _check_unchanged(files: dict[str, Identity], root: str, part: str) -> None:
    """Raise SourceError if a file was changed since the folder was opened: its content may have been compared then."""
    if _files(root, part) != files:
        raise SourceError("was changed since it was opened; load it again", path=part)


def _opened(folder: str, driver: str, paths: list[tuple[str, ...]], together: bool) -> dict[tuple[str, ...], Any]:
    """Return arrays of tensorstore by their paths: all in one OCDBT database, or each in a folder of its own."""
    try:
        import tensorstore
    except ImportError as error:
        raise missing_package("tensorstore", extra="orbax") from error
    out = {}
    for path in paths:
        name = ".".join(path)
        if not together and not is_plain_name(name, ""):
            raise FormatError("its name is not that of a folder beside the metadata", tensor=name)
        files = {"driver": "file", "path": f"{folder}/" if together else f"{folder}/{name}/"}
        store = {"driver": "ocdbt", "base": files, "path": f"{name}/"} if together else files
        with located(tensor=name), _faults("tensorstore cannot open it"):
            out[path] = tensorstore.open({"driver": driver, "kvstore": store}, open=True, read=True).result()
    return out


def _pieces(array: Any, check: Callable[[], None]) -> Iterator[Any]:
    """Yield an array's bytes, rows of chunks at a time; all of packed elements, which may end within a byte.

    `check` is called before and after: it raises if the files are not those that were opened. One that became a pipe
    would be waited for.
    """
    check()
    packed = dtypes.from_numpy(array.dtype.numpy_dtype).packed
    count = array.shape[0] if array.size and array.rank and not packed else 0
    rows = array.chunk_layout.read_chunk.shape[0] if count else 0
    for part in [array[i : min(i + rows, count)] for i in range(0, count, rows)] if rows else [array]:
        yield (PackedTensor.pack(_values(part)).packed if packed else as_bytes(_values(part))).data
    check()


def _values(array: Any) -> Any:
    with _faults("tensorstore cannot read it"):
        return array.read().result()


@contextlib.contextmanager
def _faults(fault: str) -> Iterator[None]:
    """Raise FormatError for exceptions of tensorstore, or of metadata of another form."""
    try:
        yield
    except RecordError:
        raise
    except (ValueError, OSError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        raise FormatError(f"{fault}: {printable(repr(error), 200)}") from error


def _json(*path: str) -> Any:
    """Return the content of a file of JSON, {} if it is not there."""
    with contextlib.suppress(FileNotFoundError), open(os.path.join(*path), encoding="utf-8") as file:
        return json.load(file)
    return {}
