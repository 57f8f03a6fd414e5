"""How much JavaScript heap a script in a page takes while it runs; what the script does is left to others.

Counted is V8's heap, and what array buffers take outside of it: garbage too, as long as it was not collected. What
Chromium itself holds for a page (parsed documents, pieces of responses on their way) is no JavaScript, and no part of
it.
"""

from __future__ import annotations

import json
import time
from typing import Any

LONGEST = 300  # seconds that a script may take


def heap_growth(page: Any, script: str, argument: object) -> tuple[Any, int]:
    """Return an async function's result for an argument, and the bytes by which the heap grew at most.

    Raises:
        AssertionError: the function threw, or took longer than 300 seconds.
    """
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")

    def used() -> int:
        told = session.send("Runtime.getHeapUsage")
        return int(told["usedSize"] + told["backingStorageSize"])

    start = most = used()
    page.evaluate(
        f"""() => {{
          window.came = null;
          ({script})({json.dumps(argument)}).then((value) => {{ window.came = {{ value }}; }},
            (error) => {{ window.came = {{ error: String(error) }}; }});
        }}"""
    )
    end = time.monotonic() + LONGEST
    came = None
    while came is None and time.monotonic() < end:
        came = page.evaluate("window.came")
        most = max(most, used())  # after it is over, too: what it returned may only now be there
    session.detach()
    assert came is not None, f"took more than {LONGEST} seconds"
    assert "value" in came, came["error"]
    return came["value"], most - start
