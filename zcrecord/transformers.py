"""Models of Hugging Face Transformers from archives, and into archives.

A model folder has `config.json`, the tokenizer's files, and the weights in `model.zcr`. transformers makes the model
and decides which tensor goes where; `frameworks.torch` gives the tensors. Nothing of transformers is replaced.
"""

from __future__ import annotations

import copy
import functools
import os
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zcrecord.errors import MismatchError, SourceNotFoundError, UnsupportedError, missing_package, printable
from zcrecord.frameworks.torch import import_torch
from zcrecord.record.load import load_record
from zcrecord.record.record import Record
from zcrecord.record.save import save_record
from zcrecord.storage.files import open_sink, path_of, refusals, scratch_folder
from zcrecord.storage.folders import MODEL, local_folder
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.writers import SaveReport

__all__ = ["from_pretrained", "save_pretrained"]

_CONFIG, _GENERATION, _ADAPTER = "config.json", "generation_config.json", "adapter_config.json"

_SIZE = re.compile(r"(\d+(?:\.\d+)?) *([KMGT])(i?)B", re.IGNORECASE)

# Arguments that are no values for a config, though configs would take some of them.
_BESIDE = {"config", "dtype", "torch_dtype", "trust_remote_code"}

# Arguments of transformers that name weights elsewhere, each with what to do instead.
_ELSEWHERE = {
    "state_dict": "the weights are the archive's; archive= takes a Record, too",
    "gguf_file": "zcrecord convert makes an archive of a GGUF file",
    "variant": "name the archive: archive='model.fp16.zcr'",
    "subfolder": "name the folder below as the folder",
    "quantization_config": "archives are loaded without quantising; quantise the model that this returns",
}


def from_pretrained(folder: Any, model_class: Any, *args: Any, archive: Any = None, **kwargs: Any) -> Any:
    """Return the model of a folder, as `model_class.from_pretrained(folder)` of transformers, from its archive.

    transformers reads `config.json` and the generation config, makes the model, gives each tensor its place, renames
    keys, ties weights, and logs missing and unexpected keys, as ever. The weights lie on a private mapping of the
    archive: nothing is copied or read before it is used, processes share the pages, and the first write to a page, as
    by an optimizer, copies that page and never reaches the file. Copied are tensors that are converted: to another
    dtype than they are stored in, by `dtype=` or by the config; into one tensor of several, as with experts that are
    stored each by itself (`save_pretrained` tells how they need not be); and of a weight that the archive ties and
    the model does not, one of the two. A tensor for another device is copied there from the mapping. Tensors of
    strings are left out.

    Args:
        folder: with `config.json` and `model.zcr`, or the only archive or catalogue there; as `save_pretrained` writes
            it, and as `zcrecord convert` leaves it beside a `model.safetensors`.
        model_class: a class of transformers, such as `AutoModelForCausalLM`; `args` go to the model's own class.
        archive: the weights, where they are not in the folder: a path, a URL or a Record, maybe of a part or with
            other names (`Record.module`, `Record.select`). A remote one is fetched into memory.
        kwargs: of transformers' from_pretrained: `config`, `dtype`, `device_map`, `attn_implementation`,
            `output_loading_info`, `key_mapping`, `trust_remote_code` and so on, and values for the config.

    Raises:
        SourceError: there is no such folder, or in it no config or no archive. UnsupportedError: a quantised model, a
        folder with an adapter, elements that torch has no type for, or an argument that names other weights.
        MismatchError: no tensor of the archive belongs to the model. DependencyError: transformers or torch is not
        installed. transformers' own errors, as for tensors of another shape, are not changed.

    Example:
        >>> from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
        >>> sizes = {"vocab_size": 9, "n_embd": 8, "n_layer": 1, "n_head": 1, "bos_token_id": 0, "eos_token_id": 1}
        >>> _ = save_pretrained(GPT2LMHeadModel(GPT2Config(**sizes)), "tiny")
        >>> model = from_pretrained("tiny", AutoModelForCausalLM)
        >>> model.lm_head.weight is model.transformer.wte.weight  # tied
        True
    """
    transformers = _import_transformers()
    where = path_of(folder)
    _check(where, kwargs)
    config, overrides, rest = _configured(transformers, where, model_class, kwargs)
    model_class, config = _concrete(model_class, config, where, rest.get("trust_remote_code"))
    record = archive if isinstance(archive, Record) else load_record(where if archive is None else archive)
    state = _model_tensors(record)
    repeated = _repeated(transformers, state, config) if rest.get("key_mapping") is None else set()
    asked = rest.pop("output_loading_info", False)
    load = functools.partial(model_class.from_pretrained, None, *args, config=config, output_loading_info=True, **rest)
    model, told = load(state_dict={name: tensor for name, tensor in state.items() if name not in repeated})
    if any(_same_place(key, name) for key in told["missing_keys"] for name in repeated):
        model, told = load(state_dict=state)  # the class does not tie what the archive does
    if state and len(told["unexpected_keys"]) >= len(state) - len(repeated):
        what = f"none of its {len(state)} tensors belongs to a {type(model).__name__}"
        raise MismatchError(f"{what}; of a part of a record give archive=record.module('name')", path=record.path)
    _settle_ties(model, state)
    model.config.name_or_path = model.name_or_path = where
    _set_generation(transformers, model, where, overrides, rest)
    return (model, told) if asked else model


def save_pretrained(
    model: Any,
    folder: Any,
    *,
    max_shard_size: int | str | None = None,
    save_original_format: bool = True,
    durable: bool = True,
) -> SaveReport:
    """Save a model of transformers as a folder: its config and generation config, its own code, and `model.zcr`.

    transformers writes all but the archive. A failed save leaves the folder as it was: everything is written before
    anything is replaced, first the archive, and at once the others. (Killed just between them, a save leaves the new
    archive with the old config.) Tied weights are stored once, under all their names. Tensors are written from the
    model's memory. Other files stay, as with transformers: a `model.safetensors` from before is what transformers' own
    from_pretrained goes on loading. The tokenizer writes its files itself: `tokenizer.save_pretrained(folder)`.

    Args:
        model: a PreTrainedModel, or such a one wrapped for training.
        folder: made where it is not there.
        max_shard_size: bytes, or "5GB" as transformers has it; larger models are written as shards and a catalogue.
        save_original_format: as transformers has it: False stores tensors as the model has them, not under the names
            and in the pieces of older checkpoints. Then experts need not be joined when they are loaded, and lie on
            the mapping, too; but programs that know only the older names do not find them.
        durable: fsync files and folder, so that they survive power loss.

    Raises:
        UnsupportedError: the model is quantised, has adapters, or has weights on the meta device, as those offloaded
        have; or the folder is a URL. SourceError: the file system reports an error. DependencyError: transformers is
        not installed.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> tiny = BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        >>> save_pretrained(BertModel(tiny), "tiny").tied
        0
        >>> from_pretrained("tiny", BertModel).config.hidden_size
        8
    """
    transformers = _import_transformers()
    from transformers.modeling_utils import unwrap_model

    model = unwrap_model(model)
    if not isinstance(model, transformers.PreTrainedModel):
        what = f"a {type(model).__name__} is no model of transformers; save_record saves any module"
        raise UnsupportedError(f"{what}, and a PeftModel's merge_and_unload() gives one")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError("a quantised model; save it with model.save_pretrained, or dequantise it")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError("the model has adapters, which model.save_pretrained saves; delete_adapter removes them")
    state = _saved_state(model, save_original_format)
    where = Path(local_folder(folder))
    with refusals(os.fspath(where)):
        where.mkdir(parents=True, exist_ok=True)
    with scratch_folder(os.fspath(where / MODEL)) as scratch:
        _write_config(model, scratch)
        written = {path.name: path.read_bytes() for path in sorted(Path(scratch).iterdir())}
    with ExitStack() as stack:
        for name, data in written.items():  # these take their places after the archive, and not at all if it fails
            stack.enter_context(open_sink(where / name, durable=durable)).write(data)
        most = _nbytes(max_shard_size)
        return save_record(state, where / MODEL, durable=durable, metadata={"format": "pt"}, max_shard_size=most)


def _import_transformers() -> Any:
    import_torch()
    try:
        import transformers
    except ImportError as error:
        raise missing_package("transformers", "torch", extra="transformers") from error
    return transformers


# Load.


def _check(where: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that name other weights, and folders that are none or whose adapter would be left out."""
    for name, advice in _ELSEWHERE.items():
        if kwargs.get(name):
            raise UnsupportedError(f"{name}= is not for archives; {advice}")
    if not os.path.isdir(where):
        what = "is no folder here; huggingface_hub.snapshot_download gives the folder of a model of the Hub"
        raise SourceNotFoundError(what, path=where)
    if os.path.exists(os.path.join(where, _ADAPTER)):
        what = f"has an adapter ({_ADAPTER}); move it to a folder of its own and give that to model.load_adapter"
        raise UnsupportedError(what, path=where)
    if kwargs.get("config") is None and not os.path.exists(os.path.join(where, _CONFIG)):
        what = f"is a folder without {_CONFIG}; save_pretrained writes one, or give config="
        raise SourceNotFoundError(what, path=where)


def _configured(
    transformers: Any, where: str, model_class: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return the model's config, the arguments that are for its generation config, too, and those for the model.

    Of the arguments that change an Auto class's config, transformers gives none to the generation config.
    """
    config, overrides = kwargs.get("config"), {k: v for k, v in kwargs.items() if k not in _BESIDE}
    rest = {k: v for k, v in kwargs.items() if k in _BESIDE and k != "config"}
    if isinstance(config, transformers.PretrainedConfig):
        overrides, rest = {}, rest | overrides
    else:
        trusted = {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}
        own = getattr(model_class, "config_class", None)  # which an Auto class has not
        reader = own or transformers.AutoConfig
        config, unused = reader.from_pretrained(config or where, return_unused_kwargs=True, **trusted, **overrides)
        overrides = {k: v for k, v in overrides.items() if own and k not in unused}
        rest |= unused
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        how = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        what = (
            f"{_CONFIG} names a quantised model ({getattr(how, 'value', how)}), which transformers loads from its own"
        )
        raise UnsupportedError(f"{what} files alone; zcrecord convert makes its model.safetensors again", path=where)
    return config, overrides, rest


def _concrete(model_class: Any, config: Any, where: str, trusted: Any) -> tuple[Any, Any]:
    """Return the class that an Auto class stands for, any other as it is, and its config.

    An Auto class itself loads from a folder or the Hub alone.
    """
    mapping, named = getattr(model_class, "_model_mapping", None), getattr(config, "auto_map", None) or {}
    if mapping is None:
        return model_class, config
    if trusted and model_class.__name__ in named:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(named[model_class.__name__], where), config
    if type(config) not in mapping:
        what = f"{model_class.__name__} has no model for a {type(config).__name__}; name another class"
        own = "; trust_remote_code=True takes the folder's own code" if named else ""
        raise UnsupportedError(what + own, path=where)
    found = mapping[type(config)]
    if isinstance(found, list | tuple):
        by_name = {each.__name__: each for each in found}
        found = next((by_name[n] for n in getattr(config, "architectures", None) or () if n in by_name), found[0])
    text = (getattr(config, "sub_configs", None) or {}).get("text_config")
    part = text is not None and getattr(found, "config_class", None) is text  # the language model of a larger one
    return found, config.get_text_config() if part else config


def _repeated(transformers: Any, state: dict[str, Any], config: Any) -> set[str]:
    """Return the names that repeat another's tensor and that the class which was saved declares as tied to it.

    transformers ties those that are not there, as in its own files. Of those that are, it compares all bytes.
    """
    saved = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
    declared = getattr(saved, "_tied_weights_keys", None)
    if not isinstance(declared, dict) or not getattr(config, "tie_word_embeddings", False):
        return set()

    def one(a: Any, b: Any) -> bool:
        return bool(a.is_set_to(b)) and a.dtype == b.dtype

    pairs = {name: kept for name, kept in declared.items() if name in state and kept in state and kept not in declared}
    return {name for name, kept in pairs.items() if one(state[name], state[kept])}


def _model_tensors(record: Record) -> dict[str, Any]:
    """Return the tensors that a model may have, as torch's, by name: all but those of strings.

    Raises:
        UnsupportedError: torch has no type for a tensor's elements.
    """
    state = {name: tensor for name, tensor in record.torch().items() if not isinstance(tensor, StringTensor)}
    for name, tensor in state.items():
        if not hasattr(tensor, "untyped_storage"):
            what = f"torch has no such tensors of {record.info(name).dtype.name}; to load the others:"
            advice = f"archive=record.select(lambda tensor: tensor.name != {name!r})"
            raise UnsupportedError(f"{what} {advice}", path=record.path, tensor=name)
    return state


def _same_place(key: str, name: str) -> bool:
    """Return True if two names may differ by the prefix of a base model alone."""
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")


def _settle_ties(model: Any, state: dict[str, Any]) -> None:
    """Tie parameters on one memory as the model declares it; of others there, copy all but the first.

    Most are tied by now. Some versions of transformers do not tie two names that both have a value.
    """
    uses = Counter(tensor.data_ptr() for tensor in state.values())
    seen = {at: False for at, count in uses.items() if at and count > 1}
    if not seen:
        return
    for name, kept in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        tied, first = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(kept)
        if tied is not first and tied.is_set_to(first):
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, first)
    for parameter in model.parameters():
        at = parameter.data_ptr()
        if seen.get(at):
            parameter.data = parameter.data.clone()
        elif at in seen:
            seen[at] = True


def _set_generation(transformers: Any, model: Any, where: str, overrides: dict[str, Any], rest: dict[str, Any]) -> None:
    """Give a model the generation config of its folder, and the folder's own generate() where its code is trusted."""
    if not model.can_generate():
        return
    if rest.get("generation_config") is None:
        told = {} if os.path.exists(os.path.join(where, _GENERATION)) else {"_from_model_config": True}
        file = _CONFIG if told else _GENERATION
        if os.path.exists(os.path.join(where, file)):
            read = transformers.GenerationConfig.from_pretrained
            model.generation_config = read(where, config_file_name=file, **told, **overrides)
    if rest.get("trust_remote_code") and os.path.exists(os.path.join(where, "custom_generate", "generate.py")):
        custom = model.load_custom_generate(where, trust_remote_code=True)
        model.generate = functools.partial(custom, model=model)


# Save.


def _nbytes(size: int | str | None) -> int | None:
    if not isinstance(size, str):
        return size
    found = _SIZE.fullmatch(size)
    if found is None:
        raise UnsupportedError(
            f"max_shard_size={printable(repr(size))} is not a size, such as '5GB', nor a number of bytes"
        )
    number, letter, binary = found.groups()
    return int(float(number) * (1024 if binary else 1000) ** (1 + "KMGT".index(letter.upper())))


def _saved_state(model: Any, original: bool) -> dict[str, Any]:
    """Return the tensors to save, by the names of a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    left_out = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    for name, tensor in state.items():
        if getattr(tensor, "is_meta", False):
            raise UnsupportedError("is offloaded, or never loaded; load the model without offloading", tensor=name)
    found: dict[str, Any] = revert_weight_conversion(model, state) if original else state
    return found


def _write_config(model: Any, folder: str) -> None:
    """Have transformers write everything but weights, as its own save_pretrained does."""
    from transformers.dynamic_module_utils import custom_object_save

    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if getattr(model, "_auto_class", None) is not None:
        custom_object_save(model, folder, config=config)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
