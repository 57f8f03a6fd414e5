"""Reader, page and report in Firefox: what Chromium's tests look at closely holds there, too, without a word of it.

The pages' policies allow no text to be run as code: scripts go in as those of developer tools do.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import served
from firefox import visit_in_firefox
from node_packages import node_packages
from web_archives import everything_served, names_in

import zcrecord
from zcrecord import formats
from zcrecord import onnx as zonnx
from zcrecord.report import report

pytestmark = pytest.mark.needs("firefox-esr", "node", "npm")

DATA = Path(__file__).parents[1] / "data"
SUITE = """async () => {
  while (!window.results) await new Promise((done) => { setTimeout(done, 50); });
  return window.results.filter(({ error }) => error !== null).concat(window.results.length);
}"""
WAIT = """
  const until = async (holds) => {
    while (!holds()) await new Promise((done) => { setTimeout(done, 20); });
    return holds();
  };
  await until(() => document.documentElement.dataset.ready === "all");
"""
PAGE = f"""async () => {{{WAIT}
  const requests = zcrecordPage.traffic.requests;
  (await until(() => document.querySelector("input[value=wasm]"))).click();
  [...document.querySelectorAll("#model button")].find((b) => b.textContent.startsWith("Run")).click();
  const score = await until(() => document.querySelector("#model .score, #model .error:not([hidden])"));
  return {{ requests, score: score.textContent, wrong: document.querySelectorAll(".samples li.wrong").length,
    logits: [...zcrecordPage.logits.data], title: document.title }};
}}"""
REPORT = f"""async () => {{{WAIT}
  return {{ title: document.title, text: document.body.innerText }};
}}"""


def test_the_suite_of_the_reader_passes_in_firefox(tmp_path: Path) -> None:
    """Opens by ranges, verifies, reads every type; all but what needs a GPU, which Firefox has on other systems."""
    with everything_served(tmp_path) as server:
        ((result, complaints),) = visit_in_firefox((f"{server.url}/tests/programs/js/web/page.html", SUITE))
    *failed, count = result
    assert failed == []
    files = ("reading.mjs", "serving.mjs", "uploading.mjs", "hollowing.mjs", "onnx.mjs", "webnn.mjs", "browsing.mjs")
    assert count >= sum(map(names_in, files)) > 40
    # Requests that fail are what some tests are about.
    assert [text for text in complaints if "Cross-Origin Request Blocked" not in text] == []


def test_page_and_report_are_whole_and_the_model_runs(tmp_path: Path) -> None:
    archive, samples = tmp_path / "digits.zcr", tmp_path / "heldout.zcr"
    zonnx.convert(DATA / "digits.onnx", archive)
    formats.convert(DATA / "digits_heldout.npz", samples)
    report(archive, tmp_path / "digits.html")
    given: list[str | Path] = ["--samples", samples, "--onnxruntime-web", node_packages() / "onnxruntime-web"]
    with served.served(archive, *given) as url:
        shown = ((tmp_path / "digits.html").as_uri(), REPORT)
        page, written = visit_in_firefox((url, PAGE), shown)
    assert page.complaints == written.complaints == []
    assert page.result["requests"] <= 3
    assert page.result["title"] == "digits.zcr - zcrecord"
    assert page.result["score"].startswith("350 of 360 right, 97.2 %. onnxruntime-web ")
    assert ": WebAssembly, " in page.result["score"] and page.result["wrong"] == 10
    images = zcrecord.load_record(samples)["images"].reshape(-1, 64).astype(np.float32)
    session = zonnx.session(archive)
    wanted = session.run(None, {session.get_inputs()[0].name: images})[0]
    np.testing.assert_allclose(np.array(page.result["logits"]).reshape(wanted.shape), wanted, rtol=1e-5, atol=1e-5)
    assert written.result["title"].startswith("digits.zcr")
    assert all(words in written.result["text"] for words in ("7 tensors", "features", "float32"))
