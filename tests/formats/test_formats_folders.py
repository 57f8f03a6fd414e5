"""Model folders, as hubs have them, to folders of archives and back: weights in shards or whole, and small files.

`tests/onnx/test_onnx_folders.py` has folders of ONNX models.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import safetensors
import safetensors.numpy
from forge import Forge
from ml_dtypes import bfloat16

import zcrecord
from zcrecord.errors import DestinationExistsError, FormatError, SourceNotFoundError, UnsupportedError
from zcrecord.formats import convert

SMALL = ("LICENSE", "README.md", "config.json", "generation_config.json", "merges.txt", "tokenizer.json",
         "tokenizer.model", "chat_template.jinja", "vocab.txt")  # fmt: skip
OTHERS = (".hidden.json", "model.h5", "pytorch_model.bin.index.json", "picture.png")


def weights(count: int = 20) -> dict[str, Any]:
    """Return tensors in an order that no sort gives, of several types."""
    rng = np.random.default_rng(3)
    kinds: list[Any] = [np.float32, bfloat16, np.float16, np.int64]
    return {f"model.layers.{i * 7 % count}.w": rng.standard_normal((20, 30)).astype(kinds[i % 4]) for i in range(count)}


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    """A folder as a hub has it: four shards, their index, small files, and files that belong to other things."""
    folder = tmp_path / "hub"
    folder.mkdir()
    tensors = weights()
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number in range(4):
        file = f"model-{number + 1:05}-of-00004.safetensors"
        part = {name: tensors[name] for name in names[number * 5 : number * 5 + 5]}
        safetensors.numpy.save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    for name in (*SMALL, *OTHERS):
        (folder / name).write_text(f"this is {name}", encoding="utf-8")
    (folder / "sub").mkdir()
    return folder


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def numbered(count: int, suffix: str = "zcr") -> list[str]:
    return [f"model-{i:05}-of-{count:05}.{suffix}" for i in range(1, count + 1)]


def tensors_in(folder: Path) -> dict[str, Any]:
    """Return type and bytes of each tensor in a folder, by the package safetensors."""
    out: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, "np") as file:
            for name in file.offset_keys():
                out[name] = file.get_slice(name).get_dtype(), file.get_tensor(name).tobytes()
    return out


def test_a_folder_in_shards_becomes_one_of_archives_and_comes_back(hub: Path, tmp_path: Path) -> None:
    report = convert(hub, tmp_path / "out/", max_shard_size=6000)
    assert (report.dest, report.tensors) == (str(tmp_path / "out/model.zcr"), 20)
    assert files(tmp_path / "out") == sorted([*SMALL, "model.zcr", *numbered(9)])
    assert all((tmp_path / "out" / name).read_text(encoding="utf-8") == f"this is {name}" for name in SMALL)
    record = zcrecord.load_record(tmp_path / "out/model.zcr", verify="full")
    r.assert_same({n: np.array(v) for n, v in record.items()}, {name: weights()[name] for name in record})
    assert record.metadata == {"format": "pt"}
    convert(tmp_path / "out", f"{tmp_path}/back/", dest_format="safetensors", max_shard_size=9000)
    index = json.loads((tmp_path / "back/model.safetensors.index.json").read_text(encoding="utf-8"))
    assert list(index["weight_map"]) == list(record)
    assert files(tmp_path / "back") == sorted([*SMALL, "model.safetensors.index.json", *numbered(8, "safetensors")])
    assert tensors_in(tmp_path / "back") == tensors_in(hub)
    convert(tmp_path / "back", tmp_path / "again.zcr")
    again = zcrecord.load_record(tmp_path / "again.zcr")
    assert (list(again), again.content_digest()) == (list(record), record.content_digest())
    assert again.metadata == record.metadata


def test_what_archives_alone_can_say_comes_back_through_shards_of_safetensors(tmp_path: Path) -> None:
    tied = np.arange(600, dtype=np.float32).reshape(20, 30)
    tree = {
        "encoder": [{"w": tied, "heads": 8}, {"w": tied + 1}],
        "head": {"w": tied, "half": tied[:, ::2]},
        "turned": np.asfortranarray(tied),
        "none": np.zeros((0, 2), np.float32),
    }
    zcrecord.save_record(tree, tmp_path / "m.zcr", metadata={"steps": 5}, max_shard_size=2500)
    before = zcrecord.load_record(tmp_path / "m.zcr")
    assert before.archive.source.file_names
    convert(tmp_path / "m.zcr", tmp_path / "m.safetensors.index.json", max_shard_size=3000)
    convert(tmp_path / "m.safetensors.index.json", tmp_path / "n.zcr", max_shard_size=2500)
    after = zcrecord.load_record(tmp_path / "n.zcr", verify="full")
    assert after.archive.source.file_names
    assert (list(after), after.metadata) == (list(before), {"steps": 5})
    assert after.content_digest() == before.content_digest()
    assert after.info("head.w").tied == before.select(["encoder.0.w", "head.w"]).info("head.w").tied


def test_one_file_of_weights_is_taken_as_well(hub: Path, tmp_path: Path) -> None:
    for path in hub.glob("model*.safetensors*"):
        path.unlink()
    safetensors.numpy.save_file({"w": np.ones(3)}, hub / "model.safetensors")
    convert(hub, tmp_path / "out")  # a new name without a suffix is a folder, too
    assert files(tmp_path / "out") == sorted([*SMALL, "model.zcr"])
    convert(tmp_path / "out", f"{tmp_path}/back/", dest_format="safetensors")
    assert files(tmp_path / "back") == sorted([*SMALL, "model.safetensors"])


def test_weights_keep_the_name_by_which_their_own_library_finds_them(tmp_path: Path) -> None:
    stem = "adapter_model"
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    weights = {"base_model.model.h.0.lora_A.weight": np.ones((2, 3), np.float32)}
    safetensors.numpy.save_file(weights, folder / f"{stem}.safetensors", metadata={"format": "pt"})
    assert convert(folder, tmp_path / "ours").dest == str(tmp_path / "ours" / f"{stem}.zcr")
    convert(tmp_path / "ours", f"{tmp_path}/back/", dest_format="safetensors")
    assert sorted(os.listdir(tmp_path / "back")) == ["adapter_config.json", f"{stem}.safetensors"]
    found = safetensors.numpy.load_file(tmp_path / "back" / f"{stem}.safetensors")
    assert {name: array.tolist() for name, array in found.items()} == {name: w.tolist() for name, w in weights.items()}


def test_a_file_converts_into_a_folder_by_itself(hub: Path, tmp_path: Path) -> None:
    convert(hub / "model.safetensors.index.json", f"{tmp_path}/new/", max_shard_size=9000)
    assert files(tmp_path / "new") == [*numbered(8), "model.zcr"]
    (tmp_path / "there").mkdir()
    convert(tmp_path / "new/model.zcr", tmp_path / "there")
    assert files(tmp_path / "there") == ["model.zcr"]


def test_in_a_folder_that_is_there_other_files_stay_and_old_shards_go(hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(hub, f"{out}/", max_shard_size=6000)
    (out / "notes.md").write_text("mine", encoding="utf-8")
    convert(hub, out, max_shard_size=9000, force=True)
    assert files(out) == sorted([*SMALL, "model.zcr", "notes.md", *numbered(8)])
    convert(hub, out, force=True)
    assert files(out) == sorted([*SMALL, "model.zcr", "notes.md"])
    assert (out / "notes.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("there", ["model.zcr", "config.json"])
def test_nothing_is_replaced_without_force(there: str, hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / there).write_text("old", encoding="utf-8")
    with pytest.raises(DestinationExistsError, match=f"{there}: exists already; force=True replaces it"):
        convert(hub, out, max_shard_size=6000)
    assert files(out) == [there]
    assert (out / there).read_text(encoding="utf-8") == "old"
    convert(hub, out, max_shard_size=6000, force=True)
    assert files(out) == sorted([*SMALL, "model.zcr", *numbered(9)])
    assert (out / "config.json").read_text(encoding="utf-8") == "this is config.json"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("damage", ["missing", "short", "index"])
def test_a_folder_that_cannot_be_read_leaves_no_other(damage: str, there: bool, hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    if there:
        convert(hub, f"{out}/", max_shard_size=9000)
    before = {path.name: path.read_bytes() for path in out.iterdir()} if there else {}
    lost = hub / numbered(4, "safetensors")[2]
    if damage == "missing":
        lost.unlink()
    elif damage == "short":
        os.truncate(lost, 500)
    else:
        index = hub / "model.safetensors.index.json"
        index.write_text(index.read_text(encoding="utf-8").replace("00003-of", "../00003-of"), encoding="utf-8")
    with pytest.raises((SourceNotFoundError, FormatError), match=r"00003-of-00004\.safetensors"):
        convert(hub, f"{out}/", max_shard_size=6000, force=True)
    assert ({path.name: path.read_bytes() for path in out.iterdir()} if there else {}) == before
    assert files(tmp_path) == ["hub", "out"] if there else ["hub"]


@pytest.mark.parametrize("options", [{}, {"max_shard_size": 9000}])
def test_a_model_is_not_written_over_itself(options: dict[str, Any], hub: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(hub, f"{out}/", **options)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
        convert(out, out, max_shard_size=6000, force=True)
    with pytest.raises(DestinationExistsError, match="source and destination are the same file"):
        convert(hub, hub, dest_format="safetensors", max_shard_size=6000, force=True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    convert(hub, hub, max_shard_size=9000)  # beside its source it may
    assert {"model.zcr", *numbered(8), *numbered(4, "safetensors")} <= {*files(hub)}


def test_links_out_of_the_folder_are_not_followed(hub: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("secret", encoding="utf-8")
    (hub / "stolen.json").symlink_to(tmp_path / "secret.json")
    (hub / "alias.json").symlink_to(hub / "config.json")
    (hub / "dangling.json").symlink_to(hub / "nothing")
    convert(hub, f"{tmp_path}/out/")
    assert files(tmp_path / "out") == sorted([*SMALL, "model.zcr", "alias.json"])
    assert not (tmp_path / "out/alias.json").is_symlink()


def test_a_snapshot_in_the_cache_of_a_hub_is_a_folder_like_any(hub: Path, tmp_path: Path) -> None:
    """There all files are links into the folder `blobs` of the repository."""
    repository = tmp_path / "models--me--model"
    (repository / "blobs").mkdir(parents=True)
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    for number, path in enumerate(path for path in sorted(hub.iterdir()) if path.is_file()):
        shutil.move(path, repository / "blobs" / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    convert(snapshot, f"{tmp_path}/out/", max_shard_size=6000)
    assert files(tmp_path / "out") == sorted([*SMALL, "model.zcr", *numbered(9)])
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_shards_of_onnx_are_made_of_the_archive(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a shard size is not for ONNX; convert the archive that is made of it"):
        convert(r.ROOT / "tests/data/digits.onnx", tmp_path / "m.zcr", max_shard_size=4000)


# Drafts.


DRAFTS = Path(__file__).resolve().parents[1] / "data" / "draft"
SINGLE = ["nested", "numbered", "shared_texts", "signed", "tuned"]


def converted(name: str, folder: Path, **options: Any) -> zcrecord.Record:
    convert(DRAFTS / f"{name}.zcr", folder / "new.zcr", **options)
    return zcrecord.load_record(folder / "new.zcr", verify="full")


@pytest.mark.parametrize("name", SINGLE)
def test_a_draft_is_converted_to_version_1(name: str, tmp_path: Path) -> None:
    old = (DRAFTS / f"{name}.zcr").read_bytes()
    record = converted(name, tmp_path)
    assert (old[8], (tmp_path / "new.zcr").read_bytes()[8]) == (0, 1)
    assert record.layout.version == 1
    for tensor, array in record.items():
        assert bytes(np.ascontiguousarray(array)) in old, tensor


@pytest.mark.parametrize("name", ["nested", "checkpoint"])
def test_a_draft_is_loaded_by_nothing_else_and_the_error_says_how_to_convert_it(name: str) -> None:
    with pytest.raises(zcrecord.VersionError, match=r"version 0, a draft; `zcrecord convert OLD NEW` makes version 1"):
        zcrecord.load_record(DRAFTS / f"{name}.zcr")


def test_a_draft_that_shares_more_text_than_version_1_allows_is_converted(tmp_path: Path) -> None:
    """R30."""
    assert converted("shared_texts", tmp_path).tree()["labels"] == ["x" * 255] * 200


def many_lists(over: int) -> bytes:
    """Return a draft of 50 attributes that share a list: as many items as a draft may have, and so many more."""
    f = Forge(r.saved({f"k{i:02}": [1] for i in range(50)}))
    f.columns["words"] = np.arange(1000, dtype="<u8")
    each, rest = divmod(1000 + 32 * 50 + over, 50)
    f.columns["attributes"]["value"] = (each + (np.arange(50) < rest)).astype("<u8") << np.uint64(32)
    f.ends["version"] = 0
    return f.seal()


def names(over: int) -> bytes:
    """Return the same of type names that share a text: its bytes, 256 for each module, and so many more."""
    f = Forge(r.saved({f"k{i:02}": {} for i in range(50)}))
    start, size = f.text(b"x" * 1000)
    each, rest = divmod(len(f.columns["text"]) + 256 * 51 + over, 51)
    sizes = each + (np.arange(51) < rest)
    f.columns["modules"]["type_name"], f.columns["modules"]["type_name_size"] = start + size - sizes, sizes
    f.ends["version"] = 0
    return f.seal()


@pytest.mark.parametrize("make", [many_lists, names])
def test_a_draft_costs_no_more_than_its_own_budget_allows(make: Callable[[int], bytes], tmp_path: Path) -> None:
    """A MiB of one that is bounded by a multiple of its size alone took 1,409 MiB and 23 seconds."""
    (tmp_path / "old.zcr").write_bytes(make(0))
    convert(tmp_path / "old.zcr", tmp_path / "new.zcr")
    assert zcrecord.load_record(tmp_path / "new.zcr", verify="full").modules
    (tmp_path / "old.zcr").write_bytes(make(1))
    with pytest.raises(zcrecord.LimitError, match=r"^.*index: the (lists of attributes|type names) take \d+"):
        convert(tmp_path / "old.zcr", tmp_path / "again.zcr")


def test_a_draft_s_tree_comes_back_with_its_integer_keys(tmp_path: Path) -> None:
    tree = converted("numbered", tmp_path).tree()
    assert any(isinstance(key, int) for value in tree.values() if isinstance(value, dict) for key in value)


def test_a_draft_s_signature_is_left_out_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zcrecord"):
        record = converted("signed", tmp_path)
    assert record.metadata == {"author": "someone"}
    assert "the signatures of a draft of the format (version 0) are left out; sign the new archive" in caplog.text


def test_a_draft_s_tuned_part_is_left_out(tmp_path: Path) -> None:
    record = converted("tuned", tmp_path)
    assert "onnx.graph" in record.attributes and not any("onnx.tuned" in name for name in record.modules)


def test_a_draft_s_catalogue_is_converted_with_its_shards(tmp_path: Path) -> None:
    whole = converted("checkpoint", tmp_path)
    assert len(whole) and not whole.archive.source.file_names
    (tmp_path / "sharded").mkdir()
    sharded = converted("checkpoint", tmp_path / "sharded", max_shard_size=64)
    assert sharded.content_digest() == whole.content_digest() and len(sharded.archive.source.file_names) > 1


def test_an_archive_of_a_later_version_is_no_draft(tmp_path: Path) -> None:
    later = bytearray((DRAFTS / "nested.zcr").read_bytes())
    later[8] = later[-56] = 2
    (tmp_path / "later.zcr").write_bytes(later)
    with pytest.raises(zcrecord.VersionError, match="format version 2, this reader knows 1; upgrade zcrecord"):
        convert(tmp_path / "later.zcr", tmp_path / "new.zcr")
