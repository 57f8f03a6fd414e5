"""The folder of a checkpoint, on a disk or behind a URL: every operation on files that a save of many ranks needs.

    checkpoint.zcr                                        the catalogue; replacing it is what commits a save
    checkpoint~0123456789abcdef-00003-of-00008.zcr        the archive of one rank and one save; never overwritten

On a disk a rank's archive gets its name in the commit. Until then it is a scratch file, which the rank's process locks,
so that the next save knows those of the dead. Behind a URL it has its name from the start. Nothing else of
`distributed` touches the file system. Reading goes through `load_record`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from zcrecord.errors import SourceError, SourceNotFoundError
from zcrecord.record.own_shards import own_shards, proved_shards
from zcrecord.storage import uploads
from zcrecord.storage.files import is_url, open_sink, path_of, real_path
from zcrecord.storage.folders import archive_in
from zcrecord.storage.new_files import FileGroup, Identity, Placement, put_in_place, refusals, version_of
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, shard_pattern, sync_folder, unnamed
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
    """A local folder that checkpoints are saved to.

    Of two saves at one time the second fails: it finds that the catalogue is no longer the one that it is to replace.

    Args:
        path: the folder; made by `make` if it is not there.
        durable: fsync files and folder, so that they survive power loss.

    Attributes:
        scratch: the name of the scratch file that this rank's archive is; empty if it has its own name, or there is
            none.

    Raises:
        UnsupportedError: no path.
    """

    def __init__(self, path: Any, *, durable: bool) -> None:
        self.path, self._durable = path_of(path), durable
        self._catalogue = os.path.join(self.path, CATALOGUE)
        if os.path.islink(self._catalogue):  # what it leads to is replaced, and shards lie beside that
            self._catalogue = real_path(self._catalogue)
            self.path = os.path.dirname(self._catalogue)
        self._written = contextlib.ExitStack()  # of the scratch file, which is gone at its end
        self.scratch = ""

    def make(self) -> None:
        """Make the folder, and those above it, unless it is there.

        Raises:
            SourceError: it cannot be made, or is a file.
        """
        new, at = [], real_path(self.path)
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

    def shard_name(self, rank: int, count: int) -> str:
        """Return a new name for the archive of a rank, 0 the first, of so many."""
        stem = CATALOGUE.removesuffix(".zcr")
        return f"{stem}~{secrets.token_hex(8)}-{rank + 1:05}-of-{max(count, rank + 1):05}.zcr"

    def version(self) -> Identity | str | None:
        """Return the version of the catalogue that is there, empty if there is none, None if versions are not known.

        Raises:
            SourceError: the file system reports an error.
        """
        with refusals(self.path):
            return version_of(self._catalogue)

    @contextlib.contextmanager
    def new_shard(self, _name: str) -> Iterator[Sink]:
        """Yield a sink for a new file, which gets its name by `commit`.

        Raises:
            SourceError: the file system reports an error.
        """
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(FileGroup(self._catalogue, durable=self._durable, clear=False))
            yield group.add()
            self.scratch = os.path.basename(group.finish()[0])
            self._written = stack.pop_all()

    def commit(self, tree: dict[str, Any], kind: int, archives: Mapping[str, str], version: Any = None) -> None:
        """Give the ranks' archives their names, and replace the catalogue, if it is of this version, by a new one.

        The archives that the old one named are removed after that, if they are known to be its own.

        Args:
            tree: of the new one's tables.
            archives: of the ranks, names to scratch files.

        Raises:
            SourceError: another save has replaced the catalogue (DestinationExistsError: has made one); or the file
            system reports an error. The catalogue there is the old one, or this one.
        """
        at = partial(os.path.join, self.path)
        files = [Placement(at(scratch), at(name), ()) for name, scratch in archives.items()]
        self._check_there(files)
        with FileGroup(self._catalogue, durable=self._durable) as group:
            write_catalogue(tree, group.add(), kind=kind)
            [last] = group.finish()
            files.append(Placement(last, self._catalogue, version))
            put_in_place(files, durable=self._durable, shards_of=own_shards)

    def _check_there(self, files: Sequence[Placement]) -> None:
        """Raise unless files that ranks have written are there: a node may have a folder of this name to itself.

        Each is looked up by its name, which a network file system asks its server for; a listing may be an old one.

        Raises:
            SourceNotFoundError: one is not.
        """
        for file in files:
            if not os.path.exists(file.scratch):
                what = f"{os.path.basename(file.path)}, which a rank has written, is not in this folder"
                advice = "as the first rank sees it; all ranks save to one folder, on a file system that they share"
                raise SourceNotFoundError(f"{what} {advice}", path=self.path, errno=errno.ENOENT)

    def take_back(self, archives: Mapping[str, str]) -> None:
        """Remove the archives of a save that failed: the scratch files that its ranks have told."""
        for scratch in archives.values():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, scratch))

    def close(self) -> None:
        """Let go of what this rank has written; it is removed, unless a commit has taken it in."""
        self._written.close()


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

    def version(self) -> str | None:
        """Return the version of the catalogue that is there, "" if there is none, None if the store has no versions.

        Raises:
            SourceError: the store reports an error.
        """
        return uploads.version_at(self._catalogue, self._options)

    @contextlib.contextmanager
    def new_shard(self, name: str) -> Iterator[Sink]:
        """Yield a sink for a new file of this name, which appears, whole, when the block ends without an exception.

        Raises:
            SourceError: the store reports an error.
        """
        with uploads.upload(f"{self.path}/{name}", self._options) as sink:
            yield sink
        self._written.callback(self._remove, [name])

    def commit(self, tree: dict[str, Any], kind: int, archives: Mapping[str, str], version: Any = None) -> None:
        """Replace the catalogue, if it is of this version, by a new one; remove the old one's archives, as on a disk.

        Raises:
            SourceError: another save has replaced it; or the store reports an error.
        """
        replaced = {name for name, _ in proved_shards(self._catalogue, self._options)}
        with open_sink(self._catalogue, options=self._options, replaces=version) as sink:
            write_catalogue(tree, sink, kind=kind)
        self._remove(replaced - archives.keys())

    def take_back(self, archives: Mapping[str, str]) -> None:
        """Remove the archives of a save that failed, but for those that a catalogue names."""
        self._remove(archives)

    def _remove(self, names: Iterable[str]) -> None:
        """Remove archives of ranks, but for those that a catalogue names; none if that cannot be told."""
        fs, path = uploads.connected(self.path, self._options)
        with contextlib.suppress(Exception):  # file systems raise exceptions of any class
            fs.invalidate_cache(path)
            found = {name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)}
            for catalogue in {CATALOGUE, *(n for n in found if n.endswith(".zcr") and not _SHARD.fullmatch(n))}:
                with contextlib.suppress(FileNotFoundError):
                    names = unnamed(names, fs.cat_file(f"{path}/{catalogue}", start=0, end=MOST_OF_CATALOGUE))
            for name in filter(_SHARD.fullmatch, names):
                with contextlib.suppress(Exception):
                    fs.rm_file(f"{path}/{name}")


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
