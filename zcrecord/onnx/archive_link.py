"""Models whose weights lie in an archive as external data: metadata_props that identify the archive, and their check.

Writing such a model is left to `export`.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from zcrecord.archive.archive import open_archive, require_one_file
from zcrecord.archive.digest import content_digest
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.payloads import Payloads
from zcrecord.codec.file_types import HEAD
from zcrecord.errors import Advice, IntegrityError, OnnxError, UnsupportedError, located, printable
from zcrecord.onnx.lazy.locate import LocatedTensor, find_tensors
from zcrecord.onnx.names import full_names
from zcrecord.onnx.protobuf.interfaces import difference, interface_of
from zcrecord.onnx.protobuf.rewriting import read_properties
from zcrecord.onnx.protobuf.scanner import check_head
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.storage.files import Progress, absolute_path, is_url, open_source, path_of
from zcrecord.storage.memory import map_file

from . import external_data
from .graph import OpenedModel, opened_model, skeleton_of

# Keys of metadata_props.
ARCHIVE = "zcrecord.archive"  # its path from the model's folder on, as external data have it in `location`
CONTENT_DIGEST = "zcrecord.content_digest"
PAYLOAD_OFFSET = "zcrecord.payload_offset"  # in the file
INDEX_CRC = "zcrecord.index_crc"  # 8 hexadecimal digits; the index has every offset and every payload's digest
EMBEDDED = "zcrecord.embedded"  # "prefix" or "suffix", if the archive is part of a file
TUNED_FOR = "zcrecord.tuned_for"  # the target, if the model is the archive's tuned graph
MODULE = "zcrecord.module"  # the module that the model is in, if it is not the record itself
_FORMS = {  # of their values; every link has the first four
    ARCHIVE: re.compile(".+", re.DOTALL),
    CONTENT_DIGEST: re.compile("sha256:[0-9a-f]{64}"),
    PAYLOAD_OFFSET: re.compile("[0-9]{1,20}"),
    INDEX_CRC: re.compile("[0-9a-f]{8}"),
    EMBEDDED: re.compile("prefix|suffix"),
    TUNED_FOR: re.compile(r"\{[ -~]+\}"),
    MODULE: re.compile(".+", re.DOTALL),
}
PROPERTIES, _REQUIRED = tuple(_FORMS), tuple(_FORMS)[:4]
_AGAIN = Advice("export the model again with {}", "external", True)
_WITH_EXTERNAL = "a model with external weights"


class ArchiveLink(NamedTuple):
    """An archive on disk, and the location by which a model refers to it."""

    model: OpenedModel
    location: str

    def properties(self, digest: str) -> dict[str, str]:
        """Return the metadata_props that identify the archive."""
        pairs = {
            ARCHIVE: self.location,
            CONTENT_DIGEST: digest,
            PAYLOAD_OFFSET: str(_payload_offset(self.model.record)),
            INDEX_CRC: _index_crc(self.model.record),
        }
        more = {EMBEDDED: self.model.record.archive.embedded, MODULE: self.model.module}
        return pairs | {key: value for key, value in more.items() if value}


@dataclass(frozen=True, slots=True)
class ExternalReport:
    """Result of `verify_external`: the archive's path and digest, the number of tensors that lie in it, their bytes.

    `full` is True if all of the archive was read.
    """

    archive: str
    content_digest: str
    tensors: int
    nbytes: int
    full: bool


def is_link(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return True if metadata_props of these keys are as `to_onnx(external=True)` writes them: once, well formed."""
    values = dict(pairs)
    has_each_once = len(values) == len(pairs) and values.keys() >= set(_REQUIRED)
    return has_each_once and all(_FORMS[key].fullmatch(value) for key, value in pairs)


def _payload_offset(record: Record) -> int:
    return record.archive.offset + record.archive.header.payload_offset


def _index_crc(record: Record) -> str:
    return f"{record.archive.header.index_crc:08x}"


def link(model: OpenedModel, dest: str | None) -> ArchiveLink:
    """Open the archive of a model's record again, for a model at `dest` to refer to; the caller closes its record.

    Raises:
        UnsupportedError: `dest` is no path; the record has no plain file, or differs from it. ExternalDataError: a
            model at `dest` may not refer to the file. IntegrityError: the file was replaced since.
    """
    if dest is None or is_url(dest):
        fault = "refers to its archive from the folder it lies in, and a stream or a URL has none; name a path"
        raise UnsupportedError(f"{_WITH_EXTERNAL} {fault}")
    record, path = model.record, model.record.path
    if path is None:
        fault = "needs an archive in a file, and this one is in memory; save it to one"
        raise UnsupportedError(f"{_WITH_EXTERNAL} {fault}")
    if is_url(path):
        raise UnsupportedError(f"{_WITH_EXTERNAL} refers to a local file, and this is a URL; download it", path=path)
    archive = record.archive
    require_one_file(archive, _WITH_EXTERNAL)
    if record.mode != "r" or not archive.whole:
        fault = "it may hold edits that its file does not" if record.mode != "r" else "it is a part of its archive"
        raise UnsupportedError(f"{_WITH_EXTERNAL} refers to the file, but {fault}; save the record first", path=path)
    if os.path.exists(dest) and not os.path.isfile(dest):
        raise UnsupportedError(f"{_WITH_EXTERNAL} is a regular file in a folder; name one", path=dest)
    on_disk: Record = load_record(os.path.realpath(path), embedded=archive.embedded)
    if on_disk.archive.source.file is None:
        fault = "refers to bytes as they lie in a file, and these lie there compressed; unpack it first"
        raise UnsupportedError(f"{_WITH_EXTERNAL} {fault}", path=path)
    if on_disk.archive.header.encode() != archive.header.encode():
        raise IntegrityError("was replaced since it was opened; load it again", path=path)
    return ArchiveLink(opened_model(on_disk, model.module), external_data.location_from(dest, path))


def digest_of(payloads: Payloads, record: Record, progress: Callable[[int, int], None] | None = None) -> str:
    """Return a record's content digest, and check every payload; holds a few MiB at most.

    `progress` is called with the bytes read and the total; equal tensors are read once.
    """
    infos = {i.payload if i.strides is None else (i.payload, i.offset, i.shape, i.strides): i for i in payloads.infos}
    total = sum(info.nbytes for info in infos.values())
    bytes_read = 0

    def sha256(number: int) -> bytes:
        nonlocal bytes_read
        digest = hashlib.sha256()
        for piece in payloads.pieces(payloads.infos[number]):
            digest.update(piece)
            bytes_read += len(piece)
            if progress is not None:
                progress(bytes_read, total)
        return digest.digest()

    digest_text = content_digest(record.archive, sha256)
    payloads.release()
    return digest_text


def verify_external(
    path: str | os.PathLike[str], *, full: bool = False, allow_links: bool = False, progress: Progress | None = None
) -> ExternalReport:
    """Check that the archive beside a model is the one that `to_onnx(external=True)` wrote it for.

    Reads the model without its values, and the archive's header and index, which have every payload's offset and
    digest. With `full`, or if the index differs, reads the whole archive and compares the content digest: an archive
    with more metadata, but every tensor at its old offset, is accepted. Needs no package besides zcrecord's own.

    Args:
        path: the model.
        full: read the payloads, too.
        allow_links: as in `convert`.
        progress: called with bytes read and bytes in all, if the whole archive is read.

    Example:
        >>> from zcrecord.onnx import convert, to_onnx
        >>> _ = convert("model.onnx", "model.zcr")
        >>> _ = to_onnx("model.zcr", "small.onnx", external=True)
        >>> verify_external("small.onnx").tensors
        5

    Raises:
        IntegrityError: it is another archive; the text has the expected value and the actual one. UnsupportedError: the
        model does not name an archive. ExternalDataError: the archive is missing, or at a path that no model may refer
        to. OnnxError: the model is malformed. FormatError: the archive is. SourceError: a file cannot be read.
    """
    model = path_of(path)
    with located(path=model):
        with open_source(model)[0] as file:  # opened once: all that is compared comes from one file
            props = _link_properties(file)
            opened = external_data.OpenFile(os.dup(file.fileno()), model)
            tensors, places = find_tensors(opened)
            names = full_names(tensors, opened.nbytes)
            file.seek(0)
            interface = interface_of(file)
        record, location = _open_archive(model, props, allow_links)
    pairs = zip(names, places, strict=True)
    expected = {name: place for name, place in pairs if (ref := place.reference) and ref.location == location}
    with record:
        _check_archive(record, model, props, full, progress)
        part = opened_model(record, props.get(MODULE)).part
        fault_of = _payload_check(record) if TUNED_FOR in props else _tensor_check(part)
        for name, place in expected.items():
            if (fault := fault_of(name, place)) is not None:
                message = f"'{printable(model)}' expects {_describe(place)}, {fault}"
                raise IntegrityError(message, path=record.archive.path, tensor=name, advice=_AGAIN)
        change = difference(interface_of(skeleton_of(part)), interface) if TUNED_FOR in props else None
        if change is not None:
            message = f"it {change}, unlike the model in '{printable(record.path or '')}'"
            raise IntegrityError(message, path=model, advice=_AGAIN)
    return ExternalReport(
        archive=record.path or "",
        content_digest=props[CONTENT_DIGEST],
        tensors=len(expected),
        nbytes=sum(place.nbytes for place in expected.values()),
        full=full,
    )


def _link_properties(file: io.FileIO) -> dict[str, str]:
    """Return the metadata_props of a model; UnsupportedError unless it is a regular file, and they name an archive."""
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        raise UnsupportedError("not a regular file; write the model to one, beside its archive")
    check_head(file.read(HEAD))
    file.seek(0)
    props = read_properties(file)
    for key in _REQUIRED:
        if key not in props:
            fault = f"no '{key}' in its metadata_props: it was not exported with external weights"
            raise UnsupportedError(f"{fault}, and nothing tells which archive it is for")
    return props


def _open_archive(model: str, props: dict[str, str], allow_links: bool) -> tuple[Record, str]:
    """Open the archive that a model names, the very file that was checked; return it and its location."""
    embedded: Any = props.get(EMBEDDED)
    if embedded not in (None, "prefix", "suffix"):
        raise OnnxError(f"its '{EMBEDDED}' is '{printable(str(embedded))}', not prefix or suffix", advice=_AGAIN)
    location = external_data.parse({"location": props[ARCHIVE]}, 0).location
    folder = external_data.ModelFolder(os.path.dirname(absolute_path(model)), allow_links=allow_links)
    path = folder.path_of(location)
    with open(path, "rb", opener=lambda *_: folder.open(location)) as file:
        memory = map_file(path, opened=file.fileno())
    archive = open_archive(memory, verify="index", embedded=embedded)
    require_one_file(archive, "a model's external data")
    return Record(archive), location


def _check_archive(record: Record, model: str, props: dict[str, str], full: bool, progress: Progress | None) -> None:
    """Raise IntegrityError unless an archive has the offset, checksum and digest in the metadata_props of a model."""

    def compare(field: str, expected: str, actual: str) -> None:
        if actual != expected:
            fault = f"{field} {printable(expected)} was expected by '{printable(model)}', it has {actual}"
            advice = _AGAIN._replace(text=f"put that archive back, or {_AGAIN.text}")
            raise IntegrityError(fault, path=record.archive.path, advice=advice)

    compare("payload offset", props[PAYLOAD_OFFSET], str(_payload_offset(record)))
    if TUNED_FOR in props:  # packed weights are no tensors, whose offsets could be compared
        compare("index checksum", props[INDEX_CRC], _index_crc(record))
    if full or props[INDEX_CRC] != _index_crc(record):
        compare("content digest", props[CONTENT_DIGEST], digest_of(Payloads(record.archive), record, progress))


def _tensor_check(part: Record) -> Callable[[str, LocatedTensor], str | None]:
    """Return a function that compares a model's reference with the tensor of its name; it returns the fault or None."""
    infos = {info.name: info for info in part.infos()}

    def fault_of(name: str, expected: LocatedTensor) -> str | None:
        stored = infos.get(name)
        actual = "no tensor of this name" if stored is None else _describe(stored)
        if stored is not None and stored.strides is not None:
            actual = "it with strides, not in C order"
        return None if actual == _describe(expected) else f"the archive has {actual}"

    return fault_of


def _payload_check(record: Record) -> Callable[[str, LocatedTensor], str | None]:
    """Return a function as `_tensor_check` does, for a tuned graph: its references are to payloads, of any name."""
    rows = record.archive.index.payloads
    offsets = (rows["offset"] + _payload_offset(record)).tolist()
    payloads = set(zip(offsets, rows["nbytes"].tolist(), strict=True))
    return lambda _, place: None if (place.offset, place.nbytes) in payloads else "where the archive has no payload"


def _describe(info: TensorInfo | LocatedTensor) -> str:
    return f"{info.dtype.name} of shape {list(info.shape)}, {info.nbytes} bytes at {info.offset}"
