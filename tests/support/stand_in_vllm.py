"""A stand-in for the part of vLLM that a loader meets: its table of loaders, its default loader, models that slice.

Mirrors vLLM 0.32: how loaders are registered and made, the order of a load, what is strict. `./tools/vllm` runs the
loader with vLLM itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

LOADERS: dict[str, Any] = {}


@dataclass
class LoadConfig:
    load_format: str = "auto"
    download_dir: str | None = None
    model_loader_extra_config: Any = field(default_factory=dict)
    ignore_patterns: list[str] = field(default_factory=list)
    use_tqdm_on_load: bool = False


class Config(SimpleNamespace):
    def get_text_config(self) -> Config:
        """Return the part about the language model: here all of it."""
        return self


def model_config(folder: Any, **config: Any) -> Any:
    return SimpleNamespace(
        model=str(folder), revision=None, hf_config=Config(**config), word_embeddings_untied_by_checkpoint=False
    )


def register_model_loader(load_format: str) -> Callable[[Any], Any]:
    def register(loader: Any) -> Any:
        if not issubclass(loader, DefaultModelLoader):
            raise ValueError("The model loader must be a subclass of `BaseModelLoader`.")
        LOADERS[load_format] = loader
        return loader

    return register


class DefaultModelLoader:
    def __init__(self, load_config: Any) -> None:
        if load_config.model_loader_extra_config:
            raise ValueError("Unexpected extra config keys")
        self.load_config = load_config

    def download_model(self, config: Any) -> None:
        raise NotImplementedError

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        model = vllm_config.make(model_config.hf_config)
        self.load_weights(model, model_config)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        raise ValueError(f"Unknown load_format: {self.load_config.load_format}")

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, Any]]:
        assert self.load_config.load_format == "auto"
        return ((source.prefix + name, tensor) for name, tensor in source.weights.items())

    def load_weights(self, model: Any, model_config: Any) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        missing = set(model.parameters) - loaded
        if missing:
            raise ValueError(f"Following weights were not initialized from checkpoint: {missing}")


class Model:
    """A model of one rank of several: takes rows of weights named `up`, columns of `down`, all of others."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], rank: int = 0, ranks: int = 1) -> None:
        import torch

        self.rank, self.ranks = rank, ranks
        self.parameters = {}
        for name, shape in shapes.items():
            mine = [n // ranks if axis == self._axis(name) else n for axis, n in enumerate(shape)]
            self.parameters[name] = torch.nn.Parameter(torch.zeros(mine), requires_grad=False)

    @staticmethod
    def _axis(name: str) -> int | None:
        return {"up": 0, "down": 1}.get(name.rpartition(".")[2])

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if name not in self.parameters:
                raise ValueError(f"There is no module or parameter named {name!r}")
            parameter, axis = self.parameters[name], self._axis(name)
            if axis is not None:
                length = parameter.shape[axis]
                weight = weight.narrow(axis, self.rank * length, length)
            assert parameter.size() == weight.size(), f"Attempted to load {weight.size()} into {parameter.size()}"
            parameter.data.copy_(weight)
            loaded.add(name)
        return loaded


def modules() -> dict[str, ModuleType]:
    names = ["vllm", "vllm.config", "vllm.config.utils", "vllm.model_executor", "vllm.model_executor.model_loader"]
    names.append("vllm.model_executor.model_loader.weight_utils")
    made = {name: ModuleType(name) for name in names}
    made["vllm.config.utils"].__dict__.update(replace=replace)
    loaders = {"register_model_loader": register_model_loader, "DefaultModelLoader": DefaultModelLoader}
    made["vllm.model_executor.model_loader"].__dict__.update(loaders)
    hub = {"enable_tqdm": lambda chosen: chosen, "download_weights_from_hf": _download}
    made["vllm.model_executor.model_loader.weight_utils"].__dict__.update(hub)
    return made


def _download(model: str, where: str | None, patterns: list[str], revision: str | None, **_: Any) -> str:
    if patterns != ["*.zcr"]:
        raise ValueError(f"{patterns}: the archives are wanted, and nothing else")
    return f"{where}/{model}"


def install() -> None:
    """Put the stand-in where `import vllm` finds it, in this process."""
    sys.modules.update(modules())
