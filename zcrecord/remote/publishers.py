"""Who published an archive, and which one it is, as far as a URL and what fsspec is told can say. Reads text alone.

A publisher is a server, or bucket, and the first folder in it. Of a bucket's URL the server is in the options, such as
an endpoint; two that differ in anything but credentials are taken for two, which costs room in the cache and no more.
"""

from __future__ import annotations

import json
import os
import posixpath
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode

from .place import address_of, redacted

__all__ = ["identity", "publisher"]

# Options that say who asks and how, and not who answers.
_WHO = {"key", "secret", "token", "username", "user", "password", "passwd", "headers", "auth", "cookies", "anon",
        "sas_token", "account_key", "credential", "client_secret", "api_key", "bearer_token"}  # fmt: skip
_ELSEWHERE = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE")  # where botocore finds its endpoint, too

# What is in a query because of a signature, and differs each time: AWS's, Google's and others' have prefixes, before
# them AWS had three, CloudFront has three, Azure's are of two letters.
_SIGNED = ("x-amz-", "x-goog-", "x-oss-", "x-ms-", "x-cos-", "q-sign", "q-key", "q-ak", "q-head", "q-url", "q-sig")
_SIGNATURE = {"awsaccesskeyid", "googleaccessid", "signature", "expires", "key-pair-id", "policy", "token",
              "access_token", "sig", "se", "st", "sp", "sv", "sr", "spr", "sip", "skoid", "sktid", "skt", "ske", "sks",
              "skv"}  # fmt: skip


def publisher(url: str, options: Mapping[str, Any]) -> str:
    """Return what archives of one publisher have in common, and of two have not: server or bucket, and first folder.

    Example:
        >>> publisher("https://me:pw@host/models/a/m.zcr?v=1", {"headers": {"X-Key": "1"}})
        'https://host/models {}'
    """
    parts = address_of(url)
    folders = posixpath.normpath(unquote(parts.path) or "/").lstrip("/").split("/")[:-1]  # "../" is no way around it
    told: Any = dict(options)
    if parts.scheme in ("s3", "s3a"):
        told |= {name: os.environ[name] for name in _ELSEWHERE if name in os.environ}
    server = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/{folders[0] if folders else ''}"
    return f"{server} {json.dumps(_where(told), sort_keys=True)}"


def identity(url: str) -> str:
    """Return what is one archive's alone: its URL without user, password and signature; other queries count.

    Example:
        >>> identity("https://me:pw@host/m.zcr?X-Amz-Signature=1&version=2&sig=3")
        'https://host/m.zcr?version=2'
    """
    query = address_of(url).query
    kept = [(name, value) for name, value in parse_qsl(query, keep_blank_values=True) if not _is_signature(name)]
    return f"{redacted(url)}?{urlencode(kept)}" if kept else redacted(url)


def _is_signature(name: str) -> bool:
    return name.lower() in _SIGNATURE or name.lower().startswith(_SIGNED)


def _where(options: Any) -> Any:
    """Return what options say of where files are; what is no text, number or list of them says nothing of that."""
    if isinstance(options, Mapping):
        kept = {str(k): _where(v) for k, v in options.items() if str(k).lower() not in _WHO}
        return {k: v for k, v in kept.items() if v not in (None, {}, [])}
    if isinstance(options, list | tuple):
        return [_where(item) for item in options]
    return options if isinstance(options, str | int | float | bool) else None
