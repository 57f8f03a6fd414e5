"""Stamps: what an archive keeps of the conversion it comes from, and what is kept of a model that was refused.

A stamp is one text in the metadata (CONVENTIONS.md, "Conversions"): the versions of the files that were read, the
options, the version of the format. Equal stamps mean equal archives. A refusal is a small file beside the place that
the archive would have: the stamp it would have, and the error.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import Any

from zcrecord import __version__
from zcrecord.codec.conventions import SOURCE_NAME
from zcrecord.codec.layout import VERSION
from zcrecord.errors import FormatError, SourceNotFoundError, printable
from zcrecord.record.load import load_record
from zcrecord.storage.files import is_url, open_sink, read_start, refusals
from zcrecord.storage.urls import leads_inside

from .jobs import Job
from .sources import Model

__all__ = ["Stamp", "forget_refusal", "is_current", "keep_refusal", "metadata_of", "refusal_at", "stamp_at", "stamp_of"]

Stamp = dict[str, Any]
_REFUSED = ".refused"  # behind the name of an archive that could not be made
_MOST = 1 << 16  # bytes of a refusal that are read
_LONGEST = 4000  # characters of an error that are kept


def stamp_of(job: Job, versions: Mapping[str, str | None]) -> Stamp:
    """Return the stamp of an archive made of files of these versions; options that change no byte are left out."""
    options = {"alignment": job.alignment, "format": job.source_format, "max_shard_size": job.max_shard_size}
    return {"archive": VERSION, "files": dict(versions), "options": options}


def metadata_of(stamp: Stamp) -> dict[str, str]:
    """Return a stamp as an archive's metadata; equal for equal stamps."""
    return {SOURCE_NAME: json.dumps(stamp, sort_keys=True, separators=(",", ":"))}


def stamp_at(job: Job) -> Stamp | None:
    """Return the stamp of the archive at a job's destination; None if nothing is there. Reads no payload.

    An archive that no fleet wrote, or any other file, has an empty stamp.

    Raises:
        SourceError: the system or the server reports an error.
    """
    options = dict(job.dest_storage_options) if is_url(job.dest) else None
    try:
        with load_record(job.dest, verify="touch", cache=False, storage_options=options) as record:
            folder, shards = os.path.dirname(job.dest), record.archive.source.file_names
            if not all(os.path.exists(os.path.join(folder, name)) for name in shards):
                return {"files": {}}  # that of no model: it is made again
            return _decoded(record.metadata.get(SOURCE_NAME))
    except SourceNotFoundError:
        return None
    except FormatError:
        return {}


def _decoded(text: Any) -> Stamp:
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return _checked(found)


def _checked(found: Any) -> Stamp:
    """Return a stamp that anybody may have written, an empty one if it is none."""
    return found if isinstance(found, dict) and isinstance(found.get("files"), dict) else {}


def is_current(stamp: Stamp, job: Job, model: Model) -> bool:
    """Return True if a stamp is that of the model as it is now; asks for the versions of files that it names.

    Nothing is current whose version a server does not tell.
    """
    named = stamp.get("files", {})
    versions = {model.name: model.versions[model.name]}
    if named.get(model.name) != versions[model.name] or not all(map(leads_inside, named)):  # it may be a stranger's
        return False
    versions |= {name: model.version(name) for name in named if name != model.name}
    return None not in versions.values() and stamp_of(job, versions) == stamp


def refusal_at(job: Job) -> tuple[Stamp, str] | None:
    """Return the stamp and the error that an earlier run kept of a model it refused; None if there is no such file.

    Both are empty if another version of zcrecord wrote it, which may have known less.

    Raises:
        SourceError: the system or the server reports an error.
    """
    try:
        found = json.loads(_start(job.dest + _REFUSED, job.dest_storage_options))
    except (SourceNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.keys() != {"error", "stamp", "zcrecord"}:
        return None  # somebody else's
    known = found["zcrecord"] == __version__
    if not known or not isinstance(found["stamp"], dict) or not isinstance(found["error"], str):
        return {}, ""
    return _checked(found["stamp"]), printable(found["error"], _LONGEST)


def _start(place: str, options: Mapping[str, Any]) -> bytes:
    if not is_url(place):
        return b"" if os.path.exists(place) and not os.path.isfile(place) else read_start(place, _MOST)  # no pipe
    from zcrecord.remote.open_url import remote_file  # here, because many fleets stay on disks

    file = remote_file(place, options)
    assert not isinstance(file, str)
    return bytes(file.start(_MOST))


def keep_refusal(job: Job, stamp: Stamp, error: str) -> None:
    """Write down that a model was refused, for the next run.

    Raises:
        SourceError: the system or the server reports an error.
    """
    told = {"error": error[:_LONGEST], "stamp": stamp, "zcrecord": __version__}
    with open_sink(job.dest + _REFUSED, durable=False, options=job.dest_storage_options) as sink:
        sink.write(json.dumps(told, indent=1, sort_keys=True).encode() + b"\n")


def forget_refusal(job: Job) -> None:
    """Remove what was written down of a model that is converted by now.

    Raises:
        SourceError: the system or the server reports an error.
    """
    place = job.dest + _REFUSED
    if is_url(place):
        from zcrecord.remote.files import remove_file  # here, as above

        remove_file(place, job.dest_storage_options)
        return
    with refusals(place), contextlib.suppress(FileNotFoundError):
        os.unlink(place)
