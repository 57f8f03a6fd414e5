"""Memory from the system: mapped files, and zeroed memory for what is read, decompressed or copied.

A mapped file holds no file descriptor: a process may have as few as 256, and more archives than that.

Python's mmap keeps a duplicate of the descriptor that it is given, for as long as the mapping lives. From Python 3.13
on it can be told not to. Before, on 64-bit Linux, it reserves memory, for which it needs none, and the C library maps
the file over that; the memory is Python's as ever, which unmaps it, refuses to while it is used, and gives advice on
it. Elsewhere each mapping takes a descriptor.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Callable

from zcrecord.codec.layout import MAX_ALIGNMENT
from zcrecord.tensors.strides import address

__all__ = ["aligned", "map_descriptor"]

_GENERIC = sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64", "riscv64", "i686", "armv7l")
_NORESERVE = 0x4000 if _GENERIC else 0  # MAP_NORESERVE, which Python does not name; some machines number it otherwise
_FIXED = 0x10  # MAP_FIXED, likewise
_lost: list[mmap.mmap] = []  # memory that may not be ours any more: it is never unmapped


def map_descriptor(fd: int, *, private: bool = False) -> mmap.mmap:
    """Return a mapping of a whole file: read-only, or private, whose pages are copied when they are written.

    A private one reserves no memory for what may be written.

    Raises:
        ValueError: the file is empty. OSError: the system refuses.
    """
    if os.name != "posix":
        return mmap.mmap(fd, 0, access=mmap.ACCESS_COPY if private else mmap.ACCESS_READ)
    flags, prot = mmap.MAP_SHARED, mmap.PROT_READ
    if private:
        flags, prot = mmap.MAP_PRIVATE | _NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    if sys.version_info >= (3, 13):
        return mmap.mmap(fd, 0, flags, prot, trackfd=False)
    return _mapped_over(fd, flags, prot) or mmap.mmap(fd, 0, flags, prot)


def aligned(size: int, *, sparse: bool = False) -> tuple[mmap.mmap, memoryview]:
    """Return zeroed memory, as a mapping to be closed and as its aligned part of `size` bytes.

    A sparse one reserves no memory for what is never touched, so it may be larger than the machine has. Without huge
    pages on purpose: several threads that first touch one each clear it, at three times the cost in all.
    """
    if os.name == "posix":  # not shared with the children of a fork, as Python's own default would be
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_NORESERVE if sparse else 0)
        block = mmap.mmap(-1, size + MAX_ALIGNMENT, flags=flags)
    else:
        block = mmap.mmap(-1, size + MAX_ALIGNMENT)
    whole = memoryview(block)
    start = -address(whole) % MAX_ALIGNMENT
    return block, whole[start : start + size]


def _mapped_over(fd: int, flags: int, prot: int) -> mmap.mmap | None:
    """Return a mapping of a file that lies over memory which Python reserved; None where that cannot be had."""
    nbytes = os.fstat(fd).st_size
    call = _c_mmap() if nbytes and not _lost else None
    if call is None:
        return None
    room = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE, prot)
    start = address(room)
    if call(start, nbytes, prot, flags | _FIXED, fd, 0) == start:
        return room
    _lost.append(room)  # Linux may have taken it away before it failed, and another thread may have that place now
    return None


@functools.cache
def _c_mmap() -> Callable[..., int | None] | None:
    """Return the C library's mmap; None where it cannot be called, or its arguments may be of other sizes."""
    if not _GENERIC or sys.maxsize < 1 << 32:  # off_t has 64 bits where pointers have
        return None
    try:
        import ctypes  # here, because a Python may have been built without it

        call = ctypes.CDLL(None).mmap
    except (ImportError, OSError, AttributeError):
        return None
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    function: Callable[..., int | None] = call
    return function
