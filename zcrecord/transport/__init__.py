"""Archives packed for transport (`.zcr.zst`), and unpacked."""

from .packer import PackReport, pack, unpack

__all__ = ["PackReport", "pack", "unpack"]
