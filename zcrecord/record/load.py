"""`load_record`: a path, a URL or bytes to a Record."""

from __future__ import annotations

import errno
import functools
import mmap as _mmap
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack, overload

from zcrecord.archive.archive import Archive, Embedded, Verify, is_catalogue, names_files, open_archive
from zcrecord.codec.layout import HEADER_SIZE, MAGIC, ends_in_archive
from zcrecord.errors import FormatError, IntegrityError, RecordError, SourceError, UnsupportedError, printable
from zcrecord.storage.files import is_url, path_of, path_of_open, real_path
from zcrecord.storage.memory import Memory, Mode, buffer_of, is_packed, read_file, read_on_demand

from .record import Record

if TYPE_CHECKING:
    from zcrecord.archive.references import OpenFile
    from zcrecord.archive.subset import Names, Rename

T = TypeVar("T")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")


class _LoadKeywords(TypedDict, total=False):
    """The options of `load_record` beside `into`, for type checkers."""

    names: Names | None
    rename: Rename | None
    mode: Mode
    verify: Verify
    mmap: bool | None
    expect: str | None
    trusted_keys: Sequence[Any] | None
    embedded: Embedded | None
    cache: Any
    storage_options: Mapping[str, Any] | None


@overload
def load_record(source: Any, *, into: None = None, **options: Unpack[_LoadKeywords]) -> Record: ...


@overload
def load_record(source: Any, *, into: type[T], **options: Unpack[_LoadKeywords]) -> T: ...


def load_record(
    source: Any,
    *,
    into: Any = None,
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool | None = True,
    expect: str | None = None,
    trusted_keys: Sequence[Any] | None = None,
    embedded: Embedded | None = None,
    cache: Any = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Any:
    """Open an archive without reading a payload byte: tensors are views of the mapping, or of the given bytes.

    Views are read-only, except in mode "c". torch ignores that: the first write to `torch.from_numpy(record["w"])` ends
    the process, or changes the bytes that the record was loaded from. Use `record.torch()`, `mode="c"`, or a copy:
    `torch.tensor(record["w"])`.

    Args:
        source: a path, which is mapped, of an archive or of a program with one attached; any bytes-like; a binary file
            object (mapped if it is as `open(path, "rb")` gave it, the bytes of a BytesIO, else read once); a resource
            of `importlib.resources` (mapped, or read once from a zip); a URL, from which only the payloads asked for
            are fetched (see `zcrecord.remote`). An archive packed for transport is decompressed into memory, with
            `names` only the chosen part.
        into: a dataclass, attrs class, NamedTuple or other type to be returned instead; see `Record.into`.
        names, rename: load a part, or under other names; see `Record.select`.
        mode: 'r' for read-only views; 'c' for writable views of a private copy. Its pages are copied when they are
            written, so no edit reaches the file. Tied tensors stay tied; equal tensors that are not tied are edited
            apart, though stored once. Bytes in memory are copied whole.
        verify: 'index' checks every rule of the index first (of safetensors' shards a header when something in its file
            is needed); 'touch' checks entries on use, for huge archives of which little is read; 'full' also checks the
            payloads' digests, of a part of a packed archive its own.
        mmap: False reads the file into one aligned buffer, or with `names` the tensors chosen: for files that may
            change while they are used. Replacing a mapped file does no harm; reading the lost part of a file that was
            shortened in place ends the process (SIGBUS). None reads each tensor by position when it is used, into
            memory that goes with its views; torch and npz files and packed archives are read whole. A file on NFS,
            Lustre, FUSE, 9p or SMB is read so, too, and never mapped, which the logger "zcrecord" tells at level INFO.
        expect: the content digest that the archive must have ('sha256:...'); reads all of it.
        trusted_keys: public keys, as `zcrecord.integrity.check_signature` takes them; the owner of one must have signed
            the content. All of it is read first, of every shard and referenced file, and those very files stay in use.
            Not covered: metadata, and a file that is changed in place later, unless `mmap` is False.
        embedded: 'prefix' for an archive followed by other bytes (flash), 'suffix' for one appended to a file. None
            also finds an archive that is appended at an aligned offset, as by `zcrecord attach`, unless the file
            starts as a model (safetensors, GGUF, ONNX, zip, pickle, ...): other readers see other tensors there.
        cache: a folder for bytes fetched from URLs; None for the one that $ZCRECORD_CACHE names; False for none.
        storage_options: for fsspec, which opens URLs: headers, credentials, the endpoint of an S3 server.

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is not a valid archive. VersionError: it
        needs a later reader. IntegrityError: it is damaged, its content digest is not `expect`, or no trusted key's
        owner signed it. LimitError: a size or depth is beyond a limit of FORMAT.md (R9, R30, R40, R47, R49); or a
        packed archive, or equal tensors in mode "c", would take far more memory than the file. UnsupportedError: the
        source or an option is of another kind. MismatchError: it does not match `into`. DependencyError: a package is
        missing.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_record("model.zcr")["w"].shape
        (2, 3)
    """
    keys = None
    if trusted_keys is not None:
        from .signatures import public_keys  # here, as below, because few records are signed

        keys = public_keys(trusted_keys)
    options = LoadOptions(mode, verify, mmap, expect, embedded, cache, storage_options, keys)
    record = Record(_load(source, names, rename, options))
    return record if into is None else record.into(into)


def record_of(source: Any, trusted_keys: Sequence[Any] | None = None) -> Record:
    """Return a Record as it is, its signature checked by `trusted_keys`, or the record loaded from another source."""
    if not isinstance(source, Record):
        record: Record = load_record(source, trusted_keys=trusted_keys)
        return record
    if trusted_keys is not None:
        from .signatures import check_signed, public_keys

        check_signed(source, public_keys(trusted_keys))
    return source


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `load_record`, checked before anything is read."""

    mode: Mode = "r"
    verify: Verify = "index"
    mmap: bool | None = True
    expect: str | None = None
    embedded: Embedded | None = None
    cache: Any = None
    storage_options: Mapping[str, Any] | None = None
    keys: Mapping[str, Any] | None = None  # trusted ones, by their ids

    @property
    def checks_content(self) -> bool:
        """True if the content of the whole archive is checked, whatever part is loaded."""
        return self.expect is not None or self.keys is not None

    def __post_init__(self) -> None:
        _check_choice("verify", self.verify, ("touch", "index", "full"))
        _check_choice("embedded", self.embedded, (None, "prefix", "suffix"))
        _check_choice("mode", self.mode, ("r", "c"))
        if self.expect is not None and not (isinstance(self.expect, str) and _DIGEST.fullmatch(self.expect)):
            fault = "is not a content digest; give 'sha256:' and 64 hexadecimal digits, a to f small"
            raise UnsupportedError(f"expect={printable(repr(self.expect))} {fault}")


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        *others, last = (repr(k) for k in known if k is not None)
        raise UnsupportedError(f"{name}={value!r} is not known; {', '.join(others)} or {last}")


def _load(source: Any, names: Names | None, rename: Rename | None, options: LoadOptions) -> Archive:
    """Open a source as an archive, or a part of it, checked as the options ask; of safetensors perhaps deferred."""
    if is_url(source):
        from zcrecord.foreign import open_remote  # here, because few archives are remote
        from zcrecord.remote.open_url import open_url, remote_file

        cache, storage, embedded = options.cache, options.storage_options, options.embedded
        if embedded is not None and not isinstance(file := remote_file(source, storage), str):
            fault = f"embedded={embedded!r} is for local files; download it, or have the archive served by itself"
            raise UnsupportedError(fault, path=file.shown)
        opened = open_url(source, verify=options.verify, cache=cache, options=storage, open_other=open_remote)
        if not isinstance(opened, str):
            return _fetch_part(_finish_remote(source, opened, options), names, rename, options)
        source = opened
    reads_chosen = names is not None and options.mmap is False and not options.checks_content
    if reads_chosen:
        options = replace(options, mmap=None)
    memory, name = _memory(source, options.mmap)
    if options.mmap and memory.on_demand:
        import logging  # here, because few files lie in a network

        network = getattr(memory.octets, "network", "")
        logging.getLogger("zcrecord").info("%s is on %s: tensors are read when used, not mapped", name, network)
    try:
        # Only the frames that hold the chosen tensors are decompressed; without `names` all are, several at a time.
        if names is not None and not options.checks_content and options.embedded is None and is_packed(memory.octets):
            from zcrecord.transport.open_packed import open_packed

            archive = open_packed(memory, verify=options.verify, lazily=True)
            if not names_files(archive):
                return _fetch_part(archive, names, rename, options)
        defer = names is None and rename is None and not options.checks_content
        archive = _verify(_open_local(memory, options, defer=defer), options)
        _check_content(archive, options, local=True)
        archive = _select(archive, names, rename)
        if reads_chosen:
            _read_payloads(archive)
        return archive
    except RecordError as error:
        raise error.located(path=name) from error.__cause__


def _read_payloads(archive: Archive) -> None:
    """Read all payloads of an archive that is read on demand, and keep them in memory."""
    for number in range(len(archive.index.payloads)):
        for piece in archive.source.pieces(number):
            piece.source.keep(piece.number)


def _fetch_part(archive: Archive, names: Names | None, rename: Rename | None, options: LoadOptions) -> Archive:
    """Return a part of an archive whose payloads are fetched on use; the payloads of `names` are fetched now."""
    _check_content(archive, options)
    archive = _select(archive, names, rename)
    if names is not None:
        archive.fetch()
    return _verify(archive, options)


def _select(archive: Archive, names: Names | None, rename: Rename | None) -> Archive:
    if names is None and rename is None:
        return archive
    from zcrecord.archive import subset  # here, because few load a part

    return subset.select(archive, names, rename)


def _verify(archive: Archive, options: LoadOptions) -> Archive:
    """Verify the payloads if asked to; return the archive, or in mode "c" a private copy."""
    if options.verify == "full":
        from zcrecord.archive import digest  # here, because few loads read all of an archive

        digest.check(archive)
    return archive.private() if options.mode == "c" and archive.mode == "r" else archive


def _check_content(archive: Archive, options: LoadOptions, *, local: bool = False) -> None:
    """Compare the content with the expected digest, or the one that a trusted key's owner signed, if there is any.

    IntegrityError if they differ. A `local` archive is then pickled with its digest; payloads of others are pinned.
    """
    if not options.checks_content:
        return
    record, expect = Record(archive), options.expect
    if options.keys is None:
        content = record.content_digest()
    else:
        from .signatures import check_signed

        content = check_signed(record, options.keys)[1]
    if expect not in (None, content):
        raise IntegrityError(f"content digest {expect} was expected, it has {content}", path=archive.path)
    if local:
        archive.source.recipe = functools.partial(_recipe, expect=content)


def _finish_remote(url: str, archive: Archive, options: LoadOptions) -> Archive:
    """Return a remote archive, or the one that a remote catalogue, or archive of references, describes."""
    reload_options = LoadOptions(cache=options.cache, storage_options=options.storage_options)

    def recipe(pickled: Archive) -> tuple[Any, ...]:
        return _reload, (url, reload_options, pickled.seal(), pickled.source.pins())

    if not archive.whole:  # `open_url` has set the recipe of a whole one
        archive.source.recipe = recipe
    return _open_remote_files(url, archive, options, recipe) if names_files(archive) else archive


def _open_remote_files(url: str, catalogue: Archive, options: LoadOptions, recipe: Any) -> Archive:
    """Return the archive that a remote catalogue, or archive of references, describes; its files are beside the URL."""
    from zcrecord.remote.open_url import open_ranges, open_url
    from zcrecord.storage.urls import file_beside

    catalogue.fetch()  # its tables are payloads, and are read whole

    def open_shard(name: str) -> Archive:
        shard_url = file_beside(url, name)
        shard = open_url(shard_url, verify="touch", cache=options.cache, options=options.storage_options)
        assert isinstance(shard, Archive), "the shards of a remote catalogue are remote"
        return shard

    def open_file(name: str, open_memory: Any) -> Archive:
        return open_ranges(file_beside(url, name), open_memory, options.cache, options.storage_options)

    return _open_described(catalogue, open_shard, open_file, recipe)


def _open_file(mmap: bool | None, path: str, *, least: int = 2 * HEADER_SIZE, opened: int | None = None) -> Memory:
    """Map a file if `mmap` is True, read it on demand if None, read it whole if False; `map_file` has the arguments.

    A file in a format that cannot be read on demand, such as a packed archive, is read whole instead.
    """
    if mmap is not False:
        memory = read_on_demand(path, unless_local=bool(mmap), least=least, opened=opened)
        if not memory.on_demand or memory.octets[:8] == MAGIC:
            return memory
        if not is_packed(memory.octets) and _foreign_format(memory) in ("safetensors", "gguf"):
            return memory
    return read_file(path, least=least, opened=opened)


def _memory(source: Any, mmap: bool | None) -> tuple[Memory, str | None]:
    """Return a source's bytes, and its name in errors; None for bytes and streams, which have none."""
    opened = None
    if hasattr(source, "read") and (name := path_of_open(source)) is not None:
        source, opened = name, source.fileno()
    if not isinstance(source, str | os.PathLike):
        from zcrecord.storage.memory import read_resource, read_stream  # here, because few sources are no paths

        if hasattr(source, "read_bytes"):
            return read_resource(source), str(source)
        is_stream = hasattr(source, "read") and not isinstance(source, _mmap.mmap)
        return read_stream(source) if is_stream else Memory(buffer_of(source)), None
    path, read = path_of(source), functools.partial(_open_file, mmap)
    try:
        return read(path, opened=opened), path
    except SourceError as error:
        if error.errno != errno.EISDIR or opened is not None:
            raise
        from zcrecord.foreign.folders import model_in  # here, because few sources are folders

        path = model_in(path, archive_first=True)
        return read(path, least=0), path
    except FormatError:
        memory = read(path, least=0, opened=opened)  # packed archives and other formats' files may be that small
        if not is_packed(memory.octets) and _foreign_format(memory) is None:
            raise
        return memory, path


def _open_local(memory: Memory, options: LoadOptions, *, defer: bool) -> Archive:
    """Return the archive in memory, a catalogue's over its shards; with `defer`, perhaps a DeferredArchive."""
    embedded = options.embedded
    if embedded is None and is_packed(memory.octets):
        from zcrecord.transport.open_packed import open_packed

        archive = open_packed(memory, verify=options.verify, mode=options.mode)
    elif embedded is None and memory.octets[:8] != MAGIC and (kind := _foreign_format(memory)) is not None:
        archive = _open_other_format(kind, memory, options, defer=defer)
        if not isinstance(archive, Archive):  # a deferred one
            return archive
    else:
        if embedded is None and ends_in_archive(memory.octets):
            embedded = "suffix"
        is_private = memory.identity is not None and not memory.octets.readonly  # a file's bytes, in our own memory
        mode: Mode = options.mode if is_private else "r"
        archive = open_archive(memory, verify=options.verify, embedded=embedded, mode=mode)
    archive.source.recipe = _recipe
    return _open_local_files(archive, memory) if names_files(archive) else archive


def _open_other_format(kind: str, memory: Memory, options: LoadOptions, *, defer: bool) -> Archive:
    """Return the archive over a file of another format; of safetensors, with `defer`, one that is made on first use."""
    from zcrecord.foreign import open_foreign

    ends_in_archive(memory.octets)  # raises: other readers would not see the one attached
    has_shards = (memory.path or "").endswith(".json")
    can_defer = kind == "safetensors" and memory.mapping is not None and options.verify != "full"
    if defer and can_defer and not (has_shards and (options.mode == "c" or not options.mmap)):  # it maps the shards
        from zcrecord.foreign.safetensors import DeferredArchive

        return DeferredArchive(memory, _recipe, options.mode)  # type: ignore[return-value]  # it stands for one
    return open_foreign(kind, memory, read=functools.partial(_open_file, options.mmap))


def _foreign_format(memory: Memory) -> str | None:
    from zcrecord.foreign import foreign_format  # here, because few files are of another format

    return foreign_format(memory)


def _open_described(
    archive: Archive, open_shard: Callable[[str], Archive], open_file: OpenFile, recipe: Any
) -> Archive:
    """Return the archive that a catalogue, or an archive of references, describes; its files are opened when needed."""
    from zcrecord.archive.references import ReferencedFiles  # here, because few archives name files
    from zcrecord.archive.sharded import open_catalogue
    from zcrecord.archive.shards import Shards

    if is_catalogue(archive):
        whole = open_catalogue(archive, lambda archive, index: Shards(archive, open_shard, len(index.payloads)))
    else:
        whole = open_catalogue(archive, lambda archive, index: ReferencedFiles(archive, open_file, index))
    whole.source.recipe = recipe
    return whole


def _open_local_files(catalogue: Archive, memory: Memory) -> Archive:
    """Return the archive that a local catalogue, or archive of references, describes; its files are opened as it was.

    They lie beside it, or, if its path is a link, beside the file that the link leads to.
    """
    if memory.absolute is None or catalogue.embedded is not None:
        kind = "a catalogue, whose shards" if is_catalogue(catalogue) else "an archive of references, whose files"
        raise UnsupportedError(f"is {kind} lie beside it in files; load it by its path or URL", path=memory.path)
    catalogue_path = memory.absolute
    read = functools.partial(_open_file, None if memory.on_demand else memory.octets.readonly)

    def neighbour_of(name: str) -> str:
        is_beside = os.path.exists(os.path.join(os.path.dirname(catalogue_path), name))
        return catalogue_path if is_beside else real_path(catalogue_path)

    def open_shard(name: str) -> Archive:
        shard = open_archive(read(os.path.join(os.path.dirname(neighbour_of(name)), name)), verify="touch")
        shard.source.recipe = _recipe
        return shard

    def open_file(name: str, open_memory: Any) -> Archive:
        from zcrecord.foreign.readers import open_beside  # here, because few archives refer to files

        opened: Archive = open_memory(open_beside(neighbour_of(name), name, functools.partial(read, least=0)))
        return opened

    return _open_described(catalogue, open_shard, open_file, _recipe)


def _recipe(archive: Archive, expect: str | None = None) -> tuple[Any, ...]:
    """Return the function and the arguments by which pickle loads an archive again, from its path or bytes."""
    path = archive.absolute or archive.path
    options = LoadOptions(verify=archive.verified, expect=expect)
    if path is not None:
        mapped = None if archive.source.on_demand else archive.source.is_mapped
        options = replace(options, embedded=archive.embedded, mmap=mapped)
    return _reload, (bytes(archive.buffer) if path is None else path, options, archive.seal())


def _reload(source: str | bytes, options: LoadOptions, seal: bytes, pins: Mapping[Any, Any] | None = None) -> Archive:
    """Reload a pickled archive; IntegrityError if its seal or content changed. Remote payloads are compared later."""
    archive = _load(source, None, None, replace(options, expect=None)).with_index()
    if archive.seal() != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=archive.path)
    _check_content(archive, options, local=True)
    archive.source.pin(pins or {})
    return archive
