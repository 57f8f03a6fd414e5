"""Copy a range of one file into another without reading it: cloned by the file system, or copied by the system.

A clone shares the blocks on the disk until one of the files changes them: it takes no space, and 100 GB take as long as
one. XFS, Btrfs, bcachefs, ZFS and some network file systems can clone. Only Linux has these calls.
"""

from __future__ import annotations

import array
import errno
import os
import sys

BLOCK = 4096  # bytes of a file system's block, nearly everywhere: a clone starts and ends on one

_PIECE = 64 << 20  # bytes copied at a time: signals are handled between two
_FICLONERANGE = 0x4020940D  # as x86, Arm, RISC-V and LoongArch number it; others refuse it, and copy
# Errors after which the bytes are read and written instead. After any other that would fail, too.
_CANNOT_COPY = {
    errno.EBADF, errno.EINTR, errno.EINVAL, errno.ENOSYS, errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY,
    errno.EXDEV,
}  # fmt: skip


def copy_range(source: int, offset: int, dest: int, dest_offset: int, nbytes: int) -> tuple[int, bool]:
    """Copy bytes between open files; return how many, and True if they were cloned. File positions stay.

    It may be fewer than asked for, and none where the system cannot.
    """
    if not sys.platform.startswith("linux"):
        return 0, False
    if nbytes and not (offset | dest_offset | nbytes) % BLOCK:
        import fcntl

        try:
            fcntl.ioctl(dest, _FICLONERANGE, array.array("Q", [source, offset, nbytes, dest_offset]))
        except OSError as error:
            if error.errno not in _CANNOT_COPY:
                raise
        else:
            return nbytes, True
    try:
        return os.copy_file_range(source, dest, min(nbytes, _PIECE), offset, dest_offset), False
    except OSError as error:
        if error.errno not in _CANNOT_COPY:
            raise
        return 0, False
