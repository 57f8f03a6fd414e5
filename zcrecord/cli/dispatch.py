"""The commands `zcrecord` and `onnx2zc`: who does what they ask for.

Exit status: 0; 1 if the input is at fault, the disk, or the reader of a conversion; 2 for wrong usage. `diff` has
it as diff has: 1 if there are differences, 2 for any fault. Ctrl-C ends every command with 130. What only prints ends
with 141, silently, where a pipe's reader is gone. What may be said is left to `arguments`, what is printed to
`commands`, `checks` and `render`, what standard streams are to `streams`, how commands end to `endings`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from zcrecord.errors import SourceError, printable
from zcrecord.record.load import load_record
from zcrecord.storage.memory import is_url

from .arguments import onnx2zc_arguments, zcrecord_arguments
from .endings import guarded, located, tell, writing
from .stdio import binary, check_file, read_stdin, size_ahead

if TYPE_CHECKING:
    import argparse

__all__ = ["main", "onnx2zc_main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `zcrecord` and return its exit status; wrong usage, --help and --version end in SystemExit."""
    return guarded("zcrecord", lambda: _zcrecord(zcrecord_arguments(arguments)))


def onnx2zc_main(arguments: Sequence[str] | None = None) -> int:
    """Run `onnx2zc` and return its exit status; wrong usage, --help and --version end in SystemExit."""
    return guarded("onnx2zc", lambda: _onnx2zc(onnx2zc_arguments(arguments)))


def _zcrecord(args: argparse.Namespace) -> int:
    if args.command in _OF_FILES:
        return _OF_FILES[args.command](args)
    from . import compare, inspect
    from .render import Printer

    piped = args.file == "-"
    name = "standard input" if piped else args.file
    quiet = args.command in ("verify", "check") and args.quiet
    out, errors = Printer(None if quiet else sys.stdout), Printer(None if quiet else sys.stderr)
    with located(name):
        source = read_stdin() if piped else args.file
        if args.command == "verify" and name.lower().endswith(".onnx"):
            compare.verify_external(name, out, errors, level=args.level, as_json=args.json)
            return 0
        if args.command == "verify":
            compare.verify(source, name, out, errors, level=args.level, digest=args.digest, as_json=args.json)
            return 0
        with load_record(source) as record:
            if args.command == "info":
                inspect.info(record, name, out, errors, digest=args.digest, as_json=args.json)
            elif args.command == "check":
                compare.check(record, name, args.key, out, errors, as_json=args.json)
            elif args.command == "ls":
                inspect.ls(record, out, as_json=args.json, sort=args.sort, patterns=args.patterns)
            else:
                inspect.tree(record, name, out, as_json=args.json, depth=args.depth)
    return 0


def _onnx2zc(args: argparse.Namespace) -> int:
    from zcrecord import onnx

    options = {
        name: getattr(args, name) for name in ("alignment", "allow_links", "select", "exclude", "verify", "dry_run")
    }
    return _run("onnx2zc", args, onnx.convert, **options)


def _convert(args: argparse.Namespace) -> int:
    from zcrecord import formats

    for given in (args.source_format, args.dest_format):
        if given is not None and given not in formats.FORMATS:
            args.refuse(f"format '{printable(given)}' is not known; {', '.join(formats.FORMATS)}")
    names = ("alignment", "source_format", "dest_format", "max_shard_size")
    return _run("zcrecord", args, formats.convert, **{name: getattr(args, name) for name in names})


def _to_onnx(args: argparse.Namespace) -> int:
    from zcrecord import onnx

    def to_onnx(source: Any, dest: Any, **options: Any) -> Any:
        return onnx.to_onnx(source if isinstance(source, str) else read_stdin(), dest, **options)

    if args.external and "-" in (args.source, args.dest):
        args.refuse("--external refers to a file from a file: neither can be -")
    return _run("zcrecord", args, to_onnx, external=args.external)


def _pack(args: argparse.Namespace) -> int:
    from zcrecord import transport

    if not 1 <= args.level <= 22:
        args.refuse(f"level {args.level} is not from 1 to 22")
    return _run("zcrecord", args, transport.pack, level=args.level, threads=args.threads or None)


def _unpack(args: argparse.Namespace) -> int:
    from zcrecord import transport

    return _run("zcrecord", args, transport.unpack, threads=args.threads or None)


def _sign(args: argparse.Namespace) -> int:
    from . import compare
    from .render import Printer

    check_file(args.file)
    options = {"passphrase": _passphrase(args.key), "force": args.force, "durable": not args.no_sync}
    out, errors = (Printer(None if args.quiet else stream) for stream in (sys.stdout, sys.stderr))
    with writing(args.file):
        compare.sign(args.file, args.key, args.output, out, errors, as_json=args.json, **options)
    return 0


def _passphrase(key: str) -> bytes | None:
    """Return what a private key is encrypted with, asked for where there is somebody to ask; None if it is not."""
    from zcrecord.integrity import signing

    given = os.environ.get("ZCRECORD_PASSPHRASE")
    if given is not None or not signing.is_encrypted(key):
        return None if given is None else os.fsencode(given)
    if sys.stdin is None or not sys.stdin.isatty():
        raise SourceError("is encrypted; $ZCRECORD_PASSPHRASE has to hold its passphrase", path=key)
    import getpass  # here, because few keys are

    return getpass.getpass(f"Passphrase of {printable(key)}: ").encode()


def _diff(args: argparse.Namespace) -> int:
    """Return 0, 1 for differences, 2 for a fault, as diff does."""
    from . import compare
    from .render import Printer

    if args.file == args.other == "-":
        args.refuse("only one of the two can be standard input")
    out, errors = (Printer(None if args.quiet else stream) for stream in (sys.stdout, sys.stderr))
    different = False

    def work() -> int:
        nonlocal different
        options = {"fast": args.fast, "metadata": not args.no_metadata, "as_json": args.json}
        with contextlib.ExitStack() as stack:
            before, after = (stack.enter_context(_opened(given)) for given in (args.file, args.other))
            different = compare.diff(before, after, (args.file, args.other), out, errors, **options)
        return 0

    status = guarded("zcrecord", work)
    return 2 if status == 1 else status or int(different)


def _opened(given: str) -> Any:
    with located("standard input" if given == "-" else given):
        return load_record(read_stdin() if given == "-" else given)


def _report(args: argparse.Namespace) -> int:
    from zcrecord import report

    return _run("zcrecord", args, report.report, digest=args.digest)


def _embed(args: argparse.Namespace) -> int:
    from zcrecord import embed
    from zcrecord.embed.generator import out_of_place

    from . import inspect
    from .render import Printer

    names = ("blob", "assembly", "prefix", "section", "alignment", "reader")
    options = {name: getattr(args, name) for name in names}
    if wrong := out_of_place(args.lang, options):
        args.refuse(f"--{wrong}")
    check_file(args.source)
    chosen = {name: getattr(args, name) for name in ("select", "exclude", "name", "force")}
    with writing(args.source):
        report = embed.generate(args.source, args.output, lang=args.lang, **options, **chosen)
    if not args.quiet:
        inspect.embedded(report, Printer(sys.stdout), as_json=args.json)
    return 0


def _attach(args: argparse.Namespace) -> int:
    from zcrecord import embed

    from . import inspect
    from .render import Printer, showing_progress

    errors = Printer(None if args.quiet else sys.stderr)
    options = {"force": args.force, "durable": not args.no_sync}
    for given in (args.program, args.archive):
        check_file(given)
    with writing(args.program), showing_progress("attaching", errors) as progress:
        report = embed.attach(args.program, args.archive, args.output, progress=progress, **options)
    if not args.quiet:
        inspect.attached(report, Printer(sys.stdout), as_json=args.json)
    return 0


def _detach(args: argparse.Namespace) -> int:
    from zcrecord import embed

    from . import inspect
    from .render import Printer

    if args.discard and (args.keep or args.output is not None):
        args.refuse("--discard throws the archive away: neither --keep nor --output goes with it")
    check_file(args.program)
    options = {"keep": args.keep, "discard": args.discard, "force": args.force, "durable": not args.no_sync}
    with writing(args.program):
        report = embed.detach(args.program, args.output, **options)
    if not args.quiet:
        inspect.detached(report, Printer(sys.stdout), as_json=args.json)
    return 0


def _serve(args: argparse.Namespace) -> int:
    from . import serving
    from .render import Printer

    if args.file == "-" or is_url(args.file):
        args.refuse("serve takes a file")
    for given in (args.file, args.samples) if args.samples is not None else (args.file,):
        check_file(given)

    def started(url: str) -> None:
        if not serving.is_loopback(args.host):
            tell("zcrecord", f"whoever reaches {args.host} can read all of {args.file}")
        Printer(sys.stdout).line(url)
        if sys.stdout is not None:  # it is closed where nobody is to be told
            sys.stdout.flush()  # whoever waits for it may be a pipe
            if sys.stdout.isatty():
                tell("zcrecord", "Ctrl-C ends it")
        if args.open:
            import webbrowser  # here, because few ask for it

            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some return when they end

    def failed(what: str) -> None:
        tell("zcrecord", f"error: a fault of serve itself, {what}; please report it")

    where = {"host": args.host, "port": args.port}
    serving.serve(args.file, samples=args.samples, **where, started=started, failed=failed)
    return 0


def _completion(args: argparse.Namespace) -> int:
    from . import completion

    print(completion.script(args.shell))
    return 0


_OF_FILES = {
    "completion": _completion,
    "serve": _serve,
    "sign": _sign,
    "diff": _diff,
    "convert": _convert,
    "to-onnx": _to_onnx,
    "pack": _pack,
    "unpack": _unpack,
    "report": _report,
    "embed": _embed,
    "attach": _attach,
    "detach": _detach,
}


def _run(prog: str, args: argparse.Namespace, convert: Callable[..., Any], **options: Any) -> int:
    """Convert from and to files or standard streams; progress and report go where they are in nobody's way."""
    from . import inspect
    from .render import Printer, showing_progress

    if args.source == "-" and sys.stdin is not None and sys.stdin.isatty():
        args.refuse("standard input is a terminal; pipe something into it, or name a file")
    if args.dest == "-" and sys.stdout is not None and sys.stdout.isatty():
        args.refuse("standard output is a terminal, and this is no text; redirect it, or name OUT")
    source = binary(sys.stdin, "input") if args.source == "-" else args.source
    sink = binary(sys.stdout, "output") if args.dest == "-" else args.dest
    known = size_ahead(source) if args.source == "-" else None
    report_on = sys.stderr if args.dest == "-" else sys.stdout
    alone = args.json and args.dest == "-"  # nothing but the report is then on standard error
    errors = Printer(None if args.quiet or alone else sys.stderr)
    name = "standard input" if args.source == "-" else args.source
    with writing(name), showing_progress(prog, errors) as progress:
        report = convert(
            source,
            sink,
            force=args.force,
            durable=not args.no_sync,
            progress=lambda done, total: progress(done, known if total is None else total),
            **options,
        )
    if not args.quiet:
        inspect.converted(report, Printer(report_on), as_json=args.json)
    return 0
