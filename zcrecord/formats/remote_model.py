"""A model behind a URL, for `convert`: read forward, fetched as an archive, or copied to a temporary file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zcrecord.codec.file_types import Format
from zcrecord.errors import RecordError
from zcrecord.record.load import load_record
from zcrecord.remote.file import RemoteFile
from zcrecord.remote.files import ForwardReader, copy_to
from zcrecord.remote.open_url import remote_file
from zcrecord.storage.files import scratch_folder


def remote_model(url: str, options: Mapping[str, Any] | None) -> RemoteModel | str:
    """Return the model behind a URL, without a request to the server; for a `file://` URL the path.

    Raises:
        DependencyError: a package is missing. UnsupportedError: the kind of URL is not known.
    """
    file = remote_file(url, options)
    return file if isinstance(file, str) else RemoteModel(file, url, options)


class RemoteModel:
    """A model in one file behind a URL. Attribute: `shown`, the URL without secrets."""

    def __init__(self, file: RemoteFile, url: str, options: Mapping[str, Any] | None) -> None:
        self._file, self._url, self._options = file, url, options
        self.shown = file.shown

    def stream(self) -> Any:
        """Return the file as a binary file object, read forward."""
        return ForwardReader(self._file)

    @contextlib.contextmanager
    def fetched(self, kind: Format) -> Iterator[Any]:
        """Yield the record of an archive, or the path of a copy of any other file; errors name the URL.

        Raises:
            SourceError: the file cannot be read.
        """
        if kind.name == "zcr":
            with load_record(self._url, storage_options=self._options) as record:
                yield record
            return
        with scratch_folder(self.shown) as scratch:
            copy = os.path.join(scratch, f"model{kind.suffixes[0]}")
            try:
                copy_to(self._file, copy)
                yield copy
            except RecordError as error:
                error.path = self.shown if error.path == copy else error.path
                raise
