"""Examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import zcrecord
import zcrecord.onnx

MODULES = [
    found.name
    for found in pkgutil.walk_packages(zcrecord.__path__, "zcrecord.")
    if found.name.rpartition(".")[2] != "__main__" and "._schema" not in found.name
]
EXAMPLES = [
    test
    for module in ["zcrecord", *MODULES]
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module))
    if test.examples
]
