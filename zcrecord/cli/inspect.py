"""`zcrecord info`, `ls` and `tree`: print an archive's facts, its tensors, its modules. Sizes are in bytes."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from zcrecord.archive.archive import has_type_name
from zcrecord.archive.by_file import sized_openers
from zcrecord.archive.info import ModuleInfo, TensorInfo, child_of_type
from zcrecord.archive.payload_source import is_twin
from zcrecord.codec.conventions import REFERENCES_TYPE, TUNED_TYPE
from zcrecord.codec.layout import NONE
from zcrecord.dtypes import stored_name
from zcrecord.errors import DependencyError, FormatError, LimitError, TensorNotFoundError, printable
from zcrecord.record.record import Record

from .parsers import Arguments, Parser, natural
from .render import NO_TENSORS, Column, Printer, count_text, jsonable, name_text, printers, showing_progress, value_text
from .stdio import name_of, open_archive

_HASHED_ANYWAY = 64 << 20  # bytes of payload whose content digest is printed without --digest, as it takes no time
_MAX_ENTRIES = 50  # metadata, and attributes, that `info` shows on a terminal
_COLUMNS = (
    *(Column("tensor", min_width=40), Column("dtype"), Column("shape", min_width=16)),
    *(Column("bytes", "right"), Column("offset", "right"), Column("aligned", "right"), Column("tied", min_width=20)),
)
_TREE_COLUMNS = Column("name", min_width=30), Column("what"), Column("bytes", "right"), Column("holds", min_width=20)


def info_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord info`."""
    parser.add_archive()
    parser.add_key()
    parser.add_json("everything")
    about = "print the content digest, which does not depend on the layout; reads the whole archive"
    parser.add_argument("--digest", action=argparse.BooleanOptionalAction, default=None, help=about)


def info(args: Arguments) -> int:
    """Print an archive's sizes, types, attributes and metadata. For an archive of up to 64 MiB print its content
    digest, too. For a tuned archive print the machines that it is tuned for, and whether this is one of them, which
    onnxruntime tells if it is installed."""
    out, errors = printers()
    name = name_of(args.file)
    with open_archive(args.file, args.embedded, args.key) as record:
        facts = {**_facts(record, name), **_other_files(record), "tuned": _tuned_info(record)}
        facts["content_digest"] = _content_digest(record, errors, args.digest)
        if args.json:
            out.json({**facts, "metadata": jsonable(facts["metadata"]), "attributes": jsonable(facts["attributes"])})
        else:
            out.facts(name_text(name), _fact_lines(facts, out))
    return 0


def _facts(record: Record, name: str) -> dict[str, Any]:
    """Return the facts that `zcrecord info` prints of a record, by the keys of its JSON."""
    from zcrecord.onnx.names import GRAPH_ATTRIBUTE  # here, for the sake of the other commands' start

    layout, attributes = record.layout, record.attributes
    graph = attributes.get(GRAPH_ATTRIBUTE)
    copied = "archive_nbytes", "version", "alignment", "base_alignment", "payload_offset", "sealed", "digest"
    side = "front" if layout.front else "back"
    return {
        "file": name,
        **{field: getattr(layout, field) for field in copied},
        "tensors": len(record),
        "modules": len(record.modules),
        "payload_nbytes": record.nbytes,
        **_tensor_sums(record),
        "deduplicated_nbytes": layout.deduplicated,
        "index": {"place": side, "offset": layout.index_offset, "nbytes": layout.index_nbytes},
        "onnx_graph_nbytes": len(graph) if isinstance(graph, bytes | memoryview) else None,
        "metadata": record.metadata,
        "attributes": attributes,
    }


def _tensor_sums(record: Record) -> dict[str, Any]:
    """Return the facts that are counts and sums over all tensors: "dtypes", "tied_nbytes" and "foreign"."""
    dtypes: dict[str, dict[str, int]] = {}
    decodings: dict[str, int] = {}
    tied: dict[int, tuple[int, int]] = {}  # by payload: bytes of its tensors, bytes of the largest
    for tensor in record.infos():
        dtype = dtypes.setdefault(stored_name(tensor.dtype.code, tensor.bits), {"tensors": 0, "nbytes": 0})
        dtype["tensors"] += 1
        dtype["nbytes"] += tensor.nbytes
        if tensor.decoding is not None:
            decodings[tensor.decoding] = decodings.get(tensor.decoding, 0) + 1
        if len(tensor.tied) > 1 and tensor.payload is not None:
            nbytes, largest = tied.get(tensor.payload, (0, 0))
            tied[tensor.payload] = nbytes + tensor.nbytes, max(largest, tensor.nbytes)
    is_archive = record.archive.whole or record.archive.source.file_names
    return {
        "foreign": None if is_archive else decodings,
        "dtypes": dict(sorted(dtypes.items(), key=lambda item: -item[1]["nbytes"])),
        "tied_nbytes": sum(nbytes - largest for nbytes, largest in tied.values()),
    }


def _other_files(record: Record) -> dict[str, Any]:
    """Return the other files of a catalogue or an archive of references, with their bytes, under that kind."""
    neither: dict[str, Any] = {"catalogue": None, "references": None}
    source = record.archive.source
    if not source.file_names:
        return neither
    sizes = [size for size, _ in sized_openers(record.archive)]
    named_sizes = zip(source.file_names, sizes[1:], strict=True)
    files: list[dict[str, Any]] = [{"name": name, "nbytes": size} for name, size in named_sizes]
    table, payloads = source.piece_table(), record.archive.index.payloads
    if table is None or not has_type_name(source.file_archive(NONE), REFERENCES_TYPE):
        return {**neither, "catalogue": {"nbytes": sum(sizes), "shards": files}}
    nbytes, file_numbers = np.where(is_twin(payloads), 0, payloads["nbytes"]), table.whole()  # equal bytes count once
    for number, file in enumerate(files):
        file["payload_nbytes"] = int(nbytes[file_numbers == number].sum())
    own = int(nbytes[file_numbers == NONE].sum())
    return {**neither, "references": {"nbytes": sum(sizes), "files": files, "own_payload_nbytes": own}}


def _tuned_info(record: Record) -> dict[str, Any] | None:
    """Return sizes and targets of an archive's tuned part, and why one does not fit this machine; None if untuned."""
    if child_of_type(record.archive, TUNED_TYPE) is None:
        return None
    from zcrecord.onnx import runtime, target, tuned  # here, because few archives are tuned

    this_machine = None
    with contextlib.suppress(DependencyError):
        this_machine = target.this_target(runtime.onnxruntime_module())
    try:
        return tuned.describe(record.archive, this_machine)
    except FormatError as error:
        return {"fault": error.message}


def _tuned_lines(part: dict[str, Any], out: Printer) -> Iterator[tuple[str, str]]:
    """Yield labels and values about an archive's tuned part, as `_tuned_info` returns it."""
    if "fault" in part:
        yield "tuned", f"cannot be used: {part['fault']}"
        return
    before = part["untuned_nbytes"]
    yield "tuned", f"{out.size(part['nbytes'])} more than the {out.size(before)} without the tuned part"
    for target in part["targets"]:
        verdict = "fits this machine" if target["fits"] else f"does not fit this machine: {target['misfit']}"
        if target["fits"] is None:
            verdict = "fits this machine or not: needs onnxruntime to tell"
        model = f"{name_text(target['module'])}: " if target["module"] else ""
        yield "tuned for", f"{model}{target['words']}; {out.size(target['nbytes'])}; {verdict}"


def _content_digest(record: Record, errors: Printer, is_wanted: bool | None) -> str | None:
    """Return the content digest if it is wanted, with a progress bar; for None if the record is small and local."""
    if is_wanted is None:
        is_small = not record.archive.source.is_remote and record.nbytes <= _HASHED_ANYWAY
        with contextlib.suppress(LimitError):  # its views add up to too many bytes
            return record.content_digest() if is_small else None
    if not is_wanted:
        return None
    with showing_progress("hashing", errors) as progress:
        return record.content_digest(progress=progress)


def _fact_lines(facts: dict[str, Any], out: Printer) -> Iterator[tuple[str, str]]:
    """Yield the facts as labels and values in words."""
    size, index, tensors = out.size, facts["index"], facts["tensors"]
    yield from _file_lines(facts, size)
    yield "tensors", f"{tensors} in {count_text(facts['modules'], 'module')}"
    yield "payload", size(facts["payload_nbytes"])
    for kind, sums in facts["dtypes"].items():
        yield f"dtype {kind}", f"{count_text(sums['tensors'], 'tensor')}, {size(sums['nbytes'])}"
    yield "tied", f"{size(facts['tied_nbytes'])} saved"
    yield "equal bytes", f"{size(facts['deduplicated_nbytes'])} saved"
    alignment, strongest = facts["alignment"], facts["base_alignment"]
    if facts["foreign"] is None:
        more = f", of some payloads {strongest:,}" if strongest > alignment else ""
        yield "alignment", f"{alignment:,} bytes{more}"
        yield "index", f"{size(index['nbytes'])} at the {index['place']}, at {index['offset']}"
        yield "header", "sealed" if facts["sealed"] else "not sealed: sizes and checksums are in the trailer"
        yield "digests", str(facts["digest"])
    yield "content", facts["content_digest"] or "not computed; --digest reads the whole archive and prints its digest"
    if facts["onnx_graph_nbytes"] is not None:
        yield "ONNX model", f"graph of {size(facts['onnx_graph_nbytes'])} beside its tensors"
        if not tensors:
            yield "weights", NO_TENSORS
    if facts["tuned"] is not None:
        yield from _tuned_lines(facts["tuned"], out)
    yield from _entry_lines("metadata", facts["metadata"], out)
    yield from _entry_lines("attribute", facts["attributes"], out)


def _entry_lines(label: str, entries: dict[str, Any], out: Printer) -> Iterator[tuple[str, str]]:
    """Yield labels and values of metadata or attributes; on a terminal the first of many."""
    shown = _MAX_ENTRIES if out.pretty else len(entries)
    for key, value in itertools.islice(entries.items(), shown):
        yield f"{label} {name_text(key)}", value_text(value)
    if len(entries) > shown:
        yield label, f"... {len(entries)} in all; --json has them"


def _file_lines(facts: dict[str, Any], size: Callable[[int], str]) -> Iterator[tuple[str, str]]:
    """Yield the facts of the file itself: a catalogue, an archive of references, another format's file, an archive."""
    if (catalogue := facts["catalogue"]) is not None:
        count = count_text(len(catalogue["shards"]), "shard")
        yield "catalogue", f"of {count}, {size(catalogue['nbytes'])} in all files"
        yield "as one", f"{size(facts['archive_nbytes'])} of archive, format version {facts['version']}"
    elif (references := facts["references"]) is not None:
        count = count_text(len(references["files"]), "file")
        yield "references", f"to payloads in {count}, {size(references['nbytes'])} in all files"
        for other in references["files"]:
            yield f"in {printable(other['name'])}", f"{size(other['payload_nbytes'])} of payloads"
        yield "in this archive", f"{size(references['own_payload_nbytes'])} of payloads"
    elif facts["foreign"] is not None:
        exceptions = ", but those named in the next lines" if facts["foreign"] else ""
        yield "another format", f"{size(facts['archive_nbytes'])}; tensors are used as they lie in it{exceptions}"
        for reason, count in facts["foreign"].items():
            yield reason, f"{count_text(count, 'tensor')}, decoded or copied when used"
    else:
        yield "archive", f"{size(facts['archive_nbytes'])}, format version {facts['version']}"


def ls_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord ls`."""
    parser.add_archive()
    parser.add_key()
    parser.add_json("everything")
    about = "list only tensors whose names match, such as 'encoder.*.weight'"
    parser.add_argument("patterns", nargs="*", default=[], metavar="PATTERN", help=about)
    parser.add_argument("--sort", choices=("saved", "name", "size"), default="saved", help="order (default: saved)")


def ls(args: Arguments) -> int:
    """List tensors. On a terminal a table; into a pipe lines of name, dtype, shape, bytes, offset, alignment and tie,
    separated by tabs."""
    out = Printer(sys.stdout)
    with open_archive(args.file, args.embedded, args.key) as record:
        tensors = _matching_tensors(record, args.sort, args.patterns)
        source = record.archive.source
        if args.json and source.file_names:  # of a catalogue the shard, too, that contains a whole tensor
            shards = ((t, None if t.payload is None else source.file_name(t.payload)) for t in tensors)
            out.json_array({**_tensor_json(tensor), "shard": name} for tensor, name in shards)
        elif args.json:
            out.json_array(map(_tensor_json, tensors))
        else:
            out.table(_COLUMNS, (_tensor_cells(tensor, out) for tensor in tensors))
    return 0


def _matching_tensors(record: Record, sort: str, patterns: Sequence[str]) -> Iterable[TensorInfo]:
    """Return the tensors whose names match, or all, in the order `sort`; TensorNotFoundError if a name is missing."""
    tensors = record.infos()
    if patterns:
        from zcrecord.archive import subset  # here, for the sake of the other commands' start

        matching = subset.PartBuilder(record.archive).keep(patterns).chosen
        if not matching:
            raise TensorNotFoundError(" ".join(patterns), lambda: record.names, path=record.archive.path)
        tensors = (tensor for number, tensor in enumerate(tensors) if number in matching)
    if sort == "name":
        return sorted(tensors, key=lambda tensor: tensor.name)
    return sorted(tensors, key=lambda tensor: -tensor.nbytes) if sort == "size" else tensors


def _tensor_cells(tensor: TensorInfo, out: Printer) -> tuple[str, ...]:
    """Return a tensor as the cells of a row of `ls`."""
    others = len(tensor.tied) - 1
    tied = ""
    if others > 0:
        first_other = next(name for name in tensor.tied if name != tensor.name)
        tied = f"= {printable(first_other)}" + (f" and {others - 1} more" if others > 1 else "")
    numbers = out.number(tensor.nbytes), str(tensor.offset), str(tensor.alignment)
    return name_text(tensor.name), stored_name(tensor.dtype.code, tensor.bits), str(list(tensor.shape)), *numbers, tied


def _tensor_json(tensor: TensorInfo) -> dict[str, Any]:
    """Return the facts of a tensor as JSON values; of its ties only the number (tensors of one `payload` are tied)."""
    copied = "name", "bits", "shape", "strides", "nbytes", "offset", "alignment", "payload", "module", "decoding"
    return {
        **{field: getattr(tensor, field) for field in copied},
        "dtype": tensor.dtype.name,
        "digest": None if tensor.digest is None else f"{tensor.digest:016x}",
        "tied": max(len(tensor.tied) - 1, 0),
    }


def tree_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord tree`."""
    parser.add_archive()
    parser.add_key()
    parser.add_json("everything")
    parser.add_argument("--depth", type=natural, metavar="N", help="show at most N levels")


def tree(args: Arguments) -> int:
    """Show modules, tensors and attributes as a tree."""
    out = Printer(sys.stdout)
    with open_archive(args.file, args.embedded, args.key) as record:
        nodes = (node for node in record.walk() if args.depth is None or node[0] <= args.depth)
        if args.json:
            out.json_array(itertools.starmap(_node_json, nodes))
        else:
            name = name_of(args.file)
            out.table(_TREE_COLUMNS, (_node_cells(level, key or name, child, out) for level, key, child in nodes))
    return 0


def _node_cells(level: int, key: str, child: Any, out: Printer) -> tuple[str, ...]:
    """Return a module, tensor or attribute as the cells of a row of `tree`, its key indented by its level."""
    label = "  " * level + name_text(key)
    if isinstance(child, ModuleInfo):
        kind = f"{child.kind} {name_text(child.type_name)}" if child.type_name else child.kind
        return label, kind, out.number(child.nbytes), count_text(child.tensors, "tensor")
    if isinstance(child, TensorInfo):
        return label, stored_name(child.dtype.code, child.bits), out.number(child.nbytes), str(list(child.shape))
    return label, "attribute", "", value_text(child)


def _node_json(level: int, key: str, child: Any) -> dict[str, Any]:
    """Return a node of the tree as `tree --json` prints it; `what` is its kind: module, tensor or attribute."""
    position = {"depth": level, "key": key}
    if isinstance(child, ModuleInfo):
        fields = ("name", "kind", "type_name", "tensors", "nbytes")
        return {**position, "what": "module", **{field: getattr(child, field) for field in fields}}
    if isinstance(child, TensorInfo):
        return {**position, "what": "tensor", **_tensor_json(child)}
    return {**position, "what": "attribute", "value": jsonable(child)}
