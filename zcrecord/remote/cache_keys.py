"""Cache keys of URLs with fsspec's options: archives of two publishers never share one. Works on text alone.

A hub's server may tell archives apart by folder, query, user or header. So the key has everything that the server gets,
except credentials and the signature of a signed URL, which change. A key that is too specific only costs room.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from zcrecord.storage.urls import is_http

# Options with credentials. User names (`key`, `username`) are not among them: a server may have files for each user.
_CREDENTIALS = {"secret", "token", "password", "passwd", "auth", "cookies", "sas_token", "account_key", "credential",
                "client_secret", "api_key", "bearer_token", "authorization", "cookie"}  # fmt: skip
# Environment variables that name the server if neither URL nor options do.
_ELSEWHERE = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_PROFILE", "AZURE_STORAGE_ACCOUNT_NAME",
              "AZURE_STORAGE_CONNECTION_STRING", "STORAGE_EMULATOR_HOST", "HF_ENDPOINT")  # fmt: skip

# Signatures in a query, by scheme: parameters that must all be present, and those that are removed then. One of these
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
    """Return a text that identifies one archive, without signature and credentials of options; hash it before use."""
    if is_http(url):
        return json.dumps([_without_signature(url), _public(options)], sort_keys=True)
    servers = {name: os.environ[name] for name in _ELSEWHERE if name in os.environ}
    return json.dumps([url, _public({**options, **servers})], sort_keys=True)


def _without_signature(url: str) -> str:
    """Return a URL without its signature, the rest as it is written."""
    address, _, after = url.partition("?")
    query, mark, fragment = after.partition("#")
    pairs = query.split("&")
    names = [pair.partition("=")[0].lower() for pair in pairs]
    prefixes = tuple(prefix for prefix in _PREFIXED if f"{prefix}signature" in names)
    removed = {name for name in names if name.startswith(prefixes)}
    removed.update(*(parameters for required, parameters in _SIGNED if required <= set(names)))
    if not removed:
        return url
    unsigned = "&".join(pair for pair, name in zip(pairs, names, strict=True) if name not in removed)
    return address + ("?" if unsigned else "") + unsigned + mark + fragment


def _public(options: Any) -> Any:
    """Return options as JSON values, without credentials."""
    if isinstance(options, Mapping):
        public = {str(name): _public(value) for name, value in options.items() if str(name).lower() not in _CREDENTIALS}
        return {name: value for name, value in public.items() if value not in (None, {}, [])}
    if isinstance(options, list | tuple):
        return [_public(item) for item in options]
    if options is None or isinstance(options, str | int | float | bool):
        return options
    text = repr(options)
    return type(options).__qualname__ if " at 0x" in text else text  # an address changes with each run
