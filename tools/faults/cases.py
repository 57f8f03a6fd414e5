"""One save from the state that it finds to the one that it leaves, and what is wrong with that."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zcrecord import RecordError

from .saves import SAVES

__all__ = ["Case"]


class Case(NamedTuple):
    """One save, from the state that it finds to the one that it leaves."""

    name: str
    sources: Path
    folder: Path
    old: bytes | None
    new: bytes

    @property
    def dest(self) -> Path:
        return self.folder / str(SAVES[self.name].name)

    def reset(self) -> None:
        """Bring back the state before, with a mode that tells whether it is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if self.old is not None:
            self.dest.write_bytes(self.old)
            self.dest.chmod(0o640)

    def run(self) -> str | None:
        """Save; returns the kind of the error, None where there was none."""
        save = SAVES[self.name]
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                status = save.run(self.sources, self.dest)
        except RecordError as error:
            return type(error).__name__
        if not save.ends or status == 0:
            return None
        line = said.getvalue()
        one = status == 1 and line.count("\n") == 1 and ": error: " in line and "fault of" not in line
        return "exit status" if one else f"status {status}: {line}"

    def wrong(self, error: str | None, hit: str) -> Iterator[str]:
        """Yield the faults that a save which ended by itself has left."""
        content = self.dest.read_bytes() if self.dest.exists() else None
        if content != (self.new if error is None else self.old):
            which = "old" if content == self.old else "new" if content == self.new else "neither's"
            yield f"{'reported success' if error is None else 'failed'}, and the file is {which}"
        if content is not None and self.old is not None and self.dest.stat().st_mode & 0o777 != 0o640:
            yield f"its mode became {self.dest.stat().st_mode & 0o777:o}"
        beside = [name for name in os.listdir(self.folder) if name != self.dest.name]
        if beside and not hit.startswith(("unlink", "all")):
            yield f"left {beside}"
        blamed = error == "FormatError" and SAVES[self.name].zipped
        if error is not None and error not in ("SourceError", "SourceNotFoundError", "exit status") and not blamed:
            yield f"raised {error}"
