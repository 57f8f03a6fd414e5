"""Archives behind a URL: `https://`, `s3://` and whatever else fsspec reaches, opened by `load_record` like any other.

Header, index and trailer are fetched on opening, in two requests for most; a payload when a view of it is first asked
for, and its digest is checked before. `Record.prefetch(names)`, `load_record(url, names=...)`, iterating over values,
`Record.tree()` and `Record.torch()` fetch all that they need at once: neighbours merged, several requests at a time.
What is there stays until the record and all views are gone. A failing request is tried five times; a file that is
replaced meanwhile is a SourceError, never a mixture of both. Loaders take bytes as they come, in as few requests, and
keep none here; `verify="full"` and `expect=` likewise.

With a cache (`cache=` or the environment variable ZCRECORD_CACHE names a folder) what was fetched once is read from
the disk, and checked again, for the same archive and version of it alone; `trim_cache` keeps it small, and any file of
it may be removed at any time.

`ranges` is arithmetic, `place` what all places have in common, `web` and `stores` the two kinds, `frames` what is
packed in one; `publishers` which archive a URL names, `cache` the folder; `window` the memory that fills up, `feed` and
`streamed` what passes by it; `opening` the way in.
"""

from __future__ import annotations

from .cache import trim_cache

__all__ = ["trim_cache"]
