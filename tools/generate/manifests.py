"""The version in the manifests of npm, cargo and CMake, and the repository's address in the first two.

Both have one source: `__version__` in `zcrecord/__init__.py`, and `Repository` under `[project.urls]` in
`pyproject.toml`, which may be missing. Needs no package, so that `tools.release` runs with hatchling alone.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from . import ROOT

FOLDERS: tuple[Path, ...] = ()
NPM = Path("zcrecord/web/reader/package.json")
CARGO = Path("zcrecord/embed/Cargo.toml")
CMAKE = Path("zcrecord/embed/CMakeLists.txt")
_PYTHON = re.compile(r"(\d+\.\d+\.\d+)(?:(a|b|rc)(\d+))?")
_PHASES = {"a": "alpha", "b": "beta", "rc": "rc"}


def version() -> str:
    """Return `zcrecord.__version__`, read from its source."""
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / "zcrecord/__init__.py").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def repository() -> str | None:
    """Return the address of the repository without a slash at its end; None: pyproject.toml has none."""
    address = project().get("urls", {}).get("Repository")
    return address.rstrip("/") if address else None


def semantic(python: str) -> str:
    """Return a Python version as npm and cargo write it: 1.0.0rc1 is 1.0.0-rc.1.

    Raises:
        ValueError: it is neither three numbers nor these and one of a1, b1 and rc1, so they have no such version.
    """
    found = _PYTHON.fullmatch(python)
    if found is None:
        raise ValueError(
            f"version {python!r}: npm and cargo know 1.0.0, 1.0.0a1, 1.0.0b1 and 1.0.0rc1; choose one of these"
        )
    release, phase, number = found.groups()
    return f"{release}-{_PHASES[phase]}.{number}" if phase else release


def _npm(text: str, of: str, address: str | None) -> str:
    manifest = json.loads(text) | {"version": of}
    manifest.pop("repository", None)
    manifest.pop("publishConfig", None)
    if "-" in of:  # or npm would give it to whoever names no version
        manifest["publishConfig"] = {"tag": "next"}
    if address:
        manifest["repository"] = {"type": "git", "url": f"git+{address}.git", "directory": NPM.parent.as_posix()}
    return json.dumps(manifest, indent=2) + "\n"


def _cargo(text: str, of: str, address: str | None) -> str:
    text = re.sub(r'^repository = ".*"\n', "", text, flags=re.MULTILINE)
    line = f'\nrepository = "{address}"' if address else ""
    return _replaced(r'^version = ".*"$', f'version = "{of}"{line}', text)


def _replaced(pattern: str, by: str, text: str) -> str:
    text, count = re.subn(pattern, by, text, count=1, flags=re.MULTILINE)
    assert count == 1, f"{pattern} is not there"
    return text


def files(python: str | None = None, address: str | None = None) -> dict[Path, str]:
    """Return the three manifests as they should be.

    Args:
        python: the version; None: that of the package.
        address: the repository; None: that of pyproject.toml, if it has one.
    """
    python, address = python or version(), address or repository()
    of = semantic(python)
    old = {path: (ROOT / path).read_text("utf-8") for path in (NPM, CARGO, CMAKE)}
    return {
        NPM: _npm(old[NPM], of, address),
        CARGO: _cargo(old[CARGO], of, address),
        CMAKE: _replaced(
            r"^project\(zcrecord VERSION \S+", f"project(zcrecord VERSION {of.partition('-')[0]}", old[CMAKE]
        ),
    }
