"""Error messages in words of the command line: options in place of Python's arguments.

`_SPOKEN` has a row for every message of the library that names an argument and that a command can print.
"""

from __future__ import annotations

import re
from typing import Any

from zcrecord.errors import RecordError, printable

_OPTIONS = (
    *("alignment", "allow_links", "discard", "exclude", "external", "force", "keep", "max_shard_size", "module"),
    *("select", "tuned", "verify"),
)  # arguments whose option has their name
_SPOKEN: dict[str, Any] = {  # regular expressions, in this order
    r"to_onnx\(external=True\)": "zcrecord to-onnx --external",
    r"remove the tuned part \(untune\)": "remove the tuned part (zcrecord tune --remove)",
    r"dest_format=(, --to)?": "--to",
    r"source_format=(, --from)?": "--from",
    r"save it with digest='xxh3'": "zcrecord convert writes one with digests",
    r"list\(record\) gives all names": "zcrecord ls lists them",
    r"read it and pass the bytes": "pipe it in, and give - in its place",
    r", or open it as it is with embedded='suffix'": "",
    r"open that one with embedded='suffix', or": "--embedded suffix of ls, verify and check opens that one;",
    r"; see embedded=": "; cut them off, or see --embedded",
    r"scan\(\.\.\., mmap=False\) reads it instead": "copy it to a disk from which files can be mapped",
    r"in cache=": "in $ZCRECORD_CACHE",
    r"give credentials in storage_options=": "give credentials in the URL, as https://user:password@host/",
    r"do the URL and storage_options= fit, headers as text\?": "is the URL right?",
    r"(do the URL and|does) storage_options= fit\?": "do the URL and its credentials fit?",
    r"storage_options= does not fit URLs": "the settings do not fit URLs",
    rf"\b(?:{'|'.join(_OPTIONS)})=(?:True\b|(?![\w'\"(\[]))": lambda match: _option(match[0]),
}


def _option(argument: str) -> str:
    """Return the option of the command line for an argument of Python."""
    return "--" + argument.partition("=")[0].replace("_", "-")


def spoken_message(message: str) -> str:
    """Return an error's message, without path and tensor, in words of the command line.

    Example:
        >>> spoken_message("exists already; force=True replaces it")
        'exists already; --force replaces it'
    """
    for pattern, words in _SPOKEN.items():
        message = re.sub(pattern, words, message)
    return message


def spoken(error: RecordError) -> str:
    """Return an error in words of the command line; its path and its tensor's name stay as they are."""
    message = printable(error.message, len(error.message))
    return str(error).removesuffix(message) + spoken_message(message)


def error_json(error: RecordError) -> dict[str, Any]:
    """Return an error for `--json`."""
    about = {"type": type(error).__name__, "message": spoken_message(error.message)}
    return {**about, "tensor": error.tensor, "offset": error.offset}
