"""Checkpoints of Lightning as archives: a plugin of its Trainer and of Fabric.

Lightning makes the dict of a checkpoint and applies a loaded one; `save_record` and `Record.tree` write and read it.

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
from zcrecord.storage.files import is_url

__all__ = ["ZcrCheckpointIO"]

_PACKAGES = ("lightning.fabric", "lightning_fabric")  # of the packages lightning and pytorch-lightning


class ZcrCheckpointIO:
    """Saves and loads the checkpoints of a Trainer, or of Fabric, as archives: `Trainer(plugins=[ZcrCheckpointIO()])`.

    When a save returns, its path has the new checkpoint; a failed or killed save leaves the file from before. A resumed
    training is bit for bit the one that Lightning's own files resume. Nothing is pickled: functions, classes and other
    objects that a record does not hold are refused, all in one error that names them.

    Args:
        durable: fsync each checkpoint, so that it survives power loss.

    Raises:
        DependencyError: Lightning is not installed.
    """

    def __init__(self, *, durable: bool = True) -> None:
        if not any(name in sys.modules for name in _PACKAGES):
            try:
                import lightning.fabric  # noqa: F401
            except ImportError as error:
                raise missing_package("lightning", extra="lightning") from error
        for name in _PACKAGES:  # each has a class of its own, which a Trainer asks for
            if name in sys.modules:
                sys.modules[name].plugins.CheckpointIO.register(type(self))
        self._durable = durable

    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint to a path or URL; `storage_options` are for fsspec.

        Raises:
            UnsupportedError: values that a record does not hold, all of them. SourceError: the file system refuses.
        """
        if not is_url(path):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        save_record(checkpoint, path, durable=self._durable, storage_options=storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:  # noqa: ARG002
        """Return a checkpoint, with tensors on the CPU, or where `map_location` puts those of the CPU.

        On the CPU tensors lie on private pages of the file, as those of `Record.torch`. Files of Lightning's own are
        read, too. No file makes code run, so `weights_only` does not matter.

        Raises:
            SourceNotFoundError: there is no such file. FormatError: it is not a checkpoint, or damaged.
        """
        return load_record(path).tree("torch", device=_device(map_location))

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, if it is there; a folder, too, as Lightning's own plugin does."""
        from fsspec.core import url_to_fs  # which Lightning needs, too

        files, place = url_to_fs(str(path))
        if files.exists(place):
            files.rm(place, recursive=True)

    def teardown(self) -> None:
        """Do nothing; Lightning calls it at the end."""


def _device(map_location: Any) -> Any:
    """Return the device of a `map_location`, as torch.load takes it, for tensors of the CPU."""
    if callable(map_location):
        import torch

        moved = map_location(torch.UntypedStorage(0), "cpu")
        return "cpu" if moved is None else moved.device
    return map_location.get("cpu", "cpu") if isinstance(map_location, Mapping) else map_location
