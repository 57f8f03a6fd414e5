"""`convert_one`: one job of a fleet, done once however often it is run.

Decides whether there is anything to do, and whose fault a failure is. Reading a model is left to `zcrecord.formats`.
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
from zcrecord.storage.files import is_url, refusals

from .jobs import Job
from .sources import GONE, Model, shown
from .stamps import forget_refusal, is_current, keep_refusal, metadata_of, refusal_at, stamp_at, stamp_of

__all__ = ["Outcome", "State", "convert_one"]

State = Literal["converted", "kept", "refused"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one job.

    Attributes:
        job: the job.
        state: "converted"; "kept", if the archive there was made of this very model with these options; or "refused",
            if the model is at fault, or something at `dest` that no fleet wrote. All three are final: nothing is to be
            tried again before a file or an option changes.
        error: of a model that was refused, with the place of the fault; else "".
        nbytes: of the archive that was written, else 0.
        seconds: that the job took.
    """

    job: Job
    state: State
    error: str = ""
    nbytes: int = 0
    seconds: float = 0.0


def convert_one(job: Job) -> Outcome:
    """Convert one model to its archive, in bounded memory; a second call does nothing.

    The archive keeps the versions of the files it was made of (ETag, or size and time of change) and the options, so
    that a later run, anywhere, knows that it is current by its index alone. Its bytes depend on nothing else: not on
    machine, time or engine. It appears whole or not at all; killed workers leave the old one. An archive of an older
    model, or of other options, is replaced. The error of a model that is refused is kept beside it, in
    `dest`.refused, and told again by later runs, until model, options or the version of zcrecord change.

    From URLs, ONNX and safetensors in one file are streamed; others, and models of several files, are copied to the
    folder for temporary files first.

    Raises:
        SourceError: the network, the disk, a model that is missing or changed meanwhile: it may pass, and the engine is
            to try again. DependencyError: this worker lacks a package.

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

    def run(self) -> tuple[State, str, int]:
        """Return state, error and bytes of the archive."""
        job, model = self._job, self._model
        model.note([model.name])
        if model.versions[model.name] == GONE:
            raise SourceNotFoundError("no such file", path=shown(job.source))
        stamp = stamp_at(job)
        if stamp and not job.force and is_current(stamp, job, model):
            return "kept", "", 0
        refusal = refusal_at(job)
        if refusal is not None and not job.force and is_current(refusal[0], job, model):
            return "refused", refusal[1], 0
        if stamp == {} and not job.force:
            what = "exists already, and no fleet wrote it; remove it, or force=True replaces it"
            return "refused", str(DestinationExistsError(what, path=shown(job.dest))), 0
        try:
            nbytes = self._convert()
        except (SourceError, DependencyError):
            raise
        except RecordError as error:
            model.check_same()  # if it changes, it may not be at fault
            told = str(error.located(path=shown(job.source)))
            keep_refusal(job, stamp_of(job, model.versions), told)
            return "refused", told, 0
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
                pass  # it needs other files, or to be read in another order
        with self._model.on_disk() as path:
            return self._write(path)

    def _streams(self) -> bool:
        kind, name = self._job.source_format, self._model.name.lower()
        return is_url(self._job.source) and kind != "zcr" and FORMATS[kind].streams and not name.endswith(".json")

    def _write(self, source: Any) -> int:
        job, model = self._job, self._model

        def metadata() -> dict[str, str]:
            model.check_same()
            return metadata_of(stamp_of(job, model.versions))

        report = formats.convert(
            source,
            job.dest,
            source_format=job.source_format,
            force=True,
            alignment=job.alignment,
            durable=job.durable,
            max_shard_size=job.max_shard_size,
            metadata=metadata,
            storage_options=job.dest_storage_options if is_url(job.dest) else None,
        )
        return report.archive_bytes
