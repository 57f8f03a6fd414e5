"""A released archive: every use of it raises one typed error."""

from __future__ import annotations

from typing import Any

from zcrecord.errors import UnsupportedError

__all__ = ["Released", "closed"]


def closed(path: str | None) -> UnsupportedError:
    """Return the error for a record that was closed before, or by another thread meanwhile."""
    return UnsupportedError("the record is closed; views taken before stay valid", path=path)


class Released:
    """Takes the place of index and bytes in a released archive: every use of it raises the one typed error."""

    def __init__(self, path: str | None) -> None:
        self._path = path

    def __getattr__(self, _: str) -> Any:
        raise closed(self._path)

    def __getitem__(self, _: Any) -> Any:
        raise closed(self._path)
