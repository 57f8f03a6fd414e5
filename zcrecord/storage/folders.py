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
    """Return names and paths, without links, of the files in a model folder beside its weights, by their suffixes.

    Links out of the folder are left out, except inside one repository of a Hugging Face cache.
    """
    with refusals(folder):
        root = os.path.realpath(folder)
        names = [n for n in sorted(os.listdir(root)) if n.endswith(_COMPANIONS) and not n.endswith(_INDEX)]
    real = {name: os.path.realpath(os.path.join(root, name)) for name in names}
    inside = (n for n in names if os.path.dirname(real[n]) == root or in_hub_cache(root, real[n]))
    return {name: real[name] for name in inside if not name.startswith(".") and os.path.isfile(real[name])}


def belongs_to(folder: str, path: str) -> bool:
    """Return True for a path below a folder, or in its Hugging Face repository; both without links."""
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
    exists = os.path.isdir(dest)
    paths = {} if source is None else companions(source)
    names = [name for name in paths if not (exists and _same_bytes(paths[name], os.path.join(dest, name)))]
    places = {name: os.path.join(dest, name) for name in (*names, weights) if exists}
    versions = {name: check_destination(None, place, force) for name, place in places.items()}
    with scratch_folder(os.path.join(dest, weights) if exists else dest) as scratch:
        new = os.path.join(scratch, "folder")
        with refusals(dest):
            os.mkdir(new)
        for name in names:
            copy_file(paths[name], os.path.join(new, name), durable=durable)
        yield os.path.join(dest if exists else new, weights)
        with refusals(dest):
            if not exists:
                os.rename(new, dest)
            for name in names if exists else ():
                placement = Placement(os.path.join(new, name), places[name], versions[name])
                put_in_place([placement], durable=False)
        if durable and os.name == "posix":
            sync_folder(dest if exists else os.path.dirname(dest))


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


def _same_bytes(one: str, other: str) -> bool:
    import filecmp  # here, because few folders are written

    with contextlib.suppress(OSError):
        return filecmp.cmp(one, other, shallow=False)
    return False
