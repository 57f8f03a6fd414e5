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
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from zcrecord.errors import RecordError, SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.record.own_shards import own_shards, proved_shards
from zcrecord.storage import uploads
from zcrecord.storage.files import is_url, open_sink, path_of, real_path
from zcrecord.storage.folders import archive_in
from zcrecord.storage.new_files import FileGroup, Identity, Placement, put_in_place, refusals, version_of
from zcrecord.storage.scratch import MOST_OF_CATALOGUE, orphans, shard_pattern, sync_folder
from zcrecord.storage.sink import Sink
from zcrecord.storage.urls import connect, redacted
from zcrecord.writing.catalogue import write_catalogue

CATALOGUE = "checkpoint.zcr"
_SHARD = re.compile(shard_pattern(CATALOGUE))


def checkpoint_folder(path: Any, *, durable: bool, options: Mapping[str, Any] | None = None) -> CheckpointFolder:
    """Return the folder of a checkpoint at a path or a URL; `options` are fsspec's. Creates nothing."""
    if is_url(path):
        local = uploads.local_path(path, options)
        if local is None:
            return CheckpointPrefix(path, options)
        path = local
    return CheckpointFolder(path, durable=durable)


class CheckpointFolder:
    """A local folder that checkpoints are saved to.

    Of two saves at one time the second fails: it finds that the catalogue is no longer the one that it is to replace.
    `scratch` is the name of this rank's archive until the commit; empty if it has its own name, or there is none. If
    `durable`, files and folder are fsynced, so that they survive power loss.
    """

    def __init__(self, path: Any, *, durable: bool) -> None:
        self.path, self._durable = path_of(path), durable
        self._catalogue = os.path.join(self.path, CATALOGUE)
        if os.path.islink(self._catalogue):  # its target is replaced, and shards lie beside that
            self._catalogue = real_path(self._catalogue)
            self.path = os.path.dirname(self._catalogue)
        self._removal = contextlib.ExitStack()  # its end removes this rank's archive
        self.scratch = ""

    def make(self) -> None:
        """Make the folder and its missing parents; SourceError if the file system refuses. Fsyncs them if `durable`."""
        missing, folder = [], real_path(self.path)
        while not os.path.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        try:
            os.makedirs(self.path, exist_ok=True)
        except OSError as error:
            reason = f"cannot be made: {error.strerror}"
            if isinstance(error, FileExistsError):
                reason = "is a file; a checkpoint is saved to a folder: name another path"
            raise SourceError(reason, path=self.path, errno=error.errno) from error
        for folder in missing if self._durable and os.name == "posix" else ():
            sync_folder(os.path.dirname(folder))

    def shard_name(self, rank: int, count: int) -> str:
        """Return a new random name for the archive of a rank, counted from 0; `count` is the number of ranks."""
        stem = CATALOGUE.removesuffix(".zcr")
        return f"{stem}~{secrets.token_hex(8)}-{rank + 1:05}-of-{max(count, rank + 1):05}.zcr"

    def version(self) -> Identity | str | None:
        """Return the catalogue's version, by which `commit` notices other saves; empty if there is no catalogue."""
        with refusals(self.path):
            return version_of(self._catalogue)

    @contextlib.contextmanager
    def new_shard(self, _name: str) -> Iterator[Sink]:
        """Yield a sink for a new scratch file, which gets its name by `commit`; until then `close` removes it."""
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(FileGroup(self._catalogue, durable=self._durable, clear=False))
            yield group.add()
            self.scratch = os.path.basename(group.finish()[0])
            self._removal = stack.pop_all()

    def commit(self, tree: dict[str, Any], kind: int, archives: Mapping[str, str], version: Any = None) -> None:
        """Give the ranks' scratch files, the values of `archives`, the names in its keys; replace the catalogue.

        The archives that the old catalogue, of this version, named are removed, if they are known to be its own.

        Raises:
            SourceError: another save has replaced the catalogue (DestinationExistsError: has created it) since it had
            this version, or an archive is missing. The folder then has the old catalogue or the new one, whole.
        """
        in_folder = partial(os.path.join, self.path)
        files = [Placement(in_folder(scratch), in_folder(name), ()) for name, scratch in archives.items()]
        for file in files:  # one by one: a network file system asks its server for names, but may list an old folder
            if not os.path.exists(file.scratch):
                reason = f"{os.path.basename(file.path)}, which a rank has written, is not in this folder"
                advice = "as the first rank sees it; all ranks save to one folder, on a file system that they share"
                raise SourceNotFoundError(f"{reason} {advice}", path=self.path, errno=errno.ENOENT)
        with FileGroup(self._catalogue, durable=self._durable) as group:
            write_catalogue(tree, group.add(), kind=kind)
            [scratch] = group.finish()
            files.append(Placement(scratch, self._catalogue, version))
            put_in_place(files, durable=self._durable, shards_of=own_shards)

    def take_back(self, archives: Mapping[str, str]) -> None:
        """Remove the archives of a save that failed, the scratch files among the values of `archives`."""
        for scratch in archives.values():
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self.path, scratch))

    def close(self) -> None:
        """Remove the archive that this rank has written, unless it was committed."""
        self._removal.close()


class CheckpointPrefix(CheckpointFolder):
    """A folder behind a URL that checkpoints are saved to.

    Its URL is of any kind that `storage.uploads` writes to, and raises the errors of `uploads.connect_to_write`.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None) -> None:
        super().__init__(url.rstrip("/"), durable=True)
        self._options, self._catalogue = options, f"{self.path}/{CATALOGUE}"
        uploads.connect_to_write(self.path, options)

    def make(self) -> None:
        """Make the folder, if the file system has folders: prefixes of object stores need not be made."""
        fs, path = uploads.connect_to_write(self.path, self._options)
        if uploads.has_folders(fs):
            with uploads.store_refusals(redacted(self.path), "cannot be made"):
                fs.makedirs(path, exist_ok=True)

    def version(self) -> str | None:
        """Return the catalogue's version, "" if there is no catalogue, None if the store has no versions."""
        return uploads.version_at(self._catalogue, self._options)

    @contextlib.contextmanager
    def new_shard(self, name: str) -> Iterator[Sink]:
        """Yield a sink for a new file of this name, which appears, whole, when the block ends without an exception."""
        with uploads.upload(f"{self.path}/{name}", self._options) as sink:
            yield sink
        self._removal.callback(self._remove, [name])

    def commit(self, tree: dict[str, Any], kind: int, archives: Mapping[str, str], version: Any = None) -> None:
        """Replace the catalogue, if it has this version; remove the archives that only the old one named."""
        old_names = {name for name, _ in proved_shards(self._catalogue, self._options)}
        with open_sink(self._catalogue, options=self._options, replaces=version) as sink:
            write_catalogue(tree, sink, kind=kind)
        self._remove(old_names - archives.keys())

    def take_back(self, archives: Mapping[str, str]) -> None:
        """Remove the archives of a save that failed, except those that a catalogue names."""
        self._remove(archives)

    def _remove(self, names: Iterable[str]) -> None:
        """Remove archives of ranks that no catalogue in the folder names; none if one cannot be read. Never raises."""
        fs, path = uploads.connect_to_write(self.path, self._options)
        with contextlib.suppress(Exception):  # file systems raise exceptions of any class
            fs.invalidate_cache(path)
            present = {name.rstrip("/").rpartition("/")[2] for name in fs.ls(path, detail=False)}
            catalogues = {name for name in present if name.endswith(".zcr") and not _SHARD.fullmatch(name)}
            for catalogue in {CATALOGUE, *catalogues}:
                with contextlib.suppress(FileNotFoundError):
                    start = fs.cat_file(f"{path}/{catalogue}", start=0, end=MOST_OF_CATALOGUE)
                    names = orphans(names, start) if b".zcr" in start or len(start) < MOST_OF_CATALOGUE else []
            for name in filter(_SHARD.fullmatch, names):
                with contextlib.suppress(Exception):
                    fs.rm_file(f"{path}/{name}")


def is_known(path: Any) -> bool:
    """Return True for a path, and for a URL unless fsspec does not know its kind."""
    try:
        return not is_url(path) or bool(connect(path, None))
    except RecordError as error:
        return not isinstance(error, UnsupportedError)  # such as a missing package, or an unreachable server


def catalogue_of(path: Any) -> str:
    """Return the path or URL of the archive to open for a checkpoint, given as folder, file, or URL of either.

    It is the catalogue; in a folder without one, the only archive, as of a consolidated checkpoint.

    Raises:
        SourceError: the folder has several archives and no catalogue. SourceNotFoundError: the folder does not exist,
        or no save to it was finished.
    """
    if is_url(path):
        url = str(path)
        return url if url.partition("?")[0].endswith(".zcr") else f"{url.rstrip('/')}/{CATALOGUE}"
    folder = path_of(path)
    catalogue = os.path.join(folder, CATALOGUE)
    if os.path.exists(catalogue):
        return catalogue
    if not os.path.isdir(folder):
        if os.path.exists(folder):
            return folder
        reason = "no such folder; name the one that the checkpoint was saved to"
        raise SourceNotFoundError(reason, path=folder, errno=errno.ENOENT)
    with refusals(folder):
        names = os.listdir(folder)
    has_shards = any(map(_SHARD.fullmatch, names))
    if not has_shards and any(name.endswith(".zcr") for name in names):
        return archive_in(folder)
    reason = "a save was begun and not finished" if has_shards else "no checkpoint was saved"
    fault = f"is no checkpoint: it has no {CATALOGUE}, which a save writes last"
    raise SourceNotFoundError(f"{fault}; {reason} here, load an earlier one", path=folder, errno=errno.ENOENT)
