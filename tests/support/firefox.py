"""Debian's Firefox for tests of pages: headless, driven by puppeteer-core over WebDriver BiDi.

Chromium is where pages are tested thoroughly (`browsers.py`). A test that is marked `needs("firefox-esr", "node",
"npm")` visits pages, and runs a script in each.
"""

from __future__ import annotations

import json
import shutil
from typing import Any, NamedTuple

from node_packages import PROGRAMS, node_packages
from processes import output


class Visit(NamedTuple):
    """The result of a script in a page, and what the page complained of: console, exceptions, policy."""

    result: Any
    complaints: list[str]


def visit_in_firefox(*visits: tuple[str, str]) -> list[Visit]:
    """Open each URL in a page of its own, and run an async function's text in it; both wait for one another.

    Raises:
        AssertionError: Firefox did not come, or a script threw.
    """
    given = {"packages": str(node_packages()), "firefox": shutil.which("firefox-esr"), "visits": visits}
    told = output("node", PROGRAMS / "js" / "web" / "firefox.mjs", input=json.dumps(given), timeout=300)
    return [Visit(one["result"], one["complaints"]) for one in json.loads(told)]
