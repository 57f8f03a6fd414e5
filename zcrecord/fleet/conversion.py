"""`convert_one`: one job of a fleet; a second run of the same job does nothing.

Decides whether an archive is current, and whether a failure is final. `zcrecord.formats` reads the models.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
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
from zcrecord.storage.files import Identity, is_url, place_for, refusals

from .jobs import Job
from .sources import GONE, Model, shown
from .stamps import forget_refusal, is_current, keep_refusal, metadata_of, refusal_at, stamp_at, stamp_of, version_at

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
    return that error until model, options or the version of zcrecord change.

    From URLs, ONNX and safetensors in one file are streamed. Other models are copied to the folder for temporary files
    first.

    Raises:
        SourceError: the network or the disk failed, or the model is missing or changed meanwhile. Such a fault may be
            temporary: the engine should try again. DependencyError: this worker lacks a package.

    Example:
        >>> from zcrecord.fleet import plan
        >>> [job] = plan(".", "archives")
        >>> convert_one(job).state, convert_one(job).state
        ('converted', 'kept')
    """
    started = time.perf_counter()
    state, error, nbytes = _JobRun(job).run()
    return Outcome(job, state, error, nbytes, time.perf_counter() - started)


class _JobRun:
    """One run of a job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._model = Model(job.source, job.source_format, job.storage_options)
        self._replaces: Identity | str | None = None  # the version of the destination as the run begins

    def run(self) -> tuple[State, str, int]:
        """Return state, error and bytes of the archive."""
        job, model = self._job, self._model
        model.note([model.name])
        if model.versions[model.name] == GONE:
            raise SourceNotFoundError("no such file", path=shown(job.source))
        self._replaces = None if job.force else version_at(job.dest, job.dest_storage_options)
        stamp = stamp_at(job)
        if stamp and not job.force and is_current(stamp, job, model):
            return "kept", "", 0
        refusal = refusal_at(job)
        if refusal is not None and not job.force and is_current(refusal[0], job, model):
            return "refused", refusal[1], 0
        if stamp == {} and not job.force:
            fault = "exists already, and no fleet wrote it; remove it, or force its replacement"
            return "refused", str(DestinationExistsError(fault, path=shown(job.dest))), 0
        try:
            nbytes = self._convert()
        except SourceError:
            if not job.force and (made := stamp_at(job)) and is_current(made, job, model):
                return "kept", "", 0  # another worker, which did the same job, came first
            raise
        except DependencyError:
            raise
        except RecordError as error:
            model.check_same()  # raises if the file changed, which may be the reason
            message = error.located(path=shown(job.source)).describe(lambda _: "")  # no job has the argument
            keep_refusal(job, stamp_of(job, model.versions), message)
            return "refused", message, 0
        if refusal is not None:
            forget_refusal(job)
        return "converted", "", nbytes

    def _convert(self) -> int:
        """Write the archive; return its bytes."""
        if not is_url(self._job.dest):
            with refusals(self._job.dest):
                os.makedirs(os.path.dirname(self._job.dest), exist_ok=True)
        if self._streams():
            try:
                with self._model.stream() as stream:
                    return self._write(stream)
            except (ExternalDataError, UnsupportedError):
                pass  # the model needs other files, or cannot be read forward
        with self._model.on_disk() as path:
            return self._write(path)

    def _streams(self) -> bool:
        kind, name = self._job.source_format, self._model.name.lower()
        return is_url(self._job.source) and kind != "zcr" and FORMATS[kind].streams and not name.endswith(".json")

    def _write(self, source: Any) -> int:
        """Convert a path or stream to the archive; return its bytes."""
        job, model = self._job, self._model

        def metadata() -> dict[str, str]:
            model.check_same()
            return metadata_of(stamp_of(job, model.versions))

        report = formats.convert(
            source,
            place_for(job.dest, self._replaces, job.dest_storage_options),
            source_format=job.source_format,
            force=True,
            alignment=job.alignment,
            durable=job.durable,
            max_shard_size=job.max_shard_size,
            metadata=metadata,
            storage_options=job.dest_storage_options if is_url(job.dest) else None,
        )
        return report.archive_bytes
