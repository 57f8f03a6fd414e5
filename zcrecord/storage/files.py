"""Local files: paths, opening to read, and destinations that appear whole or not at all.

A file is written beside its place, as a scratch file (`scratch`), and takes it at the end. Knows nothing of archives.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeGuard

from zcrecord.errors import Advice, DestinationExistsError, SourceError, SourceNotFoundError, UnsupportedError

from .new_files import FileGroup, Placement, identity_from, put_in_place
from .new_files import Identity as Identity
from .new_files import refusals as refusals
from .new_files import version_of as version_of
from .scratch import ListedFile, folder_lock
from .scratch import scratch_file as scratch_file
from .sink import ObjectSink, Sink

Binary = IO[bytes] | io.RawIOBase | io.BufferedIOBase
Progress = Callable[[int, int | None], None]  # bytes done, bytes in all where that is known

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z][A-Za-z0-9+.-]+)*://")
_SIZE = re.compile(r"(\d{1,20}(?:\.\d*)?|\.\d+) *(?:([KMGT])(i(?=B))?)?B?", re.IGNORECASE | re.ASCII)
_REGULAR = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_CLOEXEC", "O_NONBLOCK"))  # a pipe would wait otherwise

_FORCE = Advice("{} replaces it", "force", True)


def path_of(value: Any) -> str:
    """Return a path as text; UnsupportedError if it is not a path, SourceError if no file can have that name."""
    if isinstance(value, bytes):
        fault = "a path as bytes, which load_record would take for an archive's bytes; pass it as text, by os.fsdecode"
        raise UnsupportedError(fault)
    try:
        path = os.fsdecode(value)
        os.fsencode(path)
    except TypeError:
        raise UnsupportedError(f"a {type(value).__name__} is neither a path nor a binary file object") from None
    except UnicodeError:
        raise SourceError("no file can have this name, it has lone surrogates", path=repr(value)) from None
    if "\0" in path:
        raise SourceError("no file can have this name, it contains NUL", path=path)
    return path


def path_or_none(file: Any) -> str | None:
    """Return a path as text, by `path_of`; None for a file object."""
    if hasattr(file, "read") or hasattr(file, "write"):
        return None
    return path_of(file)


def path_of_open(file: Any) -> str | None:
    """Return the path of a file opened by `open`, if it is at its first byte and the path still leads to it."""
    raw = getattr(file, "raw", file)
    if not isinstance(raw, io.FileIO) or not isinstance(raw.name, str):  # a gzip file has name and descriptor, too
        return None
    with contextlib.suppress(OSError, ValueError):
        if file.readable() and file.tell() == 0 and os.path.samestat(os.stat(raw.name), os.fstat(raw.fileno())):
            return raw.name
    return None


def is_url(source: Any) -> TypeGuard[str]:
    """Return True for text that is a URL such as `https://...`, chained or not; False for a Windows path.

    A file in a folder named `https:` is reached by a `pathlib.Path`, or with `./` before its path.
    """
    return isinstance(source, str) and "://" in source and _URL.match(source) is not None


def parse_size(text: str) -> int | None:
    """Return a number of bytes as people in this field write it: "5GB" (10^9), "5GiB", "5000"; None for other text."""
    if (match := _SIZE.fullmatch(text)) is None:
        return None
    number, letter, binary = match.groups()
    power = "KMGT".index(letter.upper()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def absolute_path(path: str) -> str:
    """Return a path that stays right when the working folder changes; `..` stays, since links may come before it."""
    if os.name == "nt":
        return os.path.abspath(path)
    if path.startswith("/"):
        return path
    with contextlib.suppress(FileNotFoundError):  # the working folder was removed
        return os.path.join(os.getcwd(), path)
    return path


def real_path(path: str) -> str:
    """Return the absolute path of a file, without links."""
    try:
        return os.path.realpath(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and error.filename is None:
            fault = "the working folder was removed; go to another one, or give an absolute path"
            raise SourceNotFoundError(fault, path=path, errno=error.errno) from error
        raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error


def _check_no_url(path: str) -> None:
    if is_url(path):
        from .urls import redacted  # here, because few paths are URLs

        raise UnsupportedError("is a URL, and this reads files; download it, and name the file", path=redacted(path))


class _ReadOnlyFile(io.FileIO):
    """A file that is only read: an error of closing it means nothing."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


def open_regular(path: str, opened: int | None = None) -> tuple[io.FileIO, Identity]:
    """Open a regular file, or that of a descriptor, to read by position; return it, to be closed, and its identity."""
    _check_no_url(path)
    # Before it is opened: a file object refuses a directory's descriptor, and leaves it open.
    if opened is None and os.path.isdir(path):
        raise SourceError("is a directory; name an archive in it", path=path, errno=errno.EISDIR)
    call = map(os.open, [path], [os.O_RDONLY | _REGULAR]) if opened is None else map(os.dup, [opened])
    with contextlib.ExitStack() as stack:
        # In one step of the interpreter: Ctrl-C cannot come between the descriptor and the object that closes it.
        file = stack.enter_context(next(map(_ReadOnlyFile, call)))
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise SourceError("not a regular file; copy it to one, or give its bytes", path=path)
        stack.pop_all()
    return file, identity_from(status)


def open_source(path: str, *, regular: bool = False) -> tuple[io.FileIO, int | None]:
    """Open a file to read forward; return it, to be closed, and its size, None for a pipe, which `regular` refuses."""
    _check_no_url(path)
    at_once = regular and not os.path.isdir(path)  # as in `open_regular`
    call: Any = map(os.open, [path], [os.O_RDONLY | _REGULAR]) if at_once else [path]
    try:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(next(map(_ReadOnlyFile, call)))
            status = os.fstat(file.fileno())
            if regular and not stat.S_ISREG(status.st_mode):
                raise SourceError("not a regular file; put a copy of the file in its place", path=path)
            stack.pop_all()
    except SourceError:
        raise
    except OSError as error:
        raise read_error(error, path) from error
    if not stat.S_ISREG(status.st_mode):
        return file, None
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # advice
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
    return file, status.st_size


def read_error(error: OSError, path: str | None = None, offset: int | None = None) -> SourceError:
    """Return the typed error for a file that cannot be read."""
    kind = SourceNotFoundError if isinstance(error, FileNotFoundError) else SourceError
    return kind(f"cannot read: {error.strerror or error}", path=path, offset=offset, errno=error.errno)


def read_start(path: str, limit: int) -> bytes:
    """Return the first bytes of a file, at most `limit`; raises as `open_source`."""
    with open_source(path)[0] as file:
        try:
            return file.read(limit)
        except OSError as error:
            raise read_error(error, path) from error


def identity_of(file: int | str) -> Identity:
    """Return the identity of an open file, by its descriptor, or of the file at a path; or raise SourceError."""
    try:
        return identity_from(os.stat(file))
    except OSError as error:
        path = file if isinstance(file, str) else None
        raise SourceError(f"cannot be read: {error.strerror}", path=path, errno=error.errno) from error


@dataclass(frozen=True)
class Place(os.PathLike[str]):
    """A path or URL, and the one version of it to replace: another saver may write after `check_destination`."""

    path: str
    replaces: Identity | str  # the version, as `version_of` returns it, for a URL `uploads.version_at`

    def __fspath__(self) -> str:
        return self.path


def place_for(dest: Any, replaces: Identity | str | None, options: Mapping[str, Any] | None = None) -> Any:
    """Return a destination with the version that may be replaced, a Place; as it is if `replaces` is None, for any."""
    if replaces is None:
        return dest
    if is_url(dest):
        from . import uploads  # here, because few destinations are URLs

        dest = uploads.local_path(dest, options) or dest
    return Place(path_of(dest), replaces)


def check_destination(
    source: str | None, dest: str | None, force: bool, options: Mapping[str, Any] | None = None
) -> Identity | str | None:
    """Raise unless `dest` may be written: it does not exist, or may be replaced, and is not the source.

    Both may be URLs; `options` are for fsspec to reach `dest`. Returns the version that `open_sink` may replace: no
    file, if there is none and `force` is not given, since another saver may write one first.
    """
    if dest is None:
        return None
    if is_url(dest):
        from . import uploads  # here, because few destinations are URLs

        if (local := uploads.local_path(dest, options)) is None:
            return _check_remote_destination(source, dest, force, options)
        dest = local
    with refusals(dest):
        status = _status_of(dest)
        if status is None:
            return None if force else ()
        if source is not None and os.path.exists(source) and os.path.samestat(status, os.stat(source)):
            raise DestinationExistsError("source and destination are the same file; name another", path=dest)
        if not force and stat.S_ISREG(status.st_mode):
            raise DestinationExistsError("exists already", path=dest, advice=_FORCE)
    return None


def _check_remote_destination(
    source: str | None, dest: str, force: bool, options: Mapping[str, Any] | None
) -> str | None:
    from .uploads import version_at
    from .urls import redacted

    if source == dest:
        raise DestinationExistsError("source and destination are the same URL; name another", path=redacted(dest))
    if not force and version_at(dest, options) != "":
        raise DestinationExistsError("exists already", path=redacted(dest), advice=_FORCE)
    return None if force else ""


@contextlib.contextmanager
def open_sink(
    dest: Any,
    *,
    durable: bool = True,
    like: tuple[str, Identity] | None = None,
    options: Mapping[str, Any] | None = None,
    replaces: Identity | str | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[Sink]:
    """Yield a sink for a path, a URL or a binary file object.

    A path gets a scratch file beside it, which replaces the file there only when the block ends without an exception:
    the path holds the old file or the new one, whole. `durable` adds an fsync of the file and of its folder. A symbolic
    link keeps its target; a device or a pipe is written to directly. A URL, with `options` for fsspec, gets an upload.
    The file gets mode, owner and attributes of the file `like`, a path, if its identity is still the same.

    `replaces` is the only version that may be replaced, as `version_of` or `uploads.version_at` returns it; None for
    any. A replaced catalogue's shards are removed, unless `replaces` names its version: then it is edited. `check` is
    called for a path, under the folder's lock, right before the rename.
    """
    if hasattr(dest, "write"):
        sink = ObjectSink(dest)
        yield sink
        sink.flush()
        return
    if isinstance(dest, Place):
        dest, replaces = os.fspath(dest), dest.replaces
    if is_url(dest):
        from . import uploads  # here, because few destinations are URLs

        if (local := uploads.local_path(dest, options)) is None:
            with uploads.upload(dest, options, replaces=replaces if isinstance(replaces, str) else None) as uploaded:
                yield uploaded
            return
        dest = local
    dest_path = path_of(dest)
    path, mode = target_of(dest_path)
    if mode is not None and not stat.S_ISREG(mode):
        with refusals(dest_path):
            file = open(dest_path, "wb", buffering=0)  # noqa: SIM115  # an exception of the block is no refusal
        with file:
            yield ObjectSink(file)
        return
    with FileGroup(path, durable=durable) as group:
        yield group.add()
        [scratch] = group.finish(like)
        placement = Placement(scratch, path, replaces)
        with folder_lock(os.path.dirname(path)):
            check()
            put_in_place([placement], durable=durable, shards_of=None if replaces else _shards_of)


def _shards_of(path: str) -> Sequence[ListedFile]:
    from zcrecord.record.own_shards import own_shards  # here, because catalogues are records: all savers replace some

    return own_shards(path)


def place_beside_shards(dest: Any) -> str:
    """Return the real path of a destination that is a regular file or does not exist, for shards beside it."""
    path, mode = target_of(path_of(dest))
    if mode is not None and not (stat.S_ISREG(mode) and os.path.exists(path)):
        raise SourceError("not a regular file; name one, beside which the shards are to lie", path=path)
    return path


def target_of(dest: str) -> tuple[str, int | None]:
    """Return a destination's real path, and `st_mode` of the file there, or None; SourceError if it is a directory."""
    with refusals(dest):
        before, path = _status_of(dest), real_path(dest)
        at_real_path, after = _status_of(path), _status_of(dest)  # `after` differs if a saver replaced the file
    mode = None if before is None else before.st_mode
    if not os.path.basename(dest) or (mode is not None and stat.S_ISDIR(mode)):
        raise SourceError("is a directory; name a file in it", path=path, errno=errno.EISDIR)
    is_unreplaced = before is not None and after is not None and os.path.samestat(before, after)
    is_there = at_real_path is not None and before is not None and os.path.samestat(before, at_real_path)
    if is_unreplaced and mode is not None and stat.S_ISREG(mode) and not is_there:
        raise SourceError("is an open file that was removed; name a path, or pass the file object", path=dest)
    return path, mode


def _status_of(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def scratch_folder(beside: str) -> Iterator[str]:
    """Yield a new folder, removed at the end: beside a path, or, for a URL, among temporary files."""
    import shutil  # here, because few files are written twice
    import tempfile

    with contextlib.ExitStack() as stack:
        with refusals(beside):
            parent = None if is_url(beside) else os.path.dirname(real_path(beside))
            process, folder = os.getpid(), tempfile.mkdtemp(dir=parent, prefix=".zcrecord-")

            def remove() -> None:
                if os.getpid() == process:  # a child that ends leaves it alone, as TemporaryDirectory would not
                    shutil.rmtree(folder, ignore_errors=True)

            stack.callback(remove)
        yield folder
