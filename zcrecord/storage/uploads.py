"""Sinks for URLs: an object, or a remote file, that appears whole or not at all.

Each kind of store has its own way to publish a whole file at once:

- S3 and stores like it: a multipart upload, several parts at a time, which appears when it is completed.
- Google Cloud Storage: a resumable upload, which appears when it is finalised.
- File systems that rename (SFTP, FTP, SMB, HDFS, ...): a scratch file beside the place, renamed at the end.
- Any other: a scratch file on this machine, which fsspec's `put_file` sends at the end. Object stores show it whole.

Knows fsspec and the client of S3; nothing of archives. `remote` opens URLs to read.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from zcrecord.errors import RecordError, SourceError, SourceNotFoundError, UnsupportedError

from .new_files import check_writer
from .sink import Sink, flat_view
from .urls import connect, error_text, first_answer, protocols_of, redacted, version_tag

if TYPE_CHECKING:
    from concurrent.futures import Future

_PART = 16 << 20  # bytes of a part, while few are needed
_GROWTH = 112 << 10  # bytes by which each part exceeds the one before, so that 10,000 hold 5 TiB
_FIXED = 64 << 20  # bytes of each part where all have to have one size, and the whole is not known
_MOST_PARTS = 10_000  # of an upload, as S3 has it
_PLANNED = 9_000  # parts, if the size is known beforehand
_UNDER_WAY = 64 << 20  # bytes of all parts that are sent at a time; at least one part is
_CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "412")  # S3's codes for a changed object


def part_size(number: int, total: int, *, fixed: bool = False) -> int:
    """Return the size of part `number`, from 1 on, so that 10,000 suffice for `total`, or, if that is 0, 5 TiB."""
    if total:
        return max(_PART, -(-total // _PLANNED))
    return _FIXED if fixed else max(_PART, number * _GROWTH)


def local_path(url: str, options: Mapping[str, Any] | None) -> str | None:
    """Return the path of a local file's URL, as `file:///m.zcr`; None for any other. Raises as `connect_to_write`."""
    fs, path = connect_to_write(url, options)
    return path if {"file", "local"} & {*protocols_of(fs)} else None


def version_at(url: str, options: Mapping[str, Any] | None) -> str | None:
    """Return the version of the file at a URL, for `upload`; "" if there is none, None if the store has no versions."""
    fs, path = connect_to_write(url, options)
    with store_refusals(redacted(url), "cannot read"):
        return _version(fs, path)


@contextlib.contextmanager
def upload(url: str, options: Mapping[str, Any] | None = None, *, replaces: str | None = None) -> Iterator[Sink]:
    """Yield a sink that is published at a URL, whole, when the block ends without an exception.

    Otherwise the parts sent are removed, and the URL keeps its file. Takes the memory of five parts of 16 MiB, or of
    two of `part_size` if they are larger. `replaces` is the one version that may be replaced, as `version_at` returns
    it: "" for no file, None for any. It is compared right before the publishing, by S3 also as it publishes.
    """
    fs, path = connect_to_write(url, options)
    shown = redacted(url)
    if url.endswith("/") or not path:
        raise SourceError("names a folder; name a file in it", path=shown)
    with store_refusals(shown, "cannot write"):
        sink = _UploadSink(_upload_class(fs)(fs, path, replaces), shown)
    try:
        yield sink
        sink.commit()
    except BaseException as error:
        sink.discard(error)
        raise


def connect_to_write(url: str, options: Mapping[str, Any] | None) -> tuple[Any, str]:
    """Return fsspec's file system for a URL to write to, and the path in it; UnsupportedError if it is only read."""
    if "::" in url.partition("://")[0]:
        raise UnsupportedError("chained URLs are for reading; write to the last one of them", path=redacted(url))
    fs, path = connect(url, options)
    if not {"http", "https"}.isdisjoint(protocols_of(fs)):  # of fsspec before 2026, the URL's own alone
        advice = "write to the bucket behind it (s3://, gs://), or to a file and upload that"
        raise UnsupportedError(f"HTTP servers are for reading; {advice}", path=redacted(url))
    if "?" in path and getattr(fs, "version_aware", False):
        raise UnsupportedError("names one version of an object; leave out what follows '?'", path=redacted(url))
    return fs, path


def _version(fs: Any, path: str) -> str | None:
    """Return the version of a file, as `version_at`; fsspec's exceptions as they are."""
    fs.invalidate_cache(path)
    try:
        info = fs.info(path, **first_answer(fs))
    except FileNotFoundError:
        return ""
    if info.get("type") == "directory":
        raise IsADirectoryError("is a folder; name a file in it")
    return version_tag(info)


@contextlib.contextmanager
def store_refusals(shown: str, fault: str) -> Iterator[None]:
    """Raise exceptions of a store, which may be of any class, as one typed error."""
    try:
        yield
    except RecordError as error:
        raise error.located(path=shown) from error.__cause__
    except FileNotFoundError as error:
        raise SourceNotFoundError(f"{fault}: no such bucket or folder ({error_text(error)})", path=shown) from error
    except (PermissionError, NotImplementedError, TypeError, ValueError) as error:
        fault = f"{fault}, the store or fsspec refused it: {error_text(error)}; do the URL and its storage options fit?"
        raise SourceError(fault, path=shown) from error
    except Exception as error:
        raise SourceError(f"{fault}: {error_text(error)}", path=shown, errno=getattr(error, "errno", None)) from error


class _UploadSink(Sink):
    """A sink that cuts its bytes into parts of an upload. It cannot be read back, as a pipe cannot."""

    def __init__(self, upload: _Upload, shown: str) -> None:
        self._upload, self._shown, self._process = upload, shown, os.getpid()
        self._total = 0
        self._number = 1
        self._part = bytearray()
        self._room = part_size(1, 0, fixed=upload.fixed)

    def reserve(self, nbytes: int) -> None:
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
        """Pass the part, which is full, to the upload, and begin the next one."""
        if self._number == _MOST_PARTS:
            fault = f"takes more than {_MOST_PARTS} parts of an upload; write to a file, and upload that"
            raise SourceError(fault, path=self._shown)
        check_writer(self._process, self._shown)
        part, self._part = self._part, bytearray()
        with store_refusals(self._shown, "cannot write, and what was there is untouched"):
            self._upload.put(part)
        self._number += 1
        self._room = part_size(self._number, self._total, fixed=self._upload.fixed)

    def commit(self) -> None:
        check_writer(self._process, self._shown)
        with store_refusals(self._shown, "cannot write"):
            self._upload.commit(self._part)

    def discard(self, reason: BaseException) -> None:
        """Remove the parts sent, but not in a forked child; if that fails, `reason` gets a note."""
        if os.getpid() != self._process:
            return
        try:
            self._upload.discard()
        except Exception as error:
            fault = f"parts of the upload may be left there, removing them failed: {error_text(error)}"
            reason.add_note(f"{self._shown}: {fault}")


def has_folders(fs: Any) -> bool:
    """Return True for a file system that renames: it has folders, which must be made."""
    return _upload_class(fs) is _RenamedUpload


def _upload_class(fs: Any) -> type[_Upload]:
    """Return the way in which a file system publishes a whole file at once."""
    from fsspec import AbstractFileSystem

    if hasattr(fs, "call_s3"):
        return _MultipartUpload
    if "gs" in protocols_of(fs):
        return _ResumableUpload
    if type(fs).mv is not AbstractFileSystem.mv or "memory" in protocols_of(fs):
        return _RenamedUpload
    return _WholeUpload


def _other_version() -> SourceError:
    return SourceError("was written by another in the meantime, and stays; load it, and save again if that is right")


class _Upload:
    """Base class of uploads in progress: bytes in parts, then `commit`, or `discard` at any time."""

    fixed = False

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        self._fs, self._path, self._replaces = fs, path, replaces

    def put(self, part: bytearray) -> None:
        """Send a part that is not the last one."""
        raise NotImplementedError

    def commit(self, last: bytearray) -> None:
        """Send the last part, and publish the whole if the version there is the one to be replaced."""
        raise NotImplementedError

    def discard(self) -> None:
        """Remove the parts sent."""
        raise NotImplementedError

    def _check_version(self) -> None:
        if self._replaces is not None and _version(self._fs, self._path) != self._replaces:
            raise _other_version()


class _MultipartUpload(_Upload):
    """A multipart upload of S3, which compares versions itself, too, as it publishes; one part is one PUT."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        bucket, key, _ = fs.split_path(path)
        if not key:
            raise UnsupportedError("names a bucket; name an object in it", path=path)
        self.fixed = bool(getattr(fs, "fixed_upload_size", False))
        self._place = {"Bucket": bucket, "Key": key}
        self._condition = {}
        if replaces is not None:
            self._condition = {"IfMatch": replaces} if replaces else {"IfNoneMatch": "*"}
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
        """Upload a part; return its entry in the list that completes the upload."""
        answer = self._fs.call_s3("upload_part", **self._place, **self._id, PartNumber=number, Body=part)
        tags = {name: value for name, value in answer.items() if name == "ETag" or name.startswith("Checksum")}
        return {"PartNumber": number, **tags}

    def commit(self, last: bytearray) -> None:
        """Send the last part, and publish the object if nobody has replaced it meanwhile."""
        parts: list[dict[str, Any]] = []
        if self._pool is not None:
            self.put(last)
            parts = [future.result() for future in self._sent]
        self._check_version()
        try:
            self._publish(parts, last)
        except Exception as error:
            if not self._is_published(parts, last):
                raise (_other_version() if _s3_error_code(error) in _CONFLICTS else error) from error.__cause__
            with contextlib.suppress(Exception):  # S3 then knows no such upload; but equal bytes may have been there
                self.discard()
        self._id = {}
        self._close()
        self._fs.invalidate_cache(self._path)

    def _publish(self, parts: list[dict[str, Any]], last: bytearray) -> None:
        """Complete the upload, or, without parts, put the object; unconditionally if the store knows no conditions."""
        call = {**self._place, "Body": last}
        if parts:
            call = {**self._place, **self._id, "MultipartUpload": {"Parts": parts}}
        method = "complete_multipart_upload" if parts else "put_object"
        try:
            self._fs.call_s3(method, **call, **self._condition)
        except Exception as error:
            if not self._condition or _s3_error_code(error) != "NotImplemented":
                raise
            self._fs.call_s3(method, **call)

    def _is_published(self, parts: list[dict[str, Any]], last: bytearray) -> bool:
        """Return True if the object there is the one that was uploaded: only the answer may have been lost."""
        with contextlib.suppress(Exception):  # the first error is reported; ETags of other stores may be no digests
            expected = _md5(last)
            if parts:
                digests = [bytes.fromhex(part["ETag"].strip('"').partition("-")[0]) for part in parts]
                expected = f"{_md5(b''.join(digests))}-{len(parts)}"
            tag: str = self._fs.call_s3("head_object", **self._place, **first_answer(self._fs))["ETag"]
            return tag.strip('"') == expected
        return False

    def discard(self) -> None:
        self._close()
        if self._id:
            self._fs.call_s3("abort_multipart_upload", **self._place, **self._id)

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)  # waits: a part that came after the abort would stay


def _md5(data: Any) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def _s3_error_code(error: Exception) -> str:
    """Return S3's code of an error, such as "NoSuchKey", from an exception of s3fs; "" if it has none."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


class _ResumableUpload(_Upload):
    """A resumable upload of Google Cloud Storage, by the file object of gcsfs."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        self._file = fs.open(path, "wb", block_size=_PART, autocommit=False)

    def put(self, part: bytearray) -> None:
        self._file.write(part)

    def commit(self, last: bytearray) -> None:
        self._file.write(last)
        self._check_version()
        self._file.close()
        self._file.commit()
        self._fs.invalidate_cache(self._path)

    def discard(self) -> None:
        try:
            self._file.discard()
        finally:
            self._file.closed = True  # or its last reference would finish it


class _RenamedUpload(_Upload):
    """A scratch file beside the place, which is renamed."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        _version(fs, path)  # an error if it is a folder: a scratch file would be moved into that
        folder, slash, name = path.rpartition("/")
        self._scratch = f"{folder}{slash}.{name}.{os.urandom(6).hex()}.zcr-scratch"
        self._file: Any = None

    def put(self, part: bytearray) -> None:
        if self._file is None:
            self._file = self._fs.open(self._scratch, "wb", autocommit=True)
        self._file.write(part)

    def commit(self, last: bytearray) -> None:
        self.put(last)
        self._file.close()
        self._check_version()
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
        if self._file is not None:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._scratch)


class _WholeUpload(_Upload):
    """A scratch file on this machine, which is sent by one call."""

    def __init__(self, fs: Any, path: str, replaces: str | None) -> None:
        super().__init__(fs, path, replaces)
        import tempfile  # here, because few stores need it

        self._folder = tempfile.TemporaryDirectory(prefix=".zcrecord-")  # removed with its last reference, too
        self._scratch = os.path.join(self._folder.name, "upload")
        self._file = open(self._scratch, "xb", buffering=0)  # noqa: SIM115  # closed by `commit` or `discard`

    def put(self, part: bytearray) -> None:
        view = memoryview(part)
        while len(view):
            view = view[self._file.write(view) :]

    def commit(self, last: bytearray) -> None:
        self.put(last)
        self._file.close()
        self._check_version()
        self._fs.put_file(self._scratch, self._path)
        self._fs.invalidate_cache(self._path)
        self._folder.cleanup()

    def discard(self) -> None:
        self._file.close()
        self._folder.cleanup()
