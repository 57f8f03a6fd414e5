"""Model folders: the one archive in a folder, and the files that belong to the model beside it, as on model hubs."""

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

MODEL = "model.zcr"
# Suffixes of configuration, tokenizers, templates, code and model cards, as transformers and Optimum write them.
_COMPANIONS = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py", ".md", "LICENSE", "NOTICE")
_INDEX = ".index.json"  # of shards, which are weights
_PIECE = 1 << 20
_NO_LINK = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK"))  # a pipe would wait for its writer
_ILLEGAL = re.compile(r'[/\\:*?"<>|]')  # in a file's name, on one system or another
SHARD_NAME = re.compile(r".*-\d{5}-of-\d{5}\.zcr")


def local_folder(folder: Any) -> str:
    """Return the path of a folder that several files are written to; a URL is an UnsupportedError."""
    if is_url(folder):
        from .urls import redacted  # here, because few folders are URLs

        fault = "is a URL, expected a local folder, since several files are written; name one, and upload its files"
        raise UnsupportedError(fault, path=redacted(folder))
    return path_of(folder)


def archive_in(folder: str | os.PathLike[str]) -> str:
    """Return the path of the archive in a model folder: `model.zcr`, or the only archive that is not a shard."""
    path = path_of(folder)
    try:
        names = sorted(name for name in os.listdir(path) if name.endswith(".zcr"))
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error
    archives = [MODEL] if MODEL in names else [name for name in names if not SHARD_NAME.fullmatch(name)]
    if len(archives) == 1:
        return os.path.join(path, archives[0])
    if archives:
        listed = ", ".join(map(printable, archives))
        fault = f"is a folder with several archives: {listed}; name one, or call one {MODEL}"
    else:
        fault = f"is a folder without an archive ({MODEL}); zcrecord convert makes one"
    raise SourceError(fault, path=path, errno=errno.ENOENT)


def catalogue_of_shard(name: str) -> str | None:
    """Return the name of the catalogue that has a shard of this name; None if it is not a shard's name."""
    return re.sub(f"{SHARD_END}$", ".zcr", name) if SHARD_NAME.fullmatch(name) else None


def is_plain_name(file: str, suffix: str) -> bool:
    """Return True for a file name with that suffix that is legal on any system and stays in its folder."""
    legal = file.isprintable() and not _ILLEGAL.search(file)
    return legal and file.endswith(suffix) and file not in (suffix, ".", "..")


def takes_folder(dest: str) -> bool:
    """Return True if a folder is converted to a folder at `dest`: one that exists, or a new path without .zcr."""
    return not is_url(dest) and (names_folder(dest) or not (os.path.exists(dest) or dest.endswith(".zcr")))


def names_folder(dest: str) -> bool:
    """Return True if a path names a folder that exists, or a new one by the separator at its end."""
    new = dest.endswith(("/", os.sep)) and not os.path.exists(dest)
    return not is_url(dest) and (os.path.isdir(dest) or new)


def companions(folder: str) -> dict[str, str]:
    """Return the real paths, by name, of a model folder's files beside its weights, such as tokenizers and model cards.

    Links out of the folder are left out, except inside one repository of a Hugging Face cache.
    """
    with refusals(folder):
        root = os.path.realpath(folder)
        names = sorted(os.listdir(root))
    paths = {}
    for name in names:
        if name.endswith(_COMPANIONS) and not name.endswith(_INDEX) and not name.startswith("."):
            path = os.path.realpath(os.path.join(root, name))
            if (os.path.dirname(path) == root or in_hub_cache(root, path)) and os.path.isfile(path):
                paths[name] = path
    return paths


def belongs_to(folder: str, path: str) -> bool:
    """Return True if a file is below a folder, or in its Hugging Face repository; both paths are real ones."""
    return path.startswith(os.path.join(folder, "")) or in_hub_cache(folder, path)


def in_hub_cache(folder: str, path: str) -> bool:
    """Return True for a file in the `blobs` of the Hugging Face repository that has `folder` as a snapshot."""
    parent = Path(path).parent
    return any(above.name == "snapshots" and parent == above.with_name("blobs") for above in Path(folder).parents)


@contextlib.contextmanager
def model_folder(source: str | None, dest: str, weights: str = MODEL, *, force: bool, durable: bool) -> Iterator[str]:
    """Yield a path for the file `weights`, an archive or another format's, in the model folder `dest`.

    At the end the companions of the folder `source` are in `dest`, too. A new folder appears whole, or not at all. In
    a folder that exists the archive and its shards are at their places as soon as they are written, and the other files
    are moved there at the end; files with the same bytes stay.
    """
    dest = real_path(dest)  # once: the working folder may be another at the end
    paths = {} if source is None else companions(source)
    if os.path.isdir(dest):
        with _existing_folder(paths, dest, weights, force=force, durable=durable) as path:
            yield path
        return
    with scratch_folder(dest) as scratch:
        new = os.path.join(scratch, "folder")
        with refusals(dest):
            os.mkdir(new)
        for name, path in paths.items():
            copy_file(path, os.path.join(new, name), durable=durable)
        yield os.path.join(new, weights)
        with refusals(dest):
            os.rename(new, dest)
        if durable and os.name == "posix":
            sync_folder(os.path.dirname(dest))


@contextlib.contextmanager
def _existing_folder(paths: Mapping[str, str], dest: str, weights: str, *, force: bool, durable: bool) -> Iterator[str]:
    """Yield the path for the file `weights` in a folder; then move copies of other files, by their names, there."""
    changed = {name: path for name, path in paths.items() if not _have_same_bytes(path, os.path.join(dest, name))}
    places = {name: os.path.join(dest, name) for name in (*changed, weights)}
    versions = {name: check_destination(None, place, force) for name, place in places.items()}
    with scratch_folder(places[weights]) as scratch:
        for name, path in changed.items():
            copy_file(path, os.path.join(scratch, name), durable=durable)
        yield places[weights]
        for name in changed:
            put_in_place([Placement(os.path.join(scratch, name), places[name], versions[name])], durable=False)
        if durable and os.name == "posix":
            sync_folder(dest)


def copy_file(source: str, dest: Any, *, durable: bool, options: Mapping[str, Any] | None = None) -> None:
    """Copy a regular file, never a link, to a path or a URL, whole or not at all."""
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(open_sink(dest, durable=durable, options=options))
        stack.enter_context(refusals(source))
        file = stack.enter_context(open(source, "rb", opener=lambda path, flags: os.open(path, flags | _NO_LINK)))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file; put a copy of the file in its place", path=source)
        sink.reserve(status.st_size)
        while piece := file.read(_PIECE):
            sink.write(piece)


def _have_same_bytes(path: str, other_path: str) -> bool:
    """Return True if two files have the same bytes; False if one cannot be read."""
    import filecmp  # here, because few folders are written

    with contextlib.suppress(OSError):
        return filecmp.cmp(path, other_path, shallow=False)
    return False
