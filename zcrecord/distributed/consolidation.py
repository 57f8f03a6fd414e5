"""`consolidate`: one archive, or a model's shards, of a checkpoint by many ranks. Needs no torch."""

from __future__ import annotations

import os
from typing import Any

from zcrecord.storage.files import Binary, is_url
from zcrecord.writing.writers import ConvertReport


def consolidate(path: str | os.PathLike[str], dest: str | os.PathLike[str] | Binary, **options: Any) -> ConvertReport:
    """Write a checkpoint by many ranks as one file with whole tensors; in a few MiB of memory, and without torch.

    Everything comes along: the model, the optimizer's state, plain values; tied tensors stay tied. Tensors that are
    split over ranks are read box by box and written in C order. `dest` holds the old file or the whole new one at any
    time; the checkpoint stays as it is. It is `zcrecord.formats.convert` of the checkpoint's catalogue.

    Args:
        path: the folder of the checkpoint, or its catalogue; a URL's is fetched into memory first.
        dest: a path, a URL or a file object for an archive, or for another format that `convert` writes; into a folder
            goes model.zcr.
        options: those of `convert`, such as `force`, `max_shard_size` and `progress`.

    Raises:
        FormatError: `path` is no archive, or pieces do not make up a tensor. SourceError: a file is missing, or the
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

    return convert(catalogue_of(path) if is_url(path) else path, dest, source_format="zcr", **options)
