"""Archives that `edit` takes, and what it says of others."""

from __future__ import annotations

import os

from zcrecord.archive import info, unflatten
from zcrecord.archive.archive import Archive, takes_archive
from zcrecord.codec.conventions import TUNED_TYPE
from zcrecord.codec.entries import PayloadId, list_type, value_type
from zcrecord.errors import UnsupportedError
from zcrecord.storage.files import check_destination, real_path
from zcrecord.storage.folders import catalogue_of_shard

from .load import load_record
from .record import Record

__all__ = ["check_editable", "check_no_own_shard", "check_no_shard", "reformed_attribute"]


def reformed_attribute(archive: Archive) -> str | None:
    """Return the key of an attribute whose stored form another save would change (R69), None if there is none."""
    ix = archive.index
    for row, a in zip(ix.attributes, unflatten.attribute_entries(ix, ix.attributes, PayloadId), strict=True):
        kind = list_type(a.value) if isinstance(a.value, list | tuple) else value_type(a.value)
        if kind != int(row["type"]):
            return a.key
    return None


def check_editable(archive: Archive) -> None:
    """Raise UnsupportedError unless an archive is one of a local file, alone, whole, and without a tuned part."""
    takes_archive(archive, "edit")
    if archive.source.file_names:
        what = "is a catalogue of shards; make one archive of it, edit that, and write shards of that again"
        raise UnsupportedError(what, path=archive.path)
    if archive.embedded is not None:
        raise UnsupportedError("is attached to a program; detach it, edit it, and attach it again", path=archive.path)
    if archive.source.file is None:
        raise UnsupportedError("is packed; unpack it, edit that, and pack it again", path=archive.path)
    if info.child_of_type(archive, TUNED_TYPE) is not None:
        do = "remove the tuned part (untune, zcrecord tune --remove), edit it, and tune it again"
        raise UnsupportedError(f"is tuned, for the model as it is; {do}", path=archive.path)


def check_no_shard(path: str) -> None:
    """Raise UnsupportedError if a file is a shard of the catalogue beside it, which would not know it again."""
    folder, name = os.path.split(real_path(path))
    catalogue = catalogue_of_shard(name)
    if catalogue is not None and os.path.isfile(beside := os.path.join(folder, catalogue)):
        with load_record(beside) as record:
            known = name in record.archive.source.file_names
        if known:
            what = f"is a shard of {catalogue}, which knows it by its index"
            raise UnsupportedError(f"{what}; name another file for the new one", path=path)


def check_no_own_shard(record: Record, dest: str | None) -> None:
    """Raise DestinationExistsError if a destination is a shard of the catalogue that a record was loaded from."""
    folder = os.path.dirname(record.path or "")
    for name in record.archive.source.file_names if dest is not None else ():
        check_destination(os.path.join(folder, name), dest, force=True)
