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
    from .reader import CheckpointReading as ZcrStorageReader
    from .views import load_views
    from .writer import CheckpointWriting as ZcrStorageWriter

__all__ = ["ZcrStorageReader", "ZcrStorageWriter", "consolidate", "load_views"]


def __getattr__(name: str) -> Any:
    if name == "ZcrStorageWriter":
        from .writer import writer_class

        found = writer_class()
    elif name == "ZcrStorageReader":
        from .reader import reader_class

        found = reader_class()
    elif name == "load_views":
        from .views import load_views as found
    elif name == "consolidate":
        from .consolidation import consolidate as found
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
