"""Every function and command that writes a file, each with sources of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import zcrecord
from zcrecord import LazyTensor, RecordWriter, embed, formats, onnx, transport
from zcrecord.cli import dispatch

DIGITS = Path(__file__).resolve().parents[2] / "tests" / "data" / "digits.onnx"
TREE: dict[str, Any] = {
    "a": np.arange(20_000),
    "f": np.arange(6000).reshape(2, -1)[:, ::2],
    "b": np.ones(5),
    "c": "text",
    "d": b"\1",
}
OLD = "old.zcr"
SHARDS = "shards"
Run = Callable[[Path, Path, bool], Any]  # takes a folder that `prepare` has filled, the destination, and `force`


class Save(NamedTuple):
    """A way to write the file that `dest` names, which may be there.

    `old` names the source that is a file before, or a folder of it and its shards; `ends` tells that errors end in an
    exit status; `zipped` that the source is a zip file, of which zipfile takes it for damage if the system cannot read
    it; `in_place` that it changes a file that is there; `asks` that it replaces a file only by `force`.
    """

    run: Run
    name: str = "m.zcr"
    old: str = OLD
    ends: bool = False
    zipped: bool = False
    in_place: bool = False
    asks: bool = False

    def before(self, sources: Path) -> dict[str, bytes]:
        """Return the file that is there before, and all others if `old` is a folder."""
        old = sources / self.old
        if not old.is_dir():
            return {self.name: old.read_bytes()}
        return {path.name: path.read_bytes() for path in old.iterdir()}

    def states(self, sources: Path) -> list[dict[str, bytes]]:
        """Return the states before a save: nothing, or a file."""
        return [*[{}] * (not self.in_place), self.before(sources)]


def prepare(sources: Path) -> None:
    """Make what the saves start from."""
    zcrecord.save_record({"old": np.arange(10)}, sources / OLD)
    zcrecord.save_record(TREE, sources / "tree.zcr")
    (sources / SHARDS).mkdir()
    zcrecord.save_record({"old": np.arange(10), "other": np.ones(10)}, sources / SHARDS / "m.zcr", max_shard_size=80)
    zcrecord.save_record({name: TREE[name] for name in "afb"}, sources / "plain.zcr")
    np.savez(sources / "plain.npz", a=TREE["a"], b=TREE["b"])
    formats.convert(sources / "plain.zcr", sources / "plain.safetensors")
    onnx.convert(DIGITS, sources / "digits.zcr")
    shutil.copy(DIGITS, sources / "digits.onnx")
    transport.pack(sources / "tree.zcr", sources / "packed.zcr", threads=1)
    (sources / "program").write_bytes(b"\x7fELF" + bytes(range(256)) * 40)
    (sources / "program").chmod(0o640)  # which what is made of it has, too
    shutil.copy(sources / "program", sources / "attached")
    embed.attach(sources / "attached", sources / "old.zcr")


def _lazy(nbytes: int) -> LazyTensor:
    def pieces() -> Iterator[bytes]:
        yield from (bytes([i]) * 40_000 for i in range(nbytes // 40_000))

    return LazyTensor("u1", (nbytes,), pieces)


def _recording(_: Path, dest: Path, __: bool) -> None:
    """Payloads that equal earlier ones are read back, compared and taken back."""
    with RecordWriter(dest) as out:
        for name in ("first", "second", "third"):
            out.add(name, np.array(TREE["a"]))
        with out.tensor("pieces", "i8", (20_000,)) as tensor:
            tensor.write(TREE["a"])


def _converted(source: str) -> Run:
    return lambda sources, dest, force: formats.convert(sources / source, dest, force=force)


def _edit(sources: Path, dest: Path, force: bool) -> None:
    with zcrecord.edit(sources / "tree.zcr", dest, force=force) as model:
        model.metadata["new"] = "text"
        model.drop("b")
        model["more"] = TREE["a"] + 1


def _edit_in_place(_: Path, dest: Path, __: bool) -> None:
    with zcrecord.edit(dest) as model:
        model.metadata["new"] = "text"
        model["b"] = _lazy(80_000)


def _command(*arguments: str, program: bool = False) -> Run:
    def run(sources: Path, dest: Path, _: bool) -> int:
        given = [str(sources / a[1:]) if a.startswith("@") else a.replace("DEST", str(dest)) for a in arguments]
        return dispatch.onnx2zc_main(given) if program else dispatch.main(given)

    return run


SAVES = {
    "save_record": Save(lambda _, dest, __: zcrecord.save_record(TREE, dest)),
    "save_record, lazy": Save(lambda _, dest, __: zcrecord.save_record({"lazy": _lazy(160_000), "a": TREE["a"]}, dest)),
    "save_record, shards": Save(
        lambda _, dest, __: zcrecord.save_record(TREE, dest, max_shard_size=100_000), old=SHARDS
    ),
    "save_record, shards over one file": Save(
        lambda _, dest, __: zcrecord.save_record(TREE, dest, max_shard_size=100_000)
    ),
    "shards to archive": Save(_converted("shards/m.zcr"), old=SHARDS),
    "RecordWriter": Save(_recording),
    "onnx.convert": Save(
        lambda sources, dest, force: onnx.convert(sources / "digits.onnx", dest, force=force), asks=True
    ),
    "onnx.convert, verified": Save(
        lambda sources, dest, force: onnx.convert(sources / "digits.onnx", dest, force=force, verify=True)
    ),
    "onnx.to_onnx": Save(
        lambda sources, dest, force: onnx.to_onnx(sources / "digits.zcr", dest, force=force), "m.onnx", asks=True
    ),
    "safetensors to archive": Save(_converted("plain.safetensors"), asks=True),
    "npz to archive": Save(_converted("plain.npz"), zipped=True),
    "archive to archive": Save(_converted("tree.zcr")),
    "archive to safetensors": Save(_converted("plain.zcr"), "m.safetensors", asks=True),
    "archive to npz": Save(_converted("plain.zcr"), "m.npz", asks=True),
    "npz to safetensors": Save(_converted("plain.npz"), "m.safetensors", zipped=True),
    "edit": Save(_edit, asks=True),
    "edit in place": Save(_edit_in_place, old="tree.zcr", in_place=True),
    "pack": Save(
        lambda sources, dest, force: transport.pack(sources / "tree.zcr", dest, threads=1, force=force), asks=True
    ),
    "unpack": Save(
        lambda sources, dest, force: transport.unpack(sources / "packed.zcr", dest, threads=1, force=force), asks=True
    ),
    "attach": Save(
        lambda sources, dest, force: embed.attach(sources / "program", sources / "tree.zcr", dest, force=force),
        asks=True,
    ),
    "attach in place": Save(
        lambda sources, dest, _: embed.attach(dest, sources / "tree.zcr"), "app", "program", in_place=True
    ),
    "detach": Save(
        lambda sources, dest, force: embed.detach(sources / "attached", dest, keep=True, force=force), asks=True
    ),
    "onnx2zc": Save(_command("@digits.onnx", "DEST", "--force", "-q", program=True), ends=True),
    "zcrecord convert": Save(_command("convert", "@plain.safetensors", "DEST", "--force", "-q"), ends=True),
    "zcrecord pack": Save(_command("pack", "@tree.zcr", "DEST", "--force", "-q", "--threads", "1"), ends=True),
    "zcrecord attach": Save(
        _command("attach", "@program", "@tree.zcr", "-o", "DEST", "--force", "-q"), "app", ends=True
    ),
}
