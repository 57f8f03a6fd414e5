"""zcrecord.js in Chromium: what a small tensor of a large archive costs, what passes through the heap, what it weighs;
and when a report can be used.

The GPU is SwiftShader's, made of software: times would say nothing of others, and are not taken.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from tools.bench.harness import OURS, Promise, Row, Settings, on_path
from tools.bench.sparse import write_sparse
from tools.range_server import Server, serving
from tools.worker import ROOT

AREA = "web"
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
READER = ROOT / "zcrecord" / "web" / "reader"
WHOLE = "fetch().arrayBuffer()"
DEVICE = """
  const adapter = await navigator.gpu.requestAdapter();
  const device = await adapter.requestDevice({ requiredLimits: { maxBufferSize: adapter.limits.maxBufferSize } });
  const record = await (await import("/zcrecord/web/reader/zcrecord.js")).open(url);
"""
SMALL = """async (url) => {
  const record = await (await import("/zcrecord/web/reader/zcrecord.js")).open(url);
  return (await record.tensor("small")).nbytes;
}"""
STREAMED = f"async (url) => {{ {DEVICE} await record.uploadTo(device); device.destroy(); return record.nbytes; }}"
AT_ONCE = f"""async (url) => {{ {DEVICE}
  const held = await (await fetch(url)).arrayBuffer();
  for (const name of record.names) {{
    const {{ offset, nbytes }} = record.info(name);
    const buffer = device.createBuffer({{ size: nbytes, usage: GPUBufferUsage.COPY_DST }});
    device.queue.writeBuffer(buffer, 0, held, offset, nbytes);
  }}
  await device.queue.onSubmittedWorkDone();
  device.destroy();
  return record.nbytes;
}}"""
READY = """for (const mark of ["tree", "all"]) {
  const seen = new MutationObserver(() => {
    if (document.documentElement?.dataset.ready !== mark) return;
    performance.mark(mark);
    seen.disconnect();
  });
  seen.observe(document, { subtree: true, attributes: true, childList: true });
}"""


def run(settings: Settings) -> Iterator[Row]:
    """Yield the rows of the area; a quick run without Chromium none."""
    if not on_path("chromium"):
        return
    sys.path += [str(ROOT / "tests" / folder) for folder in ("support", "cases")]  # tests are not installed
    from browser_heap import heap_growth
    from browsers import chromium
    from web_archives import Misbehaving

    size = settings.pick(GIB, 64 * MIB)
    write_sparse(settings.folder / "sparse.zcr", size)
    with serving(settings.folder) as server, chromium() as browser:
        server.misbehave = Misbehaving()  # it serves the module, too
        page = browser.new_page()
        page.goto(f"{server.url}/blank")
        yield from _one_tensor(server, page, size)
        work = f"all of an archive of {size // MIB} MiB into GPU buffers in Chromium: growth of the JavaScript heap"
        # A page each: the garbage of the one is not the other's.
        grown = {}
        for name, script in {OURS: STREAMED, WHOLE: AT_ONCE}.items():
            page = browser.new_page()
            page.goto(f"{server.url}/blank")
            grown[name] = float(heap_growth(page, script, "/sparse.zcr")[1])
            page.close()
        yield Row(AREA, work, "B", grown, Promise("under", 48 * MIB))
        yield from _report(browser, settings)


def _one_tensor(server: Server, page: Any, size: int) -> Iterator[Row]:
    server.forget()
    assert page.evaluate(SMALL, "/sparse.zcr") == 16 * KIB
    asked = [request for request in server.requests if request.path == "/sparse.zcr"]
    work = f"one 16 KiB tensor of an archive of {size // MIB} MiB in Chromium (10 tensors)"
    yield Row(AREA, f"{work}: requests", "", {OURS: len(asked)}, Promise("under", 4))
    sent = sum(request.sent for request in asked)
    yield Row(AREA, f"{work}: bytes fetched", "B", {OURS: sent}, Promise("under", 256 * KIB))
    work = "zcrecord.js, unminified: all that a page loads to open an archive and read a dense tensor of up to 1 MiB"
    modules = [request.path.rpartition("/")[2] for request in server.requests if request.path.endswith(".js")]
    loaded = sum((READER / name).stat().st_size for name in modules)
    yield Row(AREA, work, "B", {OURS: loaded}, Promise("under", 30_000))


def _report(browser: Any, settings: Settings) -> Iterator[Row]:
    import zcrecord
    from zcrecord.report import report

    count = settings.pick(10_000, 200)
    record: dict[str, Any] = {}
    for i in range(count):
        record.setdefault(f"blocks{i // 100}", {}).setdefault(f"{i // 10 % 10}", {})[f"w{i % 10}"] = np.full(16, i)
    archive, page_file = settings.folder / "many.zcr", settings.folder / "many.html"
    zcrecord.save_record(record, archive, durable=False)
    report(archive, page_file)
    seconds: dict[str, list[float]] = {"tree": [], "all": []}
    for _ in range(settings.pick(7, 1)):
        page = browser.new_page()
        page.add_init_script(READY)
        page.goto(page_file.as_uri())
        page.wait_for_function("performance.getEntriesByName('all').length")
        for mark, times in seconds.items():
            times.append(page.evaluate("(mark) => performance.getEntriesByName(mark)[0].startTime / 1000", mark))
        page.close()
    work = f"zcrecord report of {count:,} tensors, from navigation in Chromium until"
    for mark, what in (("tree", "its tree can be used"), ("all", "all of it is drawn")):
        yield Row(AREA, f"{work} {what}", "s", {OURS: statistics.median(seconds[mark])}, Promise("under", 1))
