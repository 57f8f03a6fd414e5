"""Python code in a process of its own that has torch and zcrecord imported: a fork of one, so torch starts once.

The process that forks is started when it is first asked, ends with this one, and runs nothing else.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path
from typing import NoReturn

import records as r


def run_torch(code: str, *arguments: object, ok: bool = True) -> subprocess.CompletedProcess[str]:
    """Run code as `records.run_python` does, with torch already imported."""
    if not hasattr(os, "fork"):
        return r.run_python(code, *arguments, ok=ok)
    with tempfile.TemporaryDirectory() as folder:
        given = {"code": code, "arguments": [*map(str, arguments)], "out": f"{folder}/out", "err": f"{folder}/err"}
        forking = forking_process()
        assert forking.stdin is not None and forking.stdout is not None
        forking.stdin.write(json.dumps(given) + "\n")
        forking.stdin.flush()
        status = int(forking.stdout.readline())
        out, err = (Path(folder, name).read_text(encoding="utf-8") for name in ("out", "err"))
    assert not ok or status == 0, f"exit status {status}: {err}"
    return subprocess.CompletedProcess(code, status, out, err)


@cache
def forking_process() -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", __file__]
    process = subprocess.Popen(command, cwd=r.ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(end, process)
    return process


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait()


def serve() -> None:
    """Fork for each line of standard input, and write how the child ended."""
    import warnings

    import numpy as np  # noqa: F401  # for the children
    import torch

    import zcrecord.onnx  # noqa: F401

    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # imports as much as torch did

    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork", category=DeprecationWarning)
    for line in sys.stdin:
        given = json.loads(line)
        if not (child := os.fork()):
            as_child(**given)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def as_child(code: str, arguments: list[str], out: str, err: str) -> NoReturn:
    """Run the code as Python runs a main module, and end."""
    status = 1
    try:
        for number, path in ((1, out), (2, err)):
            with open(path, "wb") as file:
                os.dup2(file.fileno(), number)
        sys.argv = ["-c", *arguments]
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        status = 0
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
