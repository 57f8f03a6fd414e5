"""Checkpoints of Lightning as archives: a plugin of its Trainer, and of Fabric.

Source: `CheckpointIO` and `TorchCheckpointIO` in Lightning 2.6.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from zcrecord.errors import missing_package
from zcrecord.record.load import load_record
from zcrecord.record.save import save_record
from zcrecord.storage.files import is_url, refusals

__all__ = ["ZcrCheckpointIO"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")  # of the packages lightning and pytorch-lightning


class ZcrCheckpointIO:
    """Saves and loads a Trainer's checkpoints as archives: `Trainer(plugins=[ZcrCheckpointIO()])`.

    A path has the old checkpoint or the new one at any time, whole. A resumed training is bit for bit the one that
    Lightning's own files resume. Nothing is pickled: one error names all values that a record does not hold.
    """

    def __init__(self) -> None:
        try:
            if not any(name in sys.modules for name in _PACKAGES):
                import lightning.fabric  # noqa: F401
        except ImportError as error:
            raise missing_package("lightning", extra="lightning") from error
        for name in _PACKAGES:  # a Trainer asks for the class of its own package
            if name in sys.modules:
                sys.modules[name].plugins.CheckpointIO.register(type(self))

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint to a path or URL, with options for fsspec; raises what `save_record` does."""
        if not is_url(path):
            with refusals(path):
                os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        save_record(checkpoint, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:  # noqa: ARG002
        """Return the checkpoint of an archive, or of a file of torch.save; raises what `load_record` does.

        Tensors lie on private pages of the file, or where `map_location` puts those of the CPU. `weights_only` does not
        matter: no file can run code.
        """
        device = map_location
        if callable(map_location):
            import torch

            storage = map_location(torch.UntypedStorage(0), "cpu")
            device = None if storage is None else storage.device
        elif isinstance(map_location, Mapping):
            device = map_location.get("cpu")
        return load_record(path).tree("torch", device=device)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, or a folder with all in it, if it is there; a path or a URL."""
        from fsspec.core import url_to_fs  # which Lightning needs, too

        file_system, path_there = url_to_fs(str(path))
        if file_system.exists(path_there):
            file_system.rm(path_there, recursive=True)

    def teardown(self) -> None:
        """Do nothing; Lightning calls it at the end."""
