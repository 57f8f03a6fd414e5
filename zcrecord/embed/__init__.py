"""Archives as parts of programs: constants of C, C++, Rust and Python, and appended to executables.

`generate` writes sources, `attach` and `detach` work on built programs. The readers that open an archive at run time,
`zcrecord.h` for C and C++ and `zcrecord.rs` for Rust, lie beside this module; `reader_source` returns them.
"""

from .attachment import AttachReport, DetachReport, attach, detach
from .generator import EmbedReport, generate, reader_source

__all__ = ["AttachReport", "DetachReport", "EmbedReport", "attach", "detach", "generate", "reader_source"]
