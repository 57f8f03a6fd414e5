"""The API reference leaves no public name out, and shows signatures and docstrings as they are written.

That its pages are those of today's docstrings test_generate says.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import public_api
import pytest

import zcrecord
from tools.generate import reference

FILES = reference.files()


def test_every_public_module_has_a_page_and_every_public_name_a_section() -> None:
    assert set(reference.MODULES) == {*public_api.MODULES.values(), "zcrecord.errors"}
    for module, name in public_api.MODULES.items():
        page = FILES[reference.PAGES / f"{name.removeprefix('zcrecord.')}.md"]
        errors = FILES[reference.PAGES / "errors.md"]
        for public in module.__all__:
            is_error = module is zcrecord and public.endswith("Error")
            assert f"\n## {public}\n" in (errors if is_error else page), f"{name}.{public}"


def test_public_methods_that_are_promised_have_a_section() -> None:
    whole = "\n".join(FILES.values())
    promised = re.findall(r"^(\w+\.\w+)(?:\(| ->)", public_api.PUBLIC, re.MULTILINE)
    own = [name for name in promised if not name.startswith(("zcrecord.", "LoadPlan.advance"))]
    missing = [name for name in own if f"\n### {name}\n" not in whole]
    assert len(own) > 50
    assert not missing


def test_links_of_the_reference_lead_somewhere() -> None:
    for path, text in FILES.items():
        headings = {found.lower() for found in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
        for target in re.findall(r"\]\(([^)]+)\)", text):
            file, _, anchor = target.partition("#")
            assert not file or path.parent / file in FILES, f"{path}: {target}"
            assert not anchor or anchor in headings, f"{path}: {target}"


MODULE = '''
    """A package of one function: *see* `zcrecord.onnx`.

        import small

        small.cut(b"")

    The rest is prose.
    """

    from .inner import cut

    __all__ = ["LIMIT", "Part", "cut"]
    LIMIT = 3  # of parts
'''
INNER = '''
    import dataclasses

    PIECE = 1 << 20  # bytes


    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Part:
        """One part."""

        name: str
        nbytes: int = dataclasses.field(default=0)
        _hidden: int = 0

        @property
        def empty(self) -> bool:
            """True of a part of no bytes."""
            return not self.nbytes

        @classmethod
        def of(cls, data: bytes) -> "Part":
            """A part of bytes."""


    def cut(data: bytes, *parts: Part, size: int = PIECE, sep: str = ", ",
            **more: dict[str,
                         int]) -> list[bytes]:
        """Cut data into pieces of `size` bytes.

        Args:
            data, parts: what is cut,
                and into what.
            size: of a piece.

        Raises:
            FormatError: it is damaged. LimitError: it is
            too large.

        Example:
            >>> cut(b"")
            []
        """
'''


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "small").mkdir()
    text = textwrap.dedent(MODULE).replace("import cut", "import Part, cut")
    (tmp_path / "small" / "__init__.py").write_text(text, encoding="utf-8")
    (tmp_path / "small" / "inner.py").write_text(textwrap.dedent(INNER), encoding="utf-8")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "MODULES", ("small", "zcrecord.onnx"))
    reference.source_of.cache_clear()
    yield reference.page_of("small")
    reference.source_of.cache_clear()


def test_page_shows_signatures_as_they_are_written_and_what_constants_stand_for(page: str) -> None:
    assert (
        "def cut(\n    data: bytes,\n    *parts: Part,\n    size: int = 1 << 20,\n"
        '    sep: str = ", ",\n    **more: dict[str, int],\n) -> list[bytes]\n'
    ) in page
    assert "class Part(*, name: str, nbytes: int = 0)\n" in page
    assert "empty: bool  # a property\n" in page
    assert '@classmethod\ndef of(data: bytes) -> "Part"\n' in page
    assert "| [`LIMIT`](#limit) | of parts |" in page
    assert "```python\nLIMIT = 3\n```" in page


def test_page_shows_docstrings_as_prose_lists_and_code(page: str) -> None:
    assert "A package of one function: \\*see\\* [`zcrecord.onnx`](onnx.md).\n" in page
    assert '```python\nimport small\n\nsmall.cut(b"")\n```\n\nThe rest is prose.\n' in page
    assert "**Args:**\n\n- `data`, `parts`: what is cut, and into what.\n- `size`: of a piece.\n" in page
    assert "- `FormatError`: it is damaged.\n- `LimitError`: it is too large.\n" in page
    assert '```pycon\n>>> cut(b"")\n[]\n```' in page


def test_name_that_nothing_defines_is_refused(page: str) -> None:
    assert page
    with pytest.raises(ValueError, match="small does not define missing"):
        reference.find("small", "missing")
