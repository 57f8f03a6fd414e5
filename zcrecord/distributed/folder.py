"""The folder of a checkpoint: every operation on files that a save of many ranks needs.

    checkpoint.zcr                                        the catalogue; replacing it is what commits a save
    checkpoint~0123456789abcdef-00003-of-00008.zcr        the archive of one rank and one save; never overwritten

Nothing else of `distributed` touches the file system. Reading goes through `load_record`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from zcrecord.errors import SourceError, SourceNotFoundError, UnsupportedError
from zcrecord.storage.files import is_url, open_sink, path_of, refusals, sync_folder
from zcrecord.storage.folders import archive_in
from zcrecord.storage.scratch import remove_unnamed, shard_pattern
from zcrecord.storage.sink import Sink
from zcrecord.writing.catalogue import write_catalogue

__all__ = ["CATALOGUE", "CheckpointFolder", "catalogue_of"]

CATALOGUE = "checkpoint.zcr"
_SHARD = re.compile(shard_pattern(CATALOGUE))


class CheckpointFolder:
    """A local folder that checkpoints are saved to, one at a time.

    Args:
        path: the folder; made by `make` if it is not there.
        durable: fsync files and folder, so that they survive power loss.

    Raises:
        UnsupportedError: a URL, or no path.
    """

    def __init__(self, path: Any, *, durable: bool) -> None:
        if is_url(path):
            what = "a checkpoint is saved to a folder; name one, and copy it to the URL"
            raise UnsupportedError(what, path=path)
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

    def new_shard(self, name: str) -> AbstractContextManager[Sink]:
        """Return a sink for a new file of this name, which appears, whole, when the block ends without an exception.

        Raises:
            SourceError: the file system reports an error.
        """
        return open_sink(os.path.join(self.path, name), durable=self._durable)

    def replace_catalogue(self, tree: dict[str, Any], kind: int) -> None:
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
        raise SourceNotFoundError(what, path=where, errno=2)
    found = os.path.join(where, CATALOGUE)
    if os.path.exists(found):
        return found
    with refusals(where):
        names = os.listdir(where)
    if any(map(_SHARD.fullmatch, names)) or not any(name.endswith(".zcr") for name in names):
        begun = "a save was begun and not finished" if any(map(_SHARD.fullmatch, names)) else "no checkpoint was saved"
        what = f"is no checkpoint: it has no {CATALOGUE}, which a save writes last; {begun} here, load an earlier one"
        raise SourceNotFoundError(what, path=where, errno=2)
    return archive_in(where)
