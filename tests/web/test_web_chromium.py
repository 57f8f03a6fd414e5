"""zcrecord.js in Chromium: the suite that runs in Node, a real GPUDevice, and how much of an archive is in the heap.

What only Chromium shows: its fetch, its cache, the ports it refuses, promises that nobody waits for, WebGPU, and the
interfaces of WebNN.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from browser_heap import heap_growth
from browsers import Pages
from web_archives import everything_served, names_in

from tools.range_server import Server

pytestmark = pytest.mark.needs("chromium")

MIB = 1 << 20
MOST_GROWTH = 48 * MIB
UPLOAD = """async (name) => {
  const { open } = await import("/zcrecord/web/reader/zcrecord.js");
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice({ requiredLimits: { maxBufferSize: adapter.limits.maxBufferSize } });
  const record = await open(`/${name}`);
  window.bindings = await record.uploadTo(device, undefined, { onProgress: (done) => { window.done = done; } });
  return [record.nbytes, [...window.bindings.values()].reduce((sum, { buffer }) => sum + buffer.size, 0)];
}"""
CONSTANTS = """async (name) => {
  const { open } = await import("/zcrecord/web/reader/zcrecord.js");
  const { MLContext, MLGraphBuilder } = await import("/tests/programs/js/web/webnn_standin.mjs");
  const context = new MLContext({ keep: false });
  const record = await open(`/${name}`);
  const sink = await record.webnnSink(context, { builder: new MLGraphBuilder(context) });
  const hollow = await record.hollow({ sink });
  await hollow.stream(record);
  return [hollow.nbytes, hollow.seal().size];
}"""
WHOLE = """async (name) => {
  window.held = await (await fetch(`/${name}`)).arrayBuffer();
  return window.held.byteLength;
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of everything the suite reads."""
    with everything_served(tmp_path_factory.mktemp("web")) as server:
        yield server


@pytest.fixture(scope="module")
def still(browser: Any, served: Server) -> Iterator[Any]:
    """A page of the archives' origin, on which nothing runs."""
    page = browser.new_page()
    page.goto(f"{served.url}/blank")
    yield page
    page.close()


def test_the_suite_passes_in_chromium(pages: Pages, served: Server) -> None:
    page = pages()
    page.goto(f"{served.url}/tests/programs/js/web/page.html")
    page.wait_for_function("window.results", timeout=300_000)
    results = page.evaluate("window.results")
    failed = [f"{result['name']}: {result['error']}" for result in results if result["error"] is not None]
    assert not failed, "\n".join(failed)
    files = ("reading", "serving", "uploading", "hollowing", "onnx", "webnn", "gpu", "browsing")
    assert len(results) >= sum(names_in(f"{file}.mjs") for file in files) > 40
    # Debian's Chromium has no context; one with LiteRT gives the bytes back, and makes no constant tensors.
    told = page.evaluate("window.webnn")
    assert re.match(r"NotSupportedError: .*not supported on this platform|[1-9]\d+ constants read back; ", told), told
    assert f"WebNN of this browser: {told}" in page.inner_text("#told")
    # Requests that fail are what many tests are about; but a promise that nobody waits for may not be among them.
    pages.expect_complaints("Failed to load resource", "blocked by CORS policy")


def test_a_heap_that_holds_all_of_a_response_is_noticed(still: Any) -> None:
    nbytes, grown = heap_growth(still, WHOLE, "quarter.zcr")
    assert nbytes > 5 * MOST_GROWTH and grown > MOST_GROWTH
    still.evaluate("window.held = null")


def test_all_of_a_gibibyte_goes_to_the_device_through_little_heap(still: Any) -> None:
    (nbytes, held), grown = heap_growth(still, UPLOAD, "sparse1.zcr")
    assert held == nbytes and nbytes > 0.99 * (1 << 30)
    assert grown < MOST_GROWTH, f"{grown / MIB:.1f} MiB"


def test_one_constant_of_webnn_at_a_time_is_in_the_heap(still: Any) -> None:
    largest = (1 << 28) // 10
    (nbytes, count), grown = heap_growth(still, CONSTANTS, "quarter.zcr")
    assert count == 10 and nbytes > 9 * largest
    assert grown < largest + 16 * MIB, f"{grown / MIB:.1f} MiB"


def test_a_small_tensor_of_a_gibibyte_takes_three_requests(still: Any, served: Server) -> None:
    served.forget()
    read = """async () => {
      const { open } = await import("/zcrecord/web/reader/zcrecord.js");
      return Array.from((await (await open("/sparse1.zcr?again")).tensor("t9")).data.subarray(0, 5));
    }"""
    assert still.evaluate(read) == [9, 9, 9, 9, 0]
    asked = [request for request in served.requests if request.path.startswith("/sparse1")]
    assert len(asked) <= 3 and sum(request.sent for request in asked) < 256 << 10


@pytest.mark.parametrize("part, archive, ask", [
    ("structure.js", "things", "modules()"), ("tensors.js", "things", 'tensor("turned")'),
    ("pieces.js", "quarter", 'tensor("t0")'),
])  # fmt: skip
def test_a_part_of_the_module_that_cannot_be_loaded_is_a_source_error(
    part: str, archive: str, ask: str, pages: Pages, served: Server
) -> None:
    page = pages()
    page.route(f"**/{part}", lambda route: route.abort())
    page.goto(f"{served.url}/blank")
    read = f"""async () => {{
      const {{ open, SourceError }} = await import("/zcrecord/web/reader/zcrecord.js");
      const record = await open("/{archive}.zcr");
      try {{
        await record.{ask};
      }} catch (error) {{
        return [error instanceof SourceError, error.message];
      }}
    }}"""
    typed, message = page.evaluate(read)
    assert typed and "the request failed" in message and part in message
    pages.expect_complaints("Failed to load resource")
