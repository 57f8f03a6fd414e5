"""The folder of a checkpoint, on a disk or behind a URL: every operation on files that a save of many ranks needs.

    checkpoint.zcr                                        the catalogue; replacing it is what commits a save
    checkpoint~0123456789abcdef-00003-of-00008.zcr        the archive of one rank and one save; never overwritten

Nothing else of `distributed` touches the file system. Reading goes through `load_record`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from zcrecord.errors import SourceError, SourceNotFoundError
from zcrecord.storage import uploads
from zcrecord.storage.files import is_url, open_sink, path_of, refusals, sync_folder
from zcrecord.storage.folders import archive_in
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, remove_unnamed, shard_pattern, unnamed
from zcrecord.storage.sink import Sink
from zcrecord.storage.urls import redacted
from zcrecord.writing.catalogue import write_catalogue

__all__ = ["CATALOGUE", "CheckpointFolder", "CheckpointPrefix", "catalogue_of", "checkpoint_folder"]

CATALOGUE = "checkpoint.zcr"
_SHARD = re.compile(shard_pattern(CATALOGUE))


def checkpoint_folder(path: Any, *, durable: bool, options: Mapping[str, Any] | None = None) -> CheckpointFolder:
    """Return the folder at a path, or behind a URL.

    Args:
        durable: fsync files and folder on a disk, so that they survive power loss.
        options: for fsspec, if it is a URL.

    Raises:
        UnsupportedError: it is neither; or a URL that is not written to. DependencyError: a package is missing.
    """
    if is_url(path):
        local = uploads.local_path(path, options)
        if local is None:
            return CheckpointPrefix(path, options)
        path = local
    return CheckpointFolder(path, durable=durable)


class CheckpointFolder:
    """A local folder that checkpoints are saved to, one at a time.

    Args:
        path: the folder; made by `make` if it is not there.
        durable: fsync files and folder, so that they survive power loss.

    Raises:
        UnsupportedError: no path.
    """

    def __init__(self, path: Any, *, durable: bool) -> None:
        self.path, self._durable = path_of(path), durable
        self._catalogue = os.path.join(self.path, CATALOGUE)

    def make(self) -> None:
        """Make the folder, and those above it, unless it is there.

        Raises:
            SourceError: it cannot be made, or is a file.
        """
        new, at = [], os.path.abspath(self.path)
        while not os.path.exists(at):
            new.append(at)
            at = os.path.dirname(at)
        try:
            os.makedirs(self.path, exist_ok=True)
        except FileExistsError as error:
            what = "is a file; a checkpoint is saved to a folder, name another"
            raise SourceError(what, path=self.path, errno=error.errno) from error
        except OSError as error:
            raise SourceError(f"cannot be made: {error.strerror}", path=self.path, errno=error.errno) from error
        for folder in new if self._durable and os.name == "posix" else ():
            sync_folder(os.path.dirname(folder))

    def shards(self) -> set[str]:
        """Return the names of the archives of ranks that are there, of whatever save.

        Raises:
            SourceError: the folder cannot be read.
        """
        with refusals(self.path):
            return {name for name in os.listdir(self.path) if _SHARD.fullmatch(name)}

    def shard_name(self, rank: int, count: int) -> str:
        """Return a new name for the archive of a rank, 0 the first, of so many."""
        stem = CATALOGUE.removesuffix(".zcr")
        return f"{stem}~{secrets.token_hex(8)}-{rank + 1:05}-of-{max(count, rank + 1):05}.zcr"

    def version(self) -> str | None:
        """Return None: a path has no versions, and one save at a time may run for a folder."""
        return None

    def new_shard(self, name: str) -> AbstractContextManager[Sink]:
        """Return a sink for a new file of this name, which appears, whole, when the block ends without an exception.

        Raises:
            SourceError: the file system reports an error.
        """
        return open_sink(os.path.join(self.path, name), durable=self._durable)

    def check_there(self, names: Iterable[str]) -> None:
        """Raise unless files that ranks have written are there: a node may have a folder of this name to itself.

        Each is looked up by its name, which a network file system asks its server for; a listing may be an old one.

        Raises:
            SourceNotFoundError: one is not.
        """
        for name in names:
            if not os.path.exists(os.path.join(self.path, name)):
                what = f"{name}, which a rank has written, is not in this folder as the first rank sees it"
                advice = "all ranks save to one folder, on a file system that they share"
                raise SourceNotFoundError(f"{what}; {advice}", path=self.path, errno=errno.ENOENT)

    def replace_catalogue(self, tree: dict[str, Any], kind: int, version: str | None = None) -> None:  # noqa: ARG002
        """Replace the catalogue, given as the tree of its tables, in one step; remove scratch files of dead writers.

        Raises:
            SourceError: the file system reports an error; the catalogue there is the old one, or this one.
        """
        write_catalogue(tree, self._catalogue, kind=kind, durable=self._durable)

    def remove(self, names: Iterable[str]) -> None:
        """Remove archives of ranks that nothing names any more; failures are left to the next save."""
        for name in names:
            if _SHARD.fullmatch(name):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, name))

    def take_back(self, names: Iterable[str]) -> None:
        """Remove archives of a save that failed, but for those that the catalogue names by now."""
        with contextlib.suppress(OSError):
            remove_unnamed(self._catalogue, names)


class CheckpointPrefix(CheckpointFolder):
    """A folder behind a URL that checkpoints are saved to.

    Of two saves at one time the second fails: it finds that the catalogue is no longer the one that it is to replace.

    Args:
        url: of the folder, of any kind that `storage.uploads` writes to.
        options: for fsspec's file system.

    Raises:
        UnsupportedError, DependencyError: those of `uploads.connected`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        super().__init__(url.rstrip("/"), durable=True)
        self._options, self._catalogue = options, f"{self.path}/{CATALOGUE}"
        uploads.connected(self.path, options)

    def make(self) -> None:
        """Make the folder, if it is of a file system that has any: prefixes of object stores need not be made.

        Raises:
            SourceError: the store reports an error.
        """
        fs, path = uploads.connected(self.path, self._options)
        if uploads.has_folders(fs):
            with uploads.store_refusals(redacted(self.path), "cannot be made"):
                fs.makedirs(path, exist_ok=True)

    def shards(self) -> set[str]:
        """Return the names of the archives of ranks that are there, of whatever save.

        Raises:
            SourceError: the store reports an error.
        """
        fs, path = uploads.connected(self.path, self._options)
        with uploads.store_refusals(redacted(self.path), "cannot be listed"):
            fs.invalidate_cache(path)
            try:
                found = fs.ls(path, detail=False)
            except FileNotFoundError:
                return set()
        names = (name.rstrip("/").rpartition("/")[2] for name in found)
        return {name for name in names if _SHARD.fullmatch(name)}

    def version(self) -> str | None:
        """Return the version of the catalogue that is there, "" if there is none, None if the store has no versions.

        Raises:
            SourceError: the store reports an error.
        """
        return uploads.version_at(self._catalogue, self._options)

    def new_shard(self, name: str) -> AbstractContextManager[Sink]:
        """Return a sink for a new file of this name, which appears, whole, when the block ends without an exception.

        Raises:
            SourceError: the store reports an error.
        """
        return uploads.upload(f"{self.path}/{name}", self._options)

    def check_there(self, names: Iterable[str]) -> None:
        """Do nothing: a URL leads all ranks to one store."""

    def replace_catalogue(self, tree: dict[str, Any], kind: int, version: str | None = None) -> None:
        """Replace the catalogue, given as the tree of its tables, in one step, if it is of this version.

        Raises:
            SourceError: another save has replaced it; or the store reports an error.
        """
        write_catalogue(tree, self._catalogue, kind=kind, durable=True, options=self._options, replaces=version)

    def remove(self, names: Iterable[str]) -> None:
        """Remove archives of ranks that nothing names any more; failures are left to the next save."""
        fs, path = uploads.connected(self.path, self._options)
        for name in names:
            if _SHARD.fullmatch(name):
                with contextlib.suppress(Exception):  # file systems raise exceptions of any class
                    fs.rm_file(f"{path}/{name}")

    def take_back(self, names: Iterable[str]) -> None:
        """Remove archives of a save that failed, but for those that the catalogue names by now."""
        fs, path = uploads.connected(self.path, self._options)
        start = b""
        try:
            fs.invalidate_cache(path)
            start = fs.cat_file(f"{path}/{CATALOGUE}", start=0, end=MOST_OF_CATALOGUE)
        except FileNotFoundError:
            pass
        except Exception:  # nobody knows what it names
            return
        self.remove(unnamed(names, start))


def catalogue_of(path: Any) -> str:
    """Return the path or URL of the archive to open for a checkpoint: of a folder, of the file itself, or of a URL.

    A folder without a catalogue of a checkpoint may have one archive, as of a consolidated checkpoint.

    Raises:
        SourceError: there is none; SourceNotFoundError if the folder is not there, or no save to it was finished.
    """
    if is_url(path):
        url = str(path)
        return url if url.partition("?")[0].endswith(".zcr") else f"{url.rstrip('/')}/{CATALOGUE}"
    where = path_of(path)
    if not os.path.isdir(where):
        if os.path.exists(where):
            return where
        what = "no such folder; name the one that the checkpoint was saved to"
        raise SourceNotFoundError(what, path=where, errno=errno.ENOENT)
    found = os.path.join(where, CATALOGUE)
    if os.path.exists(found):
        return found
    with refusals(where):
        names = os.listdir(where)
    if any(map(_SHARD.fullmatch, names)) or not any(name.endswith(".zcr") for name in names):
        begun = "a save was begun and not finished" if any(map(_SHARD.fullmatch, names)) else "no checkpoint was saved"
        what = f"is no checkpoint: it has no {CATALOGUE}, which a save writes last; {begun} here, load an earlier one"
        raise SourceNotFoundError(what, path=where, errno=errno.ENOENT)
    return archive_in(where)
