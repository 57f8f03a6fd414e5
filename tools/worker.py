"""Call functions of this tree in a process of their own, so that its memory is theirs alone.

    with Worker() as worker:
        seconds = worker.call("tools.serving:open_session", path="gpt.zcr")
        print(memory(worker.pid))

A worker is asked line by line (JSON over its standard input and output) and keeps its modules' state between calls:
several can be sent a call at once with `send` and then waited for with `receive`. What the functions do is left to
them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
_idle: list[subprocess.Popen[str]] | None = None  # processes that the next workers take, within `reused_processes`


class WorkerError(RuntimeError):
    """A call of a worker failed; the message is its error's, the traceback went to standard error."""


class Worker:
    """One child process; leaving the context ends it, whatever it is doing.

    `packages` is a folder of Python packages that it takes before those installed, as `pip install --target` makes it.
    """

    def __init__(self, packages: Path | None = None) -> None:
        self._own_packages = packages is not None
        self._awaited = 0  # replies
        self._process = _idle.pop() if _idle and packages is None else _start(packages)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, target: str, **arguments: Any) -> None:
        """Have the function `module:name` called with JSON-able arguments; `receive` waits for its result.

        Raises:
            WorkerError: the process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([target, arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"a worker process ended with status {self._process.wait()}") from None
        self._awaited += 1

    def receive(self) -> Any:
        """Return the result of the oldest call not yet waited for.

        Raises:
            WorkerError: the function raised, or the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"a worker process ended with status {self._process.wait()}")
        reply = json.loads(line)
        self._awaited -= 1
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply["result"]

    def call(self, target: str, **arguments: Any) -> Any:
        """Call a function and wait for its result."""
        self.send(target, **arguments)
        return self.receive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _idle is None or kind is not None or self._awaited or self._own_packages:
            _end(self._process)
        else:
            _idle.append(self._process)


def _start(packages: Path | None) -> subprocess.Popen[str]:
    first = [] if packages is None else [str(packages)]
    path = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-m", "tools.worker"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):
                stream.close()


@contextlib.contextmanager
def reused_processes() -> Iterator[None]:
    """Have each worker take over the process of one that is done, with its modules and its memory.

    That saves the start and the imports, most of the time of small work; figures of memory mean nothing then.
    """
    global _idle
    kept: list[subprocess.Popen[str]] = []
    _idle = kept
    try:
        yield
    finally:
        _idle = None
        for process in kept:
            _end(process)


def call_alone(target: str, packages: Path | None = None, /, **arguments: Any) -> Any:
    """Return the result of one function called in a process of its own, with `packages` as `Worker` takes them."""
    with Worker(packages) as worker:
        return worker.call(target, **arguments)


def call_at_once(workers: Sequence[Worker], target: str, **arguments: Any) -> list[Any]:
    """Call one function in all workers at once; return the results when all have answered."""
    for worker in workers:
        worker.send(target, **arguments)
    return [worker.receive() for worker in workers]


def _serve() -> None:
    """Answer calls until standard input ends, as it does when the parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    # Replies go to a descriptor of their own: a library that prints must not garble them.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        target, arguments = json.loads(line)
        module, _, name = target.partition(":")
        try:
            reply = {"result": getattr(importlib.import_module(module), name)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    _serve()
