"""moto's S3 server, in a process of its own on this machine; nothing leaves it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def serving_moto(bucket: str) -> Iterator[dict[str, Any]]:
    """Yield the options of fsspec for a server with one empty bucket."""
    import s3fs

    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"  # no one is asked for credentials
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            while server.poll() is None and not _answers(port):
                time.sleep(0.05)
            options = {"key": "key", "secret": "secret"}
            out = {**options, "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
            s3fs.S3FileSystem(**out).mkdir(bucket)
            yield out
        finally:
            server.terminate()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
