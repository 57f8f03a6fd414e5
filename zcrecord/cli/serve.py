"""`zcrecord serve`: an archive and a page that shows it, over HTTP, until Ctrl-C."""

from __future__ import annotations

import sys
import threading

from zcrecord.storage.files import is_url

from .endings import tell
from .parsers import Arguments, Parser, natural
from .render import Printer
from .stdio import check_file


def serve_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord serve`."""
    parser.add_argument("file", metavar="FILE", help="an archive; not an archive attached to a program")
    about = "port to listen on; 0 for any free port (default: 8000, or any free port if 8000 is taken)"
    parser.add_argument("--port", type=natural, metavar="N", help=about)
    about = "address to listen on (default: 127.0.0.1); other machines may then read all of FILE"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=about)
    about = "an archive with the tensors images (or inputs) and labels; the page runs the model on them, if it can"
    parser.add_argument("--samples", metavar="ARCHIVE", help=about)
    about = """a folder of the npm package onnxruntime-web, which runs the model; without it the browser fetches that
        from cdn.jsdelivr.net when the model is run"""
    parser.add_argument("--onnxruntime-web", metavar="FOLDER", help=about)
    parser.flag("--open", help="open the page in a browser")


def serve(args: Arguments) -> int:
    """Serve an archive, and a page that shows it in a browser, until Ctrl-C. Only programs on this machine can connect,
    unless --host names another address."""
    from . import serving

    if args.file == "-" or is_url(args.file):
        args.refuse("serve needs a file, not standard input or a URL")
    for given in (args.file, args.samples) if args.samples is not None else (args.file,):
        check_file(given)

    def started(url: str) -> None:
        if not serving.is_loopback(args.host):
            tell("zcrecord", f"every machine that can connect to {args.host} can read all of {args.file}")
        Printer(sys.stdout).line(url)
        if sys.stdout is not None:  # None: standard output is closed
            sys.stdout.flush()  # a program at the other end of a pipe may wait for the URL
            if sys.stdout.isatty():
                tell("zcrecord", "Ctrl-C ends the server")
        if args.open:
            import webbrowser  # here, because few ask for it

            threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()  # some return when they end

    def failed(reason: str) -> None:
        tell("zcrecord", f"error: a fault of serve itself, {reason}; please report it")

    options = args.values("samples", "host", "port")
    serving.serve(args.file, runtime=args.onnxruntime_web, **options, started=started, failed=failed)
    return 0
