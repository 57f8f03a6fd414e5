"""The commands `zcrecord` and `onnx2zc`: arguments, standard streams, and every failure as one line.

Exit status: 0; 1 if the input is at fault, or the disk; 2 for wrong usage; 130 after Ctrl-C, 141 where a pipe's reader
is gone. What is printed is left to `commands` and `render`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from . import __version__
from .errors import DependencyError, LimitError, RecordError, SourceError, printable
from .layout import ALIGNMENT, VERSION, check_alignment
from .loading import load_record

if TYPE_CHECKING:
    from .converting import ConvertReport

__all__ = ["main", "onnx2zc_main"]

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it
_PIPE_CLOSED = 141  # 128 + SIGPIPE
_LONGEST = 2000  # characters of an error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zcrecord` and return its exit status; wrong usage, --help and --version end in SystemExit."""
    return _guarded("zcrecord", lambda: _zcrecord(_zcrecord_arguments(arguments)))


def onnx2zc_main(arguments: Sequence[str] | None = None) -> int:
    """Run `onnx2zc` and return its exit status; wrong usage, --help and --version end in SystemExit."""
    parser = _onnx2zc_parser()
    return _guarded("onnx2zc", lambda: _onnx2zc(parser, parser.parse_args(arguments)))


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}, archive format {VERSION}")
    return parser


def _zcrecord_parser() -> argparse.ArgumentParser:
    parser = _parser("zcrecord", "Look into an archive of model weights. A size is in bytes; - is standard input.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, purpose: str, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose, description=description, allow_abbrev=False)
        added.add_argument("file", metavar="FILE", help="an archive; - for standard input, read into memory")
        added.add_argument("--json", action="store_true", help="print everything, as JSON")
        return added

    command("info", "sizes, types, what was saved, metadata", "Say what an archive is.")
    listing = command(
        "ls",
        "its tensors",
        "List tensors. Into a pipe: name, dtype, shape, bytes, offset, alignment and tie, with tabs between.",
    )
    listing.add_argument("patterns", nargs="*", metavar="PATTERN", help="names to list, such as 'encoder.*.weight'")
    listing.add_argument("--sort", choices=("saved", "name", "size"), default="saved", help="order (default: saved)")
    tree = command("tree", "its modules, tensors and attributes", "Show how modules, tensors and attributes nest.")
    tree.add_argument("--depth", type=_natural, metavar="N", help="leave out what is nested deeper")
    check = command("verify", "whether it is sound", "Check an archive; exit status 1 if anything is wrong with it.")
    levels = "touch: headers and structure; index: every rule of the index, too; full (default): all digests, too"
    check.add_argument("--level", choices=("touch", "index", "full"), default="full", help=levels)
    check.add_argument("--digest", action="store_true", help="print the content digest, the same for every layout")
    check.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    _add_convert(commands)
    return parser


def _add_convert(commands: Any) -> None:
    about = """Convert to and from archives (zcr): safetensors and npz both ways, torch, gguf and onnx into one. The
        format of IN is told by its first bytes, that of OUT by its suffix; - is standard input or output."""
    parser = commands.add_parser("convert", help="from and to other formats", description=about, allow_abbrev=False)
    parser.set_defaults(refuse=parser.error)
    parser.add_argument("source", metavar="IN", help="a file; - for standard input")
    parser.add_argument("dest", metavar="OUT", help="a file; - for standard output")
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="the format of IN, where it is not plain"
    )
    parser.add_argument("--to", dest="dest_format", metavar="FORMAT", help="the format of OUT: zcr, safetensors, npz")
    what = "write safetensors in files of at most this size, such as 5GB, with their index"
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help=what)
    _add_conversion_options(parser)


def _add_conversion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", "-f", action="store_true", help="replace OUT if it exists")
    what = f"of every payload of an archive, a power of two from 16 to 65536 (default: {ALIGNMENT})"
    parser.add_argument("--alignment", type=_alignment, default=ALIGNMENT, metavar="BYTES", help=what)
    parser.add_argument("--no-sync", action="store_true", help="do not wait until OUT would survive power loss")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    what = "print the report as JSON (on standard error if OUT is -)"
    parser.add_argument("--json", action="store_true", help=what)


def _zcrecord_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments; patterns may follow options, which argparse takes ill before Python 3.13."""
    parser = _zcrecord_parser()
    args, more = parser.parse_known_args(arguments)
    if more and (args.command != "ls" or any(m.startswith("-") for m in more)):
        parser.error(f"unrecognized arguments: {printable(' '.join(more))}")
    if more:
        args.patterns = [*args.patterns, *more]
    return args


def _onnx2zc_parser() -> argparse.ArgumentParser:
    about = "Convert an ONNX model to an archive, in one pass and in little memory; - is standard input or output."
    parser = _parser("onnx2zc", about)
    parser.add_argument("source", metavar="IN", help="an ONNX model; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: IN with .zcr for its suffix; - after IN of -")
    what = "accept external data behind symbolic and hard links, wherever they lead"
    parser.add_argument("--allow-links", action="store_true", help=what)
    _add_conversion_options(parser)
    return parser


def _natural(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < 0:
        raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a number from 0 on")
    return number


def _alignment(text: str) -> int:
    try:
        return check_alignment(_natural(text))
    except LimitError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _size(text: str) -> int:
    """Return a number of bytes: '5GB' as people in this field write it (10^9), '5GiB', '5000'."""
    number, unit = text.rstrip("BbKkMmGgTtIi"), text.lstrip("0123456789.").lower()
    power = "kmgt".find(unit[:1]) + 1 if unit else 0
    known = unit in ("", "b") or (power and unit[1:] in ("", "b", "ib"))
    with contextlib.suppress(ValueError, OverflowError):
        nbytes = int(float(number) * (1024 if unit[1:] == "ib" else 1000) ** power)
        if known and nbytes > 0:
            return nbytes
    raise argparse.ArgumentTypeError(f"'{printable(text)}' is not a size, such as 5GB or 500MiB")


def _zcrecord(args: argparse.Namespace) -> int:
    if args.command == "convert":
        return _convert(args)
    from . import commands
    from .render import Printer

    piped = args.file == "-"
    name = "standard input" if piped else args.file
    quiet = args.command == "verify" and args.quiet
    out, errors = Printer(None if quiet else sys.stdout), Printer(None if quiet else sys.stderr)
    with _located(name):
        source = _read_stdin() if piped else args.file
        if args.command == "verify":
            commands.verify(source, name, out, errors, level=args.level, digest=args.digest, as_json=args.json)
            return 0
        with load_record(source) as record:
            if args.command == "info":
                commands.info(record, name, out, as_json=args.json)
            elif args.command == "ls":
                commands.ls(record, out, as_json=args.json, sort=args.sort, patterns=args.patterns)
            else:
                commands.tree(record, name, out, as_json=args.json, depth=args.depth)
    return 0


def _onnx2zc(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from . import onnx

    dest = args.dest if args.dest is not None else _default_dest(parser, args.source)
    return _run_conversion("onnx2zc", args, dest, parser.error, onnx.convert, allow_links=args.allow_links)


def _convert(args: argparse.Namespace) -> int:
    from . import formats

    for given in (args.source_format, args.dest_format):
        if given is not None and given not in formats.FORMATS:
            args.refuse(f"format '{printable(given)}' is not known; {', '.join(formats.FORMATS)}")
    options = {name: getattr(args, name) for name in ("source_format", "dest_format", "max_shard_size")}
    return _run_conversion("zcrecord", args, args.dest, args.refuse, formats.convert, **options)


def _run_conversion(
    prog: str,
    args: argparse.Namespace,
    dest: str,
    refuse: Callable[[str], object],
    convert: Callable[..., ConvertReport],
    **options: Any,
) -> int:
    """Convert from and to files or standard streams; progress and report go where they are in nobody's way."""
    from . import commands
    from .render import Printer, showing_progress

    if args.source == "-" and sys.stdin is not None and sys.stdin.isatty():
        refuse("standard input is a terminal; pipe a model into it, or name a file")
    if dest == "-" and sys.stdout is not None and sys.stdout.isatty():
        refuse("standard output is a terminal, and an archive is no text; redirect it, or name OUT")
    source = _binary(sys.stdin, "input") if args.source == "-" else args.source
    sink = _binary(sys.stdout, "output") if dest == "-" else dest
    known = _size_ahead(source) if args.source == "-" else None
    report_on = sys.stderr if dest == "-" else sys.stdout
    alone = args.json and dest == "-"  # nothing but the report is then on standard error
    errors = Printer(None if args.quiet or alone else sys.stderr)
    name = "standard input" if args.source == "-" else args.source
    with _located(name), _ending_on_signals(), showing_progress(prog, errors) as progress:
        report = convert(
            source,
            sink,
            alignment=args.alignment,
            force=args.force,
            durable=not args.no_sync,
            progress=lambda done, total: progress(done, known if total is None else total),
            **options,
        )
    if not args.quiet:
        commands.converted(report, Printer(report_on), as_json=args.json)
    return 0


def _default_dest(parser: argparse.ArgumentParser, source: str) -> str:
    if source != "-":
        path = Path(source)
        return str(path.with_suffix(".zcr")) if path.name else f"{source}.zcr"
    if sys.stdout is not None and sys.stdout.isatty():
        parser.error("OUT is required where IN is standard input and standard output a terminal")
    return "-"


def _binary(stream: Any, what: str) -> Any:
    """Return the bytes under a standard stream.

    Raises:
        SourceError: the process was started without it.
    """
    if stream is None:
        raise SourceError("it is closed", path=f"standard {what}")
    return stream.buffer


def _read_stdin() -> Any:
    try:
        return _binary(sys.stdin, "input").read()
    except OSError as error:
        if isinstance(error, RecordError):
            raise
        raise SourceError(f"cannot be read: {error.strerror or error}", errno=error.errno) from error


def _size_ahead(stream: BinaryIO) -> int | None:
    """Return how many bytes there are to read from where a regular file is; None for a pipe."""
    with contextlib.suppress(OSError, ValueError):
        status = os.fstat(stream.fileno())
        if stat.S_ISREG(status.st_mode):
            return max(status.st_size - stream.tell(), 0)
    return None


@contextlib.contextmanager
def _located(name: str) -> Iterator[None]:
    """Name the input in errors that do not say what they are about."""
    try:
        yield
    except DependencyError:
        raise
    except RecordError as error:
        raise error.located(path=name) from error.__cause__


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end the program as Ctrl-C does, by an exception, so that scratch files are removed."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP")):
            if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup has SIGHUP ignored
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _guarded(prog: str, work: Callable[[], int]) -> int:
    """Return the exit status of `work`; whatever goes wrong becomes one line on standard error, never a traceback."""
    try:
        try:
            return work()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # here, where its failing can be told
    except BrokenPipeError:
        _spare_stdout()
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        _tell(prog, "interrupted")
        return _INTERRUPTED
    except MemoryError:
        _tell(prog, "error: out of memory")
    except RecordError as error:
        _tell(prog, f"error: {error}")
    except OSError as error:  # the library's own are RecordErrors
        _tell(prog, f"error: {error.filename or 'standard output'}: {error.strerror or error}")
        _spare_stdout()
    except Exception as error:
        if sys.flags.dev_mode:
            raise
        what = f"{type(error).__name__}: {error}; please report it, python -X dev shows where"
        _tell(prog, f"error: a fault of {prog} itself, {what}")
    return 1


def _tell(prog: str, what: str) -> None:
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(f"{prog}: {printable(what, _LONGEST)}", file=sys.stderr)


def _spare_stdout() -> None:
    """Where standard output failed for good, have the interpreter not try it once more at its end, and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
