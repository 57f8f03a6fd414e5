"""What may be said on the command lines of `zcrecord` and `onnx2zc`, and what is wrong with it.

Wrong usage ends in SystemExit with status 2, as argparse has it. What is done with the arguments is left to `cli`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from zcrecord import __version__
from zcrecord.codec.layout import ALIGNMENT, VERSION, check_alignment
from zcrecord.errors import LimitError, printable
from zcrecord.storage.compressed import SUFFIXES
from zcrecord.storage.memory import is_url

from .render import columns_of, wrapped

__all__ = ["onnx2zc_arguments", "onnx2zc_parser", "zcrecord_arguments", "zcrecord_parser"]


class _Formatter(argparse.HelpFormatter):
    """Help whose usage fits a narrow terminal, too."""

    def _format_usage(self, *arguments: Any) -> str:
        usage = super()._format_usage(*arguments)
        width = columns_of(sys.stdout)
        if max(map(len, usage.splitlines()), default=0) <= width:
            return usage
        together = re.sub(r"\[[^][]*\]", lambda found: found[0].replace(" ", "\0"), " ".join(usage.split()))
        told = textwrap.fill(together, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        return told.replace("\0", " ") + "\n\n"


class _Parser(argparse.ArgumentParser):
    """A parser as all of ours are: no abbreviations, and nothing wider than the terminal."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **options)

    def error(self, message: str) -> NoReturn:
        """Print the usage and what is wrong, and end with status 2."""
        if sys.stderr is not None:
            self.print_usage(sys.stderr)
            print(wrapped(f"{self.prog}: error: {message}", sys.stderr), file=sys.stderr)
        self.exit(2)


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=description)
    parser.add_argument("--version", action="version", version=f"{prog} {__version__}, archive format {VERSION}")
    return parser


def zcrecord_parser() -> argparse.ArgumentParser:
    """Return the parser of `zcrecord`, with one for each command."""
    parser = _parser("zcrecord", "Look into an archive of model weights. A size is in bytes; - is standard input.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, purpose: str, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=purpose, description=description)
        added.add_argument("file", metavar="FILE", help="an archive; - for standard input, read into memory")
        added.add_argument("--json", action="store_true", help="print everything, as JSON")
        return added

    about = "Say what an archive is; of one of up to 64 MiB its content digest, too."
    telling = command("info", "sizes, types, what was saved, metadata", about)
    what = "print the content digest, too, the same for every layout: reads all of it"
    telling.add_argument("--digest", action=argparse.BooleanOptionalAction, default=None, help=what)
    listing = command(
        "ls",
        "its tensors",
        "List tensors. Into a pipe: name, dtype, shape, bytes, offset, alignment and tie, with tabs between.",
    )
    listing.add_argument(
        "patterns", nargs="*", default=[], metavar="PATTERN", help="names to list, such as 'encoder.*.weight'"
    )
    listing.add_argument("--sort", choices=("saved", "name", "size"), default="saved", help="order (default: saved)")
    tree = command("tree", "its modules, tensors and attributes", "Show how modules, tensors and attributes nest.")
    tree.add_argument("--depth", type=_natural, metavar="N", help="leave out what is nested deeper")
    about = """Check an archive; exit status 1 if anything is wrong with it, and all that is damaged is listed. Of an
        .onnx file whose weights lie in an archive (to-onnx --external), check that it still is that archive."""
    check = command("verify", "whether it is sound", about)
    levels = "touch: headers and structure; index: every rule of the index, too; full (default): all digests, too"
    check.add_argument("--level", choices=("touch", "index", "full"), default="full", help=levels)
    check.add_argument("--digest", action="store_true", help="print the content digest, the same for every layout")
    check.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    _add_signing(commands)
    _add_diff(commands)
    _add_convert(commands)
    _add_to_onnx(commands)
    _add_packing(commands)
    _add_report(commands)
    _add_embed(commands)
    _add_attaching(commands)
    _add_serve(commands)
    about = """Print what makes a shell complete these commands. In bash and zsh: eval "$(zcrecord completion bash)"; in
        fish: zcrecord completion fish | source"""
    completing = commands.add_parser("completion", help="for a shell", description=about)
    completing.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    return parser


def _add_signing(commands: Any) -> None:
    about = """Add an Ed25519 signature of the content digest to an archive's metadata. It stays good however the
        archive is laid out, packed or converted; metadata are not covered. A key: openssl genpkey -algorithm ed25519"""
    parser = commands.add_parser("sign", help="say whose it is", description=about)
    parser.add_argument("file", metavar="FILE", help="an archive, which is replaced")
    what = "private key, PEM or OpenSSH; where it is encrypted, $ZCRECORD_PASSPHRASE has its passphrase, or it is asked"
    parser.add_argument("--key", required=True, metavar="KEY", help=what)
    parser.add_argument("--output", "-o", metavar="OUT", help="leave FILE as it is, and write this")
    _add_output_options(parser)
    about = """Check that an archive was signed by the owner of a key, and is what was signed; exit status 1 if not.
        Tensors, modules and attributes are covered, metadata are not."""
    parser = commands.add_parser("check", help="whether it is signed", description=about)
    parser.add_argument("file", metavar="FILE", help="an archive; - for standard input, read into memory")
    what = "public key, PEM or OpenSSH; given several times, each has to have signed"
    parser.add_argument("--key", required=True, action="append", metavar="PUB", help=what)
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _add_diff(commands: Any) -> None:
    about = """Compare two archives by what they hold, however they are laid out. Exit status 0 if it is the same, 1 if
        not, 2 if that cannot be told. Into a pipe: +, - or !, what, name, before, after, difference, with tabs
        between."""
    parser = commands.add_parser("diff", help="what two do not have in common", description=about)
    parser.add_argument("file", metavar="A", help="an archive; one of the two may be - for standard input")
    parser.add_argument("other", metavar="B", help="an archive")
    what = "take payloads of the same digest for the same, unread: for archives that nobody has made up"
    parser.add_argument("--fast", action="store_true", help=what)
    parser.add_argument("--no-metadata", action="store_true", help="leave out metadata, and so signatures")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the differences as JSON")


def _add_convert(commands: Any) -> None:
    about = """Convert to and from archives (zcr): safetensors and npz both ways, torch, gguf and onnx into one. The
        format of IN is told by its first bytes, that of OUT by its suffix; - is standard input or output."""
    parser = commands.add_parser("convert", help="from and to other formats", description=about)
    parser.add_argument("source", metavar="IN", help="a file, or a folder with one model in it; - for standard input")
    parser.add_argument("dest", metavar="OUT", help="a file; - for standard output")
    parser.add_argument(
        "--from", dest="source_format", metavar="FORMAT", help="the format of IN, where it is not plain"
    )
    parser.add_argument("--to", dest="dest_format", metavar="FORMAT", help="the format of OUT: zcr, safetensors, npz")
    what = "write safetensors in files of at most this size, such as 5GB, with their index"
    parser.add_argument("--max-shard-size", type=_size, metavar="SIZE", help=what)
    _add_alignment(parser)
    _add_output_options(parser)


def _add_to_onnx(commands: Any) -> None:
    about = """Write the model in an archive that was made from ONNX as ONNX again. With --external its weights stay in
        the archive, which has to lie in OUT's folder or below it."""
    parser = commands.add_parser("to-onnx", help="back to ONNX", description=about)
    parser.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input, read into memory")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE with .onnx for its suffix")
    what = "leave the weights in the archive, as external data"
    parser.add_argument("--external", action="store_true", help=what)
    _add_output_options(parser)


def _add_packing(commands: Any) -> None:
    about = "Pack an archive for transport, as zstd frames that begin where payloads do; zstd -d unpacks it, too."
    pack = commands.add_parser("pack", help="to .zcr.zst, for transport", description=about)
    pack.add_argument("source", metavar="ARCHIVE", help="an archive; - for standard input")
    pack.add_argument("dest", metavar="OUT", nargs="?", help="default: ARCHIVE with .zst after it")
    what = "zstd's, from 1 to 22; more than 1, the default, takes longer and gains little on weights"
    pack.add_argument("--level", type=_natural, default=1, metavar="N", help=what)
    about = "Unpack an archive: its very bytes, checked as they come."
    unpack = commands.add_parser("unpack", help="from .zcr.zst", description=about)
    unpack.add_argument("source", metavar="PACKED", help="a packed archive; - for standard input")
    unpack.add_argument("dest", metavar="OUT", nargs="?", help="default: PACKED without .zst")
    for parser in (pack, unpack):
        parser.add_argument("--threads", type=_natural, metavar="N", help="default: one for each core")
        _add_output_options(parser)


def _add_report(commands: Any) -> None:
    about = """Show an archive as one HTML file that needs no server: its tree, what takes the bytes, where they lie,
        what was saved. The same archive gives the same file."""
    parser = commands.add_parser("report", help="as a web page", description=about)
    parser.add_argument("source", metavar="FILE", help="an archive, a URL of one; - for standard input")
    what = "- for standard output (default: FILE with .html for its suffix, - where FILE is -)"
    parser.add_argument("--output", "-o", dest="dest", metavar="OUT", help=what)
    what = "compute the content digest for it: reads all of FILE"
    parser.add_argument("--digest", action="store_true", help=what)
    _add_output_options(parser)


def _add_embed(commands: Any) -> None:
    about = """Write sources that make an archive's tensors constants of a program. C, C++, assembler and Rust take the
        bytes from the archive itself while they are built; what is written says how."""
    parser = commands.add_parser("embed", help="constants in a program", description=about)
    parser.add_argument("source", metavar="ARCHIVE", help="an archive, a file of its own")
    what = "c: .S and .h; cpp: .S and .hpp, of a blob as for c; asm: .S and .inc; rust: .rs; python: .py"
    parser.add_argument("--lang", required=True, choices=("c", "cpp", "asm", "rust", "python"), help=what)
    parser.add_argument("--output", "-o", default=".", metavar="DIR", help="where they go (default: here)")
    what = """C, C++, assembler: the archive as one constant, which zcrecord.h can open, by .incbin; C and C++ also by
        C23's #embed, or as string literals, which every compiler takes"""
    parser.add_argument("--blob", choices=("incbin", "embed", "string"), help=what)
    what = "Rust: place each tensor by global_asm!, for large archives; the linker then drops what is not used"
    parser.add_argument("--assembly", action="store_true", help=what)
    what = "only tensors whose names match, such as 'encoder.*'; may be given several times"
    parser.add_argument("--select", action="append", metavar="PATTERN", help=what)
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help="leave out tensors whose names match")
    what = """before every identifier, may be empty (default: the archive's stem and an underscore; in C++ and Rust,
        which have a namespace and a module, nothing)"""
    parser.add_argument("--prefix", metavar="TEXT", help=what)
    what = "of files, namespace and the like (default: the archive's stem, as an identifier in lower case)"
    parser.add_argument("--name", metavar="NAME", help=what)
    what = "section for the payloads, which the linker script must know (default: .rodata)"
    parser.add_argument("--section", metavar="NAME", help=what)
    what = "at least, of every tensor, a power of two from 16 to 65536"
    parser.add_argument("--alignment", type=_alignment, metavar="BYTES", help=what)
    what = "write zcrecord.h or zcrecord.rs, too, which open archives at run time"
    parser.add_argument("--reader", action="store_true", help=what)
    parser.add_argument("--force", "-f", action="store_true", help="replace files that this command did not write")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_attaching(commands: Any) -> None:
    about = """Append an archive to an executable, which runs as before and finds its weights in itself:
        load_record(sys.executable), or zcr_open_suffix in C."""
    attach = commands.add_parser("attach", help="append to an executable", description=about)
    attach.add_argument("program", metavar="PROGRAM", help="an executable; one attached before is replaced")
    attach.add_argument("archive", metavar="ARCHIVE", help="an archive, a file of its own")
    attach.add_argument("--output", "-o", metavar="OUT", help="leave PROGRAM as it is, and write this")
    about = "Take an attached archive off an executable again, into a file of its own."
    detach = commands.add_parser("detach", help="take it off again", description=about)
    detach.add_argument("program", metavar="PROGRAM", help="an executable with an archive attached")
    detach.add_argument("--output", "-o", metavar="ARCHIVE", help="where the archive goes (default: PROGRAM.zcr)")
    detach.add_argument("--keep", action="store_true", help="write the archive, and leave PROGRAM as it is")
    detach.add_argument("--discard", action="store_true", help="throw the archive away")
    what = "replace OUT if it exists; attach to text, scripts, zips and signed programs, too, which may not run then"
    attach.add_argument("--force", "-f", action="store_true", help=what)
    detach.add_argument("--force", "-f", action="store_true", help="replace ARCHIVE if it exists")
    for parser in (attach, detach):
        parser.add_argument("--no-sync", action="store_true", help="do not wait until it would survive power loss")
        parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
        parser.add_argument("--json", action="store_true", help="print the report as JSON")


def _add_serve(commands: Any) -> None:
    about = """Serve an archive and a page that looks into it, tensor by tensor, until Ctrl-C. Only this machine can
        reach it, unless --host says otherwise."""
    parser = commands.add_parser("serve", help="look into it in a browser", description=about)
    parser.add_argument("file", metavar="FILE", help="an archive, a file of its own")
    what = "where to listen: 0 for any port that is free (default: 8000, or any if that is taken)"
    parser.add_argument("--port", type=_natural, metavar="N", help=what)
    what = "address to listen on (default: 127.0.0.1); others than this machine may then read all of FILE"
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help=what)
    what = "an archive with images and labels, for a model that the page can run"
    parser.add_argument("--samples", metavar="ARCHIVE", help=what)
    parser.add_argument("--open", action="store_true", help="open a browser there, too")


def _add_alignment(parser: argparse.ArgumentParser) -> None:
    what = f"of every payload of an archive, a power of two from 16 to 65536 (default: {ALIGNMENT})"
    parser.add_argument("--alignment", type=_alignment, default=ALIGNMENT, metavar="BYTES", help=what)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", "-f", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--no-sync", action="store_true", help="do not wait until OUT would survive power loss")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing but errors")
    what = "print the report as JSON (on standard error if OUT is -)"
    parser.add_argument("--json", action="store_true", help=what)


def zcrecord_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of `zcrecord`; `refuse` of them ends with status 2.

    Patterns may follow options, which argparse takes ill before Python 3.13.
    """
    parser = zcrecord_parser()
    args, more = parser.parse_known_args(arguments)
    if more and (args.command != "ls" or any(m.startswith("-") for m in more)):
        parser.error(f"unrecognized arguments: {printable(' '.join(more))}")
    if more:
        args.patterns = [*args.patterns, *more]
    args.refuse = parser.error
    suffixes = {"to-onnx": ((".zst", ".zcr"), ".onnx"), "pack": ((), ".zst"), "unpack": ((".zst",), "")}
    suffixes["report"] = ((".zst", ".zcr"), ".html")
    if args.command in suffixes and args.dest is None:
        args.dest = _default_dest(args, *suffixes[args.command])
    return args


def onnx2zc_parser() -> argparse.ArgumentParser:
    """Return the parser of `onnx2zc`."""
    about = """Convert an ONNX model to an archive, in one pass and in little memory; - is standard input or output, and
        what zstd or gzip compressed is decompressed on the way."""
    parser = _parser("onnx2zc", about)
    parser.add_argument("source", metavar="IN", help="an ONNX model; - for standard input")
    parser.add_argument("dest", metavar="OUT", nargs="?", help="default: IN with .zcr for its suffix; - after IN of -")
    what = "convert only tensors whose names match, such as 'encoder.*'; may be given several times"
    parser.add_argument("--select", action="append", metavar="PATTERN", help=what)
    what = "leave out tensors whose names match; both leave out the graph"
    parser.add_argument("--exclude", action="append", metavar="PATTERN", help=what)
    what = "read IN again and OUT back, and compare, before OUT is replaced"
    parser.add_argument("--verify", action="store_true", help=what)
    parser.add_argument("--dry-run", action="store_true", help="read everything, write nothing, say what would be")
    what = "accept external data behind symbolic and hard links, wherever they lead"
    parser.add_argument("--allow-links", action="store_true", help=what)
    _add_alignment(parser)
    _add_output_options(parser)
    return parser


def onnx2zc_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments of `onnx2zc`; `refuse` of them ends with status 2."""
    parser = onnx2zc_parser()
    args = parser.parse_args(arguments)
    args.refuse = parser.error
    if args.dest is None:
        args.dest = _default_dest(args, (*SUFFIXES, ".onnx"), ".zcr")
    if args.verify and (args.dry_run or "-" in (args.source, args.dest)):
        parser.error("--verify reads IN again and OUT back: both have to be files")
    return args


def _default_dest(args: argparse.Namespace, off: tuple[str, ...], on: str) -> str:
    """Return the source's name with a suffix in the place of those that it may have."""
    if is_url(args.source):
        args.refuse("OUT is required where the source is a URL")
    if args.source == "-":
        if sys.stdout is not None and sys.stdout.isatty():
            args.refuse("OUT is required where IN is standard input and standard output a terminal")
        return "-"
    with contextlib.suppress(OSError, ValueError):  # what is wrong with it is told when it is opened
        if stat.S_ISFIFO(os.stat(args.source).st_mode):  # such as <(...), beside which nobody looks for OUT
            args.refuse("OUT is required where the source is a pipe; - is standard output")
    name = str(args.source)
    for suffix in off:
        name = name.removesuffix(suffix)
    if off and name == args.source and on:
        path = Path(name)
        return str(path.with_suffix(on)) if path.name else f"{name}{on}"
    if off and name == args.source:
        args.refuse(f"OUT is required where IN does not end in {off[0]}")
    return name + on


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
