"""URLs, as fsspec takes them: their file system, their parts, and how errors show them.

Reading them is `remote`'s, writing them `uploads`'s.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import SplitResult, urlsplit

from zcrecord.errors import DependencyError, UnsupportedError, missing_package

__all__ = ["connect", "protocols_of", "redacted", "said", "split_url", "version_tag"]

_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # not the :: of an IPv6 address
_PACKAGES = {  # the package that fsspec needs for a kind of URL, and the extra that installs it
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
}
# Names of version tags in `info`, the most reliable first.
_TAGS = ("ETag", "etag", "content_hash", "content_md5", "md5Hash", "md5", "generation", "LastModified",
         "last_modified", "updated", "mtime", "modified", "created")  # fmt: skip


def redacted(url: str) -> str:
    """Return a URL without user, password and query, which may be secret; a signature, for one."""
    *heads, last = _CHAINED.split(url)  # the last has the address
    parts = split_url(last)
    host = parts.netloc.rpartition("@")[2]
    return "::".join([*heads, f"{parts.scheme}://{host}{parts.path}"])


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; of chained URLs those of the last, which has the file's address."""
    return urlsplit(_CHAINED.split(url)[-1])


def connect(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the file's path in it.

    Raises:
        DependencyError: fsspec, or the package it needs for this kind of URL, is not installed. UnsupportedError: it
        knows no such kind, or no such options.
    """
    if options is not None and not isinstance(options, Mapping):
        raise UnsupportedError(f"storage_options= takes a mapping, not a {type(options).__name__}")
    try:
        import fsspec.core
    except ImportError as error:
        raise missing_package("fsspec", "aiohttp", extra="remote") from error
    _check_url(url)
    scheme = url.partition("://")[0].rpartition("::")[2].lower()
    try:
        fs, path = fsspec.core.url_to_fs(url, **_undecoded(url, options or {}))
    except ImportError as error:
        what = f"URLs of the kind {scheme}:// need another package ({error})"
        if scheme not in _PACKAGES:
            raise DependencyError(f"{what}; install that with pip") from error
        package, extra = _PACKAGES[scheme]
        raise missing_package(package, extra=extra, why=what) from error
    except ValueError as error:
        if "not known" in str(error):
            what = f"URLs of the kind {scheme}:// are not known to fsspec; a local file's path has no '://' in it"
            raise UnsupportedError(what) from None
        raise UnsupportedError(f"this is no URL: {error}") from error
    except TypeError as error:
        raise UnsupportedError(f"storage_options= does not fit URLs of the kind {scheme}://: {error}") from error
    return fs, path


def _undecoded(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options that keep fsspec from decompressing what an HTTP server sends, in chained URLs.

    Such as `simplecache::https://`; plain `https://` is left to `remote.http`.
    """
    out = dict(options)
    for scheme in {part.partition("://")[0] for part in _CHAINED.split(url)[1:]} & {"http", "https"}:
        own = dict(out.get(scheme) or {})
        out[scheme] = {**own, "client_kwargs": {**(own.get("client_kwargs") or {}), "auto_decompress": False}}
    return out


def _check_url(url: str) -> None:
    """Raise UnsupportedError for a URL without a valid host and port; the message quotes nothing of it.

    A password with '/' or ':' in it, for one, makes the rest of the password a port.
    """
    try:
        parts = split_url(url)
        if parts.scheme in ("http", "https") and (parts.hostname is None or parts.port == 0):
            raise ValueError
    except ValueError:
        what = "this URL has no host and port that are valid"
        raise UnsupportedError(f"{what}; write special characters of user and password as %XX") from None


def protocols_of(fs: Any) -> tuple[str, ...]:
    """Return the kinds of URL that a file system of fsspec is for, such as ("s3", "s3a")."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def version_tag(found: Mapping[str, Any]) -> str | None:
    """Return the version of a file, of what its file system's `info` tells; None if it tells none."""
    return next((f"{found[tag]}" for tag in _TAGS if found.get(tag)), None)


def said(error: Exception) -> str:
    """Return the words of a file system's exception, for the end of a message."""
    text = str(error) or type(error).__name__
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not error.args[1:] else text
