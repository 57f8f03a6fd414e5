"""Docstrings begin with a verb and its object, or with a noun phrase; none begins with a question word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from guides import ROOT

QUESTION = re.compile(r"(?i)((return|yield)s? )?(what|who|which|where|whether)(ever)?\b")
BLOCKS = ast.stmt | ast.ExceptHandler | ast.match_case
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def heads(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and first line of each docstring."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        # Not into expressions, of which there are ten times as many.
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, BLOCKS)]
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield node.body[0].lineno, docstring.partition("\n")[0]


@pytest.mark.parametrize("folder", ["zcrecord", "tools", "tests"])
def test_no_docstring_begins_with_a_question_word(folder: str) -> None:
    told = [
        f"{path.relative_to(ROOT)}:{line}: {head}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, head in heads(path)
        if QUESTION.match(head)
    ]
    assert not told, "name the thing, or begin with a verb:\n" + "\n".join(told)
