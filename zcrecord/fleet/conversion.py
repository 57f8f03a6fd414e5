"""`convert_one`: one job of a fleet; a second run of the same job does nothing.

Decides whether an archive is current, and whether a failure is final. `zcrecord.formats` reads the models.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

from zcrecord import formats
from zcrecord.codec.file_types import FORMATS
from zcrecord.errors import (
    DependencyError,
    DestinationExistsError,
    ExternalDataError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from zcrecord.storage.files import is_url, place_for, refusals

from . import stamps
from .jobs import Job
from .sources import GONE, Model, label

State = Literal["converted", "kept", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one job.

    Attributes:
        job: the job.
        state: "converted"; "kept", if the archive at `dest` was made from this model with these options; or "refused",
            if the model has a fault, or a file at `dest` is not from a fleet. All three are final: do not try again
            before a file or an option changes.
        error: the reason why the model was refused, with the place of the fault; else "".
        nbytes: the size of the archive that was written, else 0.
        seconds: the time that the job took.
    """

    job: Job
    state: State
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0


def convert_one(job: Job) -> Outcome:
    """Convert one model to its archive, in bounded memory; a second call does nothing.

    The archive stores the options and the versions of the files it was made from (ETag, or size and time of change). By
    its index alone a later run, on any machine, decides whether it is current. The archive's bytes do not depend on
    machine, time or engine. It appears whole or not at all; a killed worker leaves the old archive. An archive of an
    older model, or of other options, is replaced. If a model is refused, `dest`.refused gets the error. Later runs
    return that error until model, options or the version of zcrecord change. From URLs, ONNX and safetensors in one
    file are streamed. Other models are copied to the folder for temporary files first.

    Raises:
        SourceError: the network or the disk failed, or the model is missing or changed meanwhile. Such a fault may be
            temporary: the engine should try again. DependencyError: this worker lacks a package. UnsupportedError: the
            kind of a URL is not known, or storage options do not fit it.

    Example:
        >>> from zcrecord.fleet import plan
        >>> [job] = plan(".", "archives")
        >>> convert_one(job).state, convert_one(job).state
        ('converted', 'kept')
    """
    started = time.perf_counter()
    return replace(_run(job), seconds=time.perf_counter() - started)


def _run(job: Job) -> Outcome:
    """Run a job, unless its archive or refusal is current; return the outcome, without the time."""
    model = Model(job.source, job.source_format, job.storage_options)
    model.note([model.name])
    if model.versions[model.name] == GONE:
        raise SourceNotFoundError("no such file", path=label(job.source))
    replaces = None if job.force else stamps.version_at(job.dest, job.dest_storage_options)
    stamp = stamps.read_stamp(job)
    if stamp and not job.force and stamps.is_current(stamp, job, model):
        return Outcome(job, "kept")
    refusal = stamps.read_refusal(job)
    if refusal is not None and not job.force:
        refused_stamp, message = refusal
        if stamps.is_current(refused_stamp, job, model):
            return Outcome(job, "refused", message)
    if stamp == {} and not job.force:
        fault = "exists already, and no fleet wrote it; remove it, or force its replacement"
        return Outcome(job, "refused", str(DestinationExistsError(fault, path=label(job.dest))))
    try:
        nbytes = _convert(job, model, place_for(job.dest, replaces, job.dest_storage_options))
    except SourceError:
        if not job.force and (new_stamp := stamps.read_stamp(job)) and stamps.is_current(new_stamp, job, model):
            return Outcome(job, "kept")  # another worker, which did the same job, came first
        raise
    except DependencyError:
        raise
    except RecordError as error:
        model.check_same()  # raises if the file changed, which may be the reason
        message = error.located(path=label(job.source)).describe(lambda _: "")  # advice on arguments helps no job
        stamps.write_refusal(job, stamps.stamp_of(job, model.versions), message)
        return Outcome(job, "refused", message)
    if refusal is not None:
        stamps.remove_refusal(job)
    return Outcome(job, "converted", nbytes=nbytes)


def _convert(job: Job, model: Model, dest: Any) -> int:
    """Convert a model to the archive at `dest`, as a stream if that is possible; return the archive's bytes."""
    if not is_url(job.dest):
        with refusals(job.dest):
            os.makedirs(os.path.dirname(job.dest), exist_ok=True)
    is_one_stream = job.source_format != "zcr" and FORMATS[job.source_format].streams
    if is_url(job.source) and is_one_stream and not model.name.lower().endswith(".json"):
        # These errors tell that it has other files, or cannot be read forward: it is copied to a disk then.
        with contextlib.suppress(ExternalDataError, UnsupportedError), model.stream() as stream:
            return _convert_source(job, model, stream, dest)
    with model.on_disk() as path:
        return _convert_source(job, model, path, dest)


def _convert_source(job: Job, model: Model, source: Any, dest: Any) -> int:
    """Convert a model, as a path or a stream, to an archive with its stamp; return the archive's size in bytes."""

    def metadata() -> dict[str, str]:
        model.check_same()  # at the end, when all has been read
        return stamps.metadata_of(stamps.stamp_of(job, model.versions))

    report = formats.convert(
        source,
        dest,
        source_format=job.source_format,
        force=True,
        alignment=job.alignment,
        durable=job.durable,
        max_shard_size=job.max_shard_size,
        metadata=metadata,
        storage_options=job.dest_storage_options if is_url(job.dest) else None,
    )
    return report.archive_bytes
