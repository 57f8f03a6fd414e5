"""Error messages in words of the command line: options in the place of Python's arguments.

`_SPOKEN` has a row for every message of the library that names an argument and that a command can print.
"""

from __future__ import annotations

import re
from typing import Any

from zcrecord.errors import RecordError, printable

__all__ = ["error_json", "spoken", "spoken_message"]

_SPOKEN = {  # regular expressions, in this order
    r"force=True": "--force",
    r"discard=True": "--discard",
    r"keep=True": "--keep",
    r"allow_links=True": "--allow-links",
    r"verify=True": "--verify",
    r"to_onnx\(external=True\)": "zcrecord to-onnx --external",
    r"external=True": "--external",
    r"remove the tuned part \(untune\)": "remove the tuned part (zcrecord tune --remove)",
    r"\btuned=True": "--tuned",
    r"name one with module=": "name one with --module",
    r"select= and exclude= are": "--select and --exclude are",
    r"dest_format=(, --to)?": "--to",
    r"source_format=(, --from)?": "--from",
    r"\balignment= ": "--alignment ",
    r"save it with digest='xxh3'": "zcrecord convert writes one with digests",
    r"max_shard_size= ": "--max-shard-size ",
    r"list\(record\) gives all names": "zcrecord ls lists them",
    r"read it and pass the bytes": "pipe it in, and give - in its place",
    r", or open it as it is with embedded='suffix'": "",
    r"open that one with embedded='suffix', or": "--embedded suffix of ls, verify and check opens that one;",
    r"; see embedded=": "; cut them off, or see --embedded",
    r"scan\(\.\.\., mmap=False\) reads it instead": "copy it to a disk from which files can be mapped",
    r"in cache=": "in $ZCRECORD_CACHE",
    r"give credentials in storage_options=": "give credentials in the URL, as https://user:password@host/",
    r"does storage_options= fit\?": "do the URL and its credentials fit?",
    r"do the URL and storage_options= fit, headers as text\?": "is the URL right?",
    r"do the URL and storage_options= fit\?": "do the URL and its credentials fit?",
    r"storage_options= does not fit URLs": "the settings do not fit URLs",
}


def spoken_message(message: str) -> str:
    """Return an error's message, without path and tensor, in words of the command line.

    Example:
        >>> spoken_message("exists already; force=True replaces it")
        'exists already; --force replaces it'
    """
    for pattern, said in _SPOKEN.items():
        message = re.sub(pattern, said, message)
    return message


def spoken(error: RecordError) -> str:
    """Return an error in words of the command line; its path and its tensor's name stay as they are."""
    message = printable(error.message, len(error.message))
    return str(error).removesuffix(message) + spoken_message(message)


def error_json(error: RecordError) -> dict[str, Any]:
    """Return an error for `--json`."""
    about = {"type": type(error).__name__, "message": spoken_message(error.message)}
    return {**about, "tensor": error.tensor, "offset": error.offset}
