"""The wrong file: one typed error each, which names the file, says what it is, or what to do."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from malformed import plain

import zcrecord
from zcrecord import (
    FormatError,
    IntegrityError,
    RecordError,
    VersionError,
)

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "tests" / "data" / "digits.onnx"
ARCHIVE = plain().seal()
UNSEALED = plain(front=False, sealed=False).seal()
posix = pytest.mark.skipif(os.name != "posix", reason="platform: named pipes and devices")


def future(**fields: int) -> bytes:
    archive = plain()
    archive.ends.update(fields)
    return archive.seal()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", bytes(200))
    return file.getvalue()


LOST = r"the archive has \d+ bytes, the source \d+; it is truncated, copy it again$"
MORE = r"the archive has \d+ bytes, the source \d+; it is followed by other bytes; embedded='prefix' ignores them$"
TRAILER = "trailer: its magic is missing; the file is truncated or has bytes appended, copy it again$"
# fmt: off
FILES: list[tuple[str, bytes, str, type[RecordError]]] = [
    ("empty", b"", "the file is empty$", FormatError),
    ("text", b"# A model\n\nIt is elsewhere.\n" * 20, "this is a text file, not a zcrecord archive$", FormatError),
    ("json", b'{"w": [1, 2, 3]}\n' * 20, "this is JSON text, not a zcrecord archive$", FormatError),
    ("ONNX", DIGITS.read_bytes(), "this looks like an ONNX model, not a zcrecord archive; onnx2zc makes an archive",
     FormatError),
    ("zstd", b"\x28\xb5\x2f\xfd" + bytes(200),
     "0 bytes come out of this zstd file, too few for an archive; it is truncated, copy it again$", FormatError),
    ("safetensors", (300).to_bytes(8, "little") + b'{"x":{"dtype":"F32"}}' + b" " * 400,
     ".*one of dtype, shape and data_offsets is missing", FormatError),
    ("npz without arrays", zipped(), ".*not an array of numpy: the magic of .npy is missing", FormatError),
    ("GGUF", b"GGUF\x09" + bytes(200), ".*GGUF version 9; versions 2 and 3 can be read", FormatError),
    ("zeros", bytes(4096), "not a zcrecord archive: the first 8 bytes are not its magic$", FormatError),
    ("executable", b"\x7fELF" + bytes(200), "this is an ELF program with no archive at its end; `strip` .*attach`$",
     FormatError),
    ("Windows executable", b"MZ\x90\0" + bytes(200), "this is a Windows program with no archive at its end; ",
     FormatError),
    ("text that starts as a Windows executable", b"MZ is a magic number.\n" * 20, "this is a text file, not a zcrecord",
     FormatError),
    ("executable, an archive at its end by chance", b"\x7fELF" + bytes(77) + ARCHIVE,
     r"not a zcrecord archive; one is at its end, but from offset 81, which is no multiple of its base alignment \d+; "
     "place it with `zcrecord attach`; embedded='suffix' opens it as it is$", FormatError),
    ("executable, of an archive the end", b"\x7fELF" + bytes(124) + ARCHIVE[64:],
     "this is an ELF program with no archive at its end; ", FormatError),
    ("executable, a later archive at its end", b"\x7fELF" + bytes(2044) + future(version=2),
     "trailer: format version 2, this reader knows 1; upgrade zcrecord$", VersionError),
    ("executable, a damaged archive at its end", b"\x7fELF" + bytes(2044) + ARCHIVE[:90] + b"\xff" + ARCHIVE[91:],
     "index: its CRC does not match; the file is damaged, copy it again$", IntegrityError),
    ("truncated by a byte", ARCHIVE[:-1], LOST, FormatError),
    ("truncated in the header", ARCHIVE[:60],
     "60 bytes are too few for an archive .at least 128.; the file is truncated$", FormatError),
    ("truncated, header unsealed", UNSEALED[:-1], TRAILER, FormatError),
    ("appended bytes", ARCHIVE + b"more", MORE, FormatError),
    ("start missing", ARCHIVE[1:], "not a zcrecord archive: the first 8 bytes are not its magic$", FormatError),
    ("text mode, LF to CR LF", ARCHIVE.replace(b"\n", b"\r\n"), "the magic is damaged, as by a transfer in text mode",
     FormatError),
    ("future version", future(version=2), "header: format version 2, this reader knows 1; upgrade zcrecord$",
     VersionError),
    ("unknown feature", future(required_features=1 << 7),
     r"header: needs features \(bits \[7\]\) this reader does not know; upgrade zcrecord$", VersionError),
    ("damaged header", ARCHIVE[:50] + b"\xff" + ARCHIVE[51:],
     "header: its CRC does not match; the file is damaged, copy it again$", IntegrityError),
    ("damaged index", ARCHIVE[:90] + b"\xff" + ARCHIVE[91:],
     "index: its CRC does not match; the file is damaged, copy it again$", IntegrityError),
]
# fmt: on
@pytest.mark.parametrize(("data", "message", "kind"), [pytest.param(*f[1:], id=f[0].replace(" ", "_")) for f in FILES])
def test_wrong_file_or_bytes_give_one_clear_error(
    data: bytes, message: str, kind: type[RecordError], tmp_path: Path
) -> None:
    path = tmp_path / "model.zcr"
    path.write_bytes(data)
    for source in (path, data):
        with pytest.raises(kind, match=(r"model\.zcr: " if source is path else "^") + message) as caught:
            zcrecord.load_record(source)
        assert type(caught.value) is kind
        assert caught.value.path == (str(path) if source is path else None)
        assert len(str(caught.value).splitlines()) == 1
        assert caught.value.__cause__ is None


@pytest.mark.slow
@posix
def test_named_pipe_is_refused_without_waiting_for_it(tmp_path: Path) -> None:
    """In a process of its own: one that waits is ended, instead of the tests."""
    os.mkfifo(tmp_path / "pipe")
    code = "import sys, zcrecord\ntry: zcrecord.load_record(sys.argv[1])\nexcept zcrecord.SourceError as e: print(e)"
    command = [sys.executable, "-c", code, str(tmp_path / "pipe")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    assert done.stdout.endswith("pipe: not a regular file; copy it to one, or give its bytes\n")
