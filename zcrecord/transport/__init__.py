"""Archives packed for transport (`.zcr.zst`), and unpacked."""

from .packer import PackReport, pack
from .unpacker import unpack

__all__ = ["PackReport", "pack", "unpack"]
