"""Fleets of conversions: many models, each to its archive, by whatever engine runs functions on many machines.

`plan` lists the models below a folder or a URL, each with the place of its archive; `convert_one` converts one of them.
Both are plain functions, and what they take and return can be pickled, so that a process pool, Dask, Ray or Spark runs
them. There is no scheduler here: the engine spreads the work, and runs again what failed.

Modules: `jobs` has the plan, `sources` files and their versions, `stamps` what is kept of them beside an archive,
`conversion` one job. README.md in this folder is the guide.
"""

from __future__ import annotations

from .conversion import Outcome, convert_one
from .jobs import Job, plan

__all__ = ["Job", "Outcome", "convert_one", "plan"]
