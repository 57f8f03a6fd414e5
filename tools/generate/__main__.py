"""Writes everything that is generated in the repository.

python -m tools.generate            writes what is stale, and names it; archives of tests/conformance never change
python -m tools.generate --check    only names it; the exit status is 1 if there is any
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from . import (
    ROOT,
    checksums,
    element_types,
    golden,
    golden_catalogue,
    golden_edges,
    golden_references,
    invalid,
    manifests,
    reference,
    schema,
)


class Generator(Protocol):
    """The shape of a module of this package that generates files."""

    __name__: str

    @property
    def FOLDERS(self) -> tuple[Path, ...]:  # noqa: N802  # a constant of the module
        """The folders in which nothing else may lie."""

    def files(self) -> Mapping[Path, str | bytes]:
        """Return every file of the generator, by path from the repository's root."""


GENERATORS: tuple[Generator, ...] = (
    element_types, schema, golden, golden_edges, invalid, checksums, golden_catalogue, golden_references, manifests,
    reference,
)  # fmt: skip

FREEZE = "bring back what generates it, and give what is new another name"  # see CONTRIBUTING, "Golden archives"


def encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def stale(generator: Generator, root: Path = ROOT) -> dict[Path, bytes | None]:
    """Return the files under `root` that are not as generated, with the bytes they should have; None: no such file."""
    due = {path: encoded(content) for path, content in generator.files().items()}
    wrong: dict[Path, bytes | None] = {
        path: content
        for path, content in due.items()
        if not (root / path).exists() or (root / path).read_bytes() != content
    }
    for folder in generator.FOLDERS:
        found = {path.relative_to(root) for path in (root / folder).glob("*") if path.is_file()}
        wrong |= dict.fromkeys(sorted(found - due.keys()))
    return wrong


def main(arguments: list[str]) -> int:
    """Write stale files, or with --check only name them."""
    parser = argparse.ArgumentParser(prog="python -m tools.generate", description="Write everything that is generated.")
    parser.add_argument("--check", action="store_true", help="only name what is stale; the exit status is 1 if any is")
    check = parser.parse_args(arguments).check
    left, frozen = 0, checksums.frozen(ROOT)
    for generator in GENERATORS:
        found = stale(generator, ROOT)
        kept = frozen & found.keys()
        for path, content in found.items():
            left += check or content is None or path in kept
            if path in kept:
                print(f"{path} is of version 1 and never changes: {FREEZE}")
            elif path.with_suffix(".zcr") in kept:
                pass  # what is beside it is about other bytes
            elif content is None:
                print(f"{path}: nothing generates it; remove it")
            elif check:
                print(f"{path} is stale: run python -m tools.generate")
            else:
                (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
                (ROOT / path).write_bytes(content)
                print(f"{path} written")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
