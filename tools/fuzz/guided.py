"""Fuzzing of what is written in Python, guided by coverage: atheris, which is libFuzzer, in a process of its own.

`python -m tools.fuzz.guided archive|model [libFuzzer's arguments]` is that process: it ends with an input on disk at
the first exception that is no RecordError, at one that takes too long, or too much memory. Knows nothing of what is
tried (`targets`) or how inputs are changed (`archives`, `models`).
"""

from __future__ import annotations

import random
import sys

import atheris

from tools.measure import begin_peak, peak_rss

from . import archives, models

MUTATORS = {"archive": archives.mutated, "model": models.mutated}
INSTRUMENTED = {"archive": "zcrecord", "model": "zcrecord.onnx"}  # of the rest a model reaches the same, over and over
SPARE = 64 << 20  # bytes that any input may take, ...
FOLD = 64  # ... and times its size
# atheris 3.0 itself loses some 2 KiB an input, so that libFuzzer's own limit (MiB) can only be a distant one.
FUZZERS_LIMIT = 8192


def main(arguments: list[str]) -> None:
    """Fuzz until libFuzzer's arguments say that it is enough; ends the process."""
    what, *options = arguments
    with atheris.instrument_imports(include=[INSTRUMENTED[what]]):
        from . import targets

        target = getattr(targets, what)

    def try_one(data: bytes) -> None:
        before = begin_peak()
        target(data)
        grown = peak_rss() - before
        assert grown <= SPARE + FOLD * len(data), f"{len(data)} bytes took {grown >> 20} MiB"

    def change(data: bytes, most: int, seed: int) -> bytes:
        def raw(part: bytes) -> bytes:
            changed: bytes = atheris.Mutate(part, len(part) + 16)
            return changed

        return MUTATORS[what](bytes(data), random.Random(seed), raw)[:most]

    atheris.Setup([f"fuzz {what}", f"-rss_limit_mb={FUZZERS_LIMIT}", *options], try_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
