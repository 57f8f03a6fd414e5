"""Plan of an archive's tensors as constants: identifiers, types, byte ranges of files, shared bytes.

Every generator works from this one plan, so that all of them agree. Reads no payload byte, except of tensors that are
not in C order, whose bytes are put into C order in a second file. The generators declare constants in their languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import zcrecord
from zcrecord.archive.archive import takes_one_file
from zcrecord.archive.info import TensorInfo
from zcrecord.archive.name_patterns import NameFilter, Patterns, matcher
from zcrecord.archive.payloads import Payloads
from zcrecord.codec.layout import align_up, check_alignment, payload_alignment
from zcrecord.dtypes import DType
from zcrecord.errors import TensorNotFoundError, UnsupportedError
from zcrecord.record.record import Record
from zcrecord.storage.files import path_of
from zcrecord.storage.memory import is_packed, map_file
from zcrecord.storage.stream_reader import PIECE
from zcrecord.tensors.strides import is_c_order

from .identifiers import check_name, check_prefix, identifiers, stem_of


@dataclass(frozen=True, slots=True)
class Constant:
    """One tensor as a constant, C-contiguous.

    Attributes:
        name: its full name in the archive.
        identifier: lower-case, prefix included; legal in C, C++, Rust and Python, and unique whatever the case.
        dtype, bits, shape, nbytes: as in `TensorInfo`; an unknown element type is named "unknown N" and has no C type.
        place: "archive": its bytes lie at `offset` of the archive file; "packed": at `offset` of the packed file; None:
            an empty tensor, which has no bytes.
        alignment: of its address: the payload's alignment in the archive, or the larger one that was asked for; for a
            view, the alignment at its offset.
        base: the identifier of the constant that contains its bytes, at `base_offset`; None if it has its own bytes.
        shared: the relation to `base`: "tied" (the same bytes), "equal" (bytes stored once), "view" (a part of them).
        repacked: True if it was strided, and its bytes were put into C order.
    """

    name: str
    identifier: str
    dtype: DType
    bits: int
    shape: tuple[int, ...]
    nbytes: int
    place: str | None
    offset: int
    alignment: int
    base: str | None
    base_offset: int
    shared: str | None
    repacked: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """An archive as constants; holds no payload byte.

    Attributes:
        stem: the archive's file name as an identifier, for names of files and of the archive's own constants.
        prefix: the start of every identifier.
        archive: the path of the .zcr, as it was given.
        archive_size, base_alignment, index_crc, header_crc: from its header; the two CRCs are its last 8 bytes.
        constants: in saved order.
        packed_size: bytes of the packed file, 0 if none is needed.
        renamed: names whose identifiers are numbered, or avoid a reserved word.
        local: the name of each constant in a namespace or module of its own: without the prefix, unless a prefix was
            asked for. `renamed_locally` has the renamed ones.
        telling: whether the archive's last 8 bytes change with every payload, because it has digests.
        left_out: the number of tensors that were not selected.
    """

    stem: str
    prefix: str
    archive: str
    archive_size: int
    base_alignment: int
    index_crc: int
    header_crc: int
    constants: tuple[Constant, ...]
    packed_size: int
    renamed: tuple[tuple[str, str], ...]
    local: tuple[str, ...]
    renamed_locally: tuple[tuple[str, str], ...]
    telling: bool
    left_out: int
    record: Record = field(repr=False, compare=False)

    def packed_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the packed file: strided tensors in C order, zeros between. Holds 16 MiB at a time.

        Raises:
            IntegrityError: a payload differs from the saved one. SourceError: it cannot be read any more.
        """
        own = [c for c in self.constants if c.place == "packed" and c.base is None]
        if not own:
            return
        payloads = Payloads(self.record.archive)
        infos = {info.name: info for info in payloads.infos}
        position = 0
        for c in own:
            yield bytes(c.offset - position)
            for block in payloads.pieces(infos[c.name]):
                for start in range(0, len(block), PIECE):
                    yield bytes(block[start : start + PIECE])
            payloads.let_go()
            position = c.offset + c.nbytes


class _Bytes(NamedTuple):
    """Source of a constant's bytes: the archive itself, or its strided elements put into C order."""

    start: int
    order: tuple[Any, ...] | None  # shape, strides and bits of a strided tensor

    @classmethod
    def from_info(cls, info: TensorInfo) -> _Bytes:
        strided = info.strides is not None and not is_c_order(info.shape, info.strides)
        return cls(info.offset, (info.shape, info.strides, info.bits) if strided else None)


def plan(
    source: Any,
    *,
    select: Patterns | None = None,
    exclude: Patterns | None = None,
    prefix: str | None = None,
    name: str | None = None,
    alignment: int | None = None,
) -> Plan:
    """Return an archive's tensors as constants. A tensor's identifier does not depend on the selection.

    Args:
        source: an archive's path, or a record loaded from one: generated files name the archive's file.
        select, exclude: shell patterns of names; one that matches a module stands for all below it.
        prefix: the start of identifiers; the file's stem and an underscore by default, may be empty.
        name: used in place of the file's stem.
        alignment: the least alignment of constants with bytes of their own, from 16 to 65536.

    Raises:
        UnsupportedError: the archive is not a file of its own, a prefix is not an identifier, or a strided tensor has
            an unknown element type. TensorNotFoundError: a pattern matches nothing. LimitError: `alignment` is out of
            range. FormatError, SourceError: as `load_record`.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"layer": {"w": np.ones((2, 3), np.float32)}}, "model.zcr")
        >>> [(c.identifier, c.shape, c.place) for c in plan("model.zcr").constants]
        [('model_layer_w', (2, 3), 'archive')]
    """
    record = record_of(source)
    path, header, infos = str(record.archive.path), record.archive.header, list(record.infos())
    least = 1 if alignment is None else check_alignment(alignment)
    names = [info.name for info in infos]
    stem = stem_of(path) if name is None else check_name(name)
    whole = check_prefix(f"{stem}_" if prefix is None else prefix)
    named, changed = identifiers(names, prefix=whole, stem=stem)
    local, changed_locally = (named, changed) if prefix is not None else identifiers(names, prefix="", stem=stem)
    chosen = _chosen(names, select, exclude)
    selected = [i for i, full in enumerate(names) if full in chosen]
    planned = [_constant(infos[i], named[i], max(header.alignment, least), path) for i in selected]
    constants = _shared([infos[i] for i in selected], planned)
    constants, packed_size = _packed(constants)
    last = bytes(record.archive.buffer[-8:])
    return Plan(
        stem=stem,
        prefix=whole,
        archive=path,
        archive_size=header.archive_size,
        base_alignment=max(header.base_alignment, least),
        index_crc=header.index_crc,
        header_crc=int.from_bytes(last[4:], "little"),
        constants=tuple(constants),
        packed_size=packed_size,
        renamed=tuple((names[i], named[i]) for i in changed if names[i] in chosen),
        local=tuple(local[i] for i in selected),
        renamed_locally=tuple((names[i], local[i]) for i in changed_locally if names[i] in chosen),
        telling=bool(record.archive.index.digest_kind),
        left_out=len(infos) - len(selected),
        record=record,
    )


def check_places(planned: Plan) -> None:
    """Check that each tensor that stays in the archive has the alignment that was asked for.

    Raises:
        UnsupportedError: a tensor does not.
    """
    given = planned.record.archive.header.alignment
    for c in planned.constants:
        own = max(payload_alignment(c.nbytes, given), item_alignment(c.dtype))
        if c.base is None and c.place == "archive" and c.alignment > own and c.offset % c.alignment:
            what = f"its offset is not a multiple of {c.alignment}; save the archive with that alignment"
            raise UnsupportedError(f"{what}, or have each tensor placed by itself", path=planned.archive, tensor=c.name)


def item_alignment(dtype: DType) -> int:
    """Return the alignment of an element in every language: 8 at most."""
    if not dtype.bits:
        return 8  # strings: their offsets are u64
    whole = dtype.bits // 2 if dtype.name.startswith("complex") else dtype.bits
    return 1 if dtype.c is None else max(1, min(8, whole // 8))


def record_of(source: Any) -> Record:
    """Return the record of an archive that is a file by itself.

    Raises:
        UnsupportedError: the archive is in memory, packed, or part of another file.
    """
    if isinstance(source, Record):
        takes_one_file(source.archive, "embed")
        root = source.archive.root
        if source.path is None or not root.whole or root.embedded is not None or root.offset or root.mode != "r":
            what = "constants are made of an archive's own file; give its path, or save the record to one first"
            raise UnsupportedError(what, path=source.path)
        return source
    path = path_of(source)
    if is_packed(map_file(path, least=0).octets):
        what = "is packed for transport; unpack it first: zcrecord unpack, or zcrecord.transport.unpack"
        raise UnsupportedError(what, path=path)
    record = zcrecord.load_record(path)
    takes_one_file(record.archive, "embed")
    if record.archive.offset:
        what = "the archive is part of another file; take it out first: zcrecord detach"
        raise UnsupportedError(what, path=path)
    return record


def _chosen(names: Sequence[str], select: Patterns | None, exclude: Patterns | None) -> set[str]:
    """Return the names that `select` matches and `exclude` does not; each pattern must match a name."""
    chosen = set(names) if select is None else _matching(names, select)
    dropped = set() if exclude is None else _matching(names, exclude)
    if names and not chosen - dropped:
        raise UnsupportedError(f"select and exclude ({NameFilter(select, exclude).text}) leave no tensor")
    return chosen - dropped


def _matching(names: Sequence[str], patterns: Patterns) -> set[str]:
    matched: set[str] = set()
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        these = set(filter(matcher([pattern], below=True), names))
        if not these:
            raise TensorNotFoundError(pattern, lambda: names)
        matched |= these
    return matched


def _constant(info: TensorInfo, identifier: str, alignment: int, path: str) -> Constant:
    """Return a constant with bytes of its own; a strided tensor gets its offset in the packed file later."""
    repacked = info.nbytes > 0 and _Bytes.from_info(info).order is not None
    if repacked and info.dtype.c is None and info.dtype.bits:
        what = (
            f"it is strided, and of an element type ({info.dtype.name}) not known here; upgrade zcrecord, or exclude it"
        )
        raise UnsupportedError(what, path=path, tensor=info.name)
    weakest = item_alignment(info.dtype)
    return Constant(
        name=info.name,
        identifier=identifier,
        dtype=info.dtype,
        bits=info.bits,
        shape=info.shape,
        nbytes=info.nbytes,
        place=("packed" if repacked else "archive") if info.nbytes else None,
        offset=0 if repacked or not info.nbytes else info.offset,
        alignment=max(payload_alignment(info.nbytes, alignment), weakest) if info.nbytes else weakest,
        base=None,
        base_offset=0,
        shared=None,
        repacked=repacked,
    )


def _shared(infos: Sequence[TensorInfo], constants: Sequence[Constant]) -> list[Constant]:
    """Return the constants; one whose bytes lie in another's becomes a part of that one.

    Views that overlap only in part get bytes of their own.
    """
    out = list(constants)
    dense = [i for i, c in enumerate(out) if c.place == "archive"]
    dense.sort(key=lambda i: (out[i].offset, -out[i].nbytes, i))
    above: int | None = None  # the last one with bytes of its own: only this one can contain the next
    for i in dense:
        if above is not None and out[i].offset + out[i].nbytes <= out[above].offset + out[above].nbytes:
            out[i] = _part(out[i], out[above], infos[i].payload == infos[above].payload)
        else:
            above = i
    packed: dict[Any, int] = {}
    for i, c in enumerate(out):
        if c.repacked:
            first = packed.setdefault(_Bytes.from_info(infos[i]), i)
            if first != i:
                out[i] = _part(c, out[first], infos[i].payload == infos[first].payload)
    return out


def _part(c: Constant, base: Constant, one_payload: bool) -> Constant:
    """Return a constant as a part of another's bytes."""
    offset = c.offset - base.offset
    whole = offset == 0 and c.nbytes == base.nbytes
    shared = ("tied" if one_payload else "equal") if whole else "view"
    alignment = min(base.alignment, offset & -offset) if offset else base.alignment
    return replace(c, base=base.identifier, base_offset=offset, shared=shared, alignment=alignment)


def _packed(constants: Iterable[Constant]) -> tuple[list[Constant], int]:
    """Return the constants with their offsets in the packed file, and that file's size."""
    out, end = [], 0
    placed: dict[str, int] = {}
    for c in constants:
        if c.place == "packed":
            if c.base is None:
                offset = placed[c.identifier] = align_up(end, c.alignment)
                end = offset + c.nbytes
            c = replace(c, offset=placed[c.base or c.identifier])
        out.append(c)
    return out, end
