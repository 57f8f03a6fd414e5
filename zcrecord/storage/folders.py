"""Model folders: the one archive in a folder, and the files that belong to the model beside it.

A folder as model hubs have it: `config.json`, the tokenizer's files, and the weights, here `model.zcr`. A new one gets
copies of the files beside the weights it is made from, and appears whole.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zcrecord.errors import SourceError, UnsupportedError, printable

from .files import check_destination, is_url, open_sink, path_of, real_path, scratch_folder
from .new_files import Placement, put_in_place, refusals
from .scratch import SHARD_END, sync_folder

__all__ = [
    "MODEL",
    "SHARD_NAME",
    "archive_in",
    "catalogue_of_shard",
    "companions",
    "copy_file",
    "in_hub_cache",
    "is_plain_name",
    "local_folder",
    "model_folder",
    "names_folder",
    "takes_folder",
]

MODEL = "model.zcr"
# Suffixes of configuration, tokenizers, templates, code and model cards, as transformers and Optimum write them; an
# index of shards is none of them.
_BESIDE = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md", "LICENSE", "NOTICE")
_INDEX = ".index.json"
_PIECE = 1 << 20
_UNLINKED = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))  # a pipe would wait for its writer
SHARD_NAME = re.compile(r".*-\d{5}-of-\d{5}\.zcr")  # of a shard, which is no model by itself


def local_folder(folder: Any) -> str:
    """Return the path of a folder that several files are written to.

    Raises:
        UnsupportedError: it is no path, or a URL.
    """
    if is_url(folder):
        from .urls import redacted  # here, because few folders are

        what = "is a URL, and several files are written to a folder here; name one, and upload what is in it"
        raise UnsupportedError(what, path=redacted(folder))
    return path_of(folder)


def archive_in(folder: str | os.PathLike[str]) -> str:
    """Return the path of the archive in a model folder: `model.zcr`, or the only archive that is no shard.

    Raises:
        SourceError: there is none, or more than one; or the folder cannot be read.
    """
    where = path_of(folder)
    try:
        names = sorted(name for name in os.listdir(where) if name.endswith(".zcr"))
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", path=where, errno=error.errno) from error
    found = [MODEL] if MODEL in names else [name for name in names if not SHARD_NAME.fullmatch(name)]
    if len(found) == 1:
        return os.path.join(where, found[0])
    if found:
        what = f"is a folder with several archives: {', '.join(map(printable, found))}; name one, or call one {MODEL}"
    else:
        what = f"is a folder without an archive ({MODEL}); zcrecord convert makes one"
    raise SourceError(what, path=where, errno=errno.ENOENT)


def catalogue_of_shard(name: str) -> str | None:
    """Return the name of the catalogue whose shard a file of this name would be; None for other names."""
    return re.sub(f"{SHARD_END}$", ".zcr", name) if SHARD_NAME.fullmatch(name) else None


def is_plain_name(file: str, suffix: str) -> bool:
    """Return True for a file name with that suffix, legal on any system, that leads to no other folder."""
    name = file.isprintable() and not set(file) & set('/\\:*?"<>|') and os.path.basename(file) == file
    return name and file.endswith(suffix) and file != suffix


def takes_folder(dest: str) -> bool:
    """Return True if what is made of a folder becomes a folder at `dest`: it is one, or is new and not named .zcr.

    A URL never does.
    """
    return not is_url(dest) and (names_folder(dest) or not (os.path.exists(dest) or dest.endswith(".zcr")))


def names_folder(dest: str) -> bool:
    """Return True if a path names a folder: one that is there, or a new one by the separator at its end."""
    if is_url(dest):
        return False
    return os.path.isdir(dest) or (dest.endswith(("/", os.sep)) and not os.path.exists(dest))


def companions(folder: str) -> dict[str, str]:
    """Return the files in a model folder that belong to it beside its weights, by their suffixes: names with paths.

    The paths have no link in them, so that `copy_file` follows none that takes a file's place meanwhile. Links out of
    the folder are left out, but for those inside one repository of a Hugging Face cache.

    Raises:
        SourceError: the folder cannot be read.
    """
    with refusals(folder):
        root = os.path.realpath(folder)
        names = [n for n in sorted(os.listdir(root)) if n.endswith(_BESIDE) and not n.endswith(_INDEX)]
    real = {name: os.path.realpath(os.path.join(root, name)) for name in names}
    inside = (n for n in names if os.path.dirname(real[n]) == root or in_hub_cache(root, real[n]))
    return {name: real[name] for name in inside if not name.startswith(".") and os.path.isfile(real[name])}


def in_hub_cache(folder: str, path: str) -> bool:
    """Return True for a file in the `blobs` of the Hugging Face repository whose snapshot a folder is in."""
    holder = Path(path).parent
    return any(above.name == "snapshots" and holder == above.with_name("blobs") for above in Path(folder).parents)


@contextlib.contextmanager
def model_folder(source: str | None, dest: str, weights: str = MODEL, *, force: bool, durable: bool) -> Iterator[str]:
    """Yield a path for the archive of a new model folder; at the end it is in `dest`, with the source's companions.

    A new folder appears whole, or not at all. In one that exists the archive is at its place as soon as it is written,
    shards and all, and the other files are moved there at the end; files with the same bytes are left as they are.

    Args:
        source: a folder; None for none, so that there are no companions.
        weights: the name of the archive, or of the file of another format.

    Raises:
        DestinationExistsError: the archive, or another file of this name, is there, and `force` was not given.
        SourceError: the file system reports an error.
    """
    dest = real_path(dest)  # once: the working folder may be another at the end
    there = os.path.isdir(dest)
    found = {} if source is None else companions(source)
    names = [name for name in found if not (there and _same(found[name], os.path.join(dest, name)))]
    places = {name: os.path.join(dest, name) for name in (*names, weights) if there}
    versions = {name: check_destination(None, place, force) for name, place in places.items()}
    with scratch_folder(os.path.join(dest, weights) if there else dest) as scratch:
        made = os.path.join(scratch, "folder")
        with refusals(dest):
            os.mkdir(made)
        for name in names:
            copy_file(found[name], os.path.join(made, name), durable=durable)
        yield os.path.join(dest if there else made, weights)
        with refusals(dest):
            if not there:
                os.rename(made, dest)
            for name in names if there else ():
                moved = Placement(os.path.join(made, name), places[name], versions[name])
                put_in_place([moved], durable=False)
        if durable and os.name == "posix":
            sync_folder(dest if there else os.path.dirname(dest))


def copy_file(source: str, dest: Any, *, durable: bool, options: Mapping[str, Any] | None = None) -> None:
    """Copy a file to a path or a URL, whole or not at all.

    Raises:
        SourceError: it is a link, or no regular file; or the file system, or the store, reports an error.
    """
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(open_sink(dest, durable=durable, options=options))
        stack.enter_context(refusals(source))
        file = stack.enter_context(open(source, "rb", opener=_open_unlinked))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("is no regular file", path=source)
        sink.reserve(status.st_size)
        while piece := file.read(_PIECE):
            sink.write(piece)


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | _UNLINKED)


def _same(one: str, other: str) -> bool:
    """Return True if two paths lead to one file, or to files with the same bytes."""
    import filecmp  # here, because few folders are written

    with contextlib.suppress(OSError):
        return filecmp.cmp(one, other, shallow=False)
    return False
