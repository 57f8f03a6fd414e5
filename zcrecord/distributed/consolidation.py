"""`consolidate`: one archive, or a model's shards, of a checkpoint by many ranks. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from zcrecord.codec.layout import ALIGNMENT
from zcrecord.storage.files import Binary, Progress, is_url
from zcrecord.writing.writers import ConvertReport


def consolidate(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str] | Binary,
    *,
    force: bool = False,
    alignment: int = ALIGNMENT,
    durable: bool = True,
    max_shard_size: int | None = None,
    progress: Progress | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> ConvertReport:
    """Write a checkpoint by many ranks as one file with whole tensors; in a few MiB of memory, and without torch.

    Everything comes along: the model, the optimizer's state, plain values; tied tensors stay tied. Tensors that are
    split over ranks are read box by box and written in C order. `dest` holds the old file or the whole new one at any
    time; the checkpoint stays as it is. It is `zcrecord.formats.convert` of the checkpoint's catalogue.

    Args:
        path: the folder of the checkpoint, or its catalogue; a URL's is fetched into memory first.
        dest: a path, a URL or a file object for an archive, or for another format that `convert` writes; into a folder
            goes model.zcr.
        force: replace a file that is there.
        alignment, durable, storage_options: those of `zcrecord.save_record`; the last for `path`, too.
        max_shard_size: write files of at most so many bytes of tensors, each whole in one, and a catalogue of them.
        progress: called with the bytes of tensors written, and those to be.

    Raises:
        FormatError: it is no archive, or its pieces do not make up its tensors. SourceError: a file is missing, or the
        file system refused. IntegrityError: a file is another one than the catalogue names. DestinationExistsError:
        `dest` exists and `force` was not given, or it is a file of the checkpoint.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(3), "b": np.ones(9)}, "checkpoint.zcr", max_shard_size=50)
        >>> consolidate("checkpoint.zcr", "one.zcr").tensors
        2
    """
    from zcrecord.formats import convert  # here, because ranks that only save need no formats

    from .folder import catalogue_of

    return convert(
        catalogue_of(path) if is_url(path) else path,
        dest,
        source_format="zcr",
        force=force,
        alignment=alignment,
        durable=durable,
        max_shard_size=max_shard_size,
        progress=progress,
        storage_options=storage_options,
    )
