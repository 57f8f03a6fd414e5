"""Commands that read a file read it from a URL, too; temporary copies go, errors name the URL without its secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
import torch

import zcrecord
from zcrecord import transport
from zcrecord.cli.dispatch import main, onnx2zc_main

pytestmark = pytest.mark.usefixtures("model_folder", "memory")


def put(memory: Any, *names: str) -> None:
    for name in names:
        memory.pipe_file(f"/b/{name}", Path(name).read_bytes())


@pytest.mark.exhaustive(keep=("npz]", "safetensors"))
@pytest.mark.parametrize("name", ["m.zcr", "m.zcr.zst", "m.safetensors", "m.npz", "m.pt", "m.npz?key=1"])
def test_convert_reads_every_kind_of_file_behind_a_url(name: str, memory: Any) -> None:
    weights: dict[str, Any] = {"w": np.arange(6, dtype=np.float32), "b": np.ones(2)}
    zcrecord.save_record(weights, "m.zcr")
    transport.pack("m.zcr", "m.zcr.zst")
    torch.save({key: torch.from_numpy(array) for key, array in weights.items()}, "m.pt")
    for other in ("m.safetensors", "m.npz"):
        assert main(["convert", "m.zcr", other, "-q"]) == 0
    memory.pipe_file(f"/b/{name}", Path(name.partition("?")[0]).read_bytes())
    for dest in ("out.zcr", "out.npz"):
        assert main(["convert", f"memory://b/{name}", dest, "-q"]) == 0
    assert main(["convert", "out.npz", "back.zcr", "-q"]) == 0
    for made in ("out.zcr", "back.zcr"):
        found = zcrecord.load_record(made)
        assert {key: found[key].tolist() for key in weights} == {key: a.tolist() for key, a in weights.items()}


@pytest.mark.slow
def test_pack_unpack_and_onnx2zc_read_urls(memory: Any) -> None:
    c.make_archive()
    put(memory, "model.zcr", "model.onnx")
    assert main(["pack", "memory://b/model.zcr", "packed.zst"]) == 0
    put(memory, "packed.zst")
    assert main(["unpack", "memory://b/packed.zst", "again.zcr"]) == 0
    assert Path("again.zcr").read_bytes() == Path("model.zcr").read_bytes()
    assert main(["pack", "memory://b/model.zcr", "memory://b/other.zst", "-q"]) == 0
    assert memory.cat_file("/b/other.zst") == Path("packed.zst").read_bytes()
    assert onnx2zc_main(["memory://b/model.onnx", "digits.zcr", "-q"]) == 0
    put(memory, "digits.zcr")
    assert main(["to-onnx", "memory://b/digits.zcr", "again.onnx", "-q"]) == 0
    assert Path("again.onnx").read_bytes() == Path("model.onnx").read_bytes()


def test_consolidate_and_convert_read_catalogues_behind_urls(memory: Any) -> None:
    weights = {"w": np.arange(40.0), "b": np.ones(30)}
    zcrecord.save_record(weights, "checkpoint.zcr", max_shard_size=300)
    put(memory, *(path.name for path in Path().glob("checkpoint*.zcr")))
    for command, source in (("consolidate", "b"), ("consolidate", "b/checkpoint.zcr"), ("convert", "b/checkpoint.zcr")):
        assert main([command, f"memory://{source}", "one.zcr", "-q", "-f"]) == 0
        found = zcrecord.load_record("one.zcr")
        assert not found.archive.source.file_names and found["w"].tolist() == weights["w"].tolist()


@pytest.mark.parametrize("command", ["convert", "pack", "unpack", "consolidate"])
def test_a_url_without_a_file_is_told_without_its_secrets(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    told = main([command, "memory://user:secret@b/none.zcr", "out.zcr"])
    c.fails(capsys, told, r"memory://b/none\.zcr: (no such file|.*FileNotFound|does not exist)")


def test_a_damaged_file_behind_a_url_is_named_by_the_url(memory: Any, capsys: pytest.CaptureFixture[str]) -> None:
    memory.pipe_file("/b/m.npz", b"PK\3\4 and no more")
    c.fails(capsys, main(["convert", "memory://b/m.npz", "out.zcr"]), "error: memory://b/m.npz: ")
    memory.pipe_file("/b/m.zcr", b"no archive" * 9)
    c.fails(capsys, main(["pack", "memory://b/m.zcr", "out.zst"]), "error: memory://b/m.zcr: ")


def test_what_reads_files_alone_says_that_it_was_given_a_url(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=r"https://h/m\.zcr: is a URL, and this reads files; download"):
        transport.pack("https://user:secret@h/m.zcr?key=1", "out.zst")
    c.fails(
        capsys, main(["embed", "https://h/m.zcr", "--lang", "c"]), r"https://h/m\.zcr: is a URL, and this reads files"
    )
