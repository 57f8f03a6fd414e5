"""Checkpoints of training on many ranks: the storage of torch.distributed.checkpoint (DCP), over archives.

    import torch.distributed.checkpoint as dcp
    from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter

    dcp.save(state_dict, storage_writer=ZcrStorageWriter("checkpoints/100"))
    dcp.load(state_dict, storage_reader=ZcrStorageReader("checkpoints/100"))

A checkpoint is a folder: one archive for each rank, and `checkpoint.zcr`, a catalogue that makes one record of them.
torch is imported when one of these names is first asked for; `consolidate`, which makes one archive of a checkpoint,
needs none.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .consolidation import consolidate
    from .reader import ZcrStorageReader
    from .views import load_views
    from .writer import ZcrStorageWriter

__all__ = ["ZcrStorageReader", "ZcrStorageWriter", "consolidate", "load_views"]


def __getattr__(name: str) -> Any:
    found: Any
    if name == "ZcrStorageWriter":
        from .writer import ZcrStorageWriter

        found = _over_torch(name, ZcrStorageWriter, "StorageWriter")
    elif name == "ZcrStorageReader":
        from .reader import ZcrStorageReader

        found = _over_torch(name, ZcrStorageReader, "StorageReader")
    elif name == "load_views":
        from .views import load_views as found
    elif name == "consolidate":
        from .consolidation import consolidate as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def _over_torch(name: str, own: Any, base: str) -> Any:
    """Return a class of ours over a base class of DCP, which is imported only now.

    Raises:
        DependencyError: torch is not installed.
    """
    from zcrecord.frameworks.torch import import_torch

    import_torch()
    import torch.distributed.checkpoint as dcp

    return type(name, (own, getattr(dcp, base)), {"__doc__": own.__doc__, "__module__": __name__})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
