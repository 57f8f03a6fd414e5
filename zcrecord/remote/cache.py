"""Payloads and indexes of remote archives in a folder on this machine, found again by what they are.

A payload goes by its digest and size, so that two versions of a model share what did not change; an index by its URL
and by what tells one version of the file from another. Both are checked when they are read back: an entry that is
damaged, half written or no plain file counts as none. Any file of the folder may be removed at any time, by anyone.

A digest of 64 bits tells accidents apart, not forgeries: who could write to the folder, or publish a payload that has
another's digest, could change what is loaded. So a folder of another user's is refused, and archives share entries only
where they come from one publisher, which `publishers` tells.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from zcrecord.errors import SourceError, UnsupportedError
from zcrecord.layout import MAX_INDEX_SIZE

from .publishers import identity, publisher

__all__ = ["CACHE_VARIABLE", "Cache", "Entry", "cache_at", "trim_cache"]

CACHE_VARIABLE = "ZCRECORD_CACHE"
_FOLDER = "zcrecord-0"  # changes with what is in it; nothing else in the folder that was named is touched
_SCRATCH = ".new-"
_PIECE = 8 << 20  # bytes read and hashed at a time
_PLAIN = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


def cache_at(folder: Any, url: str, options: Mapping[str, Any] | None = None) -> Cache | None:
    """Return the cache in a folder for what is published where this URL is; None if there is to be no cache.

    Args:
        folder: a path; None for the one that the environment variable ZCRECORD_CACHE names, if any; False for none.
        url: of an archive.
        options: with which fsspec reaches it, which may say what server that is.

    Raises:
        SourceError: the folder cannot be made, or others may write to it. UnsupportedError: that is no path.
    """
    root = _folder_of(folder)
    if root is None:
        return None
    try:
        return Cache(root, url, options or {})
    except (OSError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        what = f"the cache's folder cannot be made: {getattr(error, 'strerror', None) or error}"
        raise SourceError(what, path=str(root.parent), errno=getattr(error, "errno", None)) from error


def trim_cache(folder: Any = None, *, limit: int = 0) -> int:
    """Remove what was not used for longest from a cache, until at most `limit` bytes are left; returns how many are.

    Programs that use the cache meanwhile fetch again what they miss. Nothing else in the folder is touched.

    Args:
        folder: as `load_record(cache=...)` takes it; None for the one that ZCRECORD_CACHE names.
        limit: 0 empties it.

    Raises:
        UnsupportedError: `folder` is no path, or `limit` no number.

    Example:
        >>> trim_cache("no such folder")
        0
    """
    if not isinstance(limit, int):
        raise UnsupportedError(f"limit={limit!r} is not a number of bytes")
    root = _folder_of(folder)
    found = []
    for path in root.rglob("*") if root is not None and not root.is_symlink() else ():  # which no cache is in
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode):
                found.append((status.st_mtime_ns, status.st_size, path))
    left = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in sorted(found):
        if left <= limit:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            left -= nbytes
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


class Cache:
    """What is kept of the archives of one publisher. Several processes may use it at once."""

    def __init__(self, root: Path, url: str, options: Mapping[str, Any]) -> None:
        """Make the folder, which only its owner may read: what is in it may have been behind a password."""
        self._folder = root / _short(publisher(url, options))
        self._index = self._folder / f"index-{_short(identity(url))}"
        for folder in (root, self._folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_ours(folder)

    def get(self, digest: int, target: memoryview) -> bool:
        """Fill `target` with the payload that has this digest and its size; False if it is not there, and right."""
        return self.read(digest, len(target), 0, target) and xxhash.xxh3_64_intdigest(target) == digest

    def read(self, digest: int, nbytes: int, start: int, target: memoryview) -> bool:
        """Fill `target` with bytes of a payload from `start` on, unchecked; False if it is not there."""
        try:
            with _opened(self._payload(digest, nbytes), nbytes) as file:
                file.seek(start)
                return _fill(file, target)
        except OSError:
            return False

    def has(self, digest: int, nbytes: int) -> bool:
        """Return whether a payload is there and right; reads it all, holds little of it."""
        running = xxhash.xxh3_64()
        try:
            with _opened(self._payload(digest, nbytes), nbytes) as file:
                while piece := file.read(_PIECE):
                    running.update(piece)
        except OSError:
            return False
        return running.intdigest() == digest

    def put(self, digest: int, octets: memoryview) -> None:
        """Keep a payload, unless that fails: a full disk is no reason to give up loading."""
        entry = self.entry(digest, len(octets))
        entry.write(octets)
        entry.keep()

    def entry(self, digest: int, nbytes: int) -> Entry:
        """Return what keeps a payload that comes piece by piece."""
        return Entry(self._payload(digest, nbytes))

    def has_index(self) -> bool:
        """Return whether there is an index for this URL, maybe of another version."""
        return os.path.exists(self._index)  # which raises nothing where it may not look

    def index(self, size: int, tag: str) -> list[tuple[int, bytes]] | None:
        """Return the pieces that `put_index` was given for this version of the file; None if there are none."""
        try:
            with _opened(self._index) as file:
                line, _, rest = file.readall().partition(b"\n")
            told = json.loads(line)
            if (told["size"], told["tag"], told["digest"]) != (size, tag, xxhash.xxh3_64_hexdigest(rest)):
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

    def put_index(self, size: int, tag: str, pieces: list[tuple[int, memoryview]]) -> None:
        """Keep what it takes to open the file, pieces by their offsets."""
        rest = b"".join(piece for _, piece in pieces)
        places = [(offset, len(piece)) for offset, piece in pieces]
        told = {"size": size, "tag": tag, "digest": xxhash.xxh3_64_hexdigest(rest), "pieces": places}
        entry = Entry(self._index)
        entry.write(memoryview(json.dumps(told).encode() + b"\n" + rest))
        entry.keep()

    def _payload(self, digest: int, nbytes: int) -> Path:
        return self._folder / f"{digest >> 56:02x}" / f"{digest:016x}-{nbytes}"


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
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(self._scratch, "r+b" if self._made else "xb", buffering=0) as file:  # "ab" would make it anew
                file.seek(0, os.SEEK_END)
                self._made, done = True, 0
                while done < len(octets):
                    done += file.write(octets[done:])
        except OSError:
            self.drop()

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


def _check_ours(folder: Path) -> None:
    """Raise SourceError unless nobody but its owner can have put anything there, and that is this user, or root."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise SourceError("the cache's folder is a link or a file; name another one in cache=", path=str(folder))
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid not in (os.geteuid(), 0):
        what = f"the cache's folder is another user's (number {status.st_uid}), who could change what is loaded"
        raise SourceError(f"{what}; name one of your own in cache=", path=str(folder))
    if status.st_mode & stat.S_IWOTH:
        what = "everybody may write to the cache's folder, and could change what is loaded"
        raise SourceError(f"{what}; take that right away (chmod o-w), or name another in cache=", path=str(folder))


def _opened(path: Path, nbytes: int | None = None) -> Any:
    """Return a plain file of so many bytes, open for reading; as used now, for `trim_cache`.

    Raises:
        OSError: there is none: a link, a pipe or a device is never followed, waited for or read.
    """
    fd = os.open(path, os.O_RDONLY | _PLAIN)
    try:
        status = os.fstat(fd)
        fits = status.st_size <= 2 * MAX_INDEX_SIZE if nbytes is None else status.st_size == nbytes
        if not stat.S_ISREG(status.st_mode) or not fits:
            raise OSError("no entry of a cache")
        with contextlib.suppress(OSError):  # somebody else's, which may be read alone
            os.utime(fd if os.utime in os.supports_fd else path)
        return open(fd, "rb", buffering=0)
    except BaseException:
        os.close(fd)
        raise


def _fill(file: Any, target: memoryview) -> bool:
    done = 0
    while done < len(target) and (got := file.readinto(target[done:])):
        done += got
    return done == len(target)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]
