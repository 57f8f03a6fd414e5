"""The tests that need an S3 server, against OpenStack Swift, a real one, instead of moto's.

    python -m tools.swift                                # what writes to buckets, and reads from them
    python -m tools.swift tests/distributed/test_checkpoint_urls.py

Swift comes from PyPI, into a scratch folder, and runs there on one disk: proxy, account, container and object server.
The folder's file system has to have extended attributes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tools.worker import ROOT

TESTS = (
    "tests/storage/test_uploads.py",
    "tests/remote/test_remote_s3.py",
    "tests/cli/test_command_line_urls.py",
    "tests/distributed/test_checkpoint_urls.py",
)
SECONDS = 30  # until all servers answer
USER, SECRET = "test:tester", "testing"

COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
disable_fallocate = true
workers = 0
"""
STORAGE = """
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck listing_formats s3api tempauth slo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:s3api]
use = egg:swift#s3api
min_segment_size = 65536
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
"""
FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "listing_formats", "slo")
HASHES = "[swift-hash]\nswift_hash_path_prefix = a\nswift_hash_path_suffix = b\n"


def main(arguments: list[str]) -> int:
    """Run pytest beside a Swift that runs here; returns its exit status."""
    with tempfile.TemporaryDirectory(prefix="swift-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([folder / "venv/bin/pip", "install", "--quiet", "swift", "setuptools"], check=True)
        with _serving(folder) as place:
            env = os.environ | {"ZCRECORD_TEST_S3": f"http://{USER}:{SECRET}@{place}", "ZCRECORD_TEST_ALL": "1"}
            command = [sys.executable, "-m", "pytest", *(arguments or TESTS)]
            return subprocess.run(command, cwd=ROOT, env=env, check=False).returncode


@contextlib.contextmanager
def _serving(folder: Path) -> Iterator[str]:
    """Run the four servers; yields the address of the proxy, once it answers."""
    (folder / "devices" / "disk").mkdir(parents=True)
    (folder / "swift.conf").write_text(HASHES, encoding="utf-8")
    ports = {name: _free_port() for name in ("account", "container", "object", "proxy")}
    running = []
    try:
        for name, port in ports.items():
            own = PROXY if name == "proxy" else STORAGE.format(name=name)
            own += "".join(f"[filter:{f}]\nuse = egg:swift#{f}\n" for f in FILTERS if name == "proxy")
            user = os.environ.get("USER", "root")
            settings = folder / f"{name}.conf"
            settings.write_text(COMMON.format(port=port, folder=folder, user=user) + own, encoding="utf-8")
            if name != "proxy":
                _make_ring(folder, name, port)
            command: list[str | Path] = [folder / f"venv/bin/swift-{name}-server", settings]
            running.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        _wait(f"http://127.0.0.1:{ports['proxy']}/healthcheck")
        yield f"127.0.0.1:{ports['proxy']}"
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _make_ring(folder: Path, name: str, port: int) -> None:
    """Write the ring of one kind of server: one replica on the one disk."""
    steps: tuple[list[str], ...] = (
        ["create", "4", "1", "1"],
        ["add", f"r1z1-127.0.0.1:{port}/disk", "1"],
        ["rebalance"],
    )
    for step in steps:
        command = [str(folder / "venv/bin/swift-ring-builder"), str(folder / f"{name}.builder"), *step]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _wait(url: str) -> None:
    end = time.monotonic() + SECONDS
    while True:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
