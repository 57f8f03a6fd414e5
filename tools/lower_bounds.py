"""Prints, for pip's `--constraint`, the oldest version of each package that pyproject.toml allows.

    python tools/lower_bounds.py

`tools/test --lowest` installs those, so that a bound is what was tested and not what was hoped. Needs no package.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"
BOUND = re.compile(r"(?P<name>[\w.-]+)>=(?P<version>[\w.]+)(; sys_platform != 'darwin' .*)?")


def lower_bounds(pyproject: str) -> list[str]:
    """Return `name==version` for each `name>=version` of dependencies and extras on Linux, once; no pinned names."""
    project = tomllib.loads(pyproject)["project"]
    requirements = sum(project["optional-dependencies"].values(), project["dependencies"])
    pinned = {requirement.partition("==")[0] for requirement in requirements if "==" in requirement}
    found = [match for requirement in requirements if (match := BOUND.fullmatch(requirement))]
    return sorted({f"{match['name']}=={match['version']}" for match in found if match["name"] not in pinned})


if __name__ == "__main__":
    print("\n".join(lower_bounds(PROJECT.read_text(encoding="utf-8"))))
