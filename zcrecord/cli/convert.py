"""`zcrecord convert`, `consolidate`, `to-onnx` and `onnx2zc`; and how every command converts one file to another."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

from zcrecord.errors import printable
from zcrecord.storage.compressed import SUFFIXES
from zcrecord.storage.files import check_destination, scratch_folder
from zcrecord.storage.folders import MODEL, model_folder, takes_folder

from .endings import writing
from .parsers import Arguments, Parser, add_alignment, add_output_options, choose_dest, natural, size
from .render import Printer, counted, human, showing_progress, shown
from .stdio import binary, check_file, name_of, size_ahead, source_of, taking_urls
from .tune import print_tuning, run_tuning


def convert_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord convert`."""
    from zcrecord.formats import FORMATS  # here, because other commands do not convert

    read = ", ".join(name for name, row in FORMATS.items() if row.reads)
    written = ", ".join(name for name, row in FORMATS.items() if row.writes)
    parser.description = f"""Convert a model to an archive (zcr), or an archive to another format. Formats to read:
        {read}. Formats to write: {written}. The first bytes of IN give its format, the suffix of OUT gives that of
        OUT. - is standard input or standard output. With --jobs, every model below the folder or URL IN becomes an
        archive of its own below OUT; without, a folder is one model."""
    parser.add_argument("source", metavar="IN", help="a file, or a folder with one model in it; - for standard input")
    parser.add_argument("dest", metavar="OUT", help="a file or a URL such as s3://bucket/m.zcr; - for standard output")
    about = f"format of IN, if its first bytes and its suffix do not give it: {read}"
    parser.add_argument("--from", dest="source_format", metavar="FORMAT", help=about)
    parser.add_argument("--to", dest="dest_format", metavar="FORMAT", help=f"format of OUT: {written}")
    _add_shard_size(parser)
    about = """convert all models below IN, N at a time, to archives at the same paths below OUT, and keep those that
        are up to date; 0 for one on each core"""
    parser.add_argument("--jobs", type=natural, metavar="N", help=about)
    add_alignment(parser)
    add_output_options(parser)


def _add_shard_size(parser: Parser) -> None:
    about = "write files of at most this size, such as 5GB, and a catalogue (zcr) or index (safetensors) of them"
    parser.add_argument("--max-shard-size", type=size, metavar="SIZE", help=about)


def convert(args: Arguments) -> int:
    """Convert a file from one format to another."""
    from zcrecord import formats

    for given in (args.source_format, args.dest_format):
        if given is not None and given not in formats.FORMATS:
            args.refuse(f"format '{printable(given)}' is not known; {', '.join(formats.FORMATS)}")
    if args.jobs is not None:
        from .fleet import run_fleet  # here, because most conversions are single

        return run_fleet(args)
    names = ("alignment", "source_format", "dest_format", "max_shard_size")
    return run_conversion("zcrecord", args, formats.convert, _facts, **{name: getattr(args, name) for name in names})


def consolidate_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord consolidate`."""
    parser.description = """Make one archive of a checkpoint that many ranks saved, optimizer state and all: tensors
        that are split over ranks are put together on the way to OUT, in a few MiB of memory. It is what zcrecord
        convert CHECKPOINT OUT does; the checkpoint stays as it is."""
    parser.add_argument("source", metavar="CHECKPOINT", help="the folder of a checkpoint, or its catalogue in there")
    parser.add_argument("dest", metavar="OUT", help="an archive, or a file of a format that zcrecord convert writes")
    _add_shard_size(parser)
    add_alignment(parser)
    add_output_options(parser)


def consolidate(args: Arguments) -> int:
    """Make one archive of a checkpoint that many ranks saved."""
    from zcrecord import distributed

    options = {name: getattr(args, name) for name in ("alignment", "max_shard_size")}
    return run_conversion("zcrecord", args, distributed.consolidate, _facts, **options)


def index_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord index`."""
    parser.description = """Make an archive of a few KB that names the weights in files of another format, which stay as
        they are. It opens as any archive does: names as a tree, checksums, signatures. It lies beside the files, and
        refuses one that was changed. zcrecord convert makes an archive with its own weights of it."""
    about = "a file of safetensors, GGUF or npz, an index of shards, or a folder with one of these"
    parser.add_argument("source", metavar="SOURCE", help=about)
    parser.add_argument("dest", metavar="OUT", help="the new archive, in the folder of the files")
    about = "read no weights, and store no checksums of them"
    parser.add_argument("--no-digest", dest="digest", action="store_const", const="none", default="xxh3", help=about)
    add_output_options(parser)


def index(args: Arguments) -> int:
    """Make an archive that names the weights in other files."""
    import zcrecord

    return run_conversion("zcrecord", args, zcrecord.index, _facts, digest=args.digest)


def to_onnx_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord to-onnx`."""
    parser.description = """Write the ONNX model of an archive that was made from ONNX. With --external the weights stay
        in the archive, which has to lie in OUT's folder or below it; the session options with which ONNX Runtime makes
        no copy of them are printed. The small model of a tuned archive (see zcrecord tune) is the tuned graph, which
        needs none, if it is right on every machine. With --external ARCHIVE may also be an .onnx file: the weights stay
        in it, and in its external data."""
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input, read into memory")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE with the suffix .onnx")
    about = "of an archive of several models, the one in this module, such as decoder_model"
    parser.add_argument("--module", metavar="NAME", help=about)
    about = "leave the weights where they are, and refer to them as external data"
    parser.add_argument("--external", action="store_true", help=about)
    about = "with --external, write the tuned graph even if other CPUs may compute wrong answers with it"
    parser.add_argument("--tuned", action="store_true", default=None, help=about)
    about = "with --external, write the original graph of a tuned archive, as providers other than the CPU want it"
    parser.add_argument("--no-tuned", dest="tuned", action="store_false", help=about)
    add_output_options(parser)


def to_onnx(args: Arguments) -> int:
    """Write the ONNX model of an archive."""
    from zcrecord import onnx

    choose_dest(args, (".zst", ".zcr"), ".onnx")

    def work(source: Any, dest: Any, *, force: bool, durable: bool, **options: Any) -> Any:
        if args.external and source.lower().endswith(".onnx"):
            if options["tuned"] or args.module is not None:
                args.refuse("--tuned and --module are about archives, not .onnx files")
            return onnx.scan(source).to_onnx(dest, force=force, durable=durable)  # too fast for a progress bar
        return onnx.to_onnx(source_of(args.source), dest, force=force, durable=durable, **options)

    if args.external and "-" in (args.source, args.dest):
        args.refuse("--external needs two files: neither ARCHIVE nor OUT can be -")
    if args.tuned is not None and not args.external:
        args.refuse("--tuned and --no-tuned are about models with --external")

    def facts(report: Any, out: Printer) -> Iterator[str]:
        yield from _facts(report, out)
        yield "tuned: no session options are needed" if args.external and not report.session_options else ""

    options = {name: getattr(args, name) for name in ("module", "external", "tuned")}
    return run_conversion("zcrecord", args, work, facts, **options)


def onnx2zc_arguments(parser: Parser) -> None:
    """Declare the arguments of `onnx2zc`."""
    parser.description = """Convert an ONNX model to an archive, in one pass and in little memory. - is standard input
        or standard output. Models compressed by zstd or gzip are decompressed. A folder, such as those of Hugging
        Face's Optimum, becomes one archive: each of its models is a module with its file's name, and equal weights are
        stored once. If OUT is a folder, or new and not named .zcr, it gets that archive as model.zcr, and copies of the
        configuration and tokenizer files."""
    about = "an ONNX model, or a folder of several; - for standard input"
    parser.add_argument("source", metavar="IN", help=about)
    about = "a file or URL; default: IN with the suffix .zcr; standard output if IN is -; of a folder, a new folder"
    parser.add_argument("dest", metavar="OUT", nargs="?", help=about)
    about = "convert only tensors whose names match, such as 'encoder.*'; may be given several times"
    parser.add_argument("--select", action="append", metavar="PATTERN", help=about)
    about = "leave out tensors whose names match; --select and --exclude leave out the graph, too"
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help=about)
    about = """read IN again and the archive back, and compare them, before OUT is replaced; with --tune, run the model
        and the tuned graph once, on inputs made up for the model's shapes, and compare their answers, too"""
    parser.add_argument("--verify", action="store_true", help=about)
    parser.add_argument("--dry-run", action="store_true", help="read everything, write nothing, print the report")
    about = "tune the archive for this machine, as zcrecord tune does; IN and OUT have to be files"
    parser.add_argument("--tune", action="store_true", help=about)
    about = "accept external data behind symbolic and hard links, also to other folders"
    parser.add_argument("--allow-links", action="store_true", help=about)
    add_alignment(parser)
    add_output_options(parser)


def onnx2zc(args: Arguments) -> int:
    """Convert an ONNX model to an archive."""
    from zcrecord import onnx

    choose_dest(args, (*SUFFIXES, ".onnx"), ".zcr")
    if args.verify and (args.dry_run or "-" in (args.source, args.dest)):
        args.refuse("--verify reads IN and OUT a second time: both have to be files")
    names = ("alignment", "allow_links", "select", "exclude", "verify", "dry_run")
    options = {name: getattr(args, name) for name in names}
    if args.tune:
        return _onnx2zc_tuned(args, options)
    return run_conversion("onnx2zc", args, taking_urls(onnx.convert), _facts, **options)


def _onnx2zc_tuned(args: Arguments, options: dict[str, Any]) -> int:
    """Convert a model to a scratch archive, and tune that to OUT; OUT stays as it was if either fails."""
    from zcrecord import onnx

    if "-" in (args.source, args.dest):
        args.refuse("--tune needs two files: neither IN nor OUT can be -")
    if args.select or args.exclude:
        args.refuse("--tune needs the graph, which --select and --exclude leave out")
    if args.dry_run:
        args.refuse("--tune takes the archive that is written, and --dry-run writes none")
    whole = os.path.isdir(args.source) and takes_folder(args.dest)
    if not os.path.isdir(args.source):
        check_file(args.source)
    if not whole:
        check_destination(args.source, args.dest, args.force)

    def work(source: str, _: str, **more: Any) -> Any:
        return replace(onnx.convert(source, scratch, **more), dest=target)

    def tuning(errors: Printer) -> Any:
        report = run_tuning(scratch, args, errors, dest=dest, verify=args.verify)
        return replace(report, source=args.source, dest=target)

    with writing(args.source), contextlib.ExitStack() as stack:
        dest = target = args.dest
        if whole:
            copied = model_folder(args.source, dest, force=args.force, durable=not args.no_sync)
            dest, target = stack.enter_context(copied), os.path.join(dest, MODEL)
        scratch = os.path.join(stack.enter_context(scratch_folder(dest)), MODEL)
        return run_conversion("onnx2zc", args, work, _facts, then=tuning, **options)


def run_conversion(
    prog: str,
    args: Arguments,
    convert: Callable[..., Any],
    facts: Callable[[Any, Printer], Iterator[str]],
    *,
    then: Callable[[Printer], Any] | None = None,
    **options: Any,
) -> int:
    """Convert from and to files or standard streams, show progress, and print the report.

    `facts` yields the parts of the report's line. `then` tunes the archive, and returns the report of tuning. If OUT is
    standard output, the report goes to standard error.
    """
    if args.source == "-" and sys.stdin is not None and sys.stdin.isatty():
        args.refuse("standard input is a terminal; pipe something into it, or name a file")
    if args.dest == "-" and sys.stdout is not None and sys.stdout.isatty():
        args.refuse("standard output is a terminal, and the output is binary; redirect it, or name OUT")
    source = binary(sys.stdin, "input") if args.source == "-" else args.source
    sink = binary(sys.stdout, "output") if args.dest == "-" else args.dest
    known = size_ahead(source) if args.source == "-" else None
    alone = args.json and args.dest == "-"  # then standard error gets the report only
    errors = Printer(None if args.quiet or alone else sys.stderr)
    with writing(name_of(args.source)):
        with showing_progress(prog, errors) as progress:
            report = convert(
                source,
                sink,
                force=args.force,
                durable=not args.no_sync,
                progress=lambda done, total: progress(done, known if total is None else total),
                **options,
            )
        tuning = None if then is None else then(errors)
    if args.quiet:
        return 0
    out = Printer(sys.stderr if args.dest == "-" else sys.stdout)
    if args.json:
        out.json(asdict(report) | ({} if tuning is None else {"tuning": asdict(tuning)}))
        return 0
    _print_report(report, facts, out)
    if tuning is not None:
        print_tuning(tuning, args.dest, out)
    return 0


def _print_report(report: Any, facts: Callable[[Any, Printer], Iterator[str]], out: Printer) -> None:
    parts = [part for part in facts(report, out) if part]
    parts.append(f"{report.seconds:.2f} s")
    if report.peak_rss is not None:
        parts.append(f"at most {human(report.peak_rss)} of memory")
    out.line(f"{shown(report.dest or 'standard output')}: {', '.join(parts)}")
    if entries := getattr(report, "session_options", {}):
        out.line("ONNX Runtime uses the archive's pages and makes no copy of the weights, if its session options have")
        for key, value in entries.items():
            out.line(f"  {key} = {value}")


def _facts(report: Any, out: Printer) -> Iterator[str]:
    size = out.size
    if report.dry_run:
        exists = report.dest is not None and os.path.exists(report.dest)
        yield "would replace the file there, with --force" if exists else "would be written"
    yield f"{counted(report.tensors, 'tensor')} in {counted(report.modules, 'module')}"
    yield f"{size(report.input_bytes)} in"
    yield f"{size(report.archive_bytes)} out"
    yield f"{size(report.shared_bytes)} shared"
    yield f"{counted(report.left_out, 'tensor')} and the graph left out" if report.left_out else ""
    yield f"{counted(report.renamed, 'name')} changed" if report.renamed else ""
    yield f"{size(report.repeated_bytes)} of ties written again" if report.repeated_bytes else ""
    yield "verified" if report.verified else ""
