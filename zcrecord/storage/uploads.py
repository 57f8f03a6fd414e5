"""Sinks for URLs: an object, or a file elsewhere, that appears whole or not at all.

Each kind of store has its own way to publish a whole file at once:

- S3 and its likes: a multipart upload, several parts at a time, which appears when it is completed.
- Google Cloud Storage: a resumable upload, which appears when it is finalised.
- File systems that rename (SFTP, FTP, SMB, HDFS, ...): a scratch file beside the place, renamed at the end.
- Any other: a scratch file on this machine, which fsspec's `put_file` sends at the end. Object stores show it whole.

Knows fsspec and the client of S3; nothing of archives. Opening URLs to read is `remote`'s.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from zcrecord.errors import (
    Advice,
    DestinationExistsError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)

from .new_files import check_writer
from .sink import Sink, flat_view
from .urls import connect, first_answer, protocols_of, redacted, said, version_tag

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["check_new", "connected", "has_folders", "local_path", "part_size", "store_refusals", "upload", "version_at"]

_PART = 16 << 20  # bytes of a part, while few are needed
_GROWTH = 112 << 10  # bytes by which each part exceeds the one before, so that 10,000 hold 5 TiB
_FIXED = 64 << 20  # bytes of each part where all have to have one size, and the whole is not known
_MOST_PARTS = 10_000  # of an upload, as S3 has it
_PLANNED = 9_000  # of them, if the size is known beforehand
_UNDER_WAY = 64 << 20  # bytes of parts that are sent at a time, at least one part
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "412")  # codes of S3


def part_size(number: int, total: int, *, fixed: bool = False) -> int:
    """Return the size of a part in bytes: 16 MiB, or more, so that 10,000 parts suffice.

    Args:
        number: of the part, from 1 on.
        total: bytes in all, 0 if that is not known: then the parts grow, and reach 5 TiB together.
        fixed: the store wants parts of one size.

    Example:
        >>> part_size(1, 1 << 30) >> 20, part_size(1, 1 << 40) >> 20, part_size(5000, 0) >> 20
        (16, 116, 546)
    """
    if total:
        return max(_PART, -(-total // _PLANNED))
    return _FIXED if fixed else max(_PART, number * _GROWTH)


def local_path(url: str, options: Mapping[str, Any] | None) -> str | None:
    """Return the path that a URL of this machine means, such as `file:///tmp/m.zcr`; None for any other.

    Raises:
        DependencyError: fsspec, or the package it needs, is not installed. UnsupportedError: it knows no such URL, or
            the options are no mapping.
    """
    fs, path = connected(url, options)
    return path if {"file", "local"} & {*protocols_of(fs)} else None


def check_new(url: str, options: Mapping[str, Any] | None, force: bool) -> None:
    """Raise if there is a file at a URL, unless `force` is given.

    Raises:
        DestinationExistsError: there is. SourceError: the store does not tell.
    """
    if not force and version_at(url, options) != "":
        raise DestinationExistsError(
            "exists already", path=redacted(url), advice=Advice("{} replaces it", "force", True)
        )


def version_at(url: str, options: Mapping[str, Any] | None) -> str | None:
    """Return the version of the file at a URL, for `upload`; "" if there is none, None if the store has no versions.

    Raises:
        SourceError: the store does not tell.
    """
    fs, path = connected(url, options)
    with store_refusals(redacted(url), "cannot read"):
        return _version(fs, path)


@contextlib.contextmanager
def upload(url: str, options: Mapping[str, Any] | None = None, *, replaces: str | None = None) -> Iterator[Sink]:
    """Yield a sink that is published at a URL, whole, when the block ends without an exception.

    Otherwise what was sent is removed, and the URL has what it had. Memory: five parts of 16 MiB at the most, and two
    of `part_size` where they are larger.

    Args:
        options: for fsspec's file system, as `load_record` takes them in `storage_options`.
        replaces: the version that is to be replaced, as `version_at` gives it; "" if none may be there, None for any.
            It is compared just before; S3 compares it, too, as it publishes.

    Raises:
        SourceError: the store reports an error, after the tries of its own client; or another version is there.
        UnsupportedError: the URL is none that is written to. DependencyError: a package is missing.
    """
    fs, path = connected(url, options)
    shown = redacted(url)
    if url.endswith("/") or not path:
        raise SourceError("names a folder; name a file in it", path=shown)
    with store_refusals(shown, "cannot write"):
        sink = _UploadSink(_kind(fs)(fs, path, replaces), shown)
    try:
        yield sink
        sink.commit()
    except BaseException as error:
        sink.discard(error)
        raise


def connected(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return fsspec's file system for a URL to write to, and the path in it.

    Raises:
        UnsupportedError: the URL is none that is written to. DependencyError: a package is missing.
    """
    if "::" in url.partition("://")[0]:
        what = "chained URLs are for reading; write to the last one of them"
        raise UnsupportedError(what, path=redacted(url))
    fs, path = connect(url, options)
    if "http" in protocols_of(fs):
        what = (
            "HTTP servers are for reading; write to the bucket behind it (s3://, gs://), or to a file and upload that"
        )
        raise UnsupportedError(what, path=redacted(url))
    if "?" in path and getattr(fs, "version_aware", False):
        raise UnsupportedError("names one version of an object; leave out what follows '?'", path=redacted(url))
    return fs, path


def _version(fs: Any, path: str) -> str | None:
    fs.invalidate_cache(path)
    try:
        found = fs.info(path, **first_answer(fs))
    except FileNotFoundError:
        return ""
    if found.get("type") == "directory":
        raise IsADirectoryError("is a folder; name a file in it")
    return version_tag(found)


@contextlib.contextmanager
def store_refusals(shown: str, what: str) -> Iterator[None]:
    """Raise exceptions of a store, which may be of any class, as one typed error."""
    try:
        yield
    except RecordError as error:
        raise error.located(path=shown) from error.__cause__
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"{what}: no such bucket or folder ({said(error)})", path=shown) from error
    except (PermissionError, NotImplementedError, TypeError, ValueError) as error:
        hint = "do the URL and its storage options fit?"
        raise SourceError(f"{what}, the store or fsspec refused it: {said(error)}; {hint}", path=shown) from error
    except Exception as error:
        raise SourceError(f"{what}: {said(error)}", path=shown, errno=getattr(error, "errno", None)) from error


class _Upload(Protocol):
    """An upload in progress: bytes in parts, then `commit` with the last ones, or `discard` at any time."""

    fixed: bool

    def put(self, part: bytearray) -> None:
        """Send a part that is not the last one."""

    def commit(self, last: bytearray) -> None:
        """Send the last part, and publish the whole."""

    def discard(self) -> None:
        """Remove what was sent."""


class _UploadSink:
    """A sink that cuts its bytes into parts of an upload. It cannot be read back, as a pipe cannot."""

    can_rewind = keeps = False

    def __init__(self, upload: _Upload, shown: str) -> None:
        self.position = 0
        self._upload, self._shown, self._process = upload, shown, os.getpid()
        self._total = 0
        self._number = 1
        self._part = bytearray()
        self._room = part_size(1, 0, fixed=upload.fixed)

    def reserve(self, nbytes: int) -> None:
        """Choose the size of the parts."""
        if not self.position:
            self._total, self._room = nbytes, part_size(1, nbytes)

    def write(self, data: Any) -> None:
        """Append all of a bytes-like; sends parts that are full, and waits while too many are on their way."""
        view = flat_view(data)
        while len(view):
            if len(self._part) == self._room:
                self._send()
            piece = view[: self._room - len(self._part)]
            self._part += piece
            self.position += len(piece)
            view = view[len(piece) :]

    def _send(self) -> None:
        if self._number == _MOST_PARTS:
            what = f"takes more than {_MOST_PARTS} parts of an upload; write to a file, and upload that"
            raise SourceError(what, path=self._shown)
        self._check_process()
        part, self._part = self._part, bytearray()
        with store_refusals(self._shown, "cannot write, and what was there is untouched"):
            self._upload.put(part)
        self._number += 1
        self._room = part_size(self._number, self._total, fixed=self._upload.fixed)

    def commit(self) -> None:
        """Send the rest, and publish the whole."""
        self._check_process()
        with store_refusals(self._shown, "cannot write"):
            self._upload.commit(self._part)

    def _check_process(self) -> None:
        """Raise SourceError in a child that was forked meanwhile, as `FileSink` does."""
        check_writer(self._process, self._shown)

    def discard(self, reason: BaseException) -> None:
        """Remove what was sent, but not in a child that was forked; if that fails, the reason gets a note."""
        if os.getpid() != self._process:
            return
        try:
            self._upload.discard()
        except Exception as error:
            what = f"parts of the upload may be left there, removing them failed: {said(error)}"
            reason.add_note(f"{self._shown}: {what}")

    def flush(self) -> None:
        """Do nothing: parts are sent when they are full, and the last one at the end."""

    def read_back(self, offset: int, size: int) -> bytes:
        """Refuse: the bytes are gone."""
        raise UnsupportedError(f"bytes [{offset}, {offset + size}) are on their way to {self._shown}")

    def rewind(self, offset: int) -> None:
        """Refuse: the bytes are gone."""
        raise UnsupportedError(f"bytes from {offset} on are on their way to {self._shown}")

    def patch(self, offset: int, data: bytes) -> None:
        """Refuse: the bytes are gone."""
        self.read_back(offset, len(data))

    def copy_from(self, _file: int, _offset: int, _nbytes: int) -> tuple[int, bool]:
        """Append nothing: bytes are taken by `write`."""
        return 0, False


def has_folders(fs: Any) -> bool:
    """Return True for a file system that renames, and so has folders that have to be made."""
    return _kind(fs) is _RenamedUpload


def _kind(fs: Any) -> Any:
    """Return the kind of upload for a file system."""
    from fsspec import AbstractFileSystem

    if hasattr(fs, "call_s3"):
        return _MultipartUpload
    if "gs" in protocols_of(fs):
        return _ResumableUpload
    if type(fs).mv is not AbstractFileSystem.mv or "memory" in protocols_of(fs):
        return _RenamedUpload
    return _WholeUpload


def _replaced() -> SourceError:
    return SourceError("was written by another in the meantime, and stays; load it, and save again if that is right")


class _CheckedUpload:
    """Base class of uploads: `_check`, just before one is published, raises if another version is to be replaced."""

    fixed = False

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        self._fs, self._path, self._replaces = fs, path, replaces

    def _check(self) -> None:
        if self._replaces is not None and _version(self._fs, self._path) != self._replaces:
            raise _replaced()


class _MultipartUpload(_CheckedUpload):
    """A multipart upload of S3; what fits into one part is one PUT. Transient errors are tried again by the client.

    S3 itself compares versions, too, as it publishes; its likes may not know these conditions, and ignore or refuse
    them.
    """

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        bucket, key, _ = fs.split_path(path)
        if not key:
            raise UnsupportedError("names a bucket; name an object in it", path=path)
        self.fixed = bool(getattr(fs, "fixed_upload_size", False))
        self._place = {"Bucket": bucket, "Key": key}
        self._condition = {} if replaces is None else {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
        self._id: dict[str, str] = {}
        self._sent: list[Future[dict[str, Any]]] = []
        self._waiting: deque[Future[dict[str, Any]]] = deque()
        self._pool: Any = None

    def put(self, part: bytearray) -> None:
        """Send a part by another thread; waits for earlier ones while too many bytes are on their way."""
        if self._pool is None:
            from concurrent.futures import ThreadPoolExecutor  # here, because few archives are uploaded

            self._pool = ThreadPoolExecutor(_UNDER_WAY // _PART)
            self._id = {"UploadId": self._fs.call_s3("create_multipart_upload", **self._place)["UploadId"]}
        while len(self._waiting) >= max(1, _UNDER_WAY // len(part)):
            self._waiting.popleft().result()
        self._sent.append(self._pool.submit(self._send, len(self._sent) + 1, bytes(part)))
        self._waiting.append(self._sent[-1])

    def _send(self, number: int, part: bytes) -> dict[str, Any]:
        out = self._fs.call_s3("upload_part", **self._place, **self._id, PartNumber=number, Body=part)
        tags = {name: tag for name, tag in out.items() if name == "ETag" or name.startswith("Checksum")}
        return {"PartNumber": number, **tags}

    def commit(self, last: bytearray) -> None:
        """Complete the upload, on the condition that the version there is the one to be replaced."""
        parts: list[dict[str, Any]] = []
        if self._pool is not None:
            self.put(last)
            parts = [future.result() for future in self._sent]
        self._check()
        try:
            try:
                self._publish(parts, last, self._condition)
            except Exception as error:
                if not self._condition or _code(error) != "NotImplemented":
                    raise
                self._publish(parts, last, {})
        except Exception as error:
            if not self._is_there(parts, last):
                raise (_replaced() if _code(error) in _CONFLICTS else error) from error.__cause__
            with contextlib.suppress(Exception):  # S3 then knows no such upload; but equal bytes may have been there
                self.discard()
        self._id = {}
        self._close()
        self._fs.invalidate_cache(self._path)

    def _publish(self, parts: list[dict[str, Any]], last: bytearray, condition: dict[str, str]) -> None:
        if parts:
            whole = {"MultipartUpload": {"Parts": parts}}
            self._fs.call_s3("complete_multipart_upload", **self._place, **self._id, **whole, **condition)
        else:
            self._fs.call_s3("put_object", **self._place, Body=last, **condition)

    def _is_there(self, parts: list[dict[str, Any]], last: bytearray) -> bool:
        """Return True if the object there is the one that was uploaded: the answer alone may have been lost."""
        with contextlib.suppress(Exception):  # the first error is told; ETags of other stores may be no digests
            ours = _md5(last)
            if parts:
                known = [bytes.fromhex(part["ETag"].strip('"').partition("-")[0]) for part in parts]
                ours = f"{_md5(b''.join(known))}-{len(parts)}"
            found: str = self._fs.call_s3("head_object", **self._place, **first_answer(self._fs))["ETag"]
            return found.strip('"') == ours
        return False

    def discard(self) -> None:
        """Abort the upload, so that the store keeps no part of it."""
        self._close()
        if self._id:
            self._fs.call_s3("abort_multipart_upload", **self._place, **self._id)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # waits: a part that came after the abort would stay


def _md5(data: Any) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _code(error: Exception) -> str:
    """Return the code of S3 of an exception of s3fs, "" if it has none."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


class _ResumableUpload(_CheckedUpload):
    """A resumable upload of Google Cloud Storage, by the file object of gcsfs."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        self._file = fs.open(path, "wb", block_size=_PART, autocommit=False)

    def put(self, part: bytearray) -> None:
        """Send a part."""
        self._file.write(part)

    def commit(self, last: bytearray) -> None:
        """Send the last part, and finalise the upload."""
        self._file.write(last)
        self._check()
        self._file.close()
        self._file.commit()
        self._fs.invalidate_cache(self._path)

    def discard(self) -> None:
        """Cancel the upload."""
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # or its last reference would finish it


class _RenamedUpload(_CheckedUpload):
    """A scratch file beside the place, which is renamed."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        _version(fs, path)  # an error if it is a folder: a scratch file would be moved into that
        folder, slash, name = path.rpartition("/")
        self._scratch = f"{folder}{slash}.{name}.{os.urandom(6).hex()}.zcr-scratch"
        self._file: Any = None

    def put(self, part: bytearray) -> None:
        """Append to the scratch file."""
        if self._file is None:
            self._file = self._fs.open(self._scratch, "wb", autocommit=True)
        self._file.write(part)

    def commit(self, last: bytearray) -> None:
        """Finish the scratch file, and give it its name."""
        self.put(last)
        self._file.close()
        self._check()
        if "memory" in protocols_of(self._fs):  # whose `mv` expands patterns
            self._fs.cp_file(self._scratch, self._path)
            self._fs.rm_file(self._scratch)
        else:
            self._fs.mv(self._scratch, self._path)
        self._fs.invalidate_cache()
        if self._fs.exists(self._scratch) or _version(self._fs, self._path) == "":  # WebHDFS raises nothing
            raise SourceError("the file system did not rename onto the file there; remove that first")
        self._file = None

    def discard(self) -> None:
        """Remove the scratch file."""
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._scratch)


class _WholeUpload(_CheckedUpload):
    """A scratch file on this machine, which is sent by one call."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        import tempfile  # here, because few stores need it

        self._folder = tempfile.TemporaryDirectory(prefix=".zcrecord-")  # removed with its last reference, too
        self._scratch = os.path.join(self._folder.name, "upload")
        self._file = open(self._scratch, "xb", buffering=0)  # noqa: SIM115  # closed by `commit` or `discard`

    def put(self, part: bytearray) -> None:
        """Append to the scratch file."""
        view = memoryview(part)
        while len(view):
            view = view[self._file.write(view) :]

    def commit(self, last: bytearray) -> None:
        """Send the scratch file."""
        self.put(last)
        self._file.close()
        self._check()
        self._fs.put_file(self._scratch, self._path)
        self._fs.invalidate_cache(self._path)
        self._folder.cleanup()

    def discard(self) -> None:
        """Remove the scratch file."""
        self._file.close()
        self._folder.cleanup()
