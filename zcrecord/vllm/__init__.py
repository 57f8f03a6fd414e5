"""vLLM's load format `zcrecord`: serves a model whose weights are an archive or a catalogue.

    vllm serve FOLDER --load-format zcrecord

vLLM finds `register` by the entry point `vllm.general_plugins`, and calls it in each of its processes. It imports
nothing but vLLM's own table of loaders; `loader` and `weights` import the rest when the format is chosen.
"""

from __future__ import annotations

__all__ = ["FORMAT", "register"]

FORMAT = "zcrecord"  # as `--load-format` has it


def register() -> None:
    """Add the load format to those of vLLM; may be called again.

    Raises:
        ImportError: vLLM is not installed.

    Example:
        >>> import zcrecord.vllm
        >>> zcrecord.vllm.FORMAT  # vLLM calls register(), wherever zcrecord is installed beside it
        'zcrecord'
    """
    from vllm.model_executor.model_loader import register_model_loader

    from .loader import loader_class

    register_model_loader(FORMAT)(loader_class())
