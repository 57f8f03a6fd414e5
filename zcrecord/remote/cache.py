"""Payloads and indexes of remote archives in a folder on this machine, found again by what they are.

A payload goes by its digest and size, so that two versions of a model share what did not change; an index by its URL
and by what tells one version of the file from another. Both are checked when they are read back: an entry that is
damaged, or half written, counts as none. Any file of the folder may be removed at any time, by anyone.

A digest of 64 bits tells accidents apart, not forgeries: a stranger could publish a payload that has another's digest.
So archives share entries only where they come from one publisher: one host, or bucket, and the first folder in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import posixpath
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import xxhash

from zcrecord.errors import SourceError

from .place import redacted

__all__ = ["CACHE_VARIABLE", "Cache", "cache_at", "trim_cache"]

CACHE_VARIABLE = "ZCRECORD_CACHE"
_FOLDER = "zcrecord-0"  # changes with what is in it; nothing else in the folder that was named is touched
_SCRATCH = ".new-"


def cache_at(folder: Any, url: str) -> Cache | None:
    """Return the cache in a folder for what is published where this URL is; None if there is to be no cache.

    Args:
        folder: a path; None for the one that the environment variable ZCRECORD_CACHE names, if any; False for none.
        url: of an archive.

    Raises:
        SourceError: the folder cannot be made.
    """
    if folder is None:
        folder = os.environ.get(CACHE_VARIABLE) or False
    if folder is False:
        return None
    try:
        return Cache(Path(os.fspath(folder)) / _FOLDER, url)
    except OSError as error:
        what = f"the cache's folder cannot be made: {error.strerror or error}"
        raise SourceError(what, path=os.fspath(folder), errno=error.errno) from error


def trim_cache(folder: Any = None, *, limit: int = 0) -> int:
    """Remove what was not used for longest from a cache, until at most `limit` bytes are left; returns how many are.

    Programs that use the cache meanwhile fetch again what they miss. Nothing else in the folder is touched.

    Args:
        folder: as `load_record(cache=...)` takes it; None for the one that ZCRECORD_CACHE names.
        limit: 0 empties it.

    Example:
        >>> trim_cache("no such folder")
        0
    """
    root = os.fspath(folder if folder is not None else os.environ.get(CACHE_VARIABLE, ""))
    found = []
    for path in Path(root, _FOLDER).rglob("*") if root else ():
        with contextlib.suppress(OSError):
            if path.is_file():
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
    left = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in sorted(found):
        if left <= limit:
            break
        with contextlib.suppress(OSError):
            path.unlink()
            left -= nbytes
    return left


class Cache:
    """What is kept of the archives of one publisher. Several processes may use it at once."""

    def __init__(self, root: Path, url: str) -> None:
        """Make the folder, which only its owner may read: what is in it may have been behind a password."""
        self._folder = root / _short(_publisher(url))
        self._index = self._folder / f"index-{_short(redacted(url))}"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, digest: int, target: memoryview) -> bool:
        """Fill `target` with the payload that has this digest and its size; False if it is not there, and right."""
        path = self._payload(digest, len(target))
        try:
            with open(path, "rb", buffering=0) as file:
                done = 0
                while done < len(target) and (got := file.readinto(target[done:])):
                    done += got
                if done < len(target) or file.read(1):
                    return False
            with contextlib.suppress(OSError):  # somebody else's, which may be read alone
                os.utime(path)  # for `trim_cache`
        except OSError:
            return False
        return xxhash.xxh3_64_intdigest(target) == digest

    def put(self, digest: int, octets: memoryview) -> None:
        """Keep a payload, unless that fails: a full disk is no reason to give up loading."""
        self._write(self._payload(digest, len(octets)), octets)

    def has_index(self) -> bool:
        """Return whether there is an index for this URL, maybe of another version."""
        return os.path.exists(self._index)  # which raises nothing where it may not look

    def index(self, size: int, tag: str) -> list[tuple[int, bytes]] | None:
        """Return the pieces that `put_index` was given for this version of the file; None if there are none."""
        try:
            data = self._index.read_bytes()
        except OSError:
            return None
        line, _, rest = data.partition(b"\n")
        try:
            told = json.loads(line)
            if (told["size"], told["tag"], told["digest"]) != (size, tag, xxhash.xxh3_64_hexdigest(rest)):
                return None
            out = []
            for offset, nbytes in told["pieces"]:
                out.append((int(offset), rest[:nbytes]))
                rest = rest[nbytes:]
        except (ValueError, KeyError, TypeError):
            return None
        return out

    def put_index(self, size: int, tag: str, pieces: list[tuple[int, memoryview]]) -> None:
        """Keep what it takes to open the file, pieces by their offsets."""
        rest = b"".join(piece for _, piece in pieces)
        places = [(offset, len(piece)) for offset, piece in pieces]
        told = {"size": size, "tag": tag, "digest": xxhash.xxh3_64_hexdigest(rest), "pieces": places}
        self._write(self._index, json.dumps(told).encode() + b"\n" + rest)

    def _payload(self, digest: int, nbytes: int) -> Path:
        return self._folder / f"{digest >> 56:02x}" / f"{digest:016x}-{nbytes}"

    def _write(self, path: Path, data: Any) -> None:
        """Write a file that is there whole or not at all; of several writers any one wins."""
        scratch = path.with_name(f"{_SCRATCH}{os.urandom(8).hex()}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(scratch, "xb", buffering=0) as file:
                done, data = 0, memoryview(data)
                while done < len(data):
                    done += file.write(data[done:])
            os.replace(scratch, path)
        except OSError:
            with contextlib.suppress(OSError):
                scratch.unlink()


def _publisher(url: str) -> str:
    """Return what archives of one publisher have in common: host, or bucket, and the first folder in it."""
    parts = urlsplit(url.rpartition("::")[2])
    folders = posixpath.normpath(unquote(parts.path) or "/").lstrip("/").split("/")[:-1]  # "../" is no way around it
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{folders[0] if folders else ''}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
