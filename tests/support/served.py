"""`zcrecord serve` as a process of its own, for tests: run until the block ends, then ended by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "zcrecord", "serve"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def start(*arguments: str | Path, port: str | None = "0", environment: dict[str, str] | None = None) -> Server:
    chosen = [] if port is None else ["--port", port]
    command = [*COMMAND, *map(str, arguments), *chosen]
    env = {**ENVIRONMENT, **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None
    return Server(process, process.stdout.readline().strip())


class Server:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def end(self, by: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        """End it; return its exit status and what it wrote to standard error."""
        self.process.send_signal(by)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """Serve an archive; yield the URL. Nothing is to be told on standard error."""
    server = start(*arguments)
    try:
        yield server.url
    finally:
        status, errors = server.end()
    assert (status, errors) == (0, "")
