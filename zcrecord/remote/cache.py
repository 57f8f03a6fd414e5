"""Cache of remote archives in a folder: indexes and payloads, by URL, version and offset.

So only the server of a URL decides which bytes are returned for it: 64-bit digests detect damage but no forgery, and
are used for nothing else. Entries that are damaged, half written, or not plain files are ignored, and any may be
removed at any time. A folder that others may write to, who could change loaded weights, is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zcrecord.codec.digests import digest_of, digest_of_pieces
from zcrecord.codec.layout import MAX_INDEX_SIZE
from zcrecord.errors import Advice, SourceError, UnsupportedError

from .cache_keys import identity

CACHE_VARIABLE = "ZCRECORD_CACHE"
_FOLDER = "zcrecord-1"  # changes with the layout of entries; nothing else in the user's folder is touched
_SCRATCH = ".new-"
_INDEX = "index"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PIECE = 8 << 20  # bytes read and hashed at a time
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def cache_at(folder: Any, url: str, options: Mapping[str, Any]) -> Path | None:
    """Return the folder in a cache for the archive at a URL, with fsspec's options; None if no cache is used.

    SourceError if a folder cannot be made, or others may write to it; UnsupportedError if `folder` is no path or False.
    """
    root = _folder_of(folder)
    if root is None:
        return None
    archive = root / _short_hash(identity(url, options))
    for parent in (root.parent, root):
        try:
            _make_private(parent)
            _check_owner(parent, is_users_choice=parent != root)
        except SourceError:
            raise
        except (OSError, ValueError) as error:
            fault = f"the cache's folder cannot be made: {getattr(error, 'strerror', None) or error}"
            raise SourceError(fault, path=str(parent), errno=getattr(error, "errno", None)) from error
    with contextlib.suppress(FileNotFoundError):  # the first entry makes it
        _check_owner(archive)
    return archive


def has_entries(archive: Path) -> bool:
    """Return True if an archive's folder has entries, maybe of another version."""
    try:
        return any(archive.iterdir())
    except OSError:  # the folder does not exist
        return False


def trim_cache(folder: Any = None, *, limit: int = 0) -> int:
    """Remove the least recently used files of a cache, until at most `limit` bytes are left; returns how many are left.

    Programs that use the cache meanwhile fetch removed payloads again. Nothing else in the folder is touched.

    Args:
        folder: as `load_record(cache=...)` takes it; None for the environment variable ZCRECORD_CACHE.
        limit: in bytes; 0 empties the cache.

    Raises:
        SourceError: others may write to the folder, and could have other files removed. UnsupportedError: `folder` is
        not a path, or `limit` not a number.

    Example:
        >>> trim_cache("no such folder")
        0
    """
    if not isinstance(limit, int):
        raise UnsupportedError(f"limit={limit!r} is not a number of bytes, such as 10 << 30")
    root = _folder_of(folder)
    if root is None or root.is_symlink() or not root.is_dir():  # there is no cache
        return 0
    _check_owner(root.parent, is_users_choice=True)
    _check_owner(root)
    files, folders = [], []
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            else:
                files.append((status.st_mtime_ns, status.st_size, path))
    total = sum(nbytes for _, nbytes, _ in files)
    for _, nbytes, path in sorted(files):
        if total <= limit:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            total -= nbytes
    for path in sorted(folders, reverse=True):  # inner ones first
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
    return total


def _folder_of(folder: Any) -> Path | None:
    """Return the cache's folder inside `cache=`, or ZCRECORD_CACHE for None; None if no cache is used."""
    if folder is None:
        folder = os.environ.get(CACHE_VARIABLE) or False
    if folder is False:
        return None
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        fault = f"cache= takes a folder's path, False for none, or None for ${CACHE_VARIABLE}'s"
        raise UnsupportedError(f"{fault}, not {folder!r}")
    return Path(folder) / _FOLDER


class VersionCache:
    """Cache entries of one version of one archive, by size and tag. Several processes may use it at once."""

    def __init__(self, archive: Path, size: int, tag: str) -> None:
        self._folder = archive / _short_hash(f"{size} {tag}")
        with contextlib.suppress(FileNotFoundError):  # the first entry makes it
            _check_owner(self._folder)

    def get(self, start: int, digest: int, target: memoryview) -> bool:
        """Read the payload at an offset of the archive into `target`; False if it is missing or damaged."""
        return self.read(start, len(target), 0, target) and digest_of(target) == digest

    def read(self, start: int, nbytes: int, offset: int, target: memoryview) -> bool:
        """Read bytes of the payload [start, start + nbytes) from its `offset` on, unchecked; False if it is missing."""
        try:
            with _open_entry(self._payload(start, nbytes), nbytes) as file:
                file.seek(offset)
                while len(target) and (count := file.readinto(target)):
                    target = target[count:]
                return not len(target)
        except OSError:
            return False

    def has(self, start: int, nbytes: int, digest: int) -> bool:
        """Return True if a payload is there and undamaged; reads it in pieces."""
        try:
            with _open_entry(self._payload(start, nbytes), nbytes) as file:
                return digest_of_pieces(iter(partial(file.read, _PIECE), b"")) == digest
        except OSError:
            return False

    def put(self, start: int, octets: memoryview) -> None:
        """Write a payload; failures are ignored, since loading can go on with a full disk."""
        self.entry(start, len(octets)).write_all(octets)

    def entry(self, start: int, nbytes: int) -> CacheEntry:
        """Return an entry to which a payload is written piece by piece."""
        return CacheEntry(self._payload(start, nbytes))

    def read_index(self) -> list[tuple[int, bytes]] | None:
        """Return the offsets and pieces that were given to `put_index`; None if they are missing or damaged."""
        try:
            with _open_entry(self._folder / _INDEX) as file:
                line, _, octets = file.readall().partition(b"\n")
            data = json.loads(line)
            if data["digest"] != f"{digest_of(octets):016x}":
                return None
            pieces = []
            for offset, nbytes in data["pieces"]:
                if not (type(offset) is type(nbytes) is int and 0 <= nbytes <= len(octets)):
                    return None
                pieces.append((offset, octets[:nbytes]))
                octets = octets[nbytes:]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # those of JSON, too, of a damaged entry
            return None
        return pieces

    def put_index(self, pieces: list[tuple[int, memoryview]]) -> None:
        """Write the pieces needed to open the archive, with their offsets."""
        octets = b"".join(piece for _, piece in pieces)
        places = [(offset, len(piece)) for offset, piece in pieces]
        data = {"digest": f"{digest_of(octets):016x}", "pieces": places}
        CacheEntry(self._folder / _INDEX).write_all(memoryview(json.dumps(data).encode() + b"\n" + octets))

    def _payload(self, start: int, nbytes: int) -> Path:
        return self._folder / f"{start}-{nbytes}"


class CacheEntry:
    """A file that appears whole when `keep` is called, or not at all; of several writers one wins. Raises nothing."""

    def __init__(self, path: Path) -> None:
        self._path, self._scratch = path, path.with_name(f"{_SCRATCH}{os.urandom(8).hex()}")
        self._failed, self._created = False, False

    def write(self, octets: memoryview) -> None:
        """Append bytes; drops the entry if that fails. The file is open only meanwhile: many entries may be begun."""
        if self._failed:
            return
        try:
            try:
                file = self._open()
            except FileNotFoundError:  # the first entry, or `trim_cache` removed the folder
                _make_private(self._path.parent)
                file = self._open()
            with file:
                file.seek(0, os.SEEK_END)
                self._created = True
                while len(octets):
                    octets = octets[file.write(octets) :]
        except OSError:
            self.drop()

    def _open(self) -> Any:
        mode = "r+b" if self._created else "xb"  # "ab" would create it again
        return open(self._scratch, mode, buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))

    def write_all(self, octets: memoryview) -> None:
        """Write the file at once."""
        self.write(octets)
        self.keep()

    def keep(self) -> None:
        """Finish the file: give it its name."""
        if self._created and not self._failed:
            try:
                os.replace(self._scratch, self._path)
                self._created = False
            except OSError:
                self.drop()

    def drop(self) -> None:
        """Remove the unfinished file."""
        self._failed = True
        if self._created:
            self._created = False
            with contextlib.suppress(OSError):
                self._scratch.unlink()

    __del__ = drop  # loading was cancelled


def _make_private(folder: Path) -> None:
    """Make a folder and its missing parents, readable by their owner alone: archives may be private."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _check_owner(folder: Path, *, is_users_choice: bool = False) -> None:
    """Raise SourceError unless this user or root owns the folder, and nobody else may write to it.

    The user's choice may be a link, or sticky as /tmp is: in it others cannot rename this user's files.
    """
    status = folder.stat() if is_users_choice else folder.lstat()
    is_sticky = is_users_choice and bool(status.st_mode & stat.S_ISVTX)
    if not stat.S_ISDIR(status.st_mode):
        fault = f"the cache's folder is {'a file' if is_users_choice else 'a link or a file'}"
        advice = "name another one in {}"
    elif not _is_trusted(status):
        fault = f"the cache's folder is another user's (number {status.st_uid}), who could change what is loaded"
        advice = "name one of your own in {}"
    elif hasattr(os, "geteuid") and status.st_mode & _OTHERS and not is_sticky:
        writers = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        fault = f"{writers} may write to the cache's folder, and could change what is loaded"
        advice = "take that right away (chmod go-w), or name another in {}"
    else:
        return
    raise SourceError(fault, path=str(folder), advice=Advice(advice, "cache"))


def _is_trusted(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0)


def _open_entry(path: Path, nbytes: int | None = None) -> Any:
    """Open an entry of `nbytes` bytes, and set its time of use; OSError if it is no plain file of this user alone."""
    fd = os.open(path, os.O_RDONLY | _PLAIN)
    try:
        status = os.fstat(fd)
        fits = status.st_size <= 2 * MAX_INDEX_SIZE if nbytes is None else status.st_size == nbytes
        is_private = _is_trusted(status) and (os.name != "posix" or not status.st_mode & _OTHERS)
        if not stat.S_ISREG(status.st_mode) or not fits or not is_private:
            raise OSError("not an entry of a cache")
        with contextlib.suppress(OSError):  # a read-only file of root's
            os.utime(fd if os.utime in os.supports_fd else path)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
