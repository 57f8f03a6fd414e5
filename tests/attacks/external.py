"""Hostile external data: one for each rule of where a model may point, and files that are not what they seem.

Beside the model's folder lies a file that no model may read, `SECRET`; each conversion that is accepted is searched for
its bytes. onnx itself is given the same folders. Numbers of rules are those of schema/SECURITY.md.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

from onnx_models import field

from attacks import catalogue
from attacks.catalogue import Attack, Door, Doors
from attacks.doors import command
from attacks.onnx_files import PEERS, converted, model, old_archive, scanned
from zcrecord import RecordError
from zcrecord.cli.dispatch import onnx2zc_main
from zcrecord.errors import ExternalDataError, OnnxError

SECRET = b"what no model may read, to be sure"[:24]
INSIDE = bytes(range(24))
FLOAT, STRING = field(2, 1), field(2, 8)


def linked(path: Path) -> Callable[[], object]:
    return converted(path, allow_links=True)


def searched(path: Path) -> Callable[[], object]:
    """Convert, and fail if what nobody may read was read."""
    act, dest = converted(path), old_archive(path)

    def search() -> None:
        act()
        assert SECRET not in dest.read_bytes(), "a file outside the model's folder was read"

    return search


DOORS: dict[str, Door] = {
    "convert": searched,
    "convert, links allowed": linked,
    "scan": scanned,
    "onnx2zc": command(onnx2zc_main, "--force", after=lambda path: [os.fspath(path.with_name("out.zcr"))]),
}
STRICT = frozenset(DOORS) - {"convert, links allowed"}


def external(*entries: tuple[str, str | bytes], kind: bytes = FLOAT, more: bytes = b"") -> bytes:
    """A model of one tensor of six floats that lies where these entries say."""
    pairs = [field(13, [field(1, k.encode()), field(2, v if isinstance(v, bytes) else v.encode())]) for k, v in entries]
    return model(field(1, 6) + kind + field(8, b"w") + b"".join(pairs) + field(14, 1) + more)


def folder_with(folder: Path, data: bytes, lay: Lay = lambda inside, secret: None) -> Path:
    """Make a model's folder with w.bin in it and a secret beside it; `lay` adds what the attack needs."""
    secret, inside = folder / "secret.bin", folder / "m"
    inside.mkdir()
    secret.write_bytes(SECRET)
    (inside / "w.bin").write_bytes(INSIDE)
    lay(inside, secret)
    (inside / "model.onnx").write_bytes(data)
    return inside / "model.onnx"


Lay = Callable[[Path, Path], object]  # adds what an attack needs to the model's folder; it gets that and the secret


def attack(
    rules: str, name: str, data: bytes, message: str, lay: Lay = lambda inside, secret: None, doors: Doors = None,
    error: type[RecordError] = ExternalDataError,
) -> Attack:  # fmt: skip
    return catalogue.attack(name, rules, lambda folder: folder_with(folder, data, lay), error, message, doors, PEERS)


def at(location: str | bytes, **entries: str) -> bytes:
    return external(("location", location), *entries.items())


def HARMLESS(folder: Path) -> Path:  # what attacks.running asks for
    return folder_with(folder, at("w.bin"))


def parent_link(inside: Path, secret: Path) -> None:
    (inside / "sub").symlink_to(secret.parent)


def two_links(inside: Path, secret: Path) -> None:
    (inside / "link").symlink_to("more")
    (inside / "more").symlink_to(secret)


def listening(inside: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(inside)  # the path of a socket may have no more than 108 bytes
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("socket")
    os.chdir(here)


def link_to(target: str) -> Lay:
    return lambda inside, _: (inside / "link").symlink_to(target)


LINK = "a symbolic link leads out of the model's folder"
NO_FILE = "it is not a regular file"
NUMBER = "is not a non-negative decimal integer"

ATTACKS = (
    attack("X1", "no location", external(("offset", "0")), "no location"),
    attack("X2", "an empty location", at(""), "the location is empty"),
    attack("X3", "NUL in a location", at("w.bin\0.png"), r"'w\.bin\\x00\.png': the location contains NUL"),
    attack("X4", "backslashes", at("..\\secret.bin"), "no backslash and no drive"),
    attack("X4", "a drive", at("C:/secret.bin"), "no backslash and no drive"),
    attack("X4", "another server", at("\\\\host\\share\\w.bin"), "no backslash and no drive"),
    attack("X5", "an absolute path", at("/etc/passwd"), "the location is absolute"),
    attack("X5", "an absolute path with two slashes", at("//etc/passwd"), "the location is absolute"),
    attack("X5", "the environment of the process", at("/proc/self/environ"), "the location is absolute"),
    attack("X6", "the folder above", at("../secret.bin"), r"leaves the model's folder through '\.\.'"),
    attack("X6", "the folder above, in the end", at("a/../../secret.bin"), r"leaves the model's folder through '\.\.'"),
    attack("X6", "the folder above, behind dots", at("./.././secret.bin"), r"leaves the model's folder through '\.\.'"),
    attack("X6", "30,000 folders above", at("../" * 20_000), r"leaves the model's folder through '\.\.'"),
    attack("X7", "the folder itself", at("."), "is the model's folder itself"),
    attack("X7", "the folder itself, in the end", at("a/.."), "is the model's folder itself"),
    attack("X8", "an unknown key", at("w.bin", size="24"), "unknown key 'size'"),
    attack("X8", "a key that is a terminal's", at("w.bin", **{"\x1b[2J\n": ""}), r"unknown key '\\x1b\[2J\\n'"),
    attack("X9", "a location twice", external(("location", "w.bin"), ("location", "../secret.bin")), "'location' twice",
           error=OnnxError),
    attack("X9", "a thousand keys", external(*((f"k{i}", "") for i in range(1000))), "too many external_data keys",
           error=OnnxError),
    attack("X10", "a negative offset", at("w.bin", offset="-24"), f"offset '-24' {NUMBER}"),
    attack("X10", "an offset in other digits", at("w.bin", offset="\u0661"), NUMBER),
    attack("X10", "an offset of 60,000 digits", at("w.bin", offset="9" * 60_000), NUMBER),
    attack("X10", "a negative length", at("w.bin", length="-1"), f"length '-1' {NUMBER}"),
    attack("X10", "a length with an exponent", at("w.bin", length="1e18"), NUMBER),
    attack("X10", "an offset that is a terminal's", at("w.bin", offset="\x1b]0;x\x07"), r"'\\x1b\]0;x\\x07' is not"),
    attack("X11", "a length of 2^63 - 1", at("w.bin", length=str(2**63 - 1)), "but the tensor's shape and type take"),
    attack("X11", "a length below the shape's", at("w.bin", length="23"), "but the tensor's shape and type take"),
    attack("X12", "past the end", at("w.bin", offset="1"), r"bytes 1 to 25 are past its end \(24\)"),
    attack("X12", "past the end by 2^63", at("w.bin", offset=str(2**63 - 1)), "are past its end"),
    attack("X12", "an offset that overflows with the length", at("w.bin", offset="9" * 19), "are past its end"),
    attack("X12", "4 PiB of a file of 24 bytes",
           model(field(1, 2**50) + FLOAT + field(8, b"w") + field(13, [field(1, b"location"), field(2, b"w.bin")])
                      + field(14, 1)), "are past its end"),
    attack("X13", "a file that is not there", at("absent.bin"), "cannot be opened: No such file"),
    attack("X13", "a file below a file", at("w.bin/x"), "cannot be opened: Not a directory"),
    attack("X13", "a location of 60,000 characters", at("x" * 60_000), "cannot be opened: File name too long"),
    attack("X13", "a location of 30,000 folders", at("x/" * 30_000 + "x"), "cannot be opened: "),
    attack("X13", "a location that is not UTF-8", at(b"\xff\xfe"), r"'\\udcff\\udcfe': cannot be opened"),
    attack("X13", "a location that is a terminal's", at("\x1b[31m\u202ebin\n"), r"'\\x1b\[31m\\u202ebin\\n': cannot"),
    attack("X14", "a folder", at("sub"), NO_FILE, lambda inside, _: (inside / "sub").mkdir()),
    attack("X14", "a pipe, which nobody writes into", at("pipe"), NO_FILE,
           lambda inside, _: os.mkfifo(inside / "pipe")),
    attack("X14", "a socket", at("socket"), NO_FILE, listening),
    attack("X14 X15", "a device without an end", at("link"), f"{LINK}|{NO_FILE}", link_to("/dev/zero")),
    attack("X14 X15", "the terminal", at("link"), f"{LINK}|{NO_FILE}|cannot be opened", link_to("/dev/tty")),
    attack("X15", "a link to a file outside", at("link"), LINK, link_to("../secret.bin"), STRICT),
    attack("X15", "a link through a link", at("link"), LINK, two_links, STRICT),
    attack("X15", "a file in a linked folder", at("sub/secret.bin"), LINK, parent_link, STRICT),
    attack("X15", "a linked folder, and back", at("sub/m/w.bin"), f"it is a symbolic|{LINK}", parent_link, frozenset()),
    attack("X15 X12", "a link to the environment of the process", at("link"), f"{LINK}|are past its end",
           link_to("/proc/self/environ")),
    attack("X15 X12", "a link to the memory of the process", at("link"), f"{LINK}|are past its end|{NO_FILE}",
           link_to("/proc/self/mem")),
    attack("X15", "a link to a descriptor of the process", at("link"), f"{LINK}|{NO_FILE}|past its|cannot be opened",
           link_to("/proc/self/fd/0")),
    attack("X14", "a link to itself", at("link"), f"{NO_FILE}|cannot be opened|symbolic link", link_to("link")),
    attack("X16", "a link inside the folder", at("link"), "it is a symbolic link", link_to("w.bin"), STRICT),
    attack("X17", "a hard link to a file outside", at("hard"), r"has 2 names \(hard links\)",
           lambda inside, secret: os.link(secret, inside / "hard"), STRICT),
    attack("X20", "values besides", external(("location", "w.bin"), more=field(9, INSIDE)), "and values of its own",
           error=OnnxError),
    attack("X21", "strings", external(("location", "w.bin"), kind=STRING), "strings cannot be external data"),
)  # fmt: skip
