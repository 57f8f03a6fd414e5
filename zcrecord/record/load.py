"""`load_record`: a path, a URL or bytes to a Record."""

from __future__ import annotations

import mmap as _mmap
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from zcrecord.archive.archive import Archive, Embedded, Verify, is_catalogue, open_archive
from zcrecord.codec.layout import ends_in_archive
from zcrecord.errors import FormatError, IntegrityError, RecordError, UnsupportedError, printable
from zcrecord.storage.files import is_url, path_of, path_of_open
from zcrecord.storage.memory import Memory, Mode, buffer_of, is_packed, map_file, read_file, read_resource, read_stream

from .record import Record

if TYPE_CHECKING:
    from zcrecord.archive.subset import Names, Rename

__all__ = ["load_record"]

T = TypeVar("T")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


@overload
def load_record(
    source: Any,
    *,
    into: None = None,
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
    cache: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Record: ...


@overload
def load_record(
    source: Any,
    *,
    into: type[T],
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
    cache: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> T: ...


def load_record(
    source: Any,
    *,
    into: Any = None,
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
    cache: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Open an archive without reading a payload byte: its tensors are views of the mapping, or of the given bytes.

    Views are read-only but in mode "c", and torch does not heed that: the first write to
    `torch.from_numpy(record["w"])` ends the process (of a record loaded from bytes it changes those bytes). Safe are
    `record.torch()`, `load_record(path, mode="c")` and a copy, `torch.tensor(record["w"])`.

    Args:
        source: a path (mapped), of an archive or a program that has one attached, such as `sys.executable`; any
            bytes-like; a binary file object (mapped if it is as `open(path, "rb")` gave it; else the rest of it: a
            BytesIO's own bytes, any other's read once); a package resource, as `importlib.resources` has them (mapped,
            or, in a zip, read once); a URL, of which only the payloads asked for are fetched (see `zcrecord.remote`).
            An archive packed for transport is decompressed into memory, with `names` only the chosen part.
        into: a dataclass, attrs class, NamedTuple or other type to be returned instead; see `Record.into`.
        names, rename: load a part, or under other names; see `Record.select`.
        mode: 'r' for read-only views; 'c' for writable ones of a private copy, whose pages are copied when they are
            written, so that no edit reaches the file. Tied tensors stay tied; equal ones that are not tied, though
            stored once, are edited each by itself. Of bytes in memory 'c' makes a whole copy.
        verify: 'index' checks every rule of the index first; 'touch' only the entries that are used, on use, for huge
            archives of which little is read; 'full' the payloads' digests too, of a part of a packed archive its own.
        mmap: False reads the file into one aligned buffer, several reads at a time: for network file systems, and for
            files that may shrink or change while they are used. A file that is replaced does no harm to its mappings;
            one that is shortened in place ends the process that reads the lost part (SIGBUS).
        expect: the content digest that the archive must have ('sha256:...'); reads it all.
        embedded: 'prefix' for an archive followed by other bytes (flash), 'suffix' for one appended to a file; None
            finds one that is appended where it is aligned, as by `zcrecord attach`, too, but to no file that starts as
            a model (safetensors, GGUF, ONNX, zip, pickle, ...): other readers find other tensors in that.
        cache: a folder for bytes fetched from URLs; None for the one that $ZCRECORD_CACHE names; False for none.
        storage_options: for fsspec, which opens URLs: headers, credentials, the endpoint of an S3 server.

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is no valid archive. VersionError: it needs
        a later reader. IntegrityError: it is damaged, or has another content digest than `expect`. LimitError: a size
        or depth is beyond a limit of FORMAT.md (R9, R30, R40, R47, R49); or a packed archive, or in mode "c" equal
        tensors that are not tied, would take memory out of all proportion. UnsupportedError: `source` is none of
        these, `expect` no digest. MismatchError: it does not match `into`. DependencyError: no zstandard.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_record("model.zcr")["w"].shape
        (2, 3)
    """
    _check_choices(verify, embedded, mode, expect)
    if is_url(source):
        source = _remote(source, verify, cache=cache, options=storage_options)
    how: dict[str, Any] = {"mode": mode, "verify": verify, "expect": expect, "embedded": embedded}
    record = Record(_loaded(source, names, rename, mmap, **how))
    return record if into is None else record.into(into)


def _remote(url: str, verify: Verify, **how: Any) -> Archive | str:
    """Return a remote archive, or the path that a `file://` URL is of."""
    from zcrecord.remote import open  # both here, because few archives are
    from zcrecord.storage.urls import file_beside

    archive = open.open_url(url, verify=verify, **how)
    if isinstance(archive, str) or not is_catalogue(archive):
        return archive
    archive.bring()

    def shard(name: str) -> Archive:
        return _no_path(open.open_url(file_beside(url, name), verify="touch", **how))

    named = {"cache": how["cache"], "storage_options": how["options"]}
    return _over_shards(archive, shard, lambda whole: (_reload, (url, named, whole.seal(), whole.pins())))


def _no_path(archive: Archive | str) -> Archive:
    assert isinstance(archive, Archive), "the shards of a remote catalogue are remote"
    return archive


def _over_shards(catalogue: Archive, shard: Callable[[str], Archive], recipe: Callable[[Archive], Any]) -> Archive:
    from zcrecord.archive.catalogue import open_catalogue  # here, because few archives are

    whole = open_catalogue(catalogue, shard)
    whole.recipe = recipe
    return whole


def _loaded(source: Any, names: Names | None, rename: Rename | None, mmap: bool, **how: Any) -> Archive:
    if isinstance(source, Archive):
        return _fetched(source, names, rename, **how)
    memory, name = _memory(source, mmap)
    try:
        return _opened(memory, names, rename, **how)
    except RecordError as error:
        raise error.located(path=name) from error.__cause__


def _opened(
    memory: Memory,
    names: Names | None,
    rename: Rename | None,
    *,
    mode: Mode,
    verify: Verify,
    expect: str | None,
    embedded: Embedded | None,
) -> Archive:
    """Return an archive in memory or in a mapped file, or a part of it."""
    if names is not None and expect is None and embedded is None and is_packed(memory.octets):
        from zcrecord.transport import open  # here, as below, because few archives are

        return _verified(open.select_packed(memory, names, rename, verify=verify), verify, mode)
    archive = _whole(memory, mode=mode, verify=verify, embedded=embedded)
    _check_content(archive, expect)
    return archive if names is None and rename is None else _part(archive, names, rename)


def _fetched(
    archive: Archive,
    names: Names | None,
    rename: Rename | None,
    *,
    mode: Mode,
    verify: Verify,
    expect: str | None,
    embedded: Embedded | None,
) -> Archive:
    """Return a remote archive, or a part of one, with those payloads there that were asked for."""
    if embedded is not None:
        what = f"embedded={embedded!r} is for local files; download it, or have the archive served by itself"
        raise UnsupportedError(what, path=archive.path)
    _check_content(archive, expect)
    if names is not None or rename is not None:
        archive = _part(archive, names, rename)
    if names is not None:
        archive.bring()
    return _verified(archive, verify, mode)


def _part(archive: Archive, names: Names | None, rename: Rename | None) -> Archive:
    from zcrecord.archive import subset  # here, because few load a part

    return subset.select(archive, names, rename)


def _verified(archive: Archive, verify: Verify, mode: Mode) -> Archive:
    """Return an archive, its payloads verified if they are to be, or a private copy of it."""
    if verify == "full":
        from zcrecord.archive import digest  # here, because few loads read all of an archive

        digest.check(archive)
    return archive.private() if mode == "c" and archive.mode == "r" else archive


def _check_choices(verify: Any, embedded: Any, mode: Any, expect: Any) -> None:
    """Refuse arguments that mean nothing, before anything is read."""
    _check_choice("verify", verify, ("touch", "index", "full"))
    _check_choice("embedded", embedded, (None, "prefix", "suffix"))
    _check_choice("mode", mode, ("r", "c"))
    if expect is not None and not (isinstance(expect, str) and _DIGEST.fullmatch(expect)):
        what = "is no content digest: 'sha256:' and 64 hexadecimal digits, a to f small"
        raise UnsupportedError(f"expect={printable(repr(expect))} {what}")


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        *others, last = (repr(k) for k in known if k is not None)
        raise UnsupportedError(f"{name}={value!r} is not known; {', '.join(others)} or {last}")


def _check_content(archive: Archive, expect: str | None) -> None:
    if expect is None:
        return
    from zcrecord.archive import digest

    archive.ensure_all()
    if (found := digest.content_digest(archive)) != expect:
        raise IntegrityError(f"content digest {expect} was expected, it has {found}", path=archive.path)


def _memory(source: Any, mmap: bool) -> tuple[Memory, str | None]:
    """Return a source's bytes, and its name in errors; a resource's name is no path to load it from again."""
    opened = None
    if hasattr(source, "read") and (name := path_of_open(source)) is not None:
        source, opened = name, source.fileno()
    if not isinstance(source, str | os.PathLike):
        if hasattr(source, "read_bytes"):
            return read_resource(source), str(source)
        stream = hasattr(source, "read") and not isinstance(source, _mmap.mmap)
        return read_stream(source) if stream else Memory(buffer_of(source)), None
    path, read = path_of(source), map_file if mmap else read_file
    try:
        return read(path, opened=opened), path
    except FormatError:
        memory = read(path, least=0, opened=opened)  # a small archive is packed into less than an archive can have
        if not is_packed(memory.octets):
            raise
        return memory, path


def _whole(memory: Memory, *, mode: Mode, verify: Verify, embedded: Embedded | None) -> Archive:
    if embedded is None and is_packed(memory.octets):
        from zcrecord.transport import open

        archive = open.open_packed(memory, verify=verify, mode=mode)
    else:
        if embedded is None and ends_in_archive(memory.octets):
            embedded = "suffix"
        alone = memory.identity is not None and not memory.octets.readonly  # read from a file, and nobody else's
        archive = open_archive(memory, verify=verify, embedded=embedded, mode=mode if alone else "r")
    archive.recipe = _recipe
    if is_catalogue(archive):
        archive = _local_whole(archive, memory)
    return _verified(archive, verify, mode)


def _local_whole(catalogue: Archive, memory: Memory) -> Archive:
    """Return the whole that a catalogue in a file tells of; its shards are mapped, or read, as it was.

    They lie beside it, or, if its path is a link, beside the file that it leads to.
    """
    if memory.absolute is None or catalogue.embedded is not None:
        what = "is a catalogue, whose shards lie beside it in files; load it by its path or URL"
        raise UnsupportedError(what, path=memory.path)
    at, read = memory.absolute, map_file if memory.octets.readonly else read_file

    def shard(name: str) -> Archive:
        path = os.path.join(os.path.dirname(at), name)
        if not os.path.exists(path):
            path = os.path.join(os.path.dirname(os.path.realpath(at)), name)
        archive = open_archive(read(path), verify="touch")
        archive.recipe = _recipe
        return archive

    return _over_shards(catalogue, shard, _recipe)


def _recipe(archive: Archive) -> tuple[Any, ...]:
    """Return function and arguments that load an archive again, of the same path or bytes."""
    path = archive.absolute or archive.path
    how: dict[str, Any] = {"verify": archive.verified}
    if path is not None:
        how |= {"embedded": archive.embedded, "mmap": archive.mapped}
    return _reload, (bytes(archive.buffer) if path is None else path, how, archive.seal())


def _reload(source: str | bytes, how: dict[str, Any], seal: bytes, pins: dict[Any, Any] | None = None) -> Archive:
    """Return the archive that was pickled.

    Raises:
        IntegrityError: the file has other content by now.
    """
    archive: Archive = load_record(source, **how).archive
    if archive.seal() != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=archive.path)
    archive.pin(pins or {})
    return archive
