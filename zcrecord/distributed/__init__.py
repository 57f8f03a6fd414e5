"""Checkpoints of training on many ranks: the storage of torch.distributed.checkpoint (DCP), over archives.

    import torch.distributed.checkpoint as dcp
    from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter

    dcp.save(state_dict, storage_writer=ZcrStorageWriter("checkpoints/100"))
    dcp.load(state_dict, storage_reader=ZcrStorageReader("checkpoints/100"))

A checkpoint is a folder: one archive for each rank, and `checkpoint.zcr`, a catalogue that makes one record of them.
torch is imported when one of these names is first asked for; `consolidate`, which makes one archive of a checkpoint,
needs none.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consolidation import consolidate
    from .reader import ZcrStorageReader
    from .views import load_views
    from .writer import ZcrStorageWriter

__all__ = ["ZcrStorageReader", "ZcrStorageWriter", "consolidate", "load_views"]

_MODULES = dict(zip(__all__, ("reader", "writer", "consolidation", "views"), strict=True))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULES[name]}", __name__), name)
    if name.startswith("Zcr"):
        value = _with_dcp_base(value)
    globals()[name] = value  # so that this function is called once for each name
    return value


def _with_dcp_base(own: Any) -> Any:
    """Return a subclass of a storage class of this package and of DCP's abstract one; imports torch."""
    from zcrecord.frameworks.torch import import_torch

    import_torch()
    import torch.distributed.checkpoint as dcp

    dcp_class = getattr(dcp, own.__name__.removeprefix("Zcr"))
    return type(own.__name__, (own, dcp_class), {"__doc__": own.__doc__, "__module__": __name__})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
