"""Builds every package that a release publishes, into a folder for each registry.

    python -m tools.release                      # all of them, below dist
    python -m tools.release --tag v1.0.0      # only if that is the tag of this version, and every manifest agrees

| folder | files | needs |
|---|---|---|
| python | wheel and source distribution, for PyPI | hatchling |
| npm | `zcrecord.js` | npm |
| rust | `zcrecord.rs`, for crates.io | cargo |
| c | `zcrecord.h` with its CMakeLists.txt, for the release's page | |

Nothing is fetched. `.github/RELEASING.md` says how a release is made.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.generate import manifests

ROOT = Path(__file__).resolve().parents[1]
HEADER_FILES = {
    "zcrecord.h": "zcrecord.h",
    "CMakeLists.txt": "CMakeLists.txt",
    "LICENSE": "LICENSE",
    "README.c.md": "README.md",
}


class ReleaseError(Exception):
    """A release that cannot be built; the message says why, and what to do."""


def _run(needs: str, command: list[str | Path], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise ReleaseError(f"{needs} is not installed") from None
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build_python(dest: Path) -> None:
    """Build the wheel and the source distribution into `dest`, without isolation: with the hatchling that is there."""
    _run("hatchling", [sys.executable, "-m", "hatchling", "build", "--directory", dest], ROOT)


def build_npm(dest: Path) -> None:
    _run("npm", ["npm", "pack", ROOT / manifests.NPM.parent, "--pack-destination", dest, "--ignore-scripts"], dest)


def build_rust(dest: Path) -> None:
    """Pack the crate into `dest`, without compiling it.

    Cargo writes files beside the manifest, so a copy of the folder is packed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        ours = shutil.ignore_patterns("target", "Cargo.lock")
        folder = Path(shutil.copytree(ROOT / manifests.CARGO.parent, Path(scratch) / "crate", ignore=ours))
        _run("cargo", ["cargo", "package", "--no-verify", "--offline", "--allow-dirty", "--quiet"], folder)
        (crate,) = (folder / "target" / "package").glob("*.crate")
        shutil.copy(crate, dest)


def build_c(dest: Path) -> None:
    """Pack the header, its CMakeLists.txt, licence and page into `dest`; the same files give the same bytes."""
    name = f"zcrecord-c-{manifests.semantic(manifests.version())}"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file, inside in HEADER_FILES.items():
            content = (ROOT / "zcrecord" / "embed" / file).read_bytes()
            entry = tarfile.TarInfo(f"{name}/{inside}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    (dest / f"{name}.tar.gz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))


BUILDERS: dict[str, Callable[[Path], None]] = {
    "python": build_python,
    "npm": build_npm,
    "rust": build_rust,
    "c": build_c,
}


def check(tag: str, repository: str | None) -> None:
    """Check that everything that is published says the same of its version and its home.

    Args:
        tag: `v` and the version.
        repository: the address that the release is made from, if it has one: npm refuses a package that names another.

    Raises:
        ReleaseError: another version's tag, a stale manifest, or a repository that pyproject.toml does not name.
    """
    if tag != (due := f"v{manifests.version()}"):
        raise ReleaseError(f"tag {tag}: __version__ in zcrecord/__init__.py has {due}; change it, or tag that")
    for path, text in manifests.files().items():
        if (ROOT / path).read_text("utf-8") != text:
            raise ReleaseError(f"{path} is stale: run python -m tools.generate, and commit what it writes")
    if repository is not None and manifests.repository() != repository.rstrip("/"):
        have = f'[project.urls] has no Repository = "{repository}"'
        raise ReleaseError(f"pyproject.toml: {have}; add it, and run python -m tools.generate")


def main(arguments: list[str]) -> int:
    """Build the packages that the command line names, and print their files."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Build every package of a release.")
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"one of {', '.join(BUILDERS)}; by default all")
    parser.add_argument("--dest", type=Path, default=ROOT / "dist", help="the folder, made anew; by default dist")
    parser.add_argument("--tag", help="the tag that is released: refuse one of another version, and stale manifests")
    parser.add_argument("--repository", help="with --tag: the address of the repository that is released")
    asked = parser.parse_args(arguments)
    if unknown := set(asked.packages) - set(BUILDERS):
        parser.error(f"no package is named {', '.join(sorted(unknown))}; there are {', '.join(BUILDERS)}")
    try:
        if asked.tag is not None:
            check(asked.tag, asked.repository)
        for name in asked.packages or BUILDERS:
            folder = asked.dest.absolute() / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            BUILDERS[name](folder)
            for file in sorted(folder.iterdir()):
                print(f"{os.path.relpath(file)}: {file.stat().st_size:,} B")
    except (ReleaseError, ValueError) as error:
        print(f"tools.release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
