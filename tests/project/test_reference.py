"""The API reference leaves no public name out, and shows signatures and docstrings as they are written.

That its pages are those of today's docstrings test_generate says.
"""

from __future__ import annotations

import importlib
import inspect
import re

import zcrecord
from tools.generate import reference

FILES = reference.files()


def test_every_public_name_and_method_has_a_section() -> None:
    errors = FILES[reference.PAGES / "errors.md"]
    for name in set(reference.MODULES) - {"zcrecord.errors"}:
        module = importlib.import_module(name)
        page = FILES[reference.PAGES / f"{name.removeprefix('zcrecord.')}.md"]
        for public in module.__all__:
            thing = getattr(module, public)
            is_error = isinstance(thing, type) and issubclass(thing, Exception)
            assert f"\n## {public}\n" in (errors if is_error and module is zcrecord else page), f"{name}.{public}"
            if isinstance(thing, type) and not is_error:
                methods = {key for key, value in vars(thing).items() if inspect.isfunction(value)} - {"advance"}
                missing = [key for key in methods if key[0] != "_" and f"\n### {public}.{key}\n" not in page]
                assert not missing, f"{name}.{public}: {missing}"


def test_links_of_the_reference_lead_somewhere() -> None:
    for path, text in FILES.items():
        headings = {found.lower() for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            assert not file or path.parent / file in FILES, f"{path}: {target}"
            assert not anchor or anchor in headings, f"{path}: {target}"
