"""A folder mounted a second time by FUSE, whose reads are slow, short, or fail.

Run as a program it is the file system: it answers the requests of /dev/fuse itself. Needs root and Linux.

Source: linux/fuse.h, version 7.31.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

LATENCY = 0.005  # seconds to each answer of a read
_HEADER = struct.Struct("<IIQQIIIHH")
_LOOKUP, _FORGET, _GETATTR, _STATFS, _OPEN, _READ, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 17, 14, 15, 18, 25, 26
_OPENDIR, _RELEASEDIR, _INTERRUPT, _BATCH_FORGET = 27, 29, 36, 42
_DIRECT = 1  # FOPEN_DIRECT_IO: short answers are short reads, and no page is cached


@contextlib.contextmanager
def mounted(folder: Path, at: Path, fault: str = "") -> Iterator[Path]:
    """Mount a folder at another; `fault` is "short", or "eio" for reads of the second and third MiB of a file."""
    at.mkdir()
    arguments = [sys.executable, __file__, str(folder), str(at), fault]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"mounted\n", "it needs root and /dev/fuse"
            yield at
        finally:
            ctypes.CDLL(None).umount2(os.fsencode(at), 2)  # MNT_DETACH
            server.kill()


class _Server:
    def __init__(self, folder: str, fault: str) -> None:
        self.folder, self.fault, self.names = folder, fault, [""]  # by number of the node, from 1 on

    def attributes(self, node: int) -> bytes:
        """Return struct fuse_attr of a file, or of the folder."""
        s = os.stat(os.path.join(self.folder, self.names[node - 1]))
        times = [ns // 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        parts = [ns % 10**9 for ns in (s.st_atime_ns, s.st_mtime_ns, s.st_ctime_ns)]
        return struct.pack("<6Q10I", node, s.st_size, s.st_blocks, *times, *parts, s.st_mode, 1, 0, 0, 0, 4096, 0)

    def answer(self, code: int, node: int, body: bytes) -> bytes:
        """Return the body of an answer; OSError for an error."""
        if code == _INIT:
            return struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 17, 1, 64, 48, 1 << 17, 1, 32, 0, 0)
        if code == _LOOKUP:
            name = os.fsdecode(body.rstrip(b"\0"))
            os.stat(os.path.join(self.folder, name))
            if name not in self.names:
                self.names.append(name)
            number = self.names.index(name) + 1
            return struct.pack("<QQQQII", number, 0, 0, 0, 0, 0) + self.attributes(number)
        if code == _GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if code in (_OPEN, _OPENDIR):
            return struct.pack("<QII", 0, _DIRECT if self.fault and code == _OPEN else 0, 0)
        if code == _READ:
            return self.read(node, *struct.unpack_from("<QI", body, 8))
        if code == _STATFS:
            return struct.pack("<5Q4I24x", 0, 0, 0, 0, 0, 4096, 255, 4096, 0)
        if code in (_RELEASE, _RELEASEDIR, _FLUSH):
            return b""
        raise OSError(errno.ENOSYS, "not here")

    def read(self, node: int, offset: int, size: int) -> bytes:
        """Return bytes of a file, after a while."""
        time.sleep(LATENCY)
        if self.fault == "eio" and 1 << 20 <= offset < 3 << 20:
            raise OSError(errno.EIO, "asked for")
        with open(os.path.join(self.folder, self.names[node - 1]), "rb") as file:
            file.seek(offset)
            return file.read(max(1, size // 3) if self.fault == "short" else size)

    def serve(self, fd: int) -> None:
        """Answer requests, several at a time, until the folder is unmounted."""

        def work(code: int, unique: int, node: int, body: bytes) -> None:
            failed, out = 0, b""
            try:
                out = self.answer(code, node, body)
            except OSError as error:
                failed = -(error.errno or errno.EIO)
            os.write(fd, struct.pack("<IiQ", 16 + len(out), failed, unique) + out)

        with ThreadPoolExecutor(16) as pool:
            while True:
                try:
                    request = os.read(fd, 1 << 20)
                except OSError:  # it was unmounted
                    return
                _, code, unique, node, *_ = _HEADER.unpack_from(request)
                if code not in (_FORGET, _BATCH_FORGET, _INTERRUPT):
                    pool.submit(work, code, unique, node, request[40:])


if __name__ == "__main__":
    backing, place, kind = sys.argv[1:]
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None).mount(b"zcrecord", os.fsencode(place), b"fuse", 0, options):
        sys.exit("it cannot be mounted")
    print("mounted", flush=True)
    _Server(backing, kind).serve(device)
