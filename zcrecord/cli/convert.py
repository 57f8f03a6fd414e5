"""Commands that make one file of another: `zcrecord convert`, `consolidate`, `to-onnx`, `pack`, `report`; `onnx2zc`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from zcrecord.errors import RecordError, printable
from zcrecord.record.load import record_of
from zcrecord.storage.compressed import SUFFIXES
from zcrecord.storage.files import check_destination, is_url, scratch_folder
from zcrecord.storage.folders import MODEL, model_folder, takes_folder

from .endings import writing
from .parsers import Arguments, Parser, choose_dest, natural, size
from .render import NO_TENSORS, Printer, count_text, name_text, printers, showing_progress
from .stdio import binary_stream, check_file, name_of, source_of
from .tune import print_tuning, run_tuning

_ONNX_OPTIONS = "alignment", "allow_links", "select", "exclude", "verify", "dry_run"


def convert_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord convert`."""
    from zcrecord.formats import FORMATS  # here, because other commands do not convert

    readable = ", ".join(name for name, row in FORMATS.items() if row.reads)
    writable = ", ".join(name for name, row in FORMATS.items() if row.writes)
    parser.description = f"""Convert a model to an archive (zcr), or an archive to another format. Formats to read:
        {readable}. Formats to write: {writable}. The first bytes of IN give its format, the suffix of OUT gives that of
        OUT. - is standard input or standard output. With --jobs, every model below the folder or URL IN becomes an
        archive of its own below OUT; without, a folder is one model."""
    parser.add_argument("source", metavar="IN", help="a file, or a folder with one model in it; - for standard input")
    parser.add_argument("dest", metavar="OUT", help="a file or a URL such as s3://bucket/m.zcr; - for standard output")
    about = f"format of IN, if its first bytes and its suffix do not give it: {readable}"
    parser.add_argument("--from", dest="source_format", metavar="FORMAT", help=about)
    parser.add_argument("--to", dest="dest_format", metavar="FORMAT", help=f"format of OUT: {writable}")
    _add_shard_size(parser)
    about = """convert all models below IN, N at a time, to archives at the same paths below OUT, and keep those that
        are up to date; 0 for one on each core"""
    parser.add_argument("--jobs", type=natural, metavar="N", help=about)
    parser.add_alignment()
    parser.add_output_options()


def _add_shard_size(parser: Parser) -> None:
    about = "write files of at most this size, such as 5GB, and a catalogue (zcr) or index (safetensors) of them"
    parser.add_argument("--max-shard-size", type=size, metavar="SIZE", help=about)


def convert(args: Arguments) -> int:
    """Convert a file from one format to another."""
    from zcrecord import formats

    for name in (args.source_format, args.dest_format):
        if name is not None and name not in formats.FORMATS:
            args.refuse(f"format '{printable(name)}' is not known; {', '.join(formats.FORMATS)}")
    if args.jobs is not None:
        from .fleet import run_fleet  # here, because most conversions are single

        return run_fleet(args)
    option_names = "alignment", "source_format", "dest_format", "max_shard_size"
    return run_conversion(args, formats.convert, _facts, *option_names)


def consolidate_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord consolidate`."""
    parser.add_argument("source", metavar="CHECKPOINT", help="the folder of a checkpoint, or its catalogue in there")
    parser.add_argument("dest", metavar="OUT", help="an archive, or a file of a format that zcrecord convert writes")
    _add_shard_size(parser)
    parser.add_alignment()
    parser.add_output_options()


def consolidate(args: Arguments) -> int:
    """Make one archive of a checkpoint that many ranks saved, optimizer state and all: tensors that are split over
    ranks are put together on the way to OUT, in a few MiB of memory. It is what zcrecord convert CHECKPOINT OUT does;
    the checkpoint stays as it is."""
    from zcrecord import distributed

    return run_conversion(args, distributed.consolidate, _facts, "alignment", "max_shard_size")


def index_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord index`."""
    about = "a file of safetensors, GGUF, torch or npz, an index of shards, or a folder with one of these"
    parser.add_argument("source", metavar="SOURCE", help=about)
    parser.add_argument("dest", metavar="OUT", help="the new archive, in the folder of the files")
    about = "read no weights, and store no checksums of them"
    parser.add_argument("--no-digest", dest="digest", action="store_const", const="none", default="xxh3", help=about)
    parser.add_output_options()


def index(args: Arguments) -> int:
    """Make an archive of a few KB that names the weights in files of another format, which stay as they are. It opens
    as any archive does: names as a tree, checksums, signatures. It lies beside the files, and refuses one of
    another size or header; other changes are found by verify. zcrecord convert makes an archive with its own weights
    of it."""
    import zcrecord

    return run_conversion(args, zcrecord.index, _facts, "digest")


def to_onnx_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord to-onnx`."""
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input, read into memory")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE with the suffix .onnx")
    about = "of an archive of several models, the one in this module, such as decoder_model"
    parser.add_argument("--module", metavar="NAME", help=about)
    parser.add_key()
    parser.flag("--external", help="leave the weights where they are, and refer to them as external data")
    about = "with --external, write the tuned graph even if other CPUs may compute wrong answers with it"
    parser.flag("--tuned", help=about, default=None)
    about = "with --external, write the original graph of a tuned archive, as providers other than the CPU want it"
    parser.add_argument("--no-tuned", dest="tuned", action="store_false", help=about)
    parser.add_output_options()


def to_onnx(args: Arguments) -> int:
    """Write the ONNX model of an archive that was made from ONNX. With --external the weights stay in the archive,
    which has to lie in OUT's folder or below it; the session options with which ONNX Runtime makes no copy of them are
    printed. The small model of a tuned archive (see zcrecord tune) is the tuned graph if every machine may run it; it
    needs no session options. With --external ARCHIVE may also be an .onnx file: the weights stay in it, and in its
    external data."""
    from zcrecord import onnx

    choose_dest(args, (".zst", ".zcr"), ".onnx")
    is_onnx = args.external and args.source.lower().endswith(".onnx")
    _refuse_to_onnx(args, is_onnx)

    def write_model(_source: Any, dest: Any, **options: Any) -> Any:
        if is_onnx:  # too fast for a progress bar
            return onnx.scan(args.source).to_onnx(dest, **args.values("force", "durable"))
        return onnx.to_onnx(record_of(source_of(args.source), args.key), dest, **options)

    def facts(report: Any, out: Printer) -> Iterator[str]:
        yield from _facts(report, out)
        yield "tuned: no session options are needed" if args.external and not report.session_options else ""

    return run_conversion(args, write_model, facts, "module", "external", "tuned")


def _refuse_to_onnx(args: Arguments, is_onnx: bool) -> None:
    """End with an error on options of `zcrecord to-onnx` that contradict each other."""
    if args.external and "-" in (args.source, args.dest):
        args.refuse("--external needs two files: neither ARCHIVE nor OUT can be -")
    if args.tuned is not None and not args.external:
        args.refuse("--tuned and --no-tuned need --external")
    if args.external and args.key:
        args.refuse("--key is not for --external: the small model reads the archive's weights without checking them")
    if is_onnx and (args.tuned or args.module is not None):
        args.refuse("--tuned and --module are for archives; an .onnx file has neither")


def pack_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord pack`."""
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE.zst")
    about = "level of zstd, from 1 to 22 (default: 1); higher levels take longer and gain little on weights"
    parser.add_argument("--level", type=natural, default=1, metavar="N", help=about)
    parser.add_threads("number of threads")
    parser.add_output_options()


def pack(args: Arguments) -> int:
    """Compress an archive for transport, to zstd frames. Single tensors can be read from the result without
    decompressing it all; zstd -d decompresses it, too."""
    from zcrecord import transport

    choose_dest(args, (), ".zst")
    if not 1 <= args.level <= 22:  # zstd's levels
        args.refuse(f"level {args.level} is not from 1 to 22")
    return run_conversion(args, transport.pack, _packed_facts, "level", "threads", forward=True)


def unpack_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord unpack`."""
    parser.add_argument("source", metavar="PACKED", help="a packed archive; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: PACKED without .zst")
    parser.add_threads("number of threads")
    parser.add_output_options()


def unpack(args: Arguments) -> int:
    """Decompress a packed archive to the original bytes, and check them."""
    from zcrecord import transport

    choose_dest(args, (".zst",), "")
    return run_conversion(args, transport.unpack, _packed_facts, "threads", forward=True)


def _packed_facts(report: Any, out: Printer) -> Iterator[str]:
    yield f"{out.size(report.archive_bytes)} unpacked"
    yield f"{out.size(report.packed_bytes)} packed, {100 * report.packed_bytes / report.archive_bytes:.1f}%"
    yield count_text(report.frames, "frame") if report.frames is not None else ""


def report_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord report`."""
    parser.add_argument("source", metavar="FILE", help="an archive, or the URL of one; - for standard input")
    about = "HTML file; - for standard output (default: FILE with the suffix .html; standard output if FILE is -)"
    parser.add_argument("--output", "-o", dest="dest", metavar="OUT", help=about)
    parser.flag("--digest", help="show the content digest, too; reads the whole archive")
    parser.add_output_options()


def report(args: Arguments) -> int:
    """Write an archive's tree, largest tensors, file layout and metadata as one HTML file, which needs no server. The
    same archive gives the same file."""
    from zcrecord import report as pages

    choose_dest(args, (".zst", ".zcr"), ".html")
    return run_conversion(args, pages.report, _page_facts, "digest")


def _page_facts(report: Any, out: Printer) -> Iterator[str]:
    yield f"{count_text(report.tensors, 'tensor')} in {count_text(report.modules, 'module')}"
    yield f"{out.size(report.archive_bytes)} of archive"
    yield f"{out.size(report.html_bytes)} of page"


def onnx2zc_arguments(parser: Parser) -> None:
    """Declare the arguments of `onnx2zc`."""
    parser.description = """Convert an ONNX model to an archive, in one pass and in little memory. - is standard input
        or standard output. Models compressed by zstd or gzip are decompressed. A folder, such as those of Hugging
        Face's Optimum, becomes one archive: each of its models is a module with its file's name, and equal weights are
        stored once. If OUT is a folder, or new and not named .zcr, it gets that archive as model.zcr, and copies of the
        configuration and tokenizer files."""
    parser.add_argument("source", metavar="IN", help="an ONNX model, or a folder of several; - for standard input")
    about = "a file or URL; default: IN with the suffix .zcr; standard output if IN is -; of a folder, a new folder"
    parser.add_argument("dest", metavar="OUT", nargs="?", help=about)
    parser.add_selection("leave out tensors whose names match; --select and --exclude leave out the graph, too")
    about = """read IN again and the archive back, and compare them, before OUT is replaced; with --tune, run the model
        and the tuned graph once, on inputs made up for the model's shapes, and compare their answers, too"""
    parser.flag("--verify", help=about)
    parser.flag("--dry-run", help="read everything, write nothing, print the report")
    parser.flag("--tune", help="tune the archive for this machine, as zcrecord tune does; IN and OUT have to be files")
    parser.flag("--allow-links", help="accept external data behind symbolic and hard links, also to other folders")
    parser.add_alignment()
    parser.add_output_options()


def onnx2zc(args: Arguments) -> int:
    """Convert an ONNX model to an archive."""
    from zcrecord import onnx

    choose_dest(args, (*SUFFIXES, ".onnx"), ".zcr")
    if args.verify and (args.dry_run or "-" in (args.source, args.dest)):
        args.refuse("--verify reads IN and OUT a second time: both have to be files")
    if args.tune:
        return _onnx2zc_tuned(args)
    return run_conversion(args, onnx.convert, _onnx_facts, *_ONNX_OPTIONS, forward=True)


def _onnx2zc_tuned(args: Arguments) -> int:
    """Convert a model to a scratch archive, and tune that to OUT; OUT stays as it was if either fails."""
    from zcrecord import onnx

    _refuse_untunable(args)
    to_folder = os.path.isdir(args.source) and takes_folder(args.dest)
    if not os.path.isdir(args.source):
        check_file(args.source)
    if not to_folder:
        check_destination(args.source, args.dest, args.force)

    def convert_to_scratch(source: str, _dest: str, **options: Any) -> Any:
        try:
            return replace(onnx.convert(source, scratch, **options), dest=final_path)
        except RecordError as error:
            error.path = final_path if error.path == scratch else error.path  # the scratch file is gone by then
            raise

    def tune_to_dest(errors: Printer) -> Any:
        report = run_tuning(scratch, args, errors, dest=new_path, verify=args.verify)
        return replace(report, source=args.source, dest=final_path)

    with writing(args.source), contextlib.ExitStack() as stack:
        new_path = final_path = args.dest
        if to_folder:  # a new one is written elsewhere, and renamed at the end
            folder = model_folder(args.source, args.dest, force=args.force, durable=args.durable)
            new_path, final_path = stack.enter_context(folder), os.path.join(args.dest, MODEL)
        scratch = os.path.join(stack.enter_context(scratch_folder(new_path)), MODEL)
        return run_conversion(args, convert_to_scratch, _onnx_facts, *_ONNX_OPTIONS, tune=tune_to_dest)


def _refuse_untunable(args: Arguments) -> None:
    """Refuse arguments of `onnx2zc` with which there is no archive to tune."""
    if "-" in (args.source, args.dest):
        args.refuse("--tune needs two files: neither IN nor OUT can be -")
    if args.select or args.exclude:
        args.refuse("--tune needs the graph, which --select and --exclude leave out")
    if args.dry_run:
        args.refuse("--tune takes the archive that is written, and --dry-run writes none")


def run_conversion(
    args: Arguments,
    convert: Callable[..., Any],
    facts: Callable[[Any, Printer], Iterator[str]],
    *option_names: str,
    forward: bool = False,
    tune: Callable[[Printer], Any] | None = None,
) -> int:
    """Convert from and to files or standard streams, show progress, print the report, and return the exit status.

    `option_names` are the arguments that `convert` gets. `facts` yields the parts of the report's line. With `forward`
    a URL is opened here as a stream; otherwise `convert` opens it. `tune` tunes the archive afterwards, and returns the
    report of that. If OUT is standard output, the report goes to standard error.
    """
    to_stdout = args.dest == "-"
    if args.source == "-" and sys.stdin is not None and sys.stdin.isatty():
        args.refuse("standard input is a terminal; pipe something into it, or name a file")
    if to_stdout and sys.stdout is not None and sys.stdout.isatty():
        args.refuse("standard output is a terminal, and the output is binary; redirect it, or name OUT")
    source = binary_stream(sys.stdin, "input") if args.source == "-" else args.source
    sink = binary_stream(sys.stdout, "output") if to_stdout else args.dest
    _, errors = printers(args.quiet or (args.json and to_stdout))  # standard error gets the report only
    options = args.values("force", "durable", *option_names)
    with writing(name_of(args.source)):
        if forward and is_url(source):
            from zcrecord.remote.files import open_forward  # here, because few sources are URLs

            source = open_forward(source)
        with showing_progress(args.prog, errors) as progress:
            report = convert(source, sink, progress=progress, **options)
        tuning = None if tune is None else tune(errors)
    report_stream = sys.stderr if to_stdout else sys.stdout
    out = Printer(None if args.quiet else report_stream)
    if args.json:
        out.json(asdict(report) | ({} if tuning is None else {"tuning": asdict(tuning)}))
        return 0
    _print_report(report, facts, out)
    if tuning is not None:
        print_tuning(tuning, args.dest, out)
    return 0


def _print_report(report: Any, facts: Callable[[Any, Printer], Iterator[str]], out: Printer) -> None:
    """Print the report's line, then the session options that avoid a copy of the weights, if it has any."""
    parts = [part for part in facts(report, out) if part]
    parts.append(f"{report.seconds:.2f} s")
    if report.peak_rss is not None:
        parts.append(f"at most {out.size(report.peak_rss)} of memory")
    out.line(f"{name_text(report.dest or 'standard output')}: {', '.join(parts)}")
    if entries := getattr(report, "session_options", {}):
        out.line("With these session options ONNX Runtime uses the archive's pages, and does not copy the weights:")
        for key, value in entries.items():
            out.line(f"  {key} = {value}")


def _facts(report: Any, out: Printer) -> Iterator[str]:
    """Yield the parts of the report's line that all conversions share; empty ones are left out when it is printed."""
    size = out.size
    if report.dry_run:
        exists = report.dest is not None and os.path.exists(report.dest)
        yield "would replace the file there, with --force" if exists else "would be written"
    yield f"{count_text(report.tensors, 'tensor')} in {count_text(report.modules, 'module')}"
    yield f"{size(report.input_bytes)} in"
    yield f"{size(report.archive_bytes)} out"
    yield f"{size(report.shared_bytes)} shared"
    yield f"{count_text(report.left_out, 'tensor')} and the graph left out" if report.left_out else ""
    yield f"{count_text(report.renamed, 'name')} changed" if report.renamed else ""
    yield f"{size(report.repeated_bytes)} of ties written again" if report.repeated_bytes else ""
    yield "verified" if report.verified else ""


def _onnx_facts(report: Any, out: Printer) -> Iterator[str]:
    yield from _facts(report, out)
    yield f"weights: {NO_TENSORS}" if not report.tensors and not report.left_out else ""
