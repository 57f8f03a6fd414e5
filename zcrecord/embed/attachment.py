"""Archives attached to executables: a program and its weights in one file that runs as before.

The file is the program, zeros, a note of 32 bytes, and the archive at a multiple of 65536, so that every system can map
it by itself. The note has the size of the program alone, by which `detach` restores it byte for byte. `load_record`
opens the file as it is, without this module. Nothing is attached to text, scripts, zip files, signed programs, models.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from zcrecord.archive.archive import Verify, require_one_file
from zcrecord.codec import layout
from zcrecord.codec.file_types import describe_data
from zcrecord.errors import Advice, FormatError, UnsupportedError, located
from zcrecord.record.load import load_record
from zcrecord.storage.files import Progress, check_destination, open_sink, path_of, refusals
from zcrecord.storage.memory import map_file
from zcrecord.storage.sink import Sink

_PIECE = 1 << 20  # bytes of one write
_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE, _ZIP_COMMENT = 22, 65535  # bytes of a zip's last entry, and of the comment that may follow it
_MACHO_64, _MACHO_32, _MACHO_UNIVERSAL = b"\xcf\xfa\xed\xfe", b"\xce\xfa\xed\xfe", b"\xca\xfe\xba\xbe"
_MACHO_SIGNATURE = 0x1D  # LC_CODE_SIGNATURE
_HEAD = 4096  # bytes by which text and programs are distinguished: programs have zeros among them
_MOST_SLICES = 32  # of a universal program; a file with a larger count is a Java class


@dataclass(frozen=True, slots=True)
class AttachReport:
    """Report of `attach`; sizes in bytes.

    `dest` is the file that was written. It has the program, of `program_bytes`, and the archive at `offset`.
    `replaced_bytes` is the size of the archive that was attached before; None if no archive was.
    """

    program: str
    dest: str
    program_bytes: int
    archive_bytes: int
    offset: int
    replaced_bytes: int | None


@dataclass(frozen=True, slots=True)
class DetachReport:
    """Report of `detach`; sizes in bytes.

    `dest` is the archive that was written, None if it was discarded. `program_bytes` is the program's size without it.
    `exact` is True if the program has the bytes from before `attach`. If another tool appended the archive, the
    program's end is not known: the bytes between program and archive stay, and `exact` is False.
    """

    program: str
    dest: str | None
    program_bytes: int
    archive_bytes: int
    exact: bool


class _Parts(NamedTuple):
    """Parts of a file: the program's size, and start (None if there is none) and end of an attached archive.

    A signature may follow the end. `noted` is True if the file has the note of `attach`.
    """

    program: int
    archive: int | None
    end: int
    noted: bool


def attach(
    program: Any,
    archive: Any,
    dest: Any = None,
    *,
    verify: Verify = "full",
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> AttachReport:
    """Append an archive to a program, which runs as before and opens it by `load_record(sys.executable)`.

    The program is replaced in one step, or left as it was. It may be running: a running process keeps the old file.
    Mode, owner and extended attributes stay; hard links keep the old file. An archive that was attached before is
    replaced. Use `strip` before, since it would remove the archive; sign a Windows program after. A program that reads
    its own data at the end of its file (Nuitka's onefile mode, `deno compile`) does not find that data any more.

    Args:
        program: the path of an executable that may have bytes at its end: ELF, or one that PyInstaller made.
        archive: any source that `load_record` takes.
        dest: a path for the new file; then the program stays as it is.
        verify: how much of the archive is checked before, as in `load_record`.
        force: replace `dest` if it exists, and attach to a program that may not run any more.
        durable: wait until the file would survive power loss.
        progress: called with the bytes written, and the number of all bytes.

    Raises:
        UnsupportedError: the program is a script, a zip, a model, signed, or an archive. FormatError: `archive` is not
        an archive, or the program is empty. IntegrityError: the archive is damaged. DestinationExistsError: `dest`
        exists and `force` was not given. SourceError: the file system reports an error, or the program was replaced
        meanwhile.

    Example:
        >>> import shutil, sys, numpy as np, zcrecord
        >>> _ = shutil.copy(sys.executable, "app")
        >>> _ = zcrecord.save_record({"w": np.arange(3)}, "weights.zcr")
        >>> attach("app", "weights.zcr").replaced_bytes
        >>> zcrecord.load_record("app")["w"].tolist()
        [0, 1, 2]
    """
    path = path_of(program)
    out = path if dest is None else path_of(dest)
    with refusals(out):
        in_place = out == path or (os.path.exists(out) and os.path.exists(path) and os.path.samefile(out, path))
    source = path_of(archive) if isinstance(archive, str | os.PathLike) else None
    version = None if in_place else check_destination(source, out, force)
    with load_record(archive, verify=verify) as record:
        require_one_file(record.archive, "attach")
        if not record.archive.whole:
            raise UnsupportedError("only whole archives can be attached; save the part", path=record.archive.path)
        record.archive.fetch()
        weights = record.archive.buffer
        memory = map_file(path, least=0)
        octets = memory.octets
        parts = _parts(octets, path)
        _check_unsigned(octets, parts, path)
        _check_attachable(octets[: parts.program], path, force)
        offset = layout.align_up(parts.program + layout.ATTACHED_SIZE, layout.ATTACHED_ALIGNMENT)
        note = bytes(offset - layout.ATTACHED_SIZE - parts.program) + layout.encode_attached(parts.program)
        identity = memory.identity or ()
        replaces = identity if in_place else version
        with open_sink(out, durable=durable, like=(path, identity), replaces=replaces) as sink:
            _write((octets[: parts.program], memoryview(note), weights), sink, progress)
        replaced_bytes = None if parts.archive is None else parts.end - parts.archive
        return AttachReport(path, out, parts.program, len(weights), offset, replaced_bytes)


def detach(
    program: Any,
    dest: Any = None,
    *,
    keep: bool = False,
    discard: bool = False,
    force: bool = False,
    durable: bool = True,
) -> DetachReport:
    """Remove an attached archive from a program, which becomes byte for byte the one before `attach`.

    The archive gets the bytes that were attached. They are not checked, so that a damaged archive can be removed. The
    program is replaced in one step, as by `attach`, after `dest` was written. If the program was signed with its
    archive, only a copy of the archive can be made (`keep`). To remove it, first remove the signature with the tool
    that made it; that tool leaves the checksum in the program's headers as signing made it.

    Args:
        program: the path of a program with an archive attached.
        dest: a path for the archive; by default PROGRAM.zcr, beside the program.
        keep: leave the program as it is.
        discard: do not write the archive.
        force: replace `dest` if it exists.
        durable: wait until the files would survive power loss.

    Raises:
        FormatError: no archive is attached. UnsupportedError: the program was signed with its archive and `keep` was
        not given; or `discard` was given with `dest` or `keep`. DestinationExistsError: `dest` is the program, or
        exists and `force` was not given. SourceError: the file system refused, or the program was replaced meanwhile,
        and `dest` has the archive.

    Example:
        >>> import shutil, sys, numpy as np, zcrecord
        >>> _ = shutil.copy(sys.executable, "app")
        >>> _ = zcrecord.save_record({"w": np.arange(3)}, "weights.zcr")
        >>> _ = attach("app", "weights.zcr")
        >>> detach("app", "again.zcr").exact
        True
    """
    path = path_of(program)
    if discard and (keep or dest is not None):
        raise UnsupportedError("discard throws the archive away; leave out keep and dest", path=path)
    out = None
    if not discard:
        out = f"{path.removesuffix('.exe')}.zcr" if dest is None else path_of(dest)
    version = check_destination(path, out, force)
    memory = map_file(path, least=0)
    octets = memory.octets
    parts = _parts(octets, path)
    if parts.archive is None:
        raise FormatError("no archive is attached to this file", path=path)
    if not keep:
        _check_unsigned(octets, parts, path)
    if out is not None:
        with open_sink(out, durable=durable, replaces=version) as sink:
            _write([octets[parts.archive : parts.end]], sink)
    if not keep:
        with open_sink(path, durable=durable, like=(path, memory.identity or ()), replaces=memory.identity) as sink:
            _write([octets[: parts.program]], sink)
    return DetachReport(path, out, parts.program, parts.end - parts.archive, parts.noted)


def _parts(octets: memoryview, path: str) -> _Parts:
    """Return program and attached archive of a file, by its last bytes; UnsupportedError if it is only an archive."""
    size, end = len(octets), layout.unsigned_size(octets)
    if end < 2 * layout.HEADER_SIZE or octets[end - layout.HEADER_SIZE : end][: len(layout.MAGIC)] != layout.MAGIC:
        return _Parts(size, None, size, False)
    with located(path=path):
        _, _, start = layout.locate(octets, "suffix")
        if not start:
            raise UnsupportedError("this is an archive, not a program with one attached")
        program_size = layout.decode_attached(octets[:start])
    return _Parts(start if program_size is None else program_size, start, end, program_size is not None)


def _check_unsigned(octets: memoryview, parts: _Parts, path: str) -> None:
    """Raise UnsupportedError if a program was signed with its archive: its headers refer to the signature."""
    if parts.archive is not None and parts.end < len(octets):
        tools = "`signtool remove /s`, `osslsigncode remove-signature`"
        advice = f"take the signature off first ({tools}), and sign again after"
        fault = f"it was signed with its archive attached, and the signature would no longer hold; {advice}"
        raise UnsupportedError(fault, path=path, advice=Advice("detach with {} copies the archive alone", "keep", True))


def _check_attachable(program: memoryview, path: str, force: bool) -> None:
    """Refuse a program that would not run as before; `force` accepts all but an empty file and an archive."""
    if not len(program):
        raise FormatError("the program is empty", path=path)
    if program[: len(layout.MAGIC)] == layout.MAGIC:
        raise UnsupportedError("this is a zcrecord archive, not a program", path=path)
    if not force and (reason := _objection(program)) is not None:
        fault, advice = f"nothing can be attached to this program: {reason}", Advice("{} attaches it", "force", True)
        raise UnsupportedError(fault, path=path, advice=advice)


def _write(parts: Sequence[memoryview], sink: Sink, progress: Progress | None = None) -> None:
    """Write parts one after the other, a MiB at a time, and report progress."""
    total = sum(map(len, parts))
    for part in parts:
        for start in range(0, len(part), _PIECE):
            sink.write(part[start : start + _PIECE])
            if progress is not None:
                progress(sink.position, total)


def _objection(program: memoryview) -> str | None:
    """Return the reason why a program would not work with an archive attached; None if it would."""
    if _is_zip(program):
        return "it ends in a zip's directory (a zipapp?), which has to be last; put the archive into the zip, stored"
    if bytes(program[:2]) == b"#!":
        return "it is a script, whose interpreter would read on into the archive; leave the archive beside it"
    if _is_text(program):
        return "it is text, and no executable"
    if (table := layout.certificate_table(program)) is not None and table[1]:
        return "it has an Authenticode signature, which would no longer hold; attach first, then sign"
    if _is_signed_macho(program):
        return "it has a code signature, which would no longer hold; take it off, attach, and sign it again"
    if (model := describe_data(program)) is not None:
        return f"{model}, whose readers would not see the archive; leave it beside it"
    return None


def _number(data: memoryview, offset: int, order: Literal["little", "big"] = "little") -> int:
    """Return an unsigned number of 4 bytes; bytes past the end count as zeros."""
    return int.from_bytes(data[offset : offset + 4], order)


def _is_text(program: memoryview) -> bool:
    """Return True if a file starts as text: UTF-8 without control characters, except white space and escapes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(bytes(program[:_HEAD]), final=len(program) < _HEAD)  # it may end inside a character
    except UnicodeDecodeError:
        return False
    return not any(c < " " and c not in "\t\n\v\f\r\x1b" for c in text)


def _is_zip(program: memoryview) -> bool:
    """Return True if a file ends in a zip's last entry, whose comment reaches exactly to the file's end."""
    tail = bytes(program[-(_ZIP_END_SIZE + _ZIP_COMMENT) :])
    offset = tail.rfind(_ZIP_END)
    while offset >= 0:
        if offset + _ZIP_END_SIZE + int.from_bytes(tail[offset + 20 : offset + 22], "little") == len(tail):
            return True
        offset = tail.rfind(_ZIP_END, 0, offset)
    return False


def _is_signed_macho(program: memoryview) -> bool:
    """Return True if a file is a Mach-O program, or a universal one, with a code signature."""
    # Offsets here and below are those of Apple's <mach-o/fat.h> and <mach-o/loader.h>.
    if bytes(program[:4]) == _MACHO_UNIVERSAL and (count := _number(program, 4, "big")) <= _MOST_SLICES:
        starts = [_number(program, 8 + 20 * i + 8, "big") for i in range(count)]
        return any(_has_signature(program[start:]) for start in starts)
    return _has_signature(program)


def _has_signature(program: memoryview) -> bool:
    """Return True if a Mach-O program has the load command of a code signature; False for any other file."""
    magic = bytes(program[:4])
    if magic not in (_MACHO_64, _MACHO_32):
        return False
    offset = 32 if magic == _MACHO_64 else 28  # of the first load command
    end = min(offset + _number(program, 20), len(program))
    for _ in range(_number(program, 16)):
        if offset >= end:
            return False
        if _number(program, offset) == _MACHO_SIGNATURE:
            return True
        offset += max(_number(program, offset + 4), 8)
    return False
