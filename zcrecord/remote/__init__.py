"""Archives behind a URL: `https://`, `s3://` and others that fsspec reaches, opened by `load_record` as any other.

Opening fetches header, index and trailer, mostly in two requests; a payload is fetched, and its digest checked, before
the first view of it. `Record.prefetch(names)`, `load_record(url, names=...)`, iterating over values, `Record.tree()`
and `Record.torch()` fetch all that they need at once: neighbours merged, several requests at a time. Fetched bytes stay
until the record and all views are gone. A failing request is tried five times; a file that is replaced meanwhile is a
SourceError, never a mixture of two versions. Loaders, `verify="full"` and `expect=` fetch as few times, and keep
nothing here.

With a cache (`cache=`, or the environment variable ZCRECORD_CACHE, names a folder) bytes that were fetched once are
read from disk, and checked again, for the same archive and version alone; `trim_cache` limits it, and any of its files
may be removed at any time. README.md in this folder is the guide.

Modules: `ranges` is arithmetic; `file` the base class of remote files, `http`, `fsspec` and `packed` its kinds;
`on_demand` memory that is filled on demand, `read_ahead` reads without keeping; `cache` the folder,
`cache_keys` the names in it; `open_url` opens a URL.
"""

from __future__ import annotations

from .cache import trim_cache

__all__ = ["trim_cache"]
