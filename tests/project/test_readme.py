"""README answers in half a minute: it is short, and its first screen has what a stranger looks for.

That what it shows works is test_examples' to say, that its figures are measured test_tools'.
"""

from __future__ import annotations

import re

import guides

from zcrecord.cli.registry import COMMANDS
from zcrecord.codec.file_types import FORMATS
from zcrecord.loaders import load

TEXT = guides.README.read_text(encoding="utf-8")
NEIGHBOURS = ("safetensors", "GGUF", "`.npz`", "`torch.save`", "the `.onnx` itself", "a hex array in C")


def test_readme_has_at_most_900_words() -> None:
    assert len(TEXT.split()) <= 900


def test_readme_s_first_screen_has_what_a_stranger_looks_for() -> None:
    marks = ["./tools/quickstart", "./tools/test", "```python", *(f"\n| {name} |" for name in NEIGHBOURS)]
    places = [TEXT.index(mark) for mark in marks]
    assert places == sorted(places)
    assert places[-1] < TEXT.index("\n## ")


def test_readme_says_in_two_sentences_what_it_is_and_shows_ten_lines_that_run() -> None:
    _, about, _ = TEXT.split("\n\n", 2)
    assert len(re.findall(r"\.(?:\s|$)", about)) == 2
    code = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert [sum(bool(line.strip()) for line in block.splitlines()) for block in code] == [10]


def test_readme_leads_to_every_guide_and_to_the_map() -> None:
    linked = {(guides.ROOT / target).resolve() for target in re.findall(r"\]\(([^)#]+)", TEXT)}
    assert {*guides.GUIDES, guides.REFERENCE / "README.md", guides.MAP, guides.CONTRIBUTING} <= linked


def test_links_of_readme_guides_and_specification_lead_somewhere() -> None:
    pages = (
        guides.README,
        guides.CONTRIBUTING,
        guides.RELEASING,
        guides.MAP,
        *guides.PACKAGES,
        guides.GENERATION,
        guides.ENGINES,
    )
    for page in (*pages, *guides.GUIDES, *(guides.ROOT / "schema").glob("*.md")):
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("https://"):
                file, _, heading = target.partition("#")
                found = page.parent / file if file else page
                assert found.exists(), f"{page}: {target}"
                assert not heading or heading in headings(found.read_text(encoding="utf-8")), f"{page}: {target}"


def test_the_map_and_the_specification_open_with_the_same_terms() -> None:
    pages = (guides.MAP, guides.ROOT / "schema" / "FORMAT.md")
    map_, page = (path.read_text("utf-8").split("\n## ")[1].splitlines()[:20] for path in pages)
    assert map_[0] == "Terms"
    assert [line for line in map_ if line.startswith("|")] == [line for line in page if line.startswith("|")]


def headings(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_tables_of_the_guides_have_every_command_format_and_loader() -> None:
    """The map's recipes say so: what somebody adds is found."""
    room = guides.ROOT / "zcrecord"
    due = {
        "cli": [f"`{name}" for name in COMMANDS],
        "fleet": [f"{suffix}`" for row in FORMATS.values() for suffix in row.suffixes[:1]],
        "loaders": [f'| `"{name}"` |' for name in load._OWN if name != "mapped"],
    }
    for folder, names in due.items():
        text = (room / folder / "README.md").read_text("utf-8")
        rows = "".join(line for line in text.splitlines(keepends=True) if line.startswith("|"))
        assert [name for name in names if name not in rows] == [], f"a row is missing in {folder}/README.md"
