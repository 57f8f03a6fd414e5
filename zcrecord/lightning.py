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
        """Return a checkpoint, one of torch.save, too; no file runs code, so `weights_only` does not matter.

        Tensors lie on private pages of the file, or where `map_location` puts those of the CPU.
        """
        if callable(map_location):
            import torch

            moved = map_location(torch.UntypedStorage(0), "cpu")
            map_location = None if moved is None else moved.device
        elif isinstance(map_location, Mapping):
            map_location = map_location.get("cpu")
        return load_record(path).tree("torch", device=map_location)

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, or a folder, if it is there."""
        from fsspec.core import url_to_fs  # which Lightning needs, too

        files, place = url_to_fs(str(path))
        if files.exists(place):
            files.rm(place, recursive=True)

    def teardown(self) -> None:
        """Do nothing; Lightning calls it at the end."""
