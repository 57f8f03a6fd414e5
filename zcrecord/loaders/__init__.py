"""Tensors to where they run: one small protocol, plans of what to load, and the loaders that come with it.

    from zcrecord.loaders import load_into

    weights = load_into(record, "cuda:0", "encoder.*", progress=print)

A loader is chosen by its device's name or given; `host` is the one to copy for a device of your own.
"""

from .load import load_into, loader_for
from .plan import plan_load, shard
from .protocol import Loader, LoadPlan, PayloadRef, RangeSource, Target

__all__ = ["LoadPlan", "Loader", "PayloadRef", "RangeSource", "Target", "load_into", "loader_for", "plan_load", "shard"]
