"""Plan of an archive's tensors as constants: identifiers, types, byte ranges of files, shared bytes.

Every generator works from this one plan, so that all of them agree. Reads no payload byte, except of tensors that are
not in C order, whose bytes are put into C order in a second file. The generators declare constants in their languages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import zcrecord
from zcrecord.archive.archive import require_one_file
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

from .identifiers import Identifier, check_name, check_prefix, identifiers, stem_of


@dataclass(frozen=True, slots=True)
class Constant:
    """One tensor as a constant, C-contiguous.

    Attributes:
        identifier: lower-case, prefix included; legal in C, C++, Rust and Python, and unique whatever the case.
        local: the same in a namespace or module of its own: without the prefix, unless a prefix was asked for.
        renamed, renamed_locally: True if the identifier or local name is numbered, or avoids a reserved word.
        dtype: an unknown element type is named "unknown N" and has no C type.
        place: "archive": its bytes lie at `offset` of the archive file; "packed": at `offset` of the packed file; None:
            an empty tensor, which has no bytes.
        alignment: of its address: the payload's alignment in the archive, or the larger one that was asked for; for a
            view, the alignment at its offset.
        base: the identifier of the constant that contains its bytes, at `base_offset`; None if it has its own bytes.
        base_name: the name of that tensor.
        shared: the relation to `base`: "tied" (the same bytes), "equal" (bytes stored once), "view" (a part of them).
    """

    name: str
    identifier: str
    local: str
    renamed: bool
    renamed_locally: bool
    dtype: DType
    bits: int
    shape: tuple[int, ...]
    nbytes: int
    place: str | None
    offset: int
    alignment: int
    base: str | None = None
    base_name: str = ""
    base_offset: int = 0
    shared: str | None = None

    @property
    def repacked(self) -> bool:
        """True if it was strided, and its bytes were put into C order."""
        return self.place == "packed"

    @property
    def numbers(self) -> dict[str, int]:
        """Rank, dimensions, sizes and dtype code, each by the word that is appended to the identifier for it."""
        dims = {f"dim{i}": dim for i, dim in enumerate(self.shape)}
        sizes = {"count": prod(self.shape), "nbytes": self.nbytes, "bits": self.bits, "dtype": self.dtype.code}
        return {"rank": len(self.shape), **dims, **sizes}


@dataclass(frozen=True, slots=True)
class Plan:
    """An archive as constants, in saved order; holds no payload byte.

    Attributes:
        stem: the archive's file name as an identifier, for names of files and of the archive's own constants.
        archive: the path of the .zcr, as it was given.
        last_word: the archive's last 8 bytes as a number: the CRC of its index, and that of its header.
        packed_size: bytes of the packed file, 0 if none is needed.
        has_digests: True if the archive's last 8 bytes change with every payload.
        left_out: the number of tensors that were not selected.
    """

    stem: str
    archive: str
    archive_size: int
    base_alignment: int
    last_word: int
    constants: tuple[Constant, ...]
    packed_size: int
    has_digests: bool
    left_out: int
    record: Record = field(repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, shared ones counted once."""
        return sum(constant.nbytes for constant in self.constants if constant.base is None)

    def packed_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the packed file: strided tensors in C order, zeros between. Holds 16 MiB at a time."""
        payloads = Payloads(self.record.archive)
        infos = {info.name: info for info in payloads.infos}
        position = 0
        for constant in self.constants:
            if constant.repacked and constant.base is None:
                yield bytes(constant.offset - position)
                for block in payloads.pieces(infos[constant.name]):
                    for start in range(0, len(block), PIECE):
                        yield bytes(block[start : start + PIECE])
                payloads.release()
                position = constant.offset + constant.nbytes


def plan(
    source: Any,
    *,
    select: Patterns | None = None,
    exclude: Patterns | None = None,
    prefix: str | None = None,
    name: str | None = None,
    alignment: int | None = None,
) -> Plan:
    """Return an archive's tensors as constants, and keep its mapping; arguments and errors are those of `generate`."""
    record = record_of(source)
    path, header, infos = str(record.archive.path), record.archive.header, list(record.infos())
    least_alignment = 1 if alignment is None else check_alignment(alignment)
    names = [info.name for info in infos]
    stem = stem_of(path) if name is None else check_name(name)
    full_ids = identifiers(names, prefix=check_prefix(f"{stem}_" if prefix is None else prefix), stem=stem)
    local_ids = full_ids if prefix is not None else identifiers(names, prefix="", stem=stem)
    selected_names = _selected_names(names, select, exclude)
    selected = [i for i, full_name in enumerate(names) if full_name in selected_names]
    alignment = max(header.alignment, least_alignment)
    constants = [_constant(infos[i], full_ids[i], local_ids[i], alignment, path) for i in selected]
    constants, packed_size = _with_packed_offsets(_with_shared_bytes([infos[i] for i in selected], constants))
    return Plan(
        stem=stem,
        archive=path,
        archive_size=header.archive_size,
        base_alignment=max(header.base_alignment, least_alignment),
        last_word=int.from_bytes(record.archive.buffer[-8:], "little"),
        constants=tuple(constants),
        packed_size=packed_size,
        has_digests=bool(record.archive.index.digest_kind),
        left_out=len(infos) - len(selected),
        record=record,
    )


def check_places(planned: Plan) -> None:
    """Raise UnsupportedError unless each tensor that stays in the archive has the plan's alignment there."""
    alignment = planned.record.archive.header.alignment
    for constant in planned.constants:
        stored = max(payload_alignment(constant.nbytes, alignment), item_alignment(constant.dtype))
        in_archive = constant.base is None and constant.place == "archive"
        if in_archive and constant.alignment > stored and constant.offset % constant.alignment:
            advice = "save the archive with that alignment, or have each tensor placed by itself"
            fault = f"its offset is not a multiple of {constant.alignment}; {advice}"
            raise UnsupportedError(fault, path=planned.archive, tensor=constant.name)


def item_alignment(dtype: DType) -> int:
    """Return the alignment in bytes that an element needs in any of the languages: 8 at most."""
    if not dtype.bits:
        return 8  # strings: their offsets are u64
    bits = dtype.bits // 2 if dtype.name.startswith("complex") else dtype.bits
    return 1 if dtype.c is None else max(1, min(8, bits // 8))


def record_of(source: Any) -> Record:
    """Return the record of an archive; UnsupportedError unless it is one file of its own, and not packed."""
    record: Record
    if isinstance(source, Record):
        record = source
    else:
        path = path_of(source)
        if is_packed(map_file(path, least=0).octets):
            fault = "is packed for transport; unpack it first: zcrecord unpack, or zcrecord.transport.unpack"
            raise UnsupportedError(fault, path=path)
        record = zcrecord.load_record(path)
    require_one_file(record.archive, "embed")
    root = record.archive.root
    if record.path is not None and root.offset:
        fault = "the archive is part of another file; take it out first: zcrecord detach"
        raise UnsupportedError(fault, path=record.path)
    if record.path is None or not root.whole or root.embedded is not None or root.mode != "r":
        fault = "constants are made of an archive's own file; give its path, or save the record to one first"
        raise UnsupportedError(fault, path=record.path)
    return record


def _selected_names(names: Sequence[str], select: Patterns | None, exclude: Patterns | None) -> set[str]:
    """Return the names that `select` matches and `exclude` does not; each pattern must match a name."""
    selected, excluded = ([p] if isinstance(p, str) else list(p or ()) for p in (select, exclude))
    name_filter = NameFilter(None if select is None else selected, excluded)
    for pattern in (*selected, *excluded):
        if not any(map(matcher([pattern], below=True), names)):
            raise TensorNotFoundError(pattern, lambda: names)
    names_left = set(filter(name_filter, names))
    if names and not names_left:
        raise UnsupportedError(f"select and exclude ({name_filter.text}) leave no tensor; widen them")
    return names_left


def _constant(info: TensorInfo, full: Identifier, local: Identifier, alignment: int, path: str) -> Constant:
    """Return a constant with bytes of its own; a strided tensor gets its offset in the packed file later."""
    strided = info.nbytes > 0 and info.strides is not None and not is_c_order(info.shape, info.strides)
    if strided and info.dtype.c is None and info.dtype.bits:
        fault = f"it is strided, and of an element type ({info.dtype.name}) not known here"
        raise UnsupportedError(f"{fault}; upgrade zcrecord, or exclude it", path=path, tensor=info.name)
    element_alignment = item_alignment(info.dtype)
    payload = payload_alignment(info.nbytes, alignment) if info.nbytes else 1
    return Constant(
        name=info.name,
        identifier=full.text,
        local=local.text,
        renamed=full.changed,
        renamed_locally=local.changed,
        dtype=info.dtype,
        bits=info.bits,
        shape=info.shape,
        nbytes=info.nbytes,
        place=("packed" if strided else "archive") if info.nbytes else None,
        offset=info.offset if info.nbytes and not strided else 0,
        alignment=max(payload, element_alignment),
    )


def _with_shared_bytes(infos: Sequence[TensorInfo], constants: Sequence[Constant]) -> list[Constant]:
    """Return the constants; one whose bytes lie in another's becomes a part of that one.

    Views that overlap only in part get bytes of their own. Strided tensors share bytes only if they are the same view.
    """
    out = list(constants)
    by_offset = [i for i, constant in enumerate(out) if constant.place == "archive"]
    by_offset.sort(key=lambda i: (out[i].offset, -out[i].nbytes, i))
    base: int | None = None  # the last one with bytes of its own; no other can contain the next
    for i in by_offset:
        if base is not None and out[i].offset + out[i].nbytes <= out[base].offset + out[base].nbytes:
            out[i] = _constant_in(out[i], out[base], infos[i].payload == infos[base].payload)
        else:
            base = i
    firsts: dict[Any, int] = {}  # by strided view
    for i, info in enumerate(infos):
        if out[i].repacked:
            first = firsts.setdefault((info.offset, info.shape, info.strides, info.bits), i)
            if first != i:
                out[i] = _constant_in(out[i], out[first], info.payload == infos[first].payload)
    return out


def _constant_in(constant: Constant, base: Constant, same_payload: bool) -> Constant:
    """Return a constant as a part of `base`, which has its bytes."""
    offset = constant.offset - base.offset
    shared = "view"
    if offset == 0 and constant.nbytes == base.nbytes:
        shared = "tied" if same_payload else "equal"
    alignment = min(base.alignment, offset & -offset) if offset else base.alignment
    part: dict[str, Any] = {"base": base.identifier, "base_name": base.name, "base_offset": offset}
    return replace(constant, **part, shared=shared, alignment=alignment)


def _with_packed_offsets(constants: Iterable[Constant]) -> tuple[list[Constant], int]:
    """Return the constants with their offsets in the packed file, and that file's size."""
    out, end = [], 0
    placed: dict[str, int] = {}
    for constant in constants:
        if constant.place == "packed":
            if constant.base is None:
                offset = placed[constant.identifier] = align_up(end, constant.alignment)
                end = offset + constant.nbytes
            constant = replace(constant, offset=placed[constant.base or constant.identifier])
        out.append(constant)
    return out, end
