"""Cache keys of URLs with fsspec's options: two publishers' archives never share one. Reads text alone.

On a hub everybody is on one server, and what tells one's archives from another's may be a folder, the query, the user
or a header. So everything counts that a server is told but two things, since else nothing would be found again: what
proves who asks (passwords, tokens), and the signature of a signed URL. What is told apart without need costs room in
the cache and no more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from .file import address_of

__all__ = ["identity"]

# Options that prove who asks; a name (`key`, `username`) is none of them, since a server may have files for each.
_PROOFS = {"secret", "token", "password", "passwd", "auth", "cookies", "sas_token", "account_key", "credential",
           "client_secret", "api_key", "bearer_token", "authorization", "cookie"}  # fmt: skip
# Where file systems find their server if neither URL nor options say it.
_ELSEWHERE = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME",
              "AZURE_STORAGE_CONNECTION_STRING", "STORAGE_EMULATOR_HOST", "HF_ENDPOINT")  # fmt: skip

# What a signature adds to a query, by scheme: names that are all there, and those that go then. One of these names
# alone, such as `token` or `sp`, may be how a server tells its files apart.
_PREFIXED = ("x-amz-", "x-goog-", "x-oss-")  # each with a `signature`: AWS's, Google's, Alibaba's version 4
_OLDER = frozenset({"signature", "expires", "awsaccesskeyid", "googleaccessid", "ossaccesskeyid"})
_SIGNED: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    *((frozenset({"signature", "expires", key}), _OLDER) for key in sorted(_OLDER) if key.endswith("id")),
    (frozenset({"signature", "key-pair-id"}), frozenset({"signature", "key-pair-id", "expires", "policy"})),
    (frozenset({"sig", "sv", "sr", "se"}), frozenset({"sig", "sv", "sr", "se", "st", "sp", "spr", "sip", "si", "skoid",
                                                      "sktid", "skt", "ske", "sks", "skv"})),
)  # fmt: skip


def identity(url: str, options: Mapping[str, Any]) -> str:
    """Return what is one archive's alone, whatever its URL is signed with and whoever proves to be the one who asks.

    An option that is an object counts by what it prints, or by its type where it prints its address. The name may hold
    a password of the URL's: hash it before it is written anywhere.

    Example:
        >>> identity("https://host/m.zcr?f=alice&X-Amz-Date=1&X-Amz-Signature=2", {"headers": {"Cookie": "3"}})
        '["https://host/m.zcr?f=alice", {}]'
    """
    told: Any = dict(options)
    if address_of(url).scheme in ("http", "https"):
        return json.dumps([_unsigned(url), _where(told)], sort_keys=True)
    told |= {name: os.environ[name] for name in _ELSEWHERE if name in os.environ}
    return json.dumps([url, _where(told)], sort_keys=True)


def _unsigned(url: str) -> str:
    """Return a URL without its signature, the rest as it is written."""
    before, _, after = url.partition("?")
    query, fragment, rest = after.partition("#")
    names = [pair.partition("=")[0].lower() for pair in query.split("&")]
    gone = {name for prefix in _PREFIXED if f"{prefix}signature" in names for name in names if name.startswith(prefix)}
    gone |= {name for needed, going in _SIGNED if needed <= set(names) for name in going}
    if not gone:
        return url
    kept = [pair for pair, name in zip(query.split("&"), names, strict=True) if name not in gone]
    return before + ("?" if kept else "") + "&".join(kept) + fragment + rest


def _where(options: Any) -> Any:
    """Return what options say of where files are, as JSON has it."""
    if isinstance(options, Mapping):
        kept = {str(k): _where(v) for k, v in options.items() if str(k).lower() not in _PROOFS}
        return {k: v for k, v in kept.items() if v not in (None, {}, [])}
    if isinstance(options, list | tuple):
        return [_where(item) for item in options]
    if options is None or isinstance(options, str | int | float | bool):
        return options
    shown = repr(options)
    return type(options).__qualname__ if " at 0x" in shown else shown
