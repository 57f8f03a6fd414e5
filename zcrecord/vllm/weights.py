"""Weights for a serving program: the options, the archive of a model folder or URL, and its tensors as torch's.

Knows nothing of vLLM's classes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zcrecord.archive.damage import BlockCheck, check_digest
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import check_copies
from zcrecord.errors import MismatchError, RecordError, UnsupportedError, printable
from zcrecord.foreign.folders import model_in
from zcrecord.frameworks.torch import import_torch, torch_dtype, torch_shape
from zcrecord.frameworks.torch_pages import Runs, paged, request
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.storage.files import is_url

_BATCH = 256 << 20  # bytes of tensors that are fetched from a URL at a time
_HEAD = "lm_head.weight"  # the name's end, by which vLLM itself knows an output layer
# Errors of a model's load_weights that are about the weights. RuntimeError itself: its subclasses are of memory.
_ABOUT_WEIGHTS = (AssertionError, AttributeError, IndexError, KeyError, ValueError)
_EXTRA = "--model-loader-extra-config"

# Options in --model-loader-extra-config: what each takes. All but `trusted_keys` and `verify` are of a URL.
_KINDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "url": ("a text", lambda value: isinstance(value, str)),  # of the archive, if it is not in the model's folder
    "storage_options": ("an object", lambda value: isinstance(value, dict)),  # and `cache`: as in `load_record`
    "cache": ("a folder, or false", lambda value: isinstance(value, str) or value is False),
    "trusted_keys": ("a list of files", lambda value: isinstance(value, list) and set(map(type, value)) <= {str}),
    "verify": ("true or false", lambda value: isinstance(value, bool)),  # of a local archive: check what is read
}


def loader_options(config: Any) -> dict[str, Any]:
    """Return vLLM's `model_loader_extra_config` as a checked dict: `verify`, and the archive's URL with its options.

    Raises:
        UnsupportedError: it has a key that is not known, a value of another type, or options of a URL without one.
    """
    known_keys = ", ".join(_KINDS)
    if not isinstance(config, Mapping):
        raise UnsupportedError(f"{_EXTRA} takes a JSON object with {known_keys}, not a {type(config).__name__}")
    for key, value in config.items():
        if key not in _KINDS:
            raise UnsupportedError(f"{_EXTRA} has {printable(repr(key))}, which is not known; it takes {known_keys}")
        expected, is_valid = _KINDS[key]
        if not is_valid(value):
            raise UnsupportedError(f"{_EXTRA}: {key} is {expected}, not a {type(value).__name__}")
    if "url" not in config and (unused := [key for key in config if key not in ("trusted_keys", "verify")]):
        raise UnsupportedError(f"{_EXTRA}: {', '.join(unused)} without url; leave it out for an archive in the folder")
    return dict(config)


def open_weights(folder: str, url: str | None = None, **options: Any) -> Record:
    """Return the record of a model folder, or of a URL, with options of `load_record`.

    Raises:
        SourceError: there is no archive, or several, or it cannot be read. FormatError, LimitError: it is not a valid
        archive. IntegrityError: no owner of a trusted key signed it.
    """
    record: Record = load_record(model_in(folder, archive_first=True) if url is None else url, **options)
    return record


def has_own_head(record: Record) -> bool:
    """Return True if a record has an output layer that is not tied to another tensor."""
    return any(record.info(name).tied == () for name in record.names if name.endswith(_HEAD))


def torch_weights(
    record: Record, unused: Callable[[str], bool] | None = None, *, verify: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield (name, torch tensor) of a record, in saved order, without names for which `unused` returns True.

    Tensors of a local archive lie on its mapping, read-only: the program reads only the parts that it copies, see
    `frameworks.torch_pages`. If the archive has checksums of blocks, the blocks that it reads are checked, else the
    payload's digest if it reads all of a tensor at once; with `verify` False neither.

    Tensors of a URL, or of a file on a network file system, are fetched whole, up to 256 MiB at a time or one larger
    tensor, and each payload is checked by its digest. Each has memory of its own, which is freed with it.

    Raises:
        UnsupportedError: torch has no type for a tensor; before anything is yielded. IntegrityError: a payload is
        damaged, when the tensor is read. And errors of reading.
    """
    chosen = [info for info in record.infos() if unused is None or not unused(info.name)]
    _check_types(chosen, record.path)
    if is_url(record.path):  # of a catalogue, too, whose shards are remote
        yield from _fetch_weights(record, chosen)
    elif record.archive.source.on_demand:  # its pages cannot be asked for
        yield from _read_weights(record, chosen, verify=verify)
    else:
        infos = {info.name: info for info in chosen}
        tensors = record.torch(names=lambda info: info.name in infos, writable=False)
        for name in list(tensors):
            check = _page_check(record, infos[name]) if verify else None
            yield name, paged(tensors.pop(name), check)


def _read_weights(record: Record, infos: list[TensorInfo], *, verify: bool) -> Iterator[tuple[str, Any]]:
    """Yield (name, torch tensor) of a file on a network file system, which is read in batches."""
    payload_nbytes = record.archive.index.payloads["nbytes"]
    for batch in _batches(infos):
        tensors = record.torch(names=lambda info, batch=batch: info.name in batch, writable=False)
        for name in list(tensors):
            number = batch[name].payload
            # A payload that tensors share is not checked: it would be hashed again for each of them.
            if verify and number is not None and batch[name].nbytes == payload_nbytes[number]:
                check_digest(record.archive.source.pieces(number), name)
            yield name, tensors.pop(name)


def _page_check(record: Record, info: TensorInfo) -> Callable[[Runs, bool], None] | None:
    """Return a function for `paged` that checks pages of a tensor, each block once; None if it has no bytes."""
    pieces = [] if info.payload is None else record.archive.source.pieces(info.payload)
    block_check = BlockCheck.of(pieces[0], info.name) if len(pieces) == 1 else None

    def check_pages(runs: Runs, is_whole: bool) -> None:
        if block_check is not None:
            for start, nbytes in runs:
                block_check.pages(start, nbytes, request)
        elif is_whole and info.nbytes == sum(piece.nbytes for piece in pieces):  # else the digest would need more reads
            check_digest(pieces, info.name)
            pieces.clear()  # checked once

    return check_pages if pieces else None


def _check_types(infos: list[TensorInfo], path: str | None) -> None:
    """Raise UnsupportedError, with advice, for the first tensor that torch has no type for."""
    torch = import_torch()
    dtype_of = functools.cache(functools.partial(torch_dtype, torch))
    for info in infos:
        try:
            dtype_of(info.dtype, info.bits)
            torch_shape(info.dtype, info.bits, info.shape)
        except UnsupportedError as error:
            reason = error.message.partition(";")[0]
            advice = f"save the model without it: record.select(lambda tensor: tensor.name != {info.name!r})"
            raise UnsupportedError(f"{reason}; {advice}", path=path, tensor=info.name) from None


def _fetch_weights(record: Record, infos: list[TensorInfo]) -> Iterator[tuple[str, Any]]:
    """Yield (name, torch tensor) of an archive behind a URL, fetched in batches into memory of their own."""
    from zcrecord.loaders.torch import TorchLoader

    check_copies(record.archive, infos)
    loader = TorchLoader("cpu")
    for batch in _batches(infos):
        tensors = record.load_into(loader, lambda info, batch=batch: info.name in batch)
        for name in list(tensors):
            yield name, tensors.pop(name)


def _batches(infos: list[TensorInfo]) -> Iterator[dict[str, TensorInfo]]:
    """Yield tensors to read together, by name and in order: up to _BATCH bytes, or one larger tensor."""
    batch: dict[str, TensorInfo] = {}
    nbytes = 0
    for info in infos:
        nbytes += info.nbytes
        if batch and nbytes > _BATCH:
            yield batch
            batch, nbytes = {}, info.nbytes
        batch[info.name] = info
    if batch:
        yield batch


def check_mismatch(error: Exception, model: str, path: str | None, tensor: str | None) -> None:
    """Raise MismatchError if an error of a model's `load_weights` is about the weights.

    `model` is the model's class; `tensor` is the one that it was given last, None if it had them all.
    """
    is_about_weights = isinstance(error, _ABOUT_WEIGHTS) or type(error) is RuntimeError
    if is_about_weights and not isinstance(error, RecordError):
        reason = printable(str(error) or type(error).__name__, 400)
        message = f"{model} does not take these weights: {reason}; config.json has to be of the model that was saved"
        raise MismatchError(message, path=path, tensor=tensor) from error
