"""`zcrecord sign` and `zcrecord check`: signatures of archives."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from zcrecord.errors import RecordError, SourceError, printable
from zcrecord.record.record import Record

from .endings import error_json, writing
from .parsers import Arguments, Parser, add_archive, add_json, add_output_options, add_quiet
from .render import Printer, printers, showing_progress, shown
from .stdio import check_file, name_of, opened_archive


def sign_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord sign`."""
    parser.description = """Add an Ed25519 signature of the content digest to an archive's metadata. It stays valid when
        the archive is saved with another layout, packed or converted. Metadata are not covered. Make a key with:
        openssl genpkey -algorithm ed25519 -out key.pem"""
    parser.add_argument("file", metavar="FILE", help="an archive, which is replaced")
    about = "private key, PEM or OpenSSH; the passphrase is read from $ZCRECORD_PASSPHRASE, or from the terminal"
    parser.add_argument("--key", required=True, metavar="KEY", help=about)
    about = "write the signed archive to OUT, and leave FILE unchanged"
    parser.add_argument("--output", "-o", metavar="OUT", help=about)
    add_output_options(parser)


def sign(args: Arguments) -> int:
    """Sign an archive."""
    check_file(args.file)
    options = {"passphrase": _passphrase(args.key), "force": args.force, "durable": not args.no_sync}
    out, errors = printers(args.quiet)
    with writing(args.file):
        _sign(args.file, args.key, args.output, out, errors, as_json=args.json, **options)
    return 0


def _passphrase(key: str) -> bytes | None:
    """Return the passphrase of an encrypted private key, asked for on a terminal; None if the key is not encrypted."""
    from zcrecord import integrity

    given = os.environ.get("ZCRECORD_PASSPHRASE")
    if given is not None or not integrity.is_encrypted_key(key):
        return None if given is None else os.fsencode(given)
    if sys.stdin is None or not sys.stdin.isatty():
        raise SourceError("is encrypted; set $ZCRECORD_PASSPHRASE to its passphrase", path=key)
    import getpass  # here, because few keys are

    return getpass.getpass(f"Passphrase of {printable(key)}: ").encode()


def _sign(
    path: str, key: str, dest: str | None, out: Printer, progress_on: Printer, *, as_json: bool, **options: Any
) -> None:
    """Sign an archive, and print the signed digest.

    Raises:
        RecordError: the archive cannot be signed.
    """
    from zcrecord import integrity  # here, because few need cryptography

    with showing_progress("signing", progress_on) as progress:
        report = integrity.sign(path, key, dest, progress=progress, **options)
    if as_json:
        out.json(asdict(report))
        return
    again = ", in the place of its last signature" if report.replaced else ""
    out.line(f"{shown(report.dest)}: {report.content_digest} signed by the key {report.key}{again}")


def check_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord check`."""
    parser.description = """Check that the owner of a key signed an archive, and that it has not changed since. Exit
        status 1 if not. Tensors, modules and attributes are covered, metadata are not."""
    add_archive(parser)
    about = "public key, PEM or OpenSSH; if given several times, the owner of each key has to have signed"
    parser.add_argument("--key", required=True, action="append", metavar="PUB", help=about)
    add_quiet(parser)
    add_json(parser, "the result")


def check(args: Arguments) -> int:
    """Check the signatures of an archive."""
    out, errors = printers(args.quiet)
    with opened_archive(args.file, args.embedded) as record:
        _check(record, name_of(args.file), args.key, out, errors, as_json=args.json)
    return 0


def _check(
    record: Record, name: str, keys: Sequence[str], out: Printer, progress_on: Printer, *, as_json: bool
) -> None:
    """Check that the owner of each key signed a record's contents, and print the result.

    Raises:
        RecordError: one of them did not.
    """
    from zcrecord import integrity

    result: dict[str, Any] = {"file": name, "ok": True, "signed_by": integrity.signers(record), "checked": []}
    try:
        with showing_progress("checking", progress_on) as progress:
            for key in keys:
                result["checked"].append(
                    {"file": key, "key": integrity.check_signature(record, key, progress=progress)}
                )
    except RecordError as error:
        if as_json:
            out.json({**result, "ok": False, "error": error_json(error)})
        raise
    if as_json:
        out.json(result)
        return
    for checked in result["checked"]:
        out.line(f"{shown(name)}: OK, signed by the key {checked['key']} ({shown(checked['file'])})")
