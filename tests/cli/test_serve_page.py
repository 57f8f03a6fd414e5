"""The page of `zcrecord serve` in Chromium, used as a person would: pointer, keyboard, both schemes, both widths."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import records as r
import served
from attacks import names
from browsers import Pages, scrolls_sideways
from node_packages import node_packages
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Page, expect

import zcrecord
from zcrecord import formats
from zcrecord import onnx as zonnx
from zcrecord.cli.web_runtime import BUILDS, CDN, VERSION
from zcrecord.dtypes import DTYPES
from zcrecord.tensors.packed import PackedTensor

pytestmark = pytest.mark.needs("chromium", "node", "npm")

DATA = Path(__file__).parents[1] / "data"
RNG = np.random.default_rng(5)
LARGE = 24 << 20  # bytes, three times what a look costs
ODD = np.array([[np.nan, np.inf, -np.inf, 0.0], [-1.5, 2.5, 3.25, np.nan]], np.float32)
KNOWN = [d for d in DTYPES if d.numpy is not None]
FLOATS = [d.name for d in KNOWN if "float" in d.name]
NARROW = [d.name for d in KNOWN if d.packed and "float" not in d.name]
WHOLE = [d.name for d in KNOWN if d.name not in (*FLOATS, *NARROW) and not d.name.startswith("complex")]
HTML = ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "</script><b>x</b>", "</title><i>", "&lt;u&gt;"]
HOSTILE = [*names.NAMES, *HTML]


def kinds() -> dict[str, np.ndarray[Any, Any]]:
    """Return an array of each element type, of values that each of them has."""
    values = np.array([[0, 1, 1, 0], [1, 0, 1, 1]])
    names = [name for name in (*WHOLE, *FLOATS, *NARROW) if name != "float8_e8m0fnu"]  # it has no 0
    return {name: values.astype(np.dtype(name)) for name in names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Archives: a classifier and its samples, one of each kind of tensor, hostile names, a model of more operators."""
    folder = tmp_path_factory.mktemp("page")
    zonnx.convert(DATA / "digits.onnx", folder / "digits.zcr")
    zonnx.convert(DATA / "digits_int8.onnx", folder / "int8.zcr")
    formats.convert(DATA / "digits_heldout.npz", folder / "heldout.zcr")
    record: dict[str, Any] = {"kinds": {k: PackedTensor.pack(v) if k in NARROW else v for k, v in kinds().items()}}
    record["large"] = np.arange(LARGE // 4, dtype=np.float32).reshape(-1, 16)
    record["odd"] = ODD
    record["turned"] = np.asfortranarray(np.arange(12.0).reshape(3, 4))
    record["normal"] = RNG.normal(3.0, 0.5, (40, 50)).astype(np.float32)
    record["complex"] = np.array([3 + 4j, 0])
    record["texts"] = np.array(["<b>bold</b>", "two\nlines", ""])
    record["empty"] = np.zeros((0, 3), np.float32)
    record["scalar"] = np.array(0.25)
    zcrecord.save_record(record, folder / "kinds.zcr", durable=False)
    hostile: dict[str, Any] = {name: np.full(3, i, np.float32) for i, name in enumerate(HOSTILE)}
    hostile["modules"] = {f"of {name}": {"w": np.ones(1), f"says {name}": name} for name in HOSTILE}
    hostile["texts"] = np.array(HTML)
    metadata = {name: name for name in HOSTILE}
    zcrecord.save_record(hostile, folder / f"{HTML[0]}.zcr", metadata=metadata, durable=False)
    return folder


def runtime() -> Path:
    """The folder of onnxruntime-web: tests fetch nothing."""
    return node_packages() / "onnxruntime-web"


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[dict[str, str]]:
    """The URL of each archive, by its name."""
    samples: list[str | Path] = ["--samples", folder / "heldout.zcr", "--onnxruntime-web", runtime()]
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(served.served(folder / f"{name}.zcr", *more))
            for name, more in {"digits": samples, "int8": samples, "kinds": [], HTML[0]: []}.items()
        }


def visit(page: Page, url: str) -> Page:
    """Open a page, and wait until all of it is drawn."""
    page.goto(url)
    expect(page.locator("html[data-ready=all]")).to_be_attached()
    return page


def choose(page: Page, name: str) -> None:
    """Find a tensor by its name, and click it."""
    page.get_by_role("searchbox").fill(name)
    page.get_by_role("treeitem").filter(has=page.get_by_text(name, exact=True)).first.click()
    expect(page.locator("#details h3")).to_have_text(name)


def facts(page: Page) -> dict[str, str]:
    """Return the statistics that are shown, once all was read."""
    expect(page.locator(".reading .status")).to_contain_text(re.compile(r"\bread[.,]"))
    expect(page.locator("#details .going")).to_be_hidden()
    terms, values = page.locator(".reading dt").all_inner_texts(), page.locator(".reading dd").all_inner_texts()
    return dict(zip(terms, (v.replace("−", "-").replace(",", "") for v in values), strict=True))


# Looking.


def test_opening_fetches_the_index_alone_and_a_click_its_tensor(
    pages: Pages, site: dict[str, str], folder: Path
) -> None:
    page = visit(pages(), site["kinds"])
    assert page.title() == "kinds.zcr - zcrecord"
    expect(page.locator("#summary")).to_contain_text("tensors in an archive of 24.0 MiB.")
    assert page.evaluate("zcrecordPage.traffic.requests") <= 3
    before, map_before = page.evaluate("zcrecordPage.traffic.nbytes"), page.locator("#map p.status").last.inner_text()
    assert before < 1 << 18 and "bytes fetched" in map_before
    choose(page, "normal")
    array = zcrecord.load_record(folder / "kinds.zcr")["normal"]
    found = facts(page)
    assert page.evaluate("zcrecordPage.traffic.nbytes") - before == array.nbytes
    wanted = [array.min(), array.max(), array.mean(dtype=float), array.std(dtype=float)]
    assert [float(found[k]) for k in ("smallest", "largest", "mean", "deviation")] == pytest.approx(wanted, rel=1e-4)
    assert found["elements"] == "2000"
    expect(page.locator("#map p.status").last).not_to_have_text(map_before)
    bars = page.locator(".histogram rect title").evaluate_all("all => all.map((t) => t.textContent)")
    assert sum(int(bar.rpartition(": ")[2].replace(",", "")) for bar in bars) == pytest.approx(2000, abs=30)


def test_every_element_type_is_shown(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site["kinds"])
    for name in kinds():
        choose(page, f"kinds.{name}")
        found = facts(page)
        told = [found[k] for k in ("elements", "smallest", "largest", "mean", "zeros", "distinct")]
        most = "-1" if name == "int2" and np.array(1).astype("int2") < 0 else "1"
        assert told == ["8", "0", most, "0.625", "3", "2"], name


def test_heat_map_tells_what_is_pointed_at(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site["kinds"])
    choose(page, "odd")
    facts(page)
    canvas = page.locator(".heatmap canvas")
    line = page.locator(".pointed")
    expect(page.locator(".heatmap .note")).to_contain_text("2 × 4: down axis 0, across axis 1.")
    canvas.hover(position={"x": 5, "y": 5})
    expect(line).to_have_text("[0, 0] = NaN")
    expect(page.locator(".scale")).to_have_text("≤ −2.50≥ 2.5not a number")  # what is beyond, too
    canvas.focus()
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    expect(line).to_have_text("[1, 2] = 3.25")
    page.keyboard.press("ArrowDown")  # there is no further row
    expect(line).to_have_text("[1, 2] = 3.25")


# Digests.


def test_digest_is_checked_of_bytes_that_are_fetched_anyway(pages: Pages, site: dict[str, str], folder: Path) -> None:
    page = visit(pages(), site["kinds"])
    for name in ("normal", "turned", "texts", "complex", "kinds.int4", "scalar"):
        before = page.evaluate("zcrecordPage.traffic.nbytes")
        choose(page, name)
        expect(page.locator(".reading .status")).to_contain_text("read, its digest matches.")
        nbytes = zcrecord.load_record(folder / "kinds.zcr").info(name).nbytes
        assert page.evaluate("zcrecordPage.traffic.nbytes") - before == nbytes, name
        if name == "texts":
            expect(page.locator(".strings li")).to_have_text(["'<b>bold</b>'", "'two\\x0alines'", "''"])
    choose(page, "empty")
    expect(page.locator(".reading .status")).to_have_text("It has no elements.")


def test_damaged_tensor_is_told_and_nothing_is_shown_of_it(pages: Pages, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": RNG.normal(size=(1200, 1200)).astype(np.float32), "v": np.ones(99)}, path)
    with zcrecord.load_record(path) as record:
        at = record.info("w").offset
    assert at is not None
    r.damage(path, at + 4_500_000)  # in what would be the second piece of it
    with served.served(path) as url:
        page = visit(pages(), url)
        choose(page, "w")
        expect(page.get_by_role("alert")).to_contain_text("its digest does not match; the file is damaged")
        expect(page.locator(".heatmap")).to_have_count(0)
        choose(page, "v")
        expect(page.locator(".reading .status")).to_have_text("792 bytes of 792 bytes read, its digest matches.")
        expect(page.get_by_role("alert")).to_be_hidden()


# Large ones.


def test_large_tensor_is_sampled_and_read_when_asked_for(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site["kinds"])
    before = page.evaluate("zcrecordPage.traffic.nbytes")
    choose(page, "large")
    found = facts(page)
    expect(page.locator(".reading .status")).to_contain_text("A sample: 8.0 MiB")
    assert page.evaluate("zcrecordPage.traffic.nbytes") - before <= 8 << 20
    assert float(found["largest"]) == pytest.approx(LARGE // 4 - 1, rel=1e-3)
    page.get_by_role("button", name="Read all of it, 24.0 MiB").click()
    expect(page.locator(".reading .status")).to_contain_text("24.0 MiB (25,165,824 bytes) of 24.0 MiB")
    found = facts(page)
    assert found["elements"] == str(LARGE // 4)
    assert float(found["mean"]) == pytest.approx((LARGE // 4 - 1) / 2, rel=1e-3)
    expect(page.get_by_role("button", name="Read all of it")).to_be_hidden()


def test_reading_can_be_cancelled(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site["kinds"])
    slow = page.context.new_cdp_session(page)
    rate = {"offline": False, "latency": 20, "downloadThroughput": 1 << 20, "uploadThroughput": 1 << 20}
    slow.send("Network.enable")
    slow.send("Network.emulateNetworkConditions", rate)
    choose(page, "large")
    cancel = page.get_by_role("button", name="Cancel")
    expect(page.get_by_role("progressbar")).to_be_visible()
    cancel.click()
    expect(page.locator(".reading .status")).to_have_text("Cancelled.")
    expect(cancel).to_be_hidden()
    slow.send("Network.emulateNetworkConditions", {**rate, "downloadThroughput": -1, "latency": 0})
    choose(page, "normal")
    assert facts(page)["elements"] == "2000"
    assert page.evaluate("zcrecordPage.traffic.nbytes") < 8 << 20


# When things go wrong.


def test_replaced_archive_is_told_and_can_be_opened_again(pages: Pages, tmp_path: Path) -> None:
    path, other = tmp_path / "m.zcr", tmp_path / "n.zcr"
    zcrecord.save_record({"w": np.ones(1 << 18, np.float32)}, path)
    zcrecord.save_record({"w": np.full(1 << 18, 2, np.float32)}, other)
    with served.served(path) as url:
        page = visit(pages(), url)
        os.replace(other, path)
        choose(page, "w")
        expect(page.get_by_role("alert")).to_contain_text("was replaced or changed since it was opened; open it again")
        page.get_by_role("button", name="Open it again").click()
        expect(page.locator("html[data-ready=all]")).to_be_attached()
        choose(page, "w")
        assert facts(page)["mean"] == "2"


def test_archive_that_is_gone_or_damaged_or_whose_server_ended_is_told_in_place(pages: Pages, tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"w": np.ones(1 << 18, np.float32)}, path)
    with served.served(path) as url:
        page = visit(pages(), url)
        whole = path.read_bytes()
        path.unlink()
        choose(page, "w")
        expect(page.get_by_role("alert")).to_contain_text("there is no such file: the server answered 404")
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        page.goto(url)
        expect(page.locator("#summary.error")).to_contain_text("the file is damaged, copy it again")
        expect(page.locator("main")).to_be_hidden()
        path.write_bytes(whole)
        visit(page, url)
    choose(page, "w")
    expect(page.get_by_role("alert")).to_contain_text("is the server still running?")
    expect(page.get_by_role("button", name="Open it again")).to_be_visible()
    pages.expect_complaints("404", "ERR_CONNECTION_REFUSED")


def test_hostile_names_are_text(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site[HTML[0]])
    assert page.title() == f"{HTML[0]}.zcr - zcrecord"
    for name in [*HTML, "texts"]:
        page.get_by_role("searchbox").fill(name)
        page.get_by_role("treeitem").first.click()
        expect(page.locator("#details h3")).to_contain_text(name)
        expect(page.locator(".reading .status")).to_contain_text("read,")
    page.get_by_role("searchbox").fill("")
    tags = set(page.evaluate("[...document.querySelectorAll('body *')].map((e) => e.localName)"))
    assert not {"img", "b", "i", "u", "title", "iframe", "style"} & tags
    assert page.evaluate("document.querySelectorAll('script').length") == 1
    assert not scrolls_sideways(page)


# The model.


def logits(page: Page, by: str) -> np.ndarray[Any, Any]:
    """Run the model by a provider, and return what it made of the samples."""
    page.get_by_role("radio", name=by).check()
    page.get_by_role("button", name="Run it on the samples").click()
    expect(page.locator(".score, #model .error:not([hidden])")).to_be_visible()
    expect(page.locator("#model .error")).to_be_hidden()
    found = page.evaluate("({ data: [...zcrecordPage.logits.data], shape: zcrecordPage.logits.shape })")
    return np.array(found["data"], np.float32).reshape(found["shape"])


@pytest.mark.parametrize("by, model", [("WebGPU", "digits"), ("WebAssembly", "int8")])
def test_digits_are_told_as_onnx_runtime_does(pages: Pages, site: dict[str, str], by: str, model: str) -> None:
    held = np.load(DATA / "digits_heldout.npz")
    path = DATA / {"digits": "digits.onnx", "int8": "digits_int8.onnx"}[model]
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (wanted,) = session.run(None, {session.get_inputs()[0].name: held["images"].reshape(-1, 64).astype(np.float32)})
    page = visit(pages(), site[model])
    np.testing.assert_allclose(logits(page, by), wanted, rtol=1e-5, atol=1e-5)
    right = int((wanted.argmax(1) == held["labels"]).sum())
    expect(page.locator(".score")).to_contain_text(f"{right} of 360 right")
    expect(page.locator(".score")).to_contain_text(f"onnxruntime-web {VERSION}: {by}")
    wrong = page.locator(".samples li.wrong")
    expect(wrong).to_have_count(360 - right)
    expect(page.locator(".samples canvas")).to_have_count(60)
    assert page.locator("#model progress").is_hidden()


def test_browser_without_jspi_runs_the_other_build(pages: Pages, site: dict[str, str]) -> None:
    page = pages()
    page.add_init_script("delete WebAssembly.Suspending")
    fetched: list[str] = []
    page.on("request", lambda request: fetched.append(request.url.rpartition("/")[2]))
    visit(page, site["digits"])
    assert logits(page, "WebGPU").shape == (360, 10)
    assert [name for name in fetched if name.endswith(".wasm")] == ["ort-wasm-simd-threaded.asyncify.wasm"]


def model_of(nodes: list[onnx.NodeProto], inputs: list[Any], outputs: list[Any], path: Path) -> Path:
    """Write an archive of a model."""
    values = [[helper.make_tensor_value_info(*each) for each in some] for some in (inputs, outputs)]
    weight = numpy_helper.from_array(np.ones((12, 4), np.float32), "w")
    graph = helper.make_graph(nodes, "g", *values, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    zonnx.convert(io.BytesIO(model.SerializeToString()), path, durable=False)
    return path


X, Y = ("x", TensorProto.FLOAT, ["n", 12]), ("y", TensorProto.FLOAT, ["n", 4])
PRODUCT = helper.make_node("MatMul", ["x", "w"], ["y"])
CANNOT: dict[str, tuple[Any, Any, Any]] = {
    "one input and one output, this one has 2 inputs (x, z) and 1 output (y)": (
        [PRODUCT], [X, ("z", TensorProto.FLOAT, ["n"])], [Y],
    ),
    "models of numbers, 'x' is string": (
        [helper.make_node("Identity", ["x"], ["y"])], [("x", TensorProto.STRING, ["n", 12])],
        [("y", TensorProto.STRING, ["n", 12])],
    ),
    "The model takes [n,5] as 'x', a sample of [3,4] does not fit it": (
        [helper.make_node("Relu", ["x"], ["y"])], [("x", TensorProto.FLOAT, ["n", 5])], [Y],
    ),
    "needs an output with a row for each sample, it has [1,1]": (
        [helper.make_node("ReduceMax", ["x"], ["y"])], [X], [("y", TensorProto.FLOAT, ["a", "b"])],
    ),
    "needs an output with a number for each class, or with the class": (
        [helper.make_node("ReduceMax", ["x"], ["y"], axes=[1], keepdims=0)], [X], [("y", TensorProto.FLOAT, ["n"])],
    ),
    "onnxruntime-web cannot run this model: ": (
        [helper.make_node("Unknown", ["x"], ["y"])], [X], [Y],
    ),
}  # fmt: skip


def samples(path: Path, inputs: np.ndarray[Any, Any], labels: Any = 0) -> Path:
    """Write an archive of samples."""
    labels = np.broadcast_to(np.array(labels, np.int64), len(inputs)).copy()
    zcrecord.save_record({"inputs": inputs, "labels": labels}, path, durable=False)
    return path


@pytest.mark.parametrize("words", CANNOT, ids=lambda words: words[:40])
def test_model_that_the_page_cannot_run_is_told_plainly(pages: Pages, tmp_path: Path, words: str) -> None:
    archive = model_of(*CANNOT[words], tmp_path / "m.zcr")
    inputs = samples(tmp_path / "s.zcr", np.ones((5, 3, 4), np.float32))
    with served.served(archive, "--samples", inputs, "--onnxruntime-web", runtime()) as url:
        page = visit(pages(), url)
        page.get_by_role("button", name="Run it on the samples").click()
        expect(page.locator("#model .error")).to_contain_text(words)
        expect(page.locator(".score")).to_have_count(0)


@pytest.mark.parametrize(("kind", "shape"), [
    (TensorProto.FLOAT, ["n", 12]), (TensorProto.FLOAT16, [4, 3, 4]), (TensorProto.INT64, ["n", "a", "b"]),
    (TensorProto.BOOL, [1, 1, 12]),
], ids=str)  # fmt: skip
def test_samples_are_given_as_the_model_takes_them(pages: Pages, tmp_path: Path, kind: int, shape: list[Any]) -> None:
    """In batches, the last one filled up where the model takes batches of one size; answers are those of Python."""
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=TensorProto.FLOAT),
        helper.make_node("Flatten", ["c"], ["f"]),
        helper.make_node("ArgMax", ["f"], ["y"], axis=1, keepdims=0),
    ]
    archive = model_of(nodes, [("x", kind, shape)], [("y", TensorProto.INT64, [shape[0]])], tmp_path / "m.zcr")
    inputs = RNG.integers(0, 2, (70, 3, 4)).astype(np.uint8)
    wanted = inputs.reshape(70, 12).argmax(1)
    given = samples(tmp_path / "s.zcr", inputs, np.where(np.arange(70) < 3, 99, wanted))
    with served.served(archive, "--samples", given, "--onnxruntime-web", runtime()) as url:
        page = visit(pages(), url)
        assert logits(page, "WebAssembly")[:, 0].tolist() == wanted.tolist()
        expect(page.locator(".score")).to_contain_text("67 of 70 right")


def test_onnxruntime_web_comes_from_a_public_server_only_when_a_model_is_run(pages: Pages, folder: Path) -> None:
    """Here it is answered by the test; the browser takes it only if it is what the pinned version has."""
    with served.served(folder / "digits.zcr", "--samples", folder / "heldout.zcr") as url:
        page = pages()
        asked: list[str] = []
        answers = {"by": "damage"}

        def answer(route: Any) -> None:
            asked.append(route.request.url)
            if answers["by"] == "nothing":
                route.abort("internetdisconnected")
            else:
                right = (runtime() / "dist" / asked[-1].rpartition("/")[2]).read_bytes()
                body = right if answers["by"] == "the server" else right[:-1] if len(right) < 1 << 20 else b""
                route.fulfill(body=body, headers={"Access-Control-Allow-Origin": "*"})

        page.route(re.compile("^https://"), answer)
        visit(page, url)
        note = page.locator("#model .note", has_text="onnxruntime-web")
        page.get_by_role("radio", name="WebAssembly").check()
        expect(note).to_contain_text(f"{VERSION} runs it. The first run fetches 16.1 MiB of it from cdn.jsdelivr.net")
        assert asked == []
        button, error = page.get_by_role("button", name="Run it on the samples"), page.locator("#model .error")
        for answers["by"] in ("damage", "nothing"):
            button.click()
            expect(error).to_contain_text("onnxruntime-web could not be fetched from cdn.jsdelivr.net: Failed to fetch")
            expect(error).to_contain_text("is this machine online? Start with --onnxruntime-web FOLDER")
        answers["by"] = "the server"
        button.click()
        expect(page.locator(".score, #model .error:not([hidden])")).to_be_visible()
        expect(page.locator(".score")).to_contain_text("350 of 360 right")
        assert set(asked) == {CDN + file.name for file in BUILDS["jspi"]}
    own = ("Failed to find a valid digest", "SRI's integrity checks failed", "ERR_INTERNET_DISCONNECTED")
    pages.expect_complaints("left this machine: https://cdn.jsdelivr.net/", *own)


def test_digests_are_those_of_the_pinned_version() -> None:
    dist = runtime() / "dist"
    assert json.loads((dist.parent / "package.json").read_text(encoding="utf-8"))["version"] == VERSION
    for file in [file for build in BUILDS.values() for file in build]:
        data = (dist / file.name).read_bytes()
        digest = base64.b64encode(hashlib.sha384(data).digest()).decode()
        assert (file.nbytes, file.integrity) == (len(data), f"sha384-{digest}"), file.name


def test_policy_lets_a_page_fetch_no_more_than_onnxruntime_web(
    pages: Pages, site: dict[str, str], folder: Path
) -> None:
    script = """(url) => fetch(url).then(() => "fetched", () => "refused")"""
    with served.served(folder / "digits.zcr") as url:
        page = visit(pages(), url)
        for place in ("https://cdn.jsdelivr.net/npm/other@1.0.0/dist/a.js", "https://example.org/"):
            assert page.evaluate(script, place) == "refused"
        pages.expect_complaints("Content Security Policy")
    page = visit(pages(), site["digits"])
    assert page.evaluate(script, CDN + BUILDS["jspi"][0].name) == "refused"
    pages.expect_complaints("Content Security Policy")


# How it looks, and who can use it.


def test_all_of_it_can_be_done_by_keyboard(pages: Pages, site: dict[str, str]) -> None:
    page = visit(pages(), site["digits"])
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the tensors")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("classifier.w")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator("#details h3")).to_have_text("classifier.weight")
    assert facts(page)["elements"] == "320"
    for _ in range(40):  # on to the model's button
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Run it on the samples":
            break
    page.keyboard.press("Enter")
    expect(page.locator(".score")).to_contain_text("350 of 360 right")


# What it computes with.
