"""Stamps: a description of its conversion in each archive, and refusals: a small file for each refused model.

A stamp is one text in the metadata (CONVENTIONS.md, "Conversions"): the versions of the files that were read, the
options, the version of the format. Equal stamps mean equal archives. A refusal lies beside the place of the archive,
and has the archive's stamp and the error.
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
from zcrecord.storage.files import Identity, is_url, open_sink, read_start, refusals, version_of
from zcrecord.storage.urls import leads_inside

from .jobs import Job
from .sources import Model, file_behind

Stamp = dict[str, Any]
_REFUSED = ".refused"  # suffix of a refusal, after the archive's name
_MOST_REFUSAL = 1 << 16  # bytes of a refusal that are read
_MOST_ERROR = 4000  # characters of an error in a refusal


def stamp_of(job: Job, versions: Mapping[str, str | None]) -> Stamp:
    """Return the stamp of an archive made from files of these versions; it has the options that change its bytes."""
    options = {"alignment": job.alignment, "format": job.source_format, "max_shard_size": job.max_shard_size}
    return {"archive": VERSION, "files": dict(versions), "options": options}


def metadata_of(stamp: Stamp) -> dict[str, str]:
    """Return the metadata of an archive with this stamp."""
    return {SOURCE_NAME: json.dumps(stamp, sort_keys=True, separators=(",", ":"))}


def read_stamp(job: Job) -> Stamp | None:
    """Return the stamp of the archive at a job's destination, None if no file is there. Reads no payload.

    It is empty for any file that is not from a fleet, and has no files for an archive of a fleet that lacks shards.
    """
    options = dict(job.dest_storage_options) if is_url(job.dest) else None
    try:
        with load_record(job.dest, verify="touch", cache=False, storage_options=options) as record:
            folder, shards = os.path.dirname(job.dest), record.archive.source.file_names
            if not all(os.path.exists(os.path.join(folder, name)) for name in shards):
                return {"files": {}}  # not current for any model, so that the archive is made again
            text: Any = record.metadata.get(SOURCE_NAME)
    except SourceNotFoundError:
        return None
    except FormatError:
        return {}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        return _stamp_or_empty(json.loads(text))
    return {}


def _stamp_or_empty(stamp: Any) -> Stamp:
    """Return a stamp from an untrusted file; an empty one if it is malformed."""
    return stamp if isinstance(stamp, dict) and isinstance(stamp.get("files"), dict) else {}


def is_current(stamp: Stamp, job: Job, model: Model) -> bool:
    """Return True if a stamp fits the job and the model's present files; never if a server gives no versions."""
    files, version = stamp.get("files", {}), model.versions[model.name]
    if version is None or files.get(model.name) != version or stamp_of(job, files) != stamp:
        return False
    if None in files.values() or not all(map(leads_inside, files)):  # a stranger's stamp may name any file
        return False
    return all(model.version(name) == known for name, known in files.items() if name != model.name)


def version_at(place: str, options: Mapping[str, Any]) -> Identity | str | None:
    """Return the version of the file at a path or a URL, empty if there is none, None if the store has no versions."""
    if is_url(place):
        from zcrecord.storage import uploads  # here, because many fleets stay on disks

        if (local := uploads.local_path(place, options)) is None:
            return uploads.version_at(place, options)
        place = local
    with refusals(place):
        return version_of(place)


def read_refusal(job: Job) -> tuple[Stamp, str] | None:
    """Read the refusal of a job's model: its stamp and error; None if the file is missing, or is no refusal.

    A malformed one, or one by another version of zcrecord, has an empty stamp, so that the model is converted again.
    """
    try:
        refusal = json.loads(_read_start(job.dest + _REFUSED, job.dest_storage_options))
    except (SourceNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(refusal, dict) or refusal.keys() != {"error", "stamp", "zcrecord"}:
        return None
    same_version = refusal["zcrecord"] == __version__
    if not same_version or not isinstance(refusal["stamp"], dict) or not isinstance(refusal["error"], str):
        return {}, ""
    return _stamp_or_empty(refusal["stamp"]), printable(refusal["error"], _MOST_ERROR)


def _read_start(place: str, options: Mapping[str, Any]) -> bytes:
    """Return the first bytes of a refusal; none of a folder or a pipe, which would wait for its writer."""
    if is_url(place):
        return bytes(file_behind(place, options).start(_MOST_REFUSAL))
    is_special = os.path.exists(place) and not os.path.isfile(place)
    return b"" if is_special else read_start(place, _MOST_REFUSAL)


def write_refusal(job: Job, stamp: Stamp, error: str) -> None:
    """Write the refusal of a model, for the next run; a file there that is not a refusal stays as it is."""
    refusal = {"error": error[:_MOST_ERROR], "stamp": stamp, "zcrecord": __version__}
    place, options = job.dest + _REFUSED, job.dest_storage_options
    version = version_at(place, options)
    if version not in ((), "") and read_refusal(job) is None:
        return
    with open_sink(place, durable=False, options=options, replaces=version) as sink:
        sink.write(json.dumps(refusal, indent=1, sort_keys=True).encode() + b"\n")


def remove_refusal(job: Job) -> None:
    """Remove the refusal of a model that has been converted since."""
    place = job.dest + _REFUSED
    if is_url(place):
        from zcrecord.remote.files import remove_file  # here, as above

        remove_file(place, job.dest_storage_options)
        return
    with refusals(place), contextlib.suppress(FileNotFoundError):
        os.unlink(place)
