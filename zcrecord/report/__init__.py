"""An archive's content and layout as one HTML file, which opens without a server.

Makes the description that `web/view/view.js` draws, and a page with it that loads no other file. The scripts in `web`
draw it. Reads no payload, unless a content digest is asked for.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.info import ArchiveLayout
from zcrecord.codec.blocks import is_blocks
from zcrecord.codec.entries import KIND_NAMES
from zcrecord.codec.index import Index, TensorEntry
from zcrecord.codec.layout import NONE
from zcrecord.errors import printable
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress, check_destination, open_sink, path_or_none
from zcrecord.writing.writers import peak_rss

__all__ = ["PageReport", "describe_archive", "report", "report_page"]

_WEB = Path(__file__).parents[1] / "web"
_VIEW_SCRIPTS = "text", "elements", "model", "tree", "pictures", "treemap", "layoutmap", "tables", "selection"
_SCRIPTS = *(f"view/{name}.js" for name in _VIEW_SCRIPTS), "report/report.js"  # each after those it imports
_STYLES = ("view/view.css", "report/report.css")
_MODULE_WORDS = re.compile(r"^import [^;]*;\n|^export (?=async |class |const |function )", re.MULTILINE)
_MOST_TEXT, _MOST_ITEMS, _MOST_ITEM_TEXT = 2000, 20, 200  # of a value: characters, items, characters of an item
_MOST_INTEGER = (1 << 53) - 1  # JavaScript rounds larger ones
_MOST_TITLE = 100  # characters of a name in a title


@dataclass(frozen=True, slots=True)
class PageReport:
    """The result of writing a report; sizes in bytes.

    Attributes:
        source, dest: paths; None for streams.
        tensors, modules: their numbers in the archive.
        archive_bytes, html_bytes: the sizes of the archive and of the page.
        content_digest: None unless it was asked for.
        seconds: the time it took.
        peak_rss: the largest memory of the process so far; None if the system does not report it.
    """

    source: str | None
    dest: str | None
    tensors: int
    modules: int
    archive_bytes: int
    html_bytes: int
    content_digest: str | None
    seconds: float
    peak_rss: int | None


def report(
    source: Any,
    dest: Any,
    *,
    digest: bool = False,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> PageReport:
    """Write an HTML page that shows an archive: its tree, its bytes, its values; the same page for the same archive.

    The page is one file that loads no other. No payload is read, or fetched if the archive is behind a URL.

    Args:
        source: any source that `load_record` takes, or a binary file object, which is read to its end.
        dest: a path or a URL, written whole or not at all, or a binary file object.
        digest: show the content digest, too; reads everything.
        force: replace `dest`.
        durable: wait until the page would survive power loss.
        progress: called with the bytes hashed so far, and the number of all.
        storage_options: for fsspec, if `source` or `dest` is a URL.

    Raises:
        RecordError: `source` is not an archive (a FormatError) or cannot be read, `dest` exists or cannot be written.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> report("model.zcr", "model.html").tensors
        1
    """
    started = time.perf_counter()
    path, dest_path = (path_or_none(p) if isinstance(p, str | os.PathLike) else None for p in (source, dest))
    version = check_destination(path, dest_path, force, storage_options)
    with load_record(source.read() if hasattr(source, "read") else source, storage_options=storage_options) as record:
        content_digest = record.content_digest(progress=progress) if digest else None
        page = report_page(describe_archive(record, content_digest=content_digest))
        counts = len(record), len(record.archive.index.modules), record.archive_nbytes
    with open_sink(dest, durable=durable, options=storage_options, replaces=version) as sink:
        sink.write(page)
    return PageReport(path, dest_path, *counts, len(page), content_digest, time.perf_counter() - started, peak_rss())


def describe_archive(record: Record, *, content_digest: str | None = None) -> dict[str, Any]:
    """Return the description of an archive that `web/view/view.js` draws and documents, as values for JSON.

    Takes time linear in the index; reads no payload.

    Raises:
        FormatError: the index breaks a rule, and the record was loaded without checking all rules.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> describe_archive(zcrecord.load_record("model.zcr"))["shapes"]
        ['[2, 3]']
    """
    archive = record.archive
    archive.ensure_all()
    ix = archive.index
    return {
        "name": Path(record.path).name if record.path else "archive",
        "archive": _archive(record.layout, archive, content_digest),
        **_tensors(archive),
        "payloads": {
            "offset": ix.payloads["offset"].tolist(),
            "nbytes": ix.payloads["nbytes"].tolist(),
            "digest": [f"{d:016x}" for d in ix.payloads["digest"].tolist()] if ix.digest_kind else None,
        },
        "modules": _modules(ix),
        "attributes": _values(archive, ix.attributes, placed=True),
        "metadata": _values(archive, ix.metadata[~is_blocks(ix, ix.metadata)], placed=False),
    }


def _archive(place: ArchiveLayout, archive: Archive, content_digest: str | None) -> dict[str, Any]:
    """Return the sizes, offsets and versions that the page shows of the archive as a whole."""
    return {
        "nbytes": place.archive_nbytes,
        "version": place.version,
        "base": archive.offset,
        "indexOffset": place.index_offset,
        "indexNbytes": place.index_nbytes,
        "payloadOffset": place.payload_offset,
        "front": place.front,
        "sealed": place.sealed,
        "alignment": place.alignment,
        "baseAlignment": place.base_alignment,
        "digest": place.digest,
        "contentDigest": content_digest,
        **({"shards": archive.source.file_names} if archive.source.file_names else {}),
    }


def _keys(ix: Index, rows: Any) -> list[str]:
    """Return the keys of tensors or modules, the last parts of their names."""
    ends = rows["name"].astype(np.int64) + rows["name_size"]
    return list(map(ix.string, (ends - rows["key_size"]).tolist(), rows["key_size"].tolist()))


def _tensors(archive: Archive) -> dict[str, Any]:
    """Return the columns of the table of tensors, and the texts that their numbers refer to."""
    ix = archive.index
    dtype_ids: dict[str, int] = {}  # each text with its number, since many tensors have the same
    shape_ids: dict[str, int] = {}
    strides_ids: dict[str, int] = {}
    dtype_column, shape_column, strided = [], [], {}
    for i, row in enumerate(map(TensorEntry._make, ix.tensors.tolist())):
        dtype_column.append(dtype_ids.setdefault(dtypes.stored_name(row.dtype, row.bits), len(dtype_ids)))
        shape = archive.shape(row)
        shape_column.append(shape_ids.setdefault(str(list(shape)), len(shape_ids)))
        if (strides := archive.strides(row)) is not None:
            nbytes = dtypes.nbytes(math.prod(shape), row.bits)
            strides_id = strides_ids.setdefault(str(list(strides)), len(strides_ids))
            strided[str(i)] = {"strides": strides_id, "byteOffset": row.byte_offset, "nbytes": nbytes}
    payloads = ix.tensors["payload"]
    columns = {
        "key": _keys(ix, ix.tensors),
        "module": ix.tensors["parent"].tolist(),
        "place": ix.tensors["place"].tolist(),
        "dtype": dtype_column,
        "shape": shape_column,
        "payload": np.where(payloads == NONE, -1, payloads.astype(np.int64)).tolist(),
    }
    tables = {"dtypes": list(dtype_ids), "shapes": list(shape_ids), "strides": list(strides_ids)}
    return {**tables, "tensors": columns, "strided": strided}


def _modules(ix: Index) -> dict[str, Any]:
    """Return the columns of the table of modules."""
    rows = ix.modules
    return {
        "key": _keys(ix, rows),
        "parent": [-1, *rows["parent"][1:].tolist()],
        "place": rows["place"].tolist(),
        "kind": [KIND_NAMES.get(kind, "mapping") for kind in rows["kind"].tolist()],
        "type": list(map(ix.string, rows["type_name"].tolist(), rows["type_name_size"].tolist())),
    }


def _values(archive: Archive, rows: Any, *, placed: bool) -> dict[str, Any]:
    """Return the columns of attributes or metadata; with `placed`, also each one's module, and its place in it."""
    ix = archive.index
    sizes = [*ix.payloads["nbytes"].tolist(), 0]  # the last is that of NONE
    entries = list(unflatten.attribute_entries(ix, rows, lambda n: _BlobSize(sizes[-1 if n == NONE else n])))
    columns: dict[str, Any] = {"key": [a.key for a in entries], "value": [_jsonable(a.value) for a in entries]}
    if placed:
        columns |= {"module": [a.parent for a in entries], "place": [a.place for a in entries]}
    return columns


class _BlobSize(NamedTuple):
    """The size of an attribute's bytes, which the report shows without reading them."""

    nbytes: int


def _jsonable(value: Any, most_text: int = _MOST_TEXT) -> Any:
    """Return a value as JSON that the page reads: an object for sizes, lists, long texts and numbers beyond doubles."""
    if isinstance(value, _BlobSize):
        return {"nbytes": value.nbytes}
    if isinstance(value, list | tuple):
        return {"items": [_jsonable(item, _MOST_ITEM_TEXT) for item in value[:_MOST_ITEMS]], "count": len(value)}
    if isinstance(value, str) and len(value) > most_text:
        return {"text": value[:most_text], "count": len(value)}
    is_large = isinstance(value, int) and abs(value) > _MOST_INTEGER
    if is_large or (isinstance(value, float) and not math.isfinite(value)):
        return {"number": str(value)}
    return value


def report_page(description: dict[str, Any]) -> bytes:
    """Return a description as one HTML document that loads no other file, and runs only its own script.

    Its Content-Security-Policy allows only its own script and style, by their hashes. Names in the description may
    contain any text: it is data, not code.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"</script>": np.ones(3)}, "model.zcr")
        >>> page = report_page(describe_archive(zcrecord.load_record("model.zcr")))
        >>> page.count(b"</script>")
        2
    """
    script = "".join(_MODULE_WORDS.sub("", _web_file(name)) for name in _SCRIPTS)
    style = "".join(map(_web_file, _STYLES))
    text = json.dumps(description, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    for character in "<>&":  # so that no name ends the script or starts markup
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {
        "title": html.escape(printable(description["name"], _MOST_TITLE)),
        "description": text,
        "script": script,
        "style": style,
        "script_hash": _hash(script),
        "style_hash": _hash(style),
    }
    page = re.sub(r"\{(\w+)\}", lambda match: parts[match[1]], _web_file("report/report.html"))
    return page.encode()


def _web_file(name: str) -> str:
    return (_WEB / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
