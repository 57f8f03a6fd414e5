"""One save from the state before to the state after, and the faults of that."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zcrecord import RecordError, load_record

from .saves import SAVES

Files = dict[str, bytes]  # of a folder, by name
SCRATCH = re.compile(r"\..*\.[0-9a-f]{12}\.zcr-scratch")


class Case(NamedTuple):
    """One save, from the state before to the state after: the file, and shards that it names."""

    name: str
    sources: Path
    folder: Path
    old: Files
    new: Files

    @classmethod
    def after_one_save(cls, name: str, sources: Path, folder: Path, old: Files) -> Case:
        """Return a case that has saved once, which imports everything, with its old state back."""
        case = cls(name, sources, folder, old, {})
        case.reset()
        if (error := case.run()) is not None:
            raise RuntimeError(f"{name}: {error}")
        case = case._replace(new=case.content())
        case.reset()
        return case

    @property
    def dest(self) -> Path:
        return self.folder / str(SAVES[self.name].name)

    def reset(self) -> None:
        """Bring back the state before, with a mode that tells whether it is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        for name, data in self.old.items():
            (self.folder / name).write_bytes(data)
            (self.folder / name).chmod(0o640)

    def content(self) -> Files:
        """Return the files that are there, but scratch files."""
        return {path.name: path.read_bytes() for path in self.folder.iterdir() if not SCRATCH.fullmatch(path.name)}

    def attempt(self) -> str | None:
        """Save; returns the kind of the error, and its text if it is not typed; None without an error."""
        try:
            return self.run()
        except Exception as untyped:
            return f"{type(untyped).__name__}: {untyped}"

    def run(self) -> str | None:
        """Save; returns the kind of the typed error, None without one."""
        save = SAVES[self.name]
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                status = save.run(self.sources, self.dest, True)
        except RecordError as error:
            return type(error).__name__
        if not save.ends or status == 0:
            return None
        line = errors.getvalue()
        one = status == 1 and line.count("\n") == 1 and ": error: " in line and "fault of" not in line
        return "exit status" if one else f"status {status}: {line}"

    def wrong(self, error: str | None, hit: str) -> Iterator[str]:
        """Yield the faults that a save which ended by itself has left."""
        content, due = self.content(), self.new if error is None else self.old
        if {name: content.get(name) for name in due} != due or (not due and self.dest.exists()):
            which = "old" if self.has(self.old) else "new" if self.has(self.new) else "neither's"
            yield f"{'reported success' if error is None else 'failed'}, and the file is {which}"
        if self.dest.exists() and self.old and self.dest.stat().st_mode & 0o777 != 0o640:
            yield f"its mode became {self.dest.stat().st_mode & 0o777:o}"
        beside = [name for name in os.listdir(self.folder) if name not in due]
        # A catalogue that cannot be read any more does not name its shards.
        blind = error is None and {*beside} <= self.old.keys()
        if beside and not blind and not hit.startswith(("unlink", "all")):
            yield from self._left(beside)
        blamed = error == "FormatError" and SAVES[self.name].zipped
        if error is not None and error not in ("SourceError", "SourceNotFoundError", "exit status") and not blamed:
            yield f"raised {error}"

    def _left(self, beside: list[str]) -> Iterator[str]:
        """Yield that files were left, unless one is a note of them, by which the next save removes them all."""
        if not any((self.folder / name).read_bytes().startswith(b"zcrecord shards\n") for name in beside):
            yield f"left {beside}"
            return
        self.run()
        yield from (f"left {name}, noted, to the next" for name in {*os.listdir(self.folder)} - self._named())

    def has(self, state: Files) -> bool:
        """Return True if the file is that of a state, and all other files of that state exist, too."""
        content = self.content()
        return bool(state) and all(content.get(name) == data for name, data in state.items())

    def killed(self) -> Iterator[str]:
        """Yield the faults that a killed save has left, then run the next, and yield those of that."""
        content = self.content()
        file = content.get(self.dest.name)
        if file is not None and not self.has(self.old) and not self.has(self.new):
            yield "the file is neither's"
        if file is None and self.old:
            yield "the file is gone"
        yield from (f"left {name}" for name in content.keys() - self.old.keys() - self.new.keys() - {self.dest.name})
        committed = file == self.new[self.dest.name]
        if not committed or len(self.new) == 1:
            self.dest.unlink(missing_ok=True)
            for name, data in self.old.items():
                (self.folder / name).write_bytes(data)
        self.run()
        due = self.new if not committed or len(self.new) == 1 else self._named()
        yield from (f"left {name} to the next" for name in os.listdir(self.folder) if name not in due)
        if due is self.new and not self.has(self.new):
            yield "the next save wrote something else"

    def _named(self) -> set[str]:
        """Return the names of a catalogue and its shards, which are whole."""
        with load_record(self.dest, verify="full") as record:
            return {self.dest.name, *record.archive.source.file_names}
