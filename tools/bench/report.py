"""A report of 10,000 tensors in Chromium: when its tree can be used, and when all of it is drawn."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

import zcrecord
from tools.bench.harness import OURS, Promise, Row, Settings, on_path
from tools.worker import ROOT

AREA = "report"
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
    sys.path.append(str(ROOT / "tests" / "support"))  # tests are not installed
    from browsers import chromium

    from zcrecord.report import report

    count = settings.pick(10_000, 200)
    record: dict[str, Any] = {}
    for i in range(count):
        record.setdefault(f"blocks{i // 100}", {}).setdefault(f"{i // 10 % 10}", {})[f"w{i % 10}"] = np.full(16, i)
    archive, page_file = settings.folder / "many.zcr", settings.folder / "many.html"
    zcrecord.save_record(record, archive, durable=False)
    report(archive, page_file)
    seconds: dict[str, list[float]] = {"tree": [], "all": []}
    with chromium() as browser:
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
