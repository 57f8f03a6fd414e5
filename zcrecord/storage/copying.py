"""Ranges of one file into another without reading them: cloned by the file system, or copied by the system.

A clone shares the blocks on the disk until one of the files changes them: it takes no space, and no longer for 100 GB
than for one. XFS, Btrfs, bcachefs, ZFS and some network file systems can. Linux alone has these calls.
"""

from __future__ import annotations

import array
import errno
import os
import sys

__all__ = ["BLOCK", "copy_range"]

BLOCK = 4096  # bytes of a file system's block, nearly everywhere: what is cloned starts and ends on one

_PIECE = 64 << 20  # bytes copied at a time: signals are handled between two
_FICLONERANGE = 0x4020940D  # as x86, Arm, RISC-V and LoongArch number it; others refuse it, and copy
# The system's reasons to have the bytes read and written instead. Whatever else fails would fail then, too.
_NOT_HERE = {
    errno.EBADF, errno.EINTR, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY,
    errno.EXDEV,
}  # fmt: skip


def copy_range(source: int, offset: int, dest: int, at: int, nbytes: int) -> tuple[int, bool]:
    """Copy bytes of one open file to a place in another; return how many, and True if they were cloned.

    Fewer than asked for may come, none where the system cannot. The files' positions stay as they are.

    Raises:
        OSError: the disk is full, or fails.
    """
    if not sys.platform.startswith("linux"):
        return 0, False
    if nbytes and not (offset | at | nbytes) % BLOCK:
        import fcntl

        try:
            fcntl.ioctl(dest, _FICLONERANGE, array.array("Q", [source, offset, nbytes, at]))
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
        else:
            return nbytes, True
    try:
        return os.copy_file_range(source, dest, min(nbytes, _PIECE), offset, at), False
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        return 0, False
