"""`zcrecord sign` and `zcrecord check`: signatures of archives."""

from __future__ import annotations

import os
import sys

from zcrecord.errors import RecordError, SourceError, printable

from .endings import error_json, writing
from .parsers import Arguments, Parser
from .render import name_text, print_report, printers, showing_progress
from .stdio import check_file, name_of, open_archive


def sign_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord sign`."""
    parser.add_argument("file", metavar="FILE", help="an archive, which is replaced")
    about = "private key, PEM or OpenSSH; the passphrase is read from $ZCRECORD_PASSPHRASE, or from the terminal"
    parser.add_argument("--key", required=True, metavar="KEY", help=about)
    parser.add_output("signed archive", "FILE")
    parser.add_output_options()


def sign(args: Arguments) -> int:
    """Add an Ed25519 signature of the content digest to an archive's metadata. It stays valid when the archive is saved
    with another layout, packed or converted. Metadata are not covered. Make a key with: openssl genpkey -algorithm
    ed25519 -out key.pem"""
    from zcrecord import integrity  # here, because few need cryptography

    check_file(args.file)
    options = args.values("force", "durable") | {"passphrase": _passphrase(args.key)}
    _, errors = printers(args.quiet)
    with writing(args.file), showing_progress("signing", errors) as progress:
        report = integrity.sign(args.file, args.key, args.output, progress=progress, **options)
    replaced = ", in the place of its last signature" if report.replaced else ""
    line = f"{name_text(report.dest)}: {report.content_digest} signed by the key {report.key}{replaced}"
    return print_report(args, report, lambda *_: [line])


def _passphrase(key: str) -> bytes | None:
    """Return the passphrase for a key's file: the environment's, or one typed if it is encrypted, or None."""
    from zcrecord import integrity

    if (passphrase := os.environ.get("ZCRECORD_PASSPHRASE")) is not None:
        return os.fsencode(passphrase)
    if not integrity.is_encrypted_key(key):
        return None
    if sys.stdin is None or not sys.stdin.isatty():
        raise SourceError("is encrypted; set $ZCRECORD_PASSPHRASE to its passphrase", path=key)
    import getpass  # here, because few keys are encrypted

    return getpass.getpass(f"Passphrase of {printable(key)}: ").encode()


def check_arguments(parser: Parser) -> None:
    """Declare the arguments of `zcrecord check`."""
    parser.add_archive()
    parser.add_key("if given several times, the owner of each key has to have signed", required=True)
    parser.add_quiet()
    parser.add_json("the result")


def check(args: Arguments) -> int:
    """Check that the owner of a key signed an archive, and that it has not changed since. Exit status 1 if not.
    Tensors, modules and attributes are covered, metadata are not."""
    from zcrecord import integrity

    out, errors = printers(args.quiet)
    name = name_of(args.file)
    checked: list[dict[str, str]] = []
    result: dict[str, object] = {"file": name, "ok": True, "signed_by": (), "checked": checked}
    try:
        with open_archive(args.file, args.embedded) as record, showing_progress("checking", errors) as progress:
            result["signed_by"] = integrity.signers(record)
            for key in args.key:
                signer = integrity.check_signature(record, key, progress=progress)
                checked.append({"file": key, "key": signer})
    except RecordError as error:
        if args.json:
            out.json({**result, "ok": False, "error": error_json(error)})
        raise
    if args.json:
        out.json(result)
        return 0
    for signature in checked:
        out.line(f"{name_text(name)}: OK, signed by the key {signature['key']} ({name_text(signature['file'])})")
    return 0
