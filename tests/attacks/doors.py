"""The ways into this package that attacks are tried through: archives at every level, and the commands in-process.

Each door hands over bytes or a path, then asks for everything there is to ask. What must come of it is left to
`attacks.catalogue`.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from attacks.catalogue import Door, Refused
from zcrecord import PackedTensor, Record, RecordError, StringTensor
from zcrecord.cli.dispatch import main

QUESTIONS: dict[str, Callable[[Record], object]] = {
    "names": list,
    "views": lambda record: [edges(value) for value in record.values()],
    "infos": lambda record: list(record.infos()),
    "lookups": lambda record: [(record.get(name), record.info(name)) for name in [*record][:1000]],
    "raw": lambda record: [record.raw(name) for name in [*record][:1000]],
    "tree": lambda record: record.tree(),
    "modules": lambda record: record.modules,
    "attributes": lambda record: record.attributes,
    "metadata": lambda record: record.metadata,
    "sums": lambda record: (len(record), record.nbytes, record.layout),
    "verify": lambda record: record.verify(),
    "digest": lambda record: record.content_digest(),
}


def edges(value: object) -> object:
    """Read the first and the last element: a view that left the archive would end the process here."""
    if isinstance(value, StringTensor):
        return [value[0]] if value.shape and value.shape[0] else []
    array = np.asarray(value.packed) if isinstance(value, PackedTensor) else np.asarray(value)
    return [array.flat[0], array.flat[array.size - 1]] if array.size else []


def every_question(record: Record) -> None:
    """Ask everything, each question whatever came of the ones before; raise the first error."""
    first: RecordError | None = None
    for ask in QUESTIONS.values():
        try:
            ask(record)
        except RecordError as error:
            first = first or error
    if first is not None:
        raise first


def loaded(**options: Any) -> Door:
    """Load from bytes, and ask everything; that ends in full verification at every level."""

    def door(path: Path) -> Callable[[], object]:
        data = path.read_bytes()
        return lambda: every_question(zcrecord.load_record(data, **options))

    return door


def mapped(path: Path) -> Callable[[], object]:
    """Load from the file by itself, and ask everything."""

    def act() -> None:
        try:
            with zcrecord.load_record(path) as record:
                every_question(record)
        except RecordError as error:
            error.path = None  # as the same error from bytes
            raise

    return act


def command(run: Callable[[list[str]], int], *before: str, after: Callable[[Path], list[str]] = lambda _: []) -> Door:
    """Run a command on the file in this process: `run` is its main function, `before` what comes before the path."""

    def door(path: Path) -> Callable[[], object]:
        def act() -> None:
            out, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
                status = run([*before, str(path), *after(path)])
            tell(status, out.getvalue(), errors.getvalue(), path)

        return act

    return door


def tell(status: int, out: str, errors: str, path: Path) -> None:
    """Check that a command ended as commands do; if it refused, raise Refused with its line, program and path off."""
    shown = (out + errors).replace("\n", "").replace("\t", "")  # tabs are between the columns of a pipe
    assert shown.isprintable(), f"the terminal gets {[c for c in shown if not c.isprintable()][:5]}"
    assert status in (0, 1), f"exit status {status}"
    if status:
        assert errors.count("\n") == 1, f"more than one line: {errors}"
        assert "a fault of" not in errors, errors
        _, found, said = errors.rstrip("\n").partition("error: ")
        assert found, errors
        raise Refused(said.removeprefix(f"{path}: "))


ARCHIVE_DOORS: dict[str, Door] = {
    **{f"load_record {level}": loaded(verify=level) for level in ("touch", "index", "full")},
    "load_record path": mapped,
    **{f"zcrecord {name}": command(main, name) for name in ("info", "ls", "tree", "verify")},
}
# The doors that read payloads, as every_question does: where nothing but payloads is wrong, these have to refuse.
FULL_DOORS = frozenset({name for name in ARCHIVE_DOORS if name.startswith("load_record")} | {"zcrecord verify"})
