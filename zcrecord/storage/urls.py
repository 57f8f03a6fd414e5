"""URLs, as fsspec takes them: their file system, their parts, and how errors show them.

`remote` reads them, `uploads` writes them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

from zcrecord.errors import (
    DependencyError,
    FormatError,
    RecordError,
    SourceError,
    UnsupportedError,
    missing_package,
    printable,
)

_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")  # not the :: of an IPv6 address
_CUTS = {  # texts at which a URL is cut: the consequence, and what to do
    "::": "where fsspec would cut it and take another file; write %3A%3A for HTTP and addresses of IPv6 in full, "
    "or rename the file",
    "?": "where a query begins, which only HTTP servers read, so that another file would be taken; rename the file",
}
_ANSWER = 20  # seconds for the first answer of an S3 server; its client connects in 5, and tries again by itself
_PACKAGES = {  # the package that fsspec needs for a kind of URL, and the extra that installs it
    **dict.fromkeys(("http", "https"), ("aiohttp", "remote")),
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
}
# Version tags in `info`, the most reliable first.
_TAGS = ("ETag", "etag", "content_hash", "content_md5", "md5Hash", "md5", "generation", "LastModified",
         "last_modified", "updated", "mtime", "modified", "created")  # fmt: skip


def redacted(url: str) -> str:
    """Return a URL without user, password and query, which may be secret, as a signature is."""
    *heads, last = _CHAINED.split(url)  # the last has the address
    try:
        parts = split_url(last)
    except ValueError:  # brackets around something other than an IPv6 address, which `connect` refuses
        return "::".join([*heads, f"{last.partition('://')[0]}://..."])
    host = parts.netloc.rpartition("@")[2]
    name = parts.path if is_http(last) or not parts.fragment else f"{parts.path}#{parts.fragment}"
    return "::".join([*heads, f"{parts.scheme}://{host}{name}"])


def split_url(url: str) -> SplitResult:
    """Return the parts of a URL; of chained URLs those of the last, which has the file's address."""
    return urlsplit(_CHAINED.split(url)[-1])


def is_http(url: str) -> bool:
    """Return True for the URL of a file on an HTTP server, chained or not."""
    return _CHAINED.split(url)[-1].partition("://")[0].lower() in ("http", "https")


def cut_in_url(path: str) -> str | None:
    """Return the text in a path at which a URL with that path would be cut, `::` or `?`; None if there is none."""
    return next((text for text in _CUTS if text in path), None)


def leads_inside(name: str) -> bool:
    """Return True for a path, its parts joined by "/", that stays in its folder or below."""
    plain = not {"", ".", ".."} & set(name.split("/")) and set(name).isdisjoint("\\\0")
    return plain and not os.path.splitdrive(name)[0] and not re.search("[\ud800-\udfff]", name)


def file_beside(url: str, name: str) -> str:
    """Return the URL of `name`, an untrusted path, beside the file at `url`; FormatError if it leads elsewhere.

    In an HTTP URL the name is escaped, since a server may read `%2e%2e%2f` as the folder above, and the query is kept,
    which may be a signature. In others neither is; `connect` refuses the result if the name makes it ambiguous.
    """
    if not leads_inside(name):
        raise FormatError(f"the file name {printable(repr(name))} leads to another folder", path=redacted(url))
    parts = _CHAINED.split(url)
    index = next(i for i, part in enumerate(parts) if "://" in part)  # the first such part has the path, as in a zip
    file, mark, query = parts[index].partition("?")
    if is_http(file) and file.count("/") == 2:  # no path: the name would take the place of the host
        file += "/"
    folder = file[: file.rindex("/")]
    parts[index] = f"{folder}/{quote(name)}{mark}{query}" if is_http(file) else f"{folder}/{name}"
    return "::".join(parts)


def connect(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return fsspec's file system for a URL and the path in it; DependencyError or UnsupportedError for its kind."""
    if options is not None and not isinstance(options, Mapping):
        raise UnsupportedError(f"storage_options= takes a mapping, not a {type(options).__name__}")
    try:
        import fsspec.core
    except ImportError as error:
        raise missing_package("fsspec", "aiohttp", extra="remote") from error
    _check_url(url)
    scheme = url.partition("://")[0].rpartition("::")[2].lower()
    try:
        fs, path = fsspec.core.url_to_fs(url, **_safe_options(url, options or {}))
    except RecordError:
        raise
    except ImportError as error:
        fault = f"URLs of the kind {scheme}:// need another package ({error})"
        if scheme not in _PACKAGES:
            raise DependencyError(f"{fault}; install that with pip") from error
        package, extra = _PACKAGES[scheme]
        raise missing_package(package, extra=extra, why=fault) from error
    except ValueError as error:
        if "not known" in str(error):
            fault = f"URLs of the kind {scheme}:// are not known to fsspec; a local path has no '://' in it"
            raise UnsupportedError(fault) from None
        raise UnsupportedError(f"this is not a URL: {error}") from error
    except TypeError as error:
        raise UnsupportedError(f"the storage options do not fit URLs of the kind {scheme}://: {error}") from error
    except Exception as error:  # a file system inside a file, such as zip://, reads that file here
        raise SourceError(f"cannot be opened: {error_text(error)}", path=redacted(url)) from error
    if not getattr(fs, "version_aware", False):
        _check_query(url)
    return fs, path


def _safe_options(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with which chained URLs decompress no answer, and send no header to another server."""
    out = dict(options)
    for scheme in {part.partition("://")[0].lower() for part in _CHAINED.split(url)[1:]} & {"http", "https"}:
        of_scheme = dict(out.get(scheme) or {})
        of_client = dict(of_scheme.get("client_kwargs") or {})
        of_client |= {"auto_decompress": False, "trace_configs": [_redirect_hook()]}
        out[scheme] = {**of_scheme, "client_kwargs": of_client}
    return out


@cache
def _redirect_hook() -> Any:
    """Return aiohttp's hook for redirects, always the same: fsspec compares options to find a file system again."""
    import aiohttp

    hook = aiohttp.TraceConfig()
    hook.on_request_redirect.append(_remove_headers)
    return hook


async def _remove_headers(session: Any, _context: Any, hop: Any) -> None:
    """Remove all headers from a redirect to another server, except the range; a SourceError if cookies would follow."""
    try:
        same_origin = hop.url.join(type(hop.url)(hop.response.headers["Location"])).origin() == hop.url.origin()
    except (KeyError, ValueError):  # aiohttp refuses it
        same_origin = False
    secrets = any(not cookie["domain"] for cookie in session.cookie_jar) or session.auth is not None
    if not same_origin and (secrets or getattr(session, "_middlewares", None)):
        fault = "cannot be read: the server redirects to another, to which cookies or passwords would go"
        raise SourceError(f"{fault}; give the URL without what is before '::', or storage options without them")
    for name in () if same_origin else {*map(str.title, hop.headers)} - {"Range", "Accept-Encoding"}:
        hop.headers.popall(name)


def _check_url(url: str) -> None:
    """Raise UnsupportedError for a URL that does not name one file; it quotes nothing, which may be secret."""
    try:
        parts = split_url(url)
        if parts.scheme in ("http", "https") and (parts.hostname is None or parts.port == 0):
            raise ValueError
    except ValueError:
        fault = "this URL has no valid host and port"
        raise UnsupportedError(f"{fault}; write special characters of user and password as %XX") from None
    if any("::" in part.partition("://")[2] for part in _CHAINED.split(url)):
        raise _cut_error("::", url)


def _check_query(url: str) -> None:
    """Raise UnsupportedError for a `?` in a URL that is not of HTTP or a local file: only HTTP servers read queries."""
    for part in _CHAINED.split(url):
        scheme, _, path = part.partition("://")
        if "?" in path and scheme.lower() not in ("http", "https", "file", "local"):
            raise _cut_error("?", url)


def _cut_error(text: str, url: str) -> UnsupportedError:
    return UnsupportedError(f"has '{text}' in it, {_CUTS[text]}", path=redacted(url))


def protocols_of(fs: Any) -> tuple[str, ...]:
    """Return the kinds of URL that a file system of fsspec is for, such as ("s3", "s3a")."""
    return (fs.protocol,) if isinstance(fs.protocol, str) else tuple(fs.protocol)


def first_answer(fs: Any) -> dict[str, float]:
    """Return the option by which a file system of S3 gives up if its server does not answer; {} for others."""
    return {"timeout": _ANSWER} if hasattr(fs, "call_s3") else {}


def version_tag(info: Mapping[str, Any]) -> str | None:
    """Return the version of a file from its file system's `info`; None if it has none."""
    return next((f"{info[tag]}" for tag in _TAGS if info.get(tag)), None)


def error_text(error: Exception) -> str:
    """Return the text of a file system's exception, for the end of a message."""
    if type(error).__name__ == "FSTimeoutError":
        return f"no answer in {_ANSWER} seconds; is the endpoint right, and does a proxy or firewall let it through?"
    text = str(error) or type(error).__name__
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno and not error.args[1:] else text
