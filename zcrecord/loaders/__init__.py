"""Load tensors to devices: the protocol of loaders, plans of loads, and the loaders of this package.

    from zcrecord.loaders import load_into

    weights = load_into(record, "cuda:0", "encoder.*", progress=print)

A loader is given, or chosen by the name of its device; `HostLoader` in `host` is the one to copy for a device of yours.
"""

from .boxes import shard
from .load import load_into, loader_for
from .plan import plan_load
from .protocol import Loader, LoadPlan, PayloadRef, RangeSource, Target

__all__ = ["LoadPlan", "Loader", "PayloadRef", "RangeSource", "Target", "load_into", "loader_for", "plan_load", "shard"]
