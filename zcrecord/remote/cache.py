"""Payloads and indexes of remote archives in a folder on this machine, found again by where they come from.

What is kept is one archive's alone, as `publishers` tells it by its URL, and of it one version's, as its server tells
that by size and tag; a payload goes by where it lies in it. So nobody but who answers for that URL decides what is
found: digests are of 64 bits, which tell damage and no forgery, and only whether an entry is damaged is asked of them.
One that is, or half written, or no plain file, counts as none. Any file of the folder may be removed at any time.

Who could write to the folder could change what is loaded. So one that others may write to is refused, and so is every
folder in it; what this makes only its owner may read and write.
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
from zcrecord.errors import SourceError, UnsupportedError

from .cache_keys import identity

__all__ = ["CACHE_VARIABLE", "Cache", "Entry", "Shelf", "cache_at", "trim_cache"]

CACHE_VARIABLE = "ZCRECORD_CACHE"
_FOLDER = "zcrecord-1"  # changes with what is in it; nothing else in the folder that was named is touched
_SCRATCH = ".new-"
_INDEX = "index"
_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_PIECE = 8 << 20  # bytes read and hashed at a time
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def cache_at(folder: Any, url: str, options: Mapping[str, Any] | None = None) -> Shelf | None:
    """Return what a folder has of the archive that this URL names; None if there is to be no cache.

    Args:
        folder: a path; None for the one that the environment variable ZCRECORD_CACHE names, if any; False for none.
        url: of an archive.
        options: with which fsspec reaches it, which may say what server that is.

    Raises:
        SourceError: a folder cannot be made, or others may write to it, the one that was named included.
        UnsupportedError: that is no path.
    """
    root = _folder_of(folder)
    if root is None:
        return None
    archive = root / _short(identity(url, options or {}))
    for folder in (root.parent, root):
        try:
            _make(folder)
            _check_ours(folder, named=folder != root)
        except SourceError:
            raise
        except (OSError, ValueError) as error:
            what = f"the cache's folder cannot be made: {getattr(error, 'strerror', None) or error}"
            raise SourceError(what, path=str(folder), errno=getattr(error, "errno", None)) from error
    return Shelf(archive)


def trim_cache(folder: Any = None, *, limit: int = 0) -> int:
    """Remove what was not used for longest from a cache, until at most `limit` bytes are left; returns how many are.

    Programs that use the cache meanwhile fetch again what they miss. Nothing else in the folder is touched.

    Args:
        folder: as `load_record(cache=...)` takes it; None for the one that ZCRECORD_CACHE names.
        limit: 0 empties it.

    Raises:
        SourceError: others may write to it: they could have other files removed. UnsupportedError: `folder` is no path,
        or `limit` no number.

    Example:
        >>> trim_cache("no such folder")
        0
    """
    if not isinstance(limit, int):
        raise UnsupportedError(f"limit={limit!r} is not a number of bytes")
    root = _folder_of(folder)
    if root is None or root.is_symlink() or not root.is_dir():  # which no cache is in
        return 0
    _check_ours(root.parent, named=True)
    _check_ours(root)
    found, folders = [], []
    for path in root.rglob("*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                folders.append(path)
            else:
                found.append((status.st_mtime_ns, status.st_size, path))
    left = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in sorted(found):
        if left <= limit:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            left -= nbytes
    for path in sorted(folders, reverse=True):  # those in others first
        with contextlib.suppress(OSError):  # it is not empty
            path.rmdir()
    return left


def _folder_of(folder: Any) -> Path | None:
    """Return where a cache is in the folder that was named; None if there is to be none."""
    if folder is None:
        folder = os.environ.get(CACHE_VARIABLE) or False
    if folder is False:
        return None
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        what = f"cache= takes a folder's path, False for none, or None for ${CACHE_VARIABLE}'s"
        raise UnsupportedError(f"{what}, not {folder!r}")
    return Path(folder) / _FOLDER


class Shelf:
    """Cache entries of one archive, by versions. Folders are made when something is put there."""

    def __init__(self, folder: Path) -> None:
        """Take the archive's folder.

        Raises:
            SourceError: others may write to it.
        """
        with contextlib.suppress(FileNotFoundError):
            _check_ours(folder)
        self._folder = folder

    def holds_any(self) -> bool:
        """Return whether there is anything, maybe of another version."""
        try:
            return any(self._folder.iterdir())
        except OSError:  # there is no such folder
            return False

    def version(self, size: int, tag: str) -> Cache:
        """Return what is kept of the version that its server tells by size and tag.

        Raises:
            SourceError: others may write to its folder.
        """
        folder = self._folder / _short(f"{size} {tag}")
        with contextlib.suppress(FileNotFoundError):
            _check_ours(folder)
        return Cache(folder)


class Cache:
    """Cache entries of one version of one archive. Several processes may use it at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, start: int, digest: int, target: memoryview) -> bool:
        """Fill `target` with the payload that starts there; False if it is not there, or damaged."""
        return self.read(start, len(target), 0, target) and digest_of(target) == digest

    def read(self, start: int, nbytes: int, at: int, target: memoryview) -> bool:
        """Fill `target` with bytes of a payload from `at` on, unchecked; False if it is not there."""
        try:
            with _opened(self._payload(start, nbytes), nbytes) as file:
                file.seek(at)
                return _fill(file, target)
        except OSError:
            return False

    def has(self, start: int, nbytes: int, digest: int) -> bool:
        """Return whether a payload is there and undamaged; reads it all, holds little of it."""
        try:
            with _opened(self._payload(start, nbytes), nbytes) as file:
                return digest_of_pieces(iter(partial(file.read, _PIECE), b"")) == digest
        except OSError:
            return False

    def put(self, start: int, octets: memoryview) -> None:
        """Keep a payload, unless that fails: a full disk is no reason to give up loading."""
        entry = self.entry(start, len(octets))
        entry.write(octets)
        entry.keep()

    def entry(self, start: int, nbytes: int) -> Entry:
        """Return what keeps a payload that comes piece by piece."""
        return Entry(self._payload(start, nbytes))

    def index(self) -> list[tuple[int, bytes]] | None:
        """Return the pieces that `put_index` was given; None if there are none."""
        try:
            with _opened(self._folder / _INDEX) as file:
                line, _, rest = file.readall().partition(b"\n")
            told = json.loads(line)
            if told["digest"] != f"{digest_of(rest):016x}":
                return None
            out = []
            for offset, nbytes in told["pieces"]:
                if not (type(offset) is type(nbytes) is int and 0 <= nbytes <= len(rest)):
                    return None
                out.append((offset, rest[:nbytes]))
                rest = rest[nbytes:]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        return out

    def put_index(self, pieces: list[tuple[int, memoryview]]) -> None:
        """Keep what it takes to open the file, pieces by their offsets."""
        rest = b"".join(piece for _, piece in pieces)
        places = [(offset, len(piece)) for offset, piece in pieces]
        told = {"digest": f"{digest_of(rest):016x}", "pieces": places}
        entry = Entry(self._folder / _INDEX)
        entry.write(memoryview(json.dumps(told).encode() + b"\n" + rest))
        entry.keep()

    def _payload(self, start: int, nbytes: int) -> Path:
        return self._folder / f"{start}-{nbytes}"


class Entry:
    """A file that is there whole, once it is kept, or not at all; of several writers any one wins. Raises nothing."""

    def __init__(self, path: Path) -> None:
        self._path, self._scratch = path, path.with_name(f"{_SCRATCH}{os.urandom(8).hex()}")
        self._fine, self._made = True, False

    def write(self, octets: memoryview) -> None:
        """Append bytes; the file is open only meanwhile, since of a model's payloads many may be begun."""
        if not self._fine:
            return
        try:
            try:
                file = self._opened()
            except FileNotFoundError:  # the first one, or `trim_cache` was there
                _make(self._path.parent)
                file = self._opened()
            with file:
                file.seek(0, os.SEEK_END)
                self._made, done = True, 0
                while done < len(octets):
                    done += file.write(octets[done:])
        except OSError:
            self.drop()

    def _opened(self) -> Any:
        mode = "r+b" if self._made else "xb"  # "ab" would make it anew
        return open(self._scratch, mode, buffering=0, opener=_private)

    def keep(self) -> None:
        """Have the file be there."""
        if self._fine and self._made:
            try:
                os.replace(self._scratch, self._path)
                self._made = False
            except OSError:
                self.drop()

    def drop(self) -> None:
        """Take back what was written."""
        self._fine = False
        if self._made:
            self._made = False
            with contextlib.suppress(OSError):
                self._scratch.unlink()

    def __del__(self) -> None:  # of loading that was given up
        self.drop()


def _make(folder: Path) -> None:
    """Make a folder and those above it that are missing, which only their owner may read: it may be of private use."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _check_ours(folder: Path, *, named: bool = False) -> None:
    """Raise SourceError unless nobody but its owner can put anything there, and that is this user, or root.

    The one that the user `named` may be a link, and one such as /tmp, in which nobody can rename what is another's.
    """
    status = folder.stat() if named else folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        what = "a file" if named else "a link or a file"
        raise SourceError(f"the cache's folder is {what}; name another one in cache=", path=str(folder))
    if not hasattr(os, "geteuid"):
        return
    if not _is_owners(status):
        what = f"the cache's folder is another user's (number {status.st_uid}), who could change what is loaded"
        raise SourceError(f"{what}; name one of your own in cache=", path=str(folder))
    if status.st_mode & _OTHERS and not (named and status.st_mode & stat.S_ISVTX):
        who = "everybody" if status.st_mode & stat.S_IWOTH else "its group"
        what = f"{who} may write to the cache's folder, and could change what is loaded"
        raise SourceError(f"{what}; take that right away (chmod go-w), or name another in cache=", path=str(folder))


def _is_owners(status: os.stat_result) -> bool:
    return not hasattr(os, "geteuid") or status.st_uid in (os.geteuid(), 0)


def _opened(path: Path, nbytes: int | None = None) -> Any:
    """Return a plain file of so many bytes, open for reading; as used now, for `trim_cache`.

    Raises:
        OSError: there is none: a link, a pipe or a device is never followed, waited for or read; nor is a file that
        another user has made or may have written to, from a time when the folder was open to others.
    """
    fd = os.open(path, os.O_RDONLY | _PLAIN)
    try:
        status = os.fstat(fd)
        fits = status.st_size <= 2 * MAX_INDEX_SIZE if nbytes is None else status.st_size == nbytes
        ours = _is_owners(status) and (os.name != "posix" or not status.st_mode & _OTHERS)
        if not stat.S_ISREG(status.st_mode) or not fits or not ours:
            raise OSError("no entry of a cache")
        with contextlib.suppress(OSError):  # somebody else's, which may be read alone
            os.utime(fd if os.utime in os.supports_fd else path)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _fill(file: Any, target: memoryview) -> bool:
    done = 0
    while done < len(target) and (got := file.readinto(target[done:])):
        done += got
    return done == len(target)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
