"""Model folders: the one archive in a folder, and the files that belong to the model beside it.

A folder as model hubs have it: `config.json`, the tokenizer's files, and the weights, here `model.zcr`.
"""

from __future__ import annotations

import errno
import os
import re

from zcrecord.errors import SourceError, printable

from .files import path_of

__all__ = ["MODEL", "SHARD_NAME", "archive_in", "is_plain_name"]

MODEL = "model.zcr"
SHARD_NAME = re.compile(r".*-\d{5}-of-\d{5}\.zcr")  # of a shard, which is no model by itself


def archive_in(folder: str | os.PathLike[str]) -> str:
    """Return the path of the archive in a model folder: `model.zcr`, or the only archive that is no shard.

    Raises:
        SourceError: there is none, or more than one; or the folder cannot be read.
    """
    where = path_of(folder)
    try:
        names = sorted(name for name in os.listdir(where) if name.endswith(".zcr"))
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", path=where, errno=error.errno) from error
    found = [MODEL] if MODEL in names else [name for name in names if not SHARD_NAME.fullmatch(name)]
    if len(found) == 1:
        return os.path.join(where, found[0])
    if found:
        what = f"is a folder with several archives: {', '.join(map(printable, found))}; name one, or call one {MODEL}"
    else:
        what = f"is a folder without an archive ({MODEL}); zcrecord convert makes one"
    raise SourceError(what, path=where, errno=errno.ENOENT)


def is_plain_name(file: str, suffix: str) -> bool:
    """Return True for a file name with that suffix, legal on any system, that leads to no other folder."""
    name = file.isprintable() and not set(file) & set('/\\:*?"<>|') and os.path.basename(file) == file
    return name and file.endswith(suffix) and file != suffix
