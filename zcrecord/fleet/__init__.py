"""Fleets of conversions: many models, each to its archive, by any engine that runs functions on many machines.

`plan` lists the models below a folder or a URL, each with the place of its archive; `convert_one` converts one of them.
Both are plain functions, whose arguments and results can be pickled, so that a process pool, Dask, Ray or Spark can run
them. There is no scheduler here: the engine distributes the jobs, and runs failed ones again.

Modules: `jobs` has the plan, `sources` files and their versions, `stamps` records of conversions and refusals,
`conversion` one job. README.md in this folder is the guide.
"""

from .conversion import Outcome, convert_one
from .jobs import Job, plan

__all__ = ["Job", "Outcome", "convert_one", "plan"]
