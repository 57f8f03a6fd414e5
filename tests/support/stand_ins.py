"""The two packages that tests of `zcrecord.compat.safetensors` compare, under the same names, and modules to save."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

COMPAT = "zcrecord.compat.safetensors"
PACKAGES = ("safetensors", COMPAT)


def package(name: str) -> SimpleNamespace:
    top, numpy, framework = (importlib.import_module(name + part) for part in ("", ".numpy", ".torch"))
    return SimpleNamespace(top=top, safe_open=top.safe_open, error=top.SafetensorError, np=numpy, pt=framework)


OURS = package(COMPAT)


def tied(seed: int = 0) -> Any:
    """Return a module whose embedding and head are one."""
    torch.manual_seed(seed)
    head = torch.nn.Linear(4, 10, bias=False)
    model = torch.nn.ModuleDict({"wte": torch.nn.Embedding(10, 4), "mlp": torch.nn.Linear(4, 4), "head": head})
    head.weight = model["wte"].weight
    return model


def same_state(one: Any, other: Any) -> bool:
    """Return True if two modules hold the same, under the same names."""
    a, b = one.state_dict(), other.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)
