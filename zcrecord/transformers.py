"""Models of Hugging Face Transformers from archives, and into archives.

A model folder has `config.json`, the tokenizer's files, and the weights in `model.zcr`. transformers makes the model
and decides which tensor goes where; `frameworks.torch` gives the tensors. Nothing of transformers is replaced.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zcrecord.errors import MismatchError, SourceNotFoundError, UnsupportedError, missing_package, printable
from zcrecord.frameworks.torch import import_torch
from zcrecord.record.load import record_of
from zcrecord.record.record import Record
from zcrecord.record.save import save_record
from zcrecord.storage.files import open_sink, parse_size, path_of, refusals, scratch_folder
from zcrecord.storage.folders import MODEL, local_folder
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing.writers import SaveReport

__all__ = ["from_pretrained", "save_pretrained"]

Arguments = dict[str, Any]  # of transformers' from_pretrained

_CONFIG, _GENERATION, _ADAPTER = "config.json", "generation_config.json", "adapter_config.json"

# Arguments that are not values for a config, though configs would take some of them.
_BESIDE = {"config", "dtype", "torch_dtype", "trust_remote_code"}

# Arguments of transformers that name weights elsewhere, each with what to do instead.
_ELSEWHERE = {
    "state_dict": "the weights are the archive's; archive= takes a Record, too",
    "gguf_file": "zcrecord convert makes an archive of a GGUF file",
    "variant": "name the archive: archive='model.fp16.zcr'",
    "subfolder": "name the folder below as the folder",
    "quantization_config": "archives are loaded without quantising; quantise the model that this returns",
}


def from_pretrained(
    folder: Any, model_class: Any, *args: Any, archive: Any = None, trusted_keys: Any = None, **kwargs: Any
) -> Any:
    """Return the model of a folder, as `model_class.from_pretrained(folder)` of transformers, from its archive.

    transformers itself makes the model, renames keys, ties weights, and logs missing and unexpected keys. The weights
    lie on a private mapping of the archive: nothing is read before it is used, processes share the pages, and a write
    copies its page and never reaches the file. A tensor is copied if it is converted to another dtype, if transformers
    joins it with others (see `save_pretrained`), or if the archive ties it to another one and the model does not.
    Tensors of strings are left out.

    Args:
        folder: with `config.json` and `model.zcr`, or the only archive or catalogue there.
        model_class: a class of transformers, such as `AutoModelForCausalLM`; `args` go to the model's own class.
        archive: the weights, where they are not in the folder: a path, a URL or a Record, maybe of a part or with
            other names (`Record.module`, `Record.select`). A remote one is fetched into memory.
        trusted_keys: as in `load_record`, for a Record, too. They vouch only for the archive, not for configs, code
            and tokenizer in the folder.
        kwargs: of transformers' from_pretrained, such as `dtype`, `device_map`, `output_loading_info`, `key_mapping`,
            and values for the config.

    Raises:
        SourceError: there is no such folder, or in it no config or no archive. UnsupportedError: a quantised model, a
        folder with an adapter, elements that torch has no type for, or an argument that names other weights.
        IntegrityError: no owner of a trusted key signed the archive.
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
    path = path_of(folder)
    _check_arguments(path, kwargs)
    config, overrides, options = _read_config(transformers, path, model_class, kwargs)
    model_class, config = _concrete_class(model_class, config, path, options.get("trust_remote_code"))
    record = record_of(path if archive is None else archive, trusted_keys)
    state = _model_tensors(record)
    repeated = _declared_ties(transformers, state, config) if options.get("key_mapping") is None else set()
    returns_info = options.pop("output_loading_info", False)
    options |= {"config": config, "output_loading_info": True}
    load = functools.partial(model_class.from_pretrained, None, *args, **options)
    model, info = load(state_dict={name: tensor for name, tensor in state.items() if name not in repeated})
    if any(_is_same_place(key, name) for key in info["missing_keys"] for name in repeated):
        model, info = load(state_dict=state)  # the class does not tie what the archive does
    if state and len(info["unexpected_keys"]) >= len(state) - len(repeated):
        fault = f"none of its {len(state)} tensors belongs to a {type(model).__name__}"
        raise MismatchError(f"{fault}; of a part of a record give archive=record.module('name')", path=record.path)
    _settle_ties(model, state)
    model.config.name_or_path = model.name_or_path = path
    _set_generation(transformers, model, path, overrides, options)
    return (model, info) if returns_info else model


def save_pretrained(
    model: Any,
    folder: Any,
    *,
    max_shard_size: int | str | None = None,
    save_original_format: bool = True,
    durable: bool = True,
) -> SaveReport:
    """Save a model of transformers as a folder: its config and generation config, its own code, and `model.zcr`.

    A failed save leaves the folder as it was: everything is written before anything is replaced, first the archive,
    then at once the others. (A save that is killed just between them leaves the new archive with the old config.) Tied
    weights are stored once, under all their names. Other files stay: transformers' own from_pretrained goes on loading
    an old `model.safetensors`. The tokenizer writes its files itself: `tokenizer.save_pretrained(folder)`.

    Args:
        model: a PreTrainedModel, or such a one wrapped for training.
        folder: made if it does not exist.
        max_shard_size: bytes, or "5GB" as transformers has it; larger models are written as shards and a catalogue.
        save_original_format: False stores tensors as the model has them, not in the form of older checkpoints. Experts
            are then loaded without joining them, but not by programs that know only the older names.
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
    _check_model(model, transformers)
    max_shard_nbytes = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if max_shard_nbytes is None and max_shard_size is not None:
        fault = f"max_shard_size={printable(repr(max_shard_size))} is not a size, such as '5GB', nor a number of bytes"
        raise UnsupportedError(fault)
    state = _saved_state(model, original=save_original_format)
    path = Path(local_folder(folder))
    with refusals(os.fspath(path)):
        path.mkdir(parents=True, exist_ok=True)
    with scratch_folder(os.fspath(path / MODEL)) as scratch:
        _write_config(model, scratch)
        files = {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}
    with ExitStack() as stack:
        for name, data in files.items():  # these take their places after the archive, and not at all if it fails
            stack.enter_context(open_sink(path / name, durable=durable)).write(data)
        metadata = {"format": "pt"}
        return save_record(state, path / MODEL, durable=durable, metadata=metadata, max_shard_size=max_shard_nbytes)


def _import_transformers() -> Any:
    """Return the package; DependencyError if it, or torch, is not installed."""
    import_torch()
    try:
        import transformers
    except ImportError as error:
        raise missing_package("transformers", "torch", extra="transformers") from error
    return transformers


def _check_arguments(path: str, kwargs: dict[str, Any]) -> None:
    """Refuse arguments that name other weights, and a folder that is missing, has an adapter or lacks a config."""
    for name, advice in _ELSEWHERE.items():
        if kwargs.get(name):
            raise UnsupportedError(f"{name}= is not for archives; {advice}")
    if not os.path.isdir(path):
        fault = "is no folder here; huggingface_hub.snapshot_download gives the folder of a model of the Hub"
        raise SourceNotFoundError(fault, path=path)
    if os.path.exists(os.path.join(path, _ADAPTER)):
        fault = f"has an adapter ({_ADAPTER}); move it to a folder of its own and give that to model.load_adapter"
        raise UnsupportedError(fault, path=path)
    if kwargs.get("config") is None and not os.path.exists(os.path.join(path, _CONFIG)):
        fault = f"is a folder without {_CONFIG}; save_pretrained writes one, or give config="
        raise SourceNotFoundError(fault, path=path)


def _read_config(transformers: Any, path: str, model_class: Any, kwargs: Arguments) -> tuple[Any, Arguments, Arguments]:
    """Return a model's config, the arguments for its generation config, and those for the model's class.

    Arguments that change the config of an Auto class are not for the generation config, as in transformers.
    UnsupportedError if the config is of a quantised model.
    """
    config, overrides = kwargs.get("config"), {k: v for k, v in kwargs.items() if k not in _BESIDE}
    options = {k: v for k, v in kwargs.items() if k in _BESIDE and k != "config"}
    if isinstance(config, transformers.PretrainedConfig):
        overrides, options = {}, options | overrides
    else:
        trusted = {"trust_remote_code": True} if kwargs.get("trust_remote_code") else {}
        own_class = getattr(model_class, "config_class", None)  # None for an Auto class
        config_class = own_class or transformers.AutoConfig
        config, unused = config_class.from_pretrained(config or path, return_unused_kwargs=True, **trusted, **overrides)
        overrides = {k: v for k, v in overrides.items() if own_class and k not in unused}
        options |= unused
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        fault = f"{_CONFIG} names a quantised model ({getattr(method, 'value', method)})"
        advice = "which transformers loads from its own files alone; zcrecord convert makes its model.safetensors again"
        raise UnsupportedError(f"{fault}, {advice}", path=path)
    return config, overrides, options


def _concrete_class(model_class: Any, config: Any, path: str, is_trusted: Any) -> tuple[Any, Any]:
    """Return the class that an Auto class chooses for a config, any other class as it is, and that class's config.

    An Auto class itself loads from a folder or the Hub alone. UnsupportedError if it has no model for the config.
    """
    mapping, code = getattr(model_class, "_model_mapping", None), getattr(config, "auto_map", None) or {}
    if mapping is None:
        return model_class, config
    if is_trusted and model_class.__name__ in code:
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(code[model_class.__name__], path), config
    if type(config) not in mapping:
        fault = f"{model_class.__name__} has no model for a {type(config).__name__}; name another class"
        advice = "; trust_remote_code=True takes the folder's own code" if code else ""
        raise UnsupportedError(fault + advice, path=path)
    choices = mapping[type(config)]
    choices = list(choices) if isinstance(choices, list | tuple) else [choices]
    architectures = _architectures(config)
    concrete = next((c for name in architectures for c in choices if c.__name__ == name), choices[0])
    text_class = (getattr(config, "sub_configs", None) or {}).get("text_config")
    if text_class is not None and getattr(concrete, "config_class", None) is text_class:
        return concrete, config.get_text_config()  # the language model of a larger model
    return concrete, config


def _architectures(config: Any) -> list[str]:
    """Return the class names in a config's `architectures`; empty if the config, which may be anyone's, has no list."""
    names = getattr(config, "architectures", None)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list | tuple) else []


def _declared_ties(transformers: Any, state: dict[str, Any], config: Any) -> set[str]:
    """Return names of `state` that the saved class declares as tied to another name, and that have the same tensor.

    transformers ties a name that is left out, as in its own files. Given both, it would compare all their bytes. Only
    declarations by name count: not those of transformers 4, which have no target, nor patterns.
    """
    saved_class = getattr(transformers, next(iter(_architectures(config)), ""), None)
    declared = getattr(saved_class, "_tied_weights_keys", None)
    if not isinstance(declared, dict) or not getattr(config, "tie_word_embeddings", False):
        return set()
    targets = {name: target for name, target in declared.items() if target not in declared}
    pairs = [(name, state[name], state[target]) for name, target in targets.items() if {name, target} <= state.keys()]
    return {name for name, tensor, target in pairs if tensor.dtype == target.dtype and tensor.is_set_to(target)}


def _model_tensors(record: Record) -> dict[str, Any]:
    """Return a record's tensors as torch's, by name, without strings; UnsupportedError if torch has no type."""
    state = {name: tensor for name, tensor in record.torch().items() if not isinstance(tensor, StringTensor)}
    for name, tensor in state.items():
        if not hasattr(tensor, "untyped_storage"):
            fault = f"torch has no such tensors of {record.info(name).dtype.name}; to load the others:"
            advice = f"archive=record.select(lambda tensor: tensor.name != {name!r})"
            raise UnsupportedError(f"{fault} {advice}", path=record.path, tensor=name)
    return state


def _is_same_place(key: str, name: str) -> bool:
    """Return True if two names may differ by the prefix of a base model alone."""
    return f".{key}".endswith(f".{name}") or f".{name}".endswith(f".{key}")


def _settle_ties(model: Any, state: dict[str, Any]) -> None:
    """Tie parameters and buffers of one tensor if the model declares them tied; copy other parameters but the first.

    Parameters are copied if they begin at the same address; those that overlap otherwise still share memory, as do
    buffers. Some versions of transformers do not tie two names that both have a value.
    """
    counts = Counter(tensor.data_ptr() for tensor in state.values())
    shared = {address for address, count in counts.items() if address and count > 1}
    if not shared:
        return
    for name, target_name in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        tensor, target = model.get_parameter_or_buffer(name), model.get_parameter_or_buffer(target_name)
        if tensor is not target and tensor.is_set_to(target):
            module, _, key = name.rpartition(".")
            setattr(model.get_submodule(module), key, target)
    seen = set()
    for parameter in model.parameters():
        address = parameter.data_ptr()
        if address in seen:
            parameter.data = parameter.data.clone()
        elif address in shared:
            seen.add(address)


def _set_generation(transformers: Any, model: Any, path: str, overrides: Arguments, options: Arguments) -> None:
    """Give a model the generation config of its folder, and the folder's own generate() where its code is trusted."""
    if not model.can_generate():
        return
    if options.get("generation_config") is None:
        file = _GENERATION if os.path.exists(os.path.join(path, _GENERATION)) else _CONFIG
        source = {"_from_model_config": True} if file == _CONFIG else {}
        if os.path.exists(os.path.join(path, file)):
            read = transformers.GenerationConfig.from_pretrained
            model.generation_config = read(path, config_file_name=file, **source, **overrides)
    if options.get("trust_remote_code") and os.path.exists(os.path.join(path, "custom_generate", "generate.py")):
        custom = model.load_custom_generate(path, trust_remote_code=True)
        model.generate = functools.partial(custom, model=model)


def _check_model(model: Any, transformers: Any) -> None:
    """Raise UnsupportedError, with advice, for a model that cannot be saved as an archive."""
    if not isinstance(model, transformers.PreTrainedModel):
        fault = f"a {type(model).__name__} is no model of transformers; save_record saves any module"
        raise UnsupportedError(f"{fault}, and a PeftModel's merge_and_unload() gives one")
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedError("a quantised model; save it with model.save_pretrained, or dequantise it")
    if getattr(model, "_hf_peft_config_loaded", False):
        raise UnsupportedError("the model has adapters, which model.save_pretrained saves; delete_adapter removes them")


def _saved_state(model: Any, *, original: bool) -> dict[str, Any]:
    """Return the tensors to save by name, in the `original` form of older checkpoints or as the model has them."""
    from transformers.core_model_loading import revert_weight_conversion

    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    state: dict[str, Any] = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    for name, tensor in state.items():
        if getattr(tensor, "is_meta", False):
            raise UnsupportedError("is offloaded, or never loaded; load the model without offloading", tensor=name)
    return dict(revert_weight_conversion(model, state)) if original else state


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
