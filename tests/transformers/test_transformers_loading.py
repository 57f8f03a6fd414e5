"""Models of transformers from archives: the same as from safetensors, weights on the mapping, tied where tied."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_models as models
import transformers as hf
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from forked import run_torch

import zcrecord
from tools.range_server import serving
from zcrecord import integrity
from zcrecord.cli.dispatch import main
from zcrecord.errors import (
    FormatError,
    IntegrityError,
    MismatchError,
    RecordError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
)
from zcrecord.transformers import from_pretrained, save_pretrained

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="platform: Linux tells where a file is mapped")


class Folders:
    """Each small model as transformers saves it, and as `save_pretrained` does."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def theirs(self, make: Callable[[], Any]) -> Path:
        folder = self.root / make.__name__ / "theirs"
        if not folder.exists():
            models.made(make).save_pretrained(folder)
        return folder

    def ours(self, make: Callable[[], Any]) -> Path:
        folder = self.root / make.__name__ / "ours"
        if not folder.exists():
            save_pretrained(models.made(make), folder, durable=False)
        return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def both(folders: Folders, make: Callable[[], Any], kind: Any, **options: Any) -> tuple[Any, Any, Any, Any]:
    """Load a model both ways; return ours, what was told of its loading, and the same of theirs."""
    torch.manual_seed(5)  # new weights are random
    theirs = kind.from_pretrained(folders.theirs(make), output_loading_info=True, **options)
    torch.manual_seed(5)
    ours = from_pretrained(folders.ours(make), kind, output_loading_info=True, **options)
    return *ours, *theirs


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("name", models.MAKERS)
def test_a_model_is_bit_for_bit_the_one_that_transformers_loads_from_safetensors(name: str, folders: Folders) -> None:
    make = models.MAKERS[name]
    ours, told, theirs, expected = both(folders, make, type(make()))
    assert models.same_tensors(ours, theirs) and told == expected
    inputs = models.requests(theirs)
    with torch.no_grad():
        answer, expected = ours(**inputs), theirs(**inputs)
    assert answer.logits.dtype == expected.logits.dtype and torch.equal(answer.logits, expected.logits)
    assert not ours.training and ours.config.to_diff_dict() == theirs.config.to_diff_dict()
    assert ours.name_or_path == str(folders.ours(make))


@pytest.mark.parametrize("make", [models.gpt2, models.llama, models.t5])
def test_it_generates_what_transformers_own_generates(make: Callable[[], Any], folders: Folders) -> None:
    ours, _, theirs, _ = both(folders, make, type(make()), pad_token_id=3)
    assert ours.generation_config == theirs.generation_config and ours.generation_config.pad_token_id == 3
    prompt = torch.tensor([[4, 5, 6]])
    assert torch.equal(*(model.generate(prompt, max_new_tokens=6, do_sample=False) for model in (ours, theirs)))


@pytest.mark.parametrize("make, kind", [
    (models.gpt2, hf.AutoModelForCausalLM), (models.gpt2, hf.GPT2ForSequenceClassification),
    (models.gpt2, hf.AutoModel), (models.bert, hf.AutoModelForMaskedLM), (models.bert, hf.BertModel),
    (models.llama, hf.AutoModelForSequenceClassification), (models.t5, hf.AutoModelForSeq2SeqLM),
    (models.t5, hf.T5EncoderModel),
])  # fmt: skip
def test_other_classes_get_the_tensors_and_tell_the_keys_as_from_safetensors(
    make: Callable[[], Any], kind: Any, folders: Folders
) -> None:
    ours, told, theirs, expected = both(folders, make, kind)
    assert type(ours) is type(theirs) and models.same_tensors(ours, theirs)
    assert told == expected


def test_the_archive_of_a_base_model_loads_into_a_model_with_a_head_and_ties_it(tmp_path: Path) -> None:
    base = models.made(models.bert).bert
    save_pretrained(base, tmp_path, durable=False)
    model, told = from_pretrained(tmp_path, hf.BertForMaskedLM, output_loading_info=True)
    embedding = model.bert.embeddings.word_embeddings.weight
    assert torch.equal(embedding, base.embeddings.word_embeddings.weight)
    assert model.cls.predictions.decoder.weight is embedding
    assert "cls.predictions.transform.dense.weight" in told["missing_keys"] and not told["unexpected_keys"]


@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("name", models.MAKERS)
def test_what_convert_makes_of_a_model_folder_loads_as_well(name: str, folders: Folders, tmp_path: Path) -> None:
    make = models.MAKERS[name]
    theirs = type(make()).from_pretrained(folders.theirs(make))
    whole, beside = tmp_path / "whole", tmp_path / "beside"
    assert main(["convert", str(folders.theirs(make)), str(whole), "--max-shard-size", "50KB", "-q"]) == 0
    assert len(list(whole.glob("model-*.zcr"))) > 1
    shutil.copytree(folders.theirs(make), beside)
    assert main(["convert", str(beside / "model.safetensors"), str(beside / "model.zcr"), "-q"]) == 0
    for folder in (whole, beside):
        assert models.same_tensors(from_pretrained(folder, type(theirs)), theirs)


@LINUX
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_every_weight_lies_on_the_mapping_or_on_those_of_the_shards(
    name: str, folders: Folders, tmp_path: Path
) -> None:
    make = models.MAKERS[name]
    path = folders.ours(make) / "model.zcr"
    assert models.off_the_mapping(from_pretrained(path.parent, type(make())), path) == []
    cast = from_pretrained(path.parent, type(make()), dtype=torch.float16)
    kept = {name for name, parameter in cast.named_parameters() if parameter.dtype == torch.float32}  # as T5 wants it
    copied = {name for name, parameter in cast.named_parameters() if name not in kept}
    assert copied and set(models.off_the_mapping(cast, path)) == copied, "this test sees copies"
    save_pretrained(models.made(make), tmp_path, max_shard_size="50KB", durable=False)
    sharded = from_pretrained(tmp_path, type(make()))
    off = [set(models.off_the_mapping(sharded, path)) for path in tmp_path.glob("model-*.zcr")]
    assert len(off) > 1 and not set.intersection(*off)


@LINUX
def test_experts_lie_on_the_mapping_if_they_are_saved_as_the_model_has_them(folders: Folders, tmp_path: Path) -> None:
    theirs = hf.MixtralForCausalLM.from_pretrained(folders.theirs(models.mixtral))
    joined = from_pretrained(folders.ours(models.mixtral), hf.AutoModelForCausalLM)
    assert models.same_tensors(joined, theirs)
    off = models.off_the_mapping(joined, folders.ours(models.mixtral) / "model.zcr")
    assert off and all(".experts." in name for name in off), "only what is joined of several is copied"
    save_pretrained(theirs, tmp_path, save_original_format=False, durable=False)
    model = from_pretrained(tmp_path, hf.AutoModelForCausalLM)
    assert models.same_tensors(model, theirs)
    assert models.off_the_mapping(model, tmp_path / "model.zcr") == []


MEASURED = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")  # of transformers' imports
import torch, transformers
from tools.measure import memory
from zcrecord.transformers import from_pretrained

def taken(folder, **options):
    gc.collect()
    before = memory()
    model = from_pretrained(folder, transformers.LlamaForCausalLM, **options)
    loaded = memory()
    with torch.no_grad():
        sum(p.sum() for p in model.parameters())  # all read, nothing written
    read = memory()
    return loaded.private - before.private, read.private - before.private, read.file_backed - before.file_backed

taken(sys.argv[2])  # what is imported on the way counts for nobody
print(json.dumps([taken(sys.argv[1]), taken(sys.argv[1], dtype=torch.float32)]))
"""


@pytest.mark.measured
@LINUX
def test_before_the_first_write_a_model_takes_no_private_memory(folders: Folders, tmp_path: Path) -> None:
    def large() -> Any:
        sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8}
        return hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=4096, **sizes)).to(torch.bfloat16)

    model = models.made(large)
    nbytes = sum(p.nbytes for p in model.parameters())
    save_pretrained(model, tmp_path, durable=False)
    done = run_torch(MEASURED, tmp_path, folders.ours(models.llama))
    (loaded, read, file_backed), (copied, *_) = json.loads(done.stdout)
    allowed = 8 << 20
    assert nbytes > 4 * allowed and copied > nbytes, "this test would see a copy"
    assert loaded < allowed
    assert read < allowed and file_backed > nbytes // 2, "read pages are the file's"


def test_training_gives_the_weights_of_transformers_own_and_leaves_the_file_as_it_was(folders: Folders) -> None:
    path = folders.ours(models.gpt2) / "model.zcr"
    before = path.read_bytes()
    ours, _, theirs, _ = both(folders, models.gpt2, hf.GPT2LMHeadModel)
    tokens = torch.arange(30).reshape(2, 15)
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert models.same_tensors(ours, theirs) and path.read_bytes() == before
    assert not models.same_tensors(ours, from_pretrained(path.parent, hf.GPT2LMHeadModel)), "it was trained"


@pytest.mark.parametrize("dtype", ["auto", "float32", torch.float16, None])
@pytest.mark.parametrize("kind", [hf.AutoModelForCausalLM, hf.LlamaForCausalLM])
def test_a_dtype_is_that_of_the_config_or_the_one_asked_for(kind: Any, dtype: Any, folders: Folders) -> None:
    ours, _, theirs, _ = both(folders, models.llama, kind, dtype=dtype)
    expected = {"float32": torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)
    assert ours.dtype == expected and models.same_tensors(ours, theirs)


class NothingTied(hf.GPT2LMHeadModel):  # type: ignore[misc]
    """A model that does not tie what its archive does."""

    _tied_weights_keys = None


@pytest.mark.parametrize("kind, options", [(hf.GPT2LMHeadModel, {"tie_word_embeddings": False}), (NothingTied, {})])
def test_weights_that_the_archive_ties_and_the_model_does_not_are_equal_and_apart(
    kind: Any, options: dict[str, Any], folders: Folders
) -> None:
    model = from_pretrained(folders.ours(models.gpt2), kind, **options)
    head, embedding = model.lm_head.weight, model.transformer.wte.weight
    assert torch.equal(head, embedding)
    with torch.no_grad():
        head.zero_()
    assert embedding.count_nonzero() > 0


@pytest.mark.parametrize("options", [
    {"attn_implementation": "eager"}, {"use_cache": False, "eos_token_id": 7}, {"trust_remote_code": True},
    {"generation_config": hf.GenerationConfig(max_length=9)}, {"nonsense": 1},
    {"use_safetensors": True, "low_cpu_mem_usage": True, "local_files_only": True, "revision": "main"},
])  # fmt: skip
@pytest.mark.parametrize("kind", [hf.AutoModelForCausalLM, hf.LlamaForCausalLM])
def test_other_arguments_do_what_they_do_in_transformers(kind: Any, options: dict[str, Any], folders: Folders) -> None:
    def outcome(load: Callable[..., Any]) -> Any:
        try:
            model = load()
        except TypeError as error:
            return str(error)
        config = model.config.to_dict() | {"_name_or_path": None}
        return config, model.config._attn_implementation, model.generation_config.to_dict()

    theirs = outcome(partial(kind.from_pretrained, folders.theirs(models.llama), **options))
    assert outcome(partial(from_pretrained, folders.ours(models.llama), kind, **options)) == theirs


def test_names_are_changed_on_the_way_by_a_key_mapping(tmp_path: Path) -> None:
    model = models.made(models.gpt2)
    state = {name.replace("transformer.", "decoder."): tensor for name, tensor in model.state_dict().items()}
    model.config.save_pretrained(tmp_path)
    zcrecord.save_record(state, tmp_path / "model.zcr", durable=False)
    loaded = from_pretrained(tmp_path, hf.GPT2LMHeadModel, key_mapping={r"^decoder\.": "transformer."})
    assert models.same_tensors(loaded, model)


def test_weights_may_be_another_archive_s_or_a_part_of_a_record_or_lie_behind_a_url(
    folders: Folders, tmp_path: Path
) -> None:
    folder = folders.ours(models.llama)
    expected = from_pretrained(folder, hf.AutoModelForCausalLM)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    run = {"model": expected.state_dict(), "epoch": 3}
    zcrecord.save_record(run, tmp_path / "run.zcr", durable=False)
    part = zcrecord.load_record(tmp_path / "run.zcr").module("model")
    save_pretrained(expected, tmp_path / "shards", max_shard_size="20KB", durable=False)
    with serving(folder) as server, serving(tmp_path / "shards") as shards:
        for archive in (folder / "model.zcr", part, f"{server.url}/model.zcr", f"{shards.url}/model.zcr"):
            model = from_pretrained(tmp_path, hf.AutoModelForCausalLM, archive=archive)
            assert models.same_tensors(model, expected)


@pytest.mark.parametrize("names", [5, [5], {"a": 1}, [["GPT2LMHeadModel"]], "GPT2LMHeadModel"])
def test_architectures_in_a_strangers_config_may_be_anything(names: Any, folders: Folders, tmp_path: Path) -> None:
    shutil.copytree(folders.ours(models.gpt2), tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text(encoding="utf-8")) | {"architectures": names}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model = from_pretrained(tmp_path / "m", hf.AutoModelForCausalLM)
    assert models.same_tensors(model, models.made(models.gpt2))


@pytest.mark.slow
def test_weights_that_no_trusted_key_signed_are_refused(folders: Folders, tmp_path: Path) -> None:
    folder = shutil.copytree(folders.ours(models.llama), tmp_path / "signed")
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate().public_key()
    trusted = [other, key.public_key()]
    for archive in (None, zcrecord.load_record(folder / "model.zcr")):
        with pytest.raises(IntegrityError, match=r"model\.zcr: is not signed$"):
            from_pretrained(folder, hf.AutoModelForCausalLM, archive=archive, trusted_keys=[other])
    integrity.sign(folder / "model.zcr", key)
    for archive in (None, zcrecord.load_record(folder / "model.zcr")):
        model = from_pretrained(folder, hf.AutoModelForCausalLM, archive=archive, trusted_keys=trusted)
        assert models.same_tensors(model, models.made(models.llama))
        with pytest.raises(IntegrityError, match="is not signed by this key"):
            from_pretrained(folder, hf.AutoModelForCausalLM, archive=archive, trusted_keys=[other])


OWN = {
    "configuration_own.py": """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "zcrecord-own"

    def __init__(self, width=4, **more):
        self.width = width
        super().__init__(**more)
""",
    "modeling_own.py": """
import torch
from transformers import PreTrainedModel

from .configuration_own import OwnConfig

class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    _keys_to_ignore_on_save = ["seen"]
    _keys_to_ignore_on_load_missing = ["seen"]

    def __init__(self, config):
        super().__init__(config)
        self.line = torch.nn.Linear(config.width, config.width)
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scale", torch.ones(1))
        self.post_init()

    def forward(self, x):
        return self.line(x) * self.scale
""",
}


@pytest.fixture
def own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose code goes into its folder; what transformers copies of that stays in `tmp_path`."""
    package = tmp_path / "zcrecord_own_code"
    package.mkdir()
    for name, code in OWN.items():
        (package / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    from zcrecord_own_code.configuration_own import OwnConfig  # type: ignore[import-not-found]
    from zcrecord_own_code.modeling_own import OwnModel  # type: ignore[import-not-found]

    OwnConfig.register_for_auto_class()
    OwnModel.register_for_auto_class("AutoModel")
    model = OwnModel(OwnConfig(width=6))
    model.scale.fill_(3)
    model.seen.fill_(1)
    yield model
    for name in [name for name in sys.modules if name.startswith(("zcrecord_own_code", "transformers_modules"))]:
        del sys.modules[name]


def test_a_model_of_the_folder_s_own_code_is_saved_and_loaded_with_it(own_model: Any, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_pretrained(own_model, ours, durable=False)
    own_model.save_pretrained(theirs)
    for name in ("config.json", *OWN):
        assert (ours / name).read_text(encoding="utf-8") == (theirs / name).read_text(encoding="utf-8")
    assert set(zcrecord.load_record(ours / "model.zcr")) == {"line.weight", "line.bias", "scale"}
    options = {"trust_remote_code": True, "output_loading_info": True}
    model, told = from_pretrained(ours, hf.AutoModel, **options)
    assert told == hf.AutoModel.from_pretrained(theirs, **options)[1]
    assert torch.equal(model.line.weight, own_model.line.weight) and model.scale == 3
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        from_pretrained(ours, hf.AutoModel, trust_remote_code=False)


def _quantised(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _with_int4(folder: Path) -> None:
    with zcrecord.edit(folder / "model.zcr") as archive:
        archive["packed"] = zcrecord.PackedTensor(np.zeros(2, np.uint8), "int4", (4,))


def _of_another_model(folder: Path) -> None:
    zcrecord.save_record({"something": {"else": np.ones(3, np.float32)}}, folder / "model.zcr", durable=False)


FAULTS: list[tuple[Callable[[Path], Any], type[RecordError], str]] = [
    (shutil.rmtree, SourceNotFoundError, "is no folder here; huggingface_hub.snapshot_download gives the folder"),
    (lambda folder: (folder / "config.json").unlink(), SourceNotFoundError, "is a folder without config.json; save"),
    (lambda folder: (folder / "model.zcr").unlink(), SourceError, r"is a folder without a model"),
    (lambda folder: (folder / "model.zcr").write_bytes(b"no archive"), FormatError, "not a zcrecord archive"),
    (lambda folder: (folder / "adapter_config.json").touch(), UnsupportedError, r"has an adapter \(adapter_config"),
    (_quantised, UnsupportedError, r"config.json names a quantised model \(gptq\).* zcrecord convert makes its"),
    (_with_int4, UnsupportedError, r"tensor 'packed': torch has no such tensors of int4; .* archive=record.select"),
    (_of_another_model, MismatchError, r"none of its 1 tensors belongs to a LlamaForCausalLM; .*record.module"),
]


@pytest.mark.parametrize("change, error, message", FAULTS)
@pytest.mark.parametrize("kind", [hf.AutoModelForCausalLM, hf.LlamaForCausalLM])
def test_a_folder_that_cannot_be_loaded_is_named_with_what_to_do(
    change: Callable[[Path], Any], error: type[RecordError], message: str, kind: Any, folders: Folders, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders.ours(models.llama), tmp_path / "model")
    change(folder)
    with pytest.raises(error, match=message) as caught:
        from_pretrained(folder, kind)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("option, message", [
    ({"state_dict": {"w": 1}}, "state_dict= is not for archives; .* archive= takes a Record"),
    ({"variant": "fp16"}, "variant= is not for archives; name the archive"),
    ({"gguf_file": "m.gguf"}, "gguf_file= is not for archives; zcrecord convert makes an archive"),
    ({"subfolder": "x"}, "subfolder= is not for archives; name the folder below"),
    ({"quantization_config": {"bits": 4}}, "quantization_config= is not for archives; .* quantise the model"),
    ({"model_class": hf.AutoModelForSeq2SeqLM}, "AutoModelForSeq2SeqLM has no model for a LlamaConfig; name another"),
])  # fmt: skip
def test_an_argument_that_names_other_weights_and_a_class_without_a_model_are_refused(
    option: dict[str, Any], message: str, folders: Folders
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        from_pretrained(folders.ours(models.llama), **{"model_class": hf.AutoModelForCausalLM} | option)


def test_a_tensor_of_another_shape_is_transformers_own_error_and_strings_are_left_out(
    folders: Folders, tmp_path: Path
) -> None:
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        from_pretrained(folders.ours(models.llama), hf.AutoModelForCausalLM, vocab_size=50)
    options = {"vocab_size": 50, "ignore_mismatched_sizes": True, "output_loading_info": True}
    _, told = from_pretrained(folders.ours(models.llama), hf.AutoModelForCausalLM, **options)
    assert {name for name, *_ in told["mismatched_keys"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    folder = shutil.copytree(folders.ours(models.llama), tmp_path / "model")
    with zcrecord.edit(folder / "model.zcr") as archive:
        archive["vocab"] = np.array(["a", "bb"])
    _, told = from_pretrained(folder, hf.AutoModelForCausalLM, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"]


@pytest.mark.parametrize("package", ["transformers", "torch"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folders.ours(models.llama)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(zcrecord.DependencyError, match=rf"{package} is not installed; pip install {package}"):
        from_pretrained(folder, hf.AutoModelForCausalLM)


# Architectures of many kinds: composed, tied, of experts, with buffers.


SMALL: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
VISION = {key: value for key, value in SMALL.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 8}
STACK = {"layers": 2, "attention_heads": 2, "ffn_dim": 64}
TWO_STACKS = {f"{half}_{key}": size for half in ("encoder", "decoder") for key, size in STACK.items()}
TWO_STACKS |= {"vocab_size": 100, "d_model": 32}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
AUDIO = {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
WAVES = {"conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2}
POSITIONS = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}

ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "gemma3, text and images": lambda: hf.Gemma3ForConditionalGeneration(
        hf.Gemma3Config(text_config={**GROUPED, "head_dim": 16}, vision_config=VISION, mm_tokens_per_image=4)
    ),
    "qwen2, experts": lambda: hf.Qwen2MoeForCausalLM(
        hf.Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=16, num_experts=4)
    ),
    "deepseek, experts": lambda: hf.DeepseekV3ForCausalLM(
        hf.DeepseekV3Config(
            **GROUPED, **EXPERTS, **LATENT, n_routed_experts=4, n_group=2, topk_group=1, first_k_dense_replace=1
        )
    ),
    "gpt-oss, experts": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**GROUPED, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(hf.WhisperConfig(**TWO_STACKS, **AUDIO, **TOKENS)),
    "bart": lambda: hf.BartForConditionalGeneration(hf.BartConfig(**TWO_STACKS)),
    "bert, twice": lambda: hf.EncoderDecoderModel(
        hf.EncoderDecoderConfig.from_encoder_decoder_configs(hf.BertConfig(**SMALL), hf.BertConfig(**SMALL))
    ),
    "albert": lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, embedding_size=16)),
    "mamba": lambda: hf.MambaForCausalLM(
        hf.MambaConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, state_size=4)
    ),
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION)),
    "clip": lambda: hf.CLIPModel(
        hf.CLIPConfig(text_config={**SMALL, "max_position_embeddings": 16}, vision_config=VISION, projection_dim=8)
    ),
    "wav2vec2": lambda: hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**SMALL, **WAVES, **POSITIONS)),
}
COPIED = re.compile(r".*\.experts\..*|(.*\.)?predictions\.bias|lm_head\.bias")  # joined, or padded, by transformers


@pytest.mark.slow
@pytest.mark.exhaustive(keep=("gemma3", "whisper"))
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_loads_as_from_safetensors(name: str, tmp_path: Path) -> None:
    model = models.made(ARCHITECTURES[name])
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    save_pretrained(model, ours, durable=False)
    model.save_pretrained(theirs)
    torch.manual_seed(1)
    loaded, told = from_pretrained(ours, type(model), output_loading_info=True)
    torch.manual_seed(1)
    expected, as_told = type(model).from_pretrained(theirs, output_loading_info=True)
    assert models.same_tensors(loaded, expected) and models.same_tensors(loaded, model)
    assert told == as_told
    if sys.platform == "linux":
        off = models.off_the_mapping(loaded, ours / "model.zcr")
        assert all(map(COPIED.fullmatch, off)) and len(off) < 5
