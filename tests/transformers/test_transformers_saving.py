"""Models of transformers to archives: the files of transformers, ties, shards, and folders whole or as they were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_models as models
import transformers as hf

import zcrecord
from zcrecord.cli.dispatch import main
from zcrecord.errors import RecordError, SourceError, UnsupportedError
from zcrecord.transformers import from_pretrained, save_pretrained


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.parametrize("name", models.MAKERS)
def test_every_file_but_the_weights_is_the_one_that_transformers_writes(name: str, tmp_path: Path) -> None:
    model = models.made(models.MAKERS[name])
    before = model.config.to_dict()
    save_pretrained(model, tmp_path / "ours", durable=False)
    assert model.config.to_dict() == before, "the model is left as it was"
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    del theirs["model.safetensors"]
    assert {n: data for n, data in ours.items() if n != "model.zcr"} == theirs and "model.zcr" in ours


@pytest.mark.parametrize("make", [*models.MAKERS.values(), models.mixtral])
def test_the_archive_converts_to_the_tensors_that_transformers_saves(make: Callable[[], Any], tmp_path: Path) -> None:
    model = models.made(make)
    save_pretrained(model, tmp_path, durable=False)
    model.save_pretrained(tmp_path / "theirs")
    archive, theirs = zcrecord.load_record(tmp_path / "model.zcr"), tmp_path / "theirs" / "model.safetensors"
    assert archive.metadata == {"format": "pt"}
    assert main(["convert", str(theirs), str(tmp_path / "theirs.zcr"), "-q"]) == 0
    expected = zcrecord.load_record(tmp_path / "theirs.zcr").torch()
    assert set(expected) <= set(archive)
    found = archive.torch()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name in set(archive) - set(expected):  # what is tied, which safetensors has under one name alone
        assert archive.info(name).tied, name


@pytest.mark.parametrize("size, shards", [("100KB", 2), (100_000, 2), ("0.04 MB", 4), ("1GiB", 0), (None, 0)])
def test_shards_of_the_size_asked_for_load_as_one_model(size: Any, shards: int, tmp_path: Path) -> None:
    model = models.made(models.gpt2)
    save_pretrained(model, tmp_path, max_shard_size=size, durable=False)
    found = sorted(path for path in tmp_path.glob("*.zcr") if path.name != "model.zcr")
    assert [path.name for path in found] == [f"model-{i + 1:05}-of-{shards:05}.zcr" for i in range(shards)]
    loaded = from_pretrained(tmp_path, hf.AutoModelForCausalLM)
    assert models.same_tensors(loaded, model) and loaded.lm_head.weight is loaded.transformer.wte.weight


def test_a_model_saved_over_one_of_shards_takes_its_place_and_other_files_stay(tmp_path: Path) -> None:
    first, second = models.made(models.gpt2), models.made(models.bert)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"as it was")
    save_pretrained(first, tmp_path, max_shard_size="50KB", durable=False)
    save_pretrained(second, tmp_path, max_shard_size="100KB", durable=False)
    assert models.same_tensors(from_pretrained(tmp_path, hf.AutoModelForMaskedLM), second)
    found = contents(tmp_path)
    assert len([name for name in found if name.startswith("model-")]) == 2, "those of the first are gone"
    assert found["model.safetensors"] == found["tokenizer.json"] == b"as it was"


def test_a_model_that_lies_on_an_archive_or_is_wrapped_is_saved_over_it(tmp_path: Path) -> None:
    save_pretrained(models.made(models.gpt2), tmp_path, durable=False)
    model = from_pretrained(tmp_path, hf.GPT2LMHeadModel)
    with torch.no_grad():
        model.transformer.h[0].ln_1.weight.fill_(5)
    for each in (model, torch.nn.DataParallel(model)):
        save_pretrained(each, tmp_path, durable=False)
        assert models.same_tensors(from_pretrained(tmp_path, hf.GPT2LMHeadModel), model)


def _offloaded(model: Any) -> Any:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.to("meta"))
    return model


def _with(name: str, value: Any) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        if isinstance(value, torch.Tensor):
            model.register_buffer(name, value)
        else:
            setattr(model, name, value)
        return model

    return change


FAULTS = [
    (_offloaded, r"tensor 'lm_head.weight': is offloaded, or never loaded; load the model without offloading"),
    (_with("mask", torch.eye(3).to_sparse()), r"tensor 'mask': a tensor of layout torch.sparse_coo; .*to_dense"),
    (_with("hf_quantizer", object()), r"a quantised model; save it with model.save_pretrained, or dequantise it"),
    (_with("_hf_peft_config_loaded", True), r"the model has adapters, which model.save_pretrained saves; delete_adapt"),
    (torch.nn.Sequential, r"a Sequential is no model of transformers; save_record saves any module, .*merge_and"),
]


@pytest.mark.parametrize("fault, message", FAULTS)
@pytest.mark.parametrize("before", ["a model", "nothing"])
def test_a_model_that_cannot_be_saved_is_refused_and_leaves_the_folder_as_it_was(
    fault: Callable[[Any], Any], message: str, before: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    if before == "a model":
        save_pretrained(models.made(models.bert), folder, durable=False)
    kept = contents(folder)
    with pytest.raises(UnsupportedError, match=message):
        save_pretrained(fault(models.made(models.gpt2)), folder, durable=False)
    assert contents(folder) == kept


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SourceError("no space left")])
def test_a_save_that_is_interrupted_leaves_the_folder_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_pretrained(models.made(models.bert), tmp_path, durable=False)
    kept = contents(tmp_path)

    def failing(*_: Any, **__: Any) -> None:
        found = {path.name for path in tmp_path.iterdir()}
        assert len(found) == len(kept) + 2, "config and generation config are on the disk, under other names"
        raise error

    monkeypatch.setattr("zcrecord.transformers.save_record", failing)
    with pytest.raises(type(error)):
        save_pretrained(models.made(models.gpt2), tmp_path, durable=False)
    assert contents(tmp_path) == kept
    monkeypatch.undo()
    save_pretrained(models.made(models.gpt2), tmp_path, durable=False)
    from_pretrained(tmp_path, hf.GPT2LMHeadModel)


@pytest.mark.parametrize("folder, size, message", [
    ("model", "5 bananas", "max_shard_size='5 bananas' is not a size"), ("model", "GB", "max_shard_size='GB' is not a"),
    ("model", "-1KB", "max_shard_size='-1KB' is not a"), ("model", 0, "max_shard_size=.* is not a"),
    ("s3://bucket/model?key=secret", None, "s3://bucket/model: is a URL, .* name one, and upload its files"),
    ("a file", None, "a file: cannot write: File exists; the file there before is untouched"),
])  # fmt: skip
def test_a_folder_that_is_none_and_a_shard_size_that_is_none_are_refused(
    folder: str, size: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a file").touch()
    with pytest.raises(RecordError, match=message):
        save_pretrained(models.made(models.bert), folder, max_shard_size=size)
    assert {path.name for path in tmp_path.rglob("*")} <= {"a file", "model"}
