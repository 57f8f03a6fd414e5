"""The page that `zcrecord report` writes, in Chromium, as people use it: mouse, keyboard, phone, both colour schemes.

What is in the page is in test_report. A page that complains, of its own policy too, fails whatever opened it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from attacks import names as hostile

import zcrecord
from zcrecord.report import report

if TYPE_CHECKING:
    from browsers import Pages
    from playwright.sync_api import Locator, Page

pytestmark = pytest.mark.needs("chromium")

VIEW = Path(zcrecord.__file__).parent / "web" / "view"
Open = Callable[..., "Page"]

# wait_for_function would have the page evaluate text, which its policy forbids. A canvas is made with a width of 300.
DRAWN = """() => new Promise((done) => {
    const drawn = (canvas) => canvas.width !== 300 || canvas.height !== 150;
    const all = () => [...document.querySelectorAll('canvas')].every(drawn);
    const look = () => (all() ? done() : requestAnimationFrame(look));
    look();
})"""


def model() -> dict[str, Any]:
    """A model with ties, equal bytes, strides, an empty tensor, attributes."""
    w = np.arange(4096, dtype=np.float32).reshape(64, 64)
    attention = [{"weight": w + i + 1, "bias": np.zeros(16, np.float16)} for i in range(3)]
    layers = [{"attention": a, "norm": np.full(8, i, np.int8), "heads": i} for i, a in enumerate(attention)]
    return {"embed": w, "layers": layers, "head": {"weight": w, "turned": np.asfortranarray(w[:8] - 1)},
            "empty": np.zeros((0, 5)), "note": "of the model", "blob": b"x" * 100}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of archives: model, hostile names, no tensor."""
    folder = tmp_path_factory.mktemp("reports")
    zcrecord.save_record(model(), folder / "model.zcr", metadata={"author": "me"}, durable=False)
    hostile.archive(folder)
    zcrecord.save_record({"note": "no tensor"}, folder / "none.zcr", durable=False)
    for path in list(folder.glob("*.zcr")):
        report(path, path.with_suffix(".html"), digest=True, durable=False)
    return folder


@pytest.fixture
def opened(pages: Pages, folder: Path) -> Open:
    """Opens a report by its name, and waits until it is all there."""

    def opened(name: str = "model", **options: Any) -> Page:
        page = pages(**options)
        page.goto((folder / f"{name}.html").as_uri())
        page.wait_for_selector("html[data-ready=all]")
        page.evaluate(DRAWN)
        return page

    return opened


def rows(page: Page) -> list[str]:
    """The names of the rows of the tree, from top to bottom."""
    script = "rows => rows.map(r => [r.getBoundingClientRect().top, r.querySelector('.name').textContent])"
    found: list[tuple[float, str]] = page.locator("[role=treeitem]").evaluate_all(script)
    return [name for _, name in sorted(found)]


def row(page: Page, name: str) -> Locator:
    return page.locator("[role=treeitem]").filter(has=page.get_by_text(name, exact=True))


def active(page: Page) -> str:
    """The name of the row that a screen reader is told the focus is on."""
    script = """() => document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))
        .querySelector('.name').textContent"""
    return str(page.evaluate(script))


def detail(page: Page, term: str) -> str:
    """Return the text of one detail."""
    return page.locator("#details dt", has_text=re.compile(f"^{term}$")).locator("+ dd").inner_text()


def press(page: Page, *keys: str) -> None:
    for key in keys:
        page.keyboard.press(key)


def type_letters(page: Page, word: str, *, apart: int) -> None:
    """Type letters so many ms apart by their own time stamps, however long the machine takes."""
    script = """([word, apart]) => [...word].forEach((key, i) => {
        const event = new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true });
        Object.defineProperty(event, 'timeStamp', { value: performance.now() + i * apart });
        document.activeElement.dispatchEvent(event);
    })"""
    page.evaluate(script, [word, apart])


def chosen(page: Page) -> str:
    return page.locator("#details h3").inner_text()


def test_says_what_the_archive_is(opened: Open, folder: Path) -> None:
    page = opened()
    assert page.title() == "model.zcr"
    size = (folder / "model.zcr").stat().st_size
    assert page.locator("h1").inner_text() == "model.zcr"
    assert page.locator("#summary").inner_text() == f"13 tensors in an archive of {size / 1024:.1f} KiB"
    facts = page.locator("#facts").inner_text()
    with zcrecord.load_record(folder / "model.zcr") as record:
        assert record.content_digest() in facts
    assert re.search(r"float32\s+6\s+82\.0 KiB\s+100 %", facts)
    assert re.search(r"ties save\s+16,384", facts)
    assert re.search(r"equal bytes stored once save\s+64", facts)
    assert re.search(r"author\s+'me'", facts)
    assert re.search(r"layers\.2\.heads\s+2", facts)
    cells = page.locator("table", has_text="payloads, as stored").locator("tbody tr").all_inner_texts()
    stored, index, ends, padding, tied, equal = (int(re.split(r"\t", text)[1].replace(",", "")) for text in cells)
    assert (stored + index + ends + padding, tied, equal) == (size, 16384, 64), "space adds up to the archive"


def test_modules_open_and_tensors_tell_their_details(opened: Open, folder: Path) -> None:
    page = opened()
    assert rows(page) == ["model.zcr", "embed", "layers", "head", "empty", "note", "blob"]
    row(page, "head").click()
    assert rows(page)[3:6] == ["head", "weight", "turned"]
    row(page, "turned").click()
    with zcrecord.load_record(folder / "model.zcr") as record:
        info = record.info("head.turned")
    assert chosen(page) == "head.turned"
    assert detail(page, "type") == "float32"
    assert detail(page, "shape") == "[8, 64]"
    assert detail(page, "strides") == "[1, 8], in elements"
    assert detail(page, "at") == f"0x{info.offset:x} ({info.offset:,}) in the file"
    assert detail(page, "payload's digest") == f"xxh3 {info.digest:016x}"
    row(page, "weight").click()
    assert detail(page, "tied to") == "embed"
    page.locator("#details").get_by_role("button", name="embed").click()
    assert (chosen(page), detail(page, "tied to")) == ("embed", "head.weight")
    row(page, "empty").click()
    assert detail(page, "payload") == "none: it is empty"
    row(page, "note").click()
    assert detail(page, "value") == "'of the model'"
    row(page, "head").click()
    assert "turned" not in rows(page)


def test_keyboard_alone_gets_everywhere_in_the_tree(opened: Open) -> None:
    page = opened()
    press(page, "Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    press(page, "Enter", "Tab", "Tab")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "tree"
    press(page, "ArrowDown", "ArrowDown")
    assert active(page) == "layers"
    press(page, "ArrowRight")
    assert rows(page)[3:6] == ["0", "1", "2"]
    press(page, "ArrowRight", "ArrowRight", "ArrowRight")
    assert active(page) == "attention"
    press(page, "ArrowRight", "ArrowRight", "Enter")
    assert chosen(page) == "layers.0.attention.weight"
    press(page, "ArrowLeft")
    assert active(page) == "attention"
    press(page, "ArrowLeft")
    assert "weight" not in rows(page)
    press(page, "End")
    assert active(page) == "blob"
    press(page, "ArrowUp", "ArrowUp", "ArrowUp")
    assert active(page) == "head"
    press(page, "Home")
    assert active(page) == "model.zcr"
    type_letters(page, "emp", apart=100)
    assert active(page) == "empty"
    press(page, "Home")
    type_letters(page, "el", apart=1000)
    assert active(page) == "layers", "after a pause another word begins"
    press(page, "PageUp", "ArrowLeft")
    assert rows(page) == ["model.zcr"]


def test_search_finds_by_any_part_of_a_name(opened: Open) -> None:
    page = opened()
    page.get_by_role("searchbox").fill("ATTENTION.w")
    assert rows(page) == [f"layers.{i}.attention.weight" for i in range(3)]
    assert page.locator(".tree .status").inner_text() == "3 tensors found"
    press(page, "ArrowDown", "ArrowDown", "Enter")
    assert chosen(page) == "layers.1.attention.weight"
    page.get_by_role("searchbox").fill("nothing like it")
    assert rows(page) == []
    page.get_by_role("searchbox").fill("")
    assert rows(page)[0] == "model.zcr"
    selected = page.locator("[role=treeitem][aria-selected=true]")  # what was found is shown where it belongs
    assert (selected.locator(".name").inner_text(), selected.get_attribute("aria-level")) == ("weight", "5")


def test_treemap_names_what_is_pointed_at_and_chooses_it(opened: Open) -> None:
    page = opened()
    treemap, words = page.locator(".treemap"), page.locator("#treemap .words")
    treemap.hover(position={"x": 20, "y": 100})
    assert re.fullmatch(r"layers\.\d\.attention\.weight: float32 \[64, 64\], 16\.0 KiB, 2\d %", words.inner_text())
    treemap.click(position={"x": 20, "y": 100})
    assert chosen(page) == words.inner_text().split(":")[0]
    assert page.locator("[role=treeitem][aria-selected=true]").inner_text().startswith("weight")
    assert page.locator("#treemap .mark").count() == 1
    assert page.locator("#map .mark").count() == 3  # it goes on in the rows below
    script = """() => {
        const row = document.querySelector('[aria-selected=true]').getBoundingClientRect();
        const list = document.querySelector('.list').getBoundingClientRect();
        return row.top >= list.top && row.bottom <= list.bottom;
    }"""
    assert page.evaluate(script), "it is opened and in view in the tree"


def test_keyboard_alone_goes_through_both_pictures(opened: Open) -> None:
    page = opened()
    strip, words = page.locator(".strip"), page.locator("#map .words")
    strip.hover(position={"x": 0, "y": 5})
    assert words.inner_text().startswith("header"), "the pointer does it, too"
    strip.focus()
    press(page, "ArrowRight")
    assert words.inner_text() == "header: 0x0 to 0x40, 64 B"
    press(page, "ArrowRight")
    assert words.inner_text().startswith("index: 0x40 to 0x")
    press(page, "End")
    assert words.inner_text().startswith("trailer: 0x")
    press(page, "Home", "ArrowRight", "ArrowRight")
    while words.inner_text().startswith("zeros"):
        press(page, "ArrowRight")
    assert re.search(r"^payload: .*: embed, head\.weight$", words.inner_text())
    press(page, "Enter")
    assert chosen(page) == "embed"
    page.locator(".treemap").focus()
    press(page, "Home", "ArrowRight", " ")
    assert chosen(page) == page.locator("#treemap .words").inner_text().split(":")[0] != "embed"


@pytest.mark.parametrize(
    "name, scheme, width", [("model", "light", 1280), ("model", "dark", 360), ("hostile", "light", 360)]
)
def test_fits_every_window_and_can_be_read(opened: Open, name: str, scheme: str, width: int) -> None:
    page = opened(name, width=width, scheme=scheme)
    from browsers import scrolls_sideways

    assert not scrolls_sideways(page)
    page.locator("[role=treeitem]").nth(2).click()
    assert not scrolls_sideways(page)
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", colour)[:3]))
    assert lightness > 600 if scheme == "light" else lightness < 200


def test_hostile_names_are_text_and_nothing_else(opened: Open) -> None:
    page = opened("hostile")
    for _ in range(3):
        for name in ("lists", "modules"):
            if row(page, name).count():
                row(page, name).click()
        press(page, "End")
    found = [page.locator(tags).count() for tags in ("script", "red, link, img, iframe, b, a")]
    assert found == [2, 1]  # the link is the one that skips
    page.get_by_role("searchbox").fill("exe")
    row(page, "\\u{202e}gnp.exe").click()
    assert chosen(page) == "\\u{202e}gnp.exe"
    page.get_by_role("searchbox").fill("[red]")
    assert "[red]x[/red]" in rows(page)
    seen = page.evaluate("document.body.innerText")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff]", seen)


def test_code_that_got_into_the_page_would_not_run(opened: Open, pages: Pages) -> None:
    page = opened()
    page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.evil = 1';
        document.body.append(script);
        const image = document.createElement('img');
        image.setAttribute('onerror', 'window.evil = 2');
        image.src = 'data:image/png,none';
        document.body.append(image);
    }""")
    for policies in (["script-src"], ["img-src", "default-src"]):
        while not any(policy in text for text in pages.complaints for policy in policies):
            page.wait_for_event("console")
    assert page.evaluate("window.evil") is None
    pages.complaints.clear()


@pytest.fixture
def view(pages: Pages, folder: Path) -> Page:
    """A page of its own for parts of the view, as the one that is served has them."""
    page = pages()
    page.route("http://localhost/**", lambda route: route.fulfill(**answer(route.request.url, folder)))
    page.goto("http://localhost/index.html")
    return page


def test_tree_reaches_rows_past_the_tallest_element_there_can_be(view: Page) -> None:
    script = """async (n) => {
        const { tree } = await import('/view.js');
        const description = JSON.parse(document.getElementById('description').textContent);
        const numbers = Array.from({ length: n }, (_, i) => i);
        const column = (value) => new Array(n).fill(value);
        const tensors = { key: numbers.map(String), module: column(0), place: numbers, dtype: column(0),
            shape: column(0), payload: column(-1) };
        const modules = { key: [''], parent: [-1], place: [0], kind: ['mapping'], type: [''] };
        const none = { key: [], module: [], place: [], value: [] };
        const made = tree({ ...description, tensors, modules, strided: {}, attributes: none });
        document.body.replaceChildren(made.element);
        made.focus();
        return document.querySelector('.rows').offsetHeight;
    }"""
    count = 900_000
    assert 28 * count > view.evaluate(script, count) > 10_000_000
    press(view, "End")
    assert active(view) == rows(view)[-1] == str(count - 1)
    in_view = """() => { const list = document.querySelector('.list').getBoundingClientRect();
        return [...document.querySelectorAll('.row')].filter((r) => r.getBoundingClientRect().top >= list.top - 1 &&
            r.getBoundingClientRect().bottom <= list.bottom + 1).map((r) => r.querySelector('.name').textContent); }"""
    assert str(count - 1) in view.evaluate(in_view)
    press(view, *["ArrowUp"] * 3)
    assert active(view) in view.evaluate(in_view)
    assert view.locator("[role=treeitem]").count() < 60
    view.locator(".list").evaluate("list => { list.scrollTop = list.scrollHeight / 2; }")
    view.wait_for_function(f"(middle) => Math.abs(Number(({in_view})()[0]) - middle) < 100", arg=count / 2)


def test_map_colours_in_what_is_fetched(view: Page, folder: Path) -> None:
    script = """async (fetched) => {
        const { layoutMap } = await import('/view.js');
        const description = JSON.parse(document.getElementById('description').textContent);
        const map = layoutMap(description, { fetching: true });
        document.body.replaceChildren(map.element);
        const painted = () => map.canvas.toDataURL();
        const empty = painted();
        while (painted() === empty) await new Promise(requestAnimationFrame);
        const before = painted();
        for (const [start, end] of fetched) map.fetched(start, end);
        return [map.fetchedBytes, map.bytes.textContent, before, painted()];
    }"""
    size = (folder / "model.zcr").stat().st_size
    fetched = [[500, 700], [0, 64], [64, 500], [600, 800], [size - 64, size + 9]]
    told, text, before, after = view.evaluate(script, fetched)
    assert told == 800 + 64
    assert text == f"864 of {size:,} bytes fetched, {100 * 864 / size:.1f} %"
    assert before != after


def answer(url: str, folder: Path) -> dict[str, Any]:
    """Return a server's response: the view's scripts, or a page with a report's description."""
    name = url.rsplit("/", 1)[1]
    if name.endswith(".js"):
        return {"path": VIEW / name, "content_type": "text/javascript"}
    if name != "index.html":
        return {"status": 404}
    text = (folder / "model.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/json".*?</script>', text, re.DOTALL)
    style = (VIEW / "view.css").read_text(encoding="utf-8")
    return {"body": f"<style>{style}</style>{data and data[0]}", "content_type": "text/html"}
