"""The model loader that vLLM is given: its own default loader, fed from an archive.

Everything beside the weights is vLLM's: creating the model, slicing for tensor-parallel ranks, quantised configs,
expert parallelism, the check that no parameter is left without weights, weights in further files
(`secondary_weights`). `weights` opens the archive and makes the tensors.

Source: the methods of `DefaultModelLoader` in vLLM 0.32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from zcrecord.errors import UnsupportedError

if TYPE_CHECKING:
    from zcrecord.record.record import Record

    DefaultModelLoader = Any
else:
    DefaultModelLoader = object  # vLLM's comes after it, in `loader_class`

_BAR = "{desc}: {percentage:3.0f}% of {total_fmt} tensors [{elapsed}<{remaining}]\n"  # a line each: workers share a log


@functools.cache
def loader_class() -> Any:
    """Return the loader's class, a subclass of vLLM's DefaultModelLoader; the first call imports that, and makes it."""
    from vllm.model_executor.model_loader import DefaultModelLoader

    return type("ArchiveLoader", (ArchiveLoading, DefaultModelLoader), {"__doc__": ArchiveLoading.__doc__})


class ArchiveLoading(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not installed where mypy runs
    """Loads a model's weights from the archive or catalogue in its folder, or behind a URL.

    These are the methods that differ from those of vLLM's default loader.
    """

    def __init__(self, load_config: Any) -> None:
        from vllm.config.utils import replace

        from . import weights  # here, because every process of vLLM imports this module, whatever it loads

        self._weights = weights
        self._options = weights.loader_options(load_config.model_loader_extra_config)
        self._verify = self._options.pop("verify", True)
        super().__init__(replace(load_config, model_loader_extra_config={}))  # vLLM's refuses options of others
        self._opened: Record | None = None  # the archive, during a load, and the model that it is of
        self._opened_for: str | None = None
        self._last_name: str | None = None  # of the tensor that the model was given last

    def download_model(self, model_config: Any) -> None:
        """Fetch the archives of a model of a hub; does nothing for a folder and for a URL, which is read later."""
        if "url" not in self._options:
            self._folder(model_config)

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model with its weights; input and output embeddings are untied if the archive has both."""
        config = model_config.hf_config
        if getattr(config, "tie_word_embeddings", False) and self._weights.has_own_head(self._record(model_config)):
            # As vLLM does where it finds such a head in a .safetensors; once loaded, equal ones are tied again.
            config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
            model_config.word_embeddings_untied_by_checkpoint = True
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the archive's tensors into a model.

        Raises:
            SourceError: there is no archive, or it cannot be read. UnsupportedError: torch has no type for a
            tensor. MismatchError: the archive has weights that the model has no place for, or lacks some.
        """
        import time

        self.counter_before_loading_weights = time.perf_counter()
        try:
            super().load_weights(model, model_config)
        except Exception as error:
            path = self._opened.path if self._opened is not None else None
            self._weights.check_mismatch(error, type(model).__name__, path, self._last_name)
            raise
        finally:
            self._opened = None

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield (name, tensor) of the archive, in saved order, and then of the model's `secondary_weights`."""
        from tqdm.auto import tqdm
        from vllm.model_executor.model_loader.weight_utils import enable_tqdm

        record = self._record(model_config)
        further = getattr(model, "secondary_weights", ())
        if further and "trusted_keys" in self._options:
            fault = "has further files of weights, which vLLM reads itself, unsigned: trusted_keys is not for it"
            raise UnsupportedError(f"{type(model).__name__} {fault}")
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        tensors = self._weights.torch_weights(record, unused, verify=self._verify)
        quiet = not enable_tqdm(self.load_config.use_tqdm_on_load)
        bar = {"desc": "Loading zcrecord", "bar_format": _BAR, "mininterval": 2, "disable": quiet}
        for name, tensor in tqdm(tensors, total=len(record), **bar):
            self._last_name = name
            yield name, tensor
        self._last_name = None
        for source in further:
            from vllm.config.utils import replace  # here, because few models have any
            from vllm.model_executor.model_loader import DefaultModelLoader

            loader = DefaultModelLoader(replace(self.load_config, load_format="auto"))
            yield from loader._get_weights_iterator(source)

    def _record(self, model_config: Any) -> Record:
        """Return the model's opened archive; `load_weights` lets go of it at its end."""
        if self._opened is None or self._opened_for != model_config.model:
            folder = "" if "url" in self._options else self._folder(model_config)
            self._opened = self._weights.open_weights(folder, **self._options)
            self._opened_for = model_config.model
        return self._opened

    def _folder(self, model_config: Any) -> str:
        """Return the path of the model's folder; fetches a model of a hub, its archives alone."""
        import os

        from vllm.model_executor.model_loader.weight_utils import download_weights_from_hf

        if os.path.isdir(model_config.model):
            return str(model_config.model)
        cache, ignored = self.load_config.download_dir, self.load_config.ignore_patterns
        revision = model_config.revision
        return str(download_weights_from_hf(model_config.model, cache, ["*.zcr"], revision, ignore_patterns=ignored))
