"""`zcrecord embed`, `attach` and `detach`: archives in programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .endings import writing
from .parsers import Arguments, Parser, alignment
from .render import Printer, count_text, name_text, print_report, printers, showing_progress
from .stdio import check_file

if TYPE_CHECKING:
    from zcrecord.embed import AttachReport, DetachReport, EmbedReport


def embed_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord embed`."""
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; not an archive attached to a program")
    about = """language, and the files written; c: .S and .h; cpp: .S and .hpp, with --blob as for c;
        asm: .S and .inc; rust: .rs; python: .py"""
    parser.add_argument("--lang", required=True, choices=("c", "cpp", "asm", "rust", "python"), help=about)
    about = "folder to write to (default: the current one)"
    parser.add_argument("--output", "-o", default=".", metavar="DIR", help=about)
    about = """C, C++, assembler: write the whole archive as one constant, which zcrecord.h can open; incbin: by the
        assembler's .incbin; embed: by C23's #embed; string: as string literals, for every C and C++ compiler"""
    parser.add_argument("--blob", choices=("incbin", "embed", "string"), help=about)
    about = "Rust: place each tensor by global_asm!, for large archives; the linker then drops unused ones"
    parser.flag("--assembly", help=about)
    parser.add_selection()
    about = """put TEXT before every identifier; TEXT may be empty (default: the archive's name and an underscore; empty
        in C++ and Rust, which have a namespace and a module)"""
    parser.add_argument("--prefix", metavar="TEXT", help=about)
    about = "name of the files, the namespace or module (default: the archive's name, as a lower-case identifier)"
    parser.add_argument("--name", metavar="NAME", help=about)
    about = """section for the payloads, which the linker script must know; a name with a dot at its end gets each
        identifier added (default: .rodata.)"""
    parser.add_argument("--section", metavar="NAME", help=about)
    about = "alignment of every tensor, at least; a power of two from 16 to 65536"
    parser.add_argument("--alignment", type=alignment, metavar="BYTES", help=about)
    parser.flag("--reader", help="write the reader zcrecord.h or zcrecord.rs, too, which opens archives at run time")
    parser.flag("--force", "-f", help="replace files that this command did not write")
    parser.add_quiet()
    parser.add_json("the report")


def embed(args: Arguments) -> int:
    """Write source code with an archive's tensors as constants of a program. In C, C++, assembler and Rust the compiler
    reads the bytes from the archive itself; comments in the generated files tell how to build."""
    from zcrecord.embed import generate
    from zcrecord.embed.generator import out_of_place

    options = args.values("blob", "assembly", "prefix", "section", "alignment", "reader")
    if fault := out_of_place(args.lang, options):  # starts with the option's name
        args.refuse(f"--{fault}")
    check_file(args.source)
    options |= args.values("lang", "select", "exclude", "name", "force")
    with writing(args.source):
        report = generate(args.source, args.output, **options)
    return print_report(args, report, _embed_lines)


def _embed_lines(report: EmbedReport, out: Printer) -> Iterator[str]:
    """Yield the files written, and the tensors whose layout or name was changed."""
    yield from map(name_text, report.files)
    facts = (
        f"{count_text(report.tensors, 'tensor')}, {out.size(report.nbytes)}",
        f"{report.shared} inside another tensor's bytes" if report.shared else "",
        f"{report.empty} without bytes" if report.empty else "",
        f"{count_text(report.left_out, 'tensor')} left out" if report.left_out else "",
    )
    yield f"{name_text(report.archive)}: {', '.join(filter(None, facts))}"
    yield from (f"  put into C order: {name_text(name)}" for name in report.repacked)
    yield from (f"  strided, so no member of the blob: {name_text(name)}" for name in report.unplaced)
    yield from (f"  {name_text(name)} is {identifier}" for name, identifier in report.renamed)


def attach_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord attach`."""
    parser.add_argument("program", metavar="PROGRAM", help="an executable; an archive attached before is replaced")
    parser.add_argument("archive", metavar="ARCHIVE", help="an archive; not an archive attached to a program")
    parser.add_output("program", "PROGRAM")
    about = """replace OUT if it exists; attach to text, scripts, zips and signed programs, too, although they may no
        longer run"""
    parser.add_output_options(about, stdout=False)


def attach(args: Arguments) -> int:
    """Append an archive to an executable. The program runs as before, and reads the weights from its own file: by
    load_record(sys.executable), or zcr_open_suffix in C."""
    from zcrecord.embed import attach

    _, errors = printers(args.quiet)
    for path in (args.program, args.archive):
        check_file(path)
    with writing(args.program), showing_progress("attaching", errors) as progress:
        options = args.values("force", "durable")
        report = attach(args.program, args.archive, args.output, progress=progress, **options)
    return print_report(args, report, _attach_lines)


def _attach_lines(report: AttachReport, out: Printer) -> Iterator[str]:
    replaced = "" if report.replaced_bytes is None else f", instead of one of {out.size(report.replaced_bytes)}"
    sizes = f"{out.size(report.program_bytes)} of program, {out.size(report.archive_bytes)} of archive"
    yield f"{name_text(report.dest)}: {sizes} at {report.offset}{replaced}"


def detach_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord detach`."""
    parser.add_argument("program", metavar="PROGRAM", help="an executable with an archive attached")
    about = "file to write the archive to (default: PROGRAM.zcr)"
    parser.add_argument("--output", "-o", metavar="ARCHIVE", help=about)
    parser.flag("--keep", help="write the archive, and leave PROGRAM unchanged")
    parser.flag("--discard", help="remove the archive without writing it")
    parser.add_output_options("replace ARCHIVE if it exists", stdout=False)


def detach(args: Arguments) -> int:
    """Remove an attached archive from an executable, and write it to a file."""
    from zcrecord.embed import detach

    if args.discard and (args.keep or args.output is not None):
        args.refuse("--discard writes no archive: do not give --keep or --output with it")
    check_file(args.program)
    with writing(args.program):
        report = detach(args.program, args.output, **args.values("keep", "discard", "force", "durable"))
    return print_report(args, report, _detach_lines)


def _detach_lines(report: DetachReport, out: Printer) -> Iterator[str]:
    if report.dest is not None:
        yield f"{name_text(report.dest)}: {out.size(report.archive_bytes)}"
    extra = "" if report.exact else ", with the bytes between program and archive, which another tool attached"
    yield f"{name_text(report.program)}: {out.size(report.program_bytes)}{extra}"
