"""Generated files: `python -m tools.generate` writes all of them, `--check` says which of them are stale.

A module of this package is a generator. It has `files()`, which returns the whole text or bytes of each file that it
generates, by path from the repository's root; and `FOLDERS`, in which nothing else may lie.
"""
