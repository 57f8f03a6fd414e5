"""Archives behind a URL: `https://`, `s3://` and others that fsspec reaches, opened by `load_record` as any other.

Opening fetches header, index and trailer; a payload is fetched, and its digest checked, before the first view of it.
Calls that need many fetch them at once. Fetched bytes stay until the record and all views are gone; loaders,
`verify="full"` and `expect=` keep nothing. With a cache they are read from disk, and checked again. README.md in this
folder is the guide.

Modules: `ranges` is arithmetic; `file` the base class of remote files, `http`, `fsspec` and `packed` its kinds;
`on_demand` memory that is filled on demand, `read_ahead` reads without keeping; `cache` the folder, `cache_keys` the
names in it; `open_url` opens a URL.
"""

from __future__ import annotations

from .cache import trim_cache

__all__ = ["trim_cache"]
