"""Published files of Python are complete: wheel, source distribution, editable install, metadata.

All are built without a network: by hatchling's own interface, in the environment that the tests run in. They are
installed in test_installable.py.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest
import yaml
from guides import RELEASING, ROOT

import zcrecord
import zcrecord.storage.urls
from tools.generate import manifests
from tools.release import BUILDERS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INFO = f"zcrecord-{zcrecord.__version__}.dist-info"
OF_OTHER_PACKAGES = {"Cargo.toml", "lib.rs", "CMakeLists.txt"}
LICENSES = ["zcrecord/LICENSE", "zcrecord/embed/LICENSE"]
SDIST = f"zcrecord-{zcrecord.__version__}"


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build a 'wheel', 'sdist' or 'editable' of the project in `source`; return what came out."""
    folder.mkdir(parents=True)
    code = f"import sys, hatchling.build; print(hatchling.build.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, folder], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def files_under(folder: str) -> set[str]:
    """Every file of a folder that belongs to the project, relative to the repository."""
    paths = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("dist") / "wheel")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("dist")
    with tarfile.open(build("sdist", ROOT, folder / "sdist")) as archive:
        if hasattr(tarfile, "data_filter"):  # from 3.11.4 on
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(folder)
    return folder / SDIST


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    return Parser().parsestr(contents(wheel)[f"{INFO}/METADATA"].decode())


def test_wheel_holds_the_package_and_the_schema_and_nothing_else(wheel: Path) -> None:
    ours = {name for name in files_under("zcrecord") | files_under("schema") if not is_documentation(name)}
    published = {name for name in ours if Path(name).name not in OF_OTHER_PACKAGES}
    about = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")} | {
        f"{INFO}/licenses/{name}" for name in LICENSES
    }
    assert {"schema/FORMAT.md", "schema/CONVENTIONS.md", "schema/zcrecord.fbs"} <= published
    assert "zcrecord/_schema/__init__.py" in published
    assert {"zcrecord/py.typed", "zcrecord/LICENSE", "zcrecord/CHANGELOG.md"} <= published
    assert set(contents(wheel)) == {re.sub("^schema/", "zcrecord/_schema/", name) for name in published} | about


def is_documentation(name: str) -> bool:
    """Tell whether a file is read elsewhere alone: guides, the API reference, pages of other packages."""
    return Path(name).match("README*.md") or Path(name).name == "INTEGRITY.md" or name.startswith("zcrecord/reference/")


@pytest.mark.slow
def test_source_distribution_holds_what_it_takes_to_test_it(sdist: Path) -> None:
    found = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    expected = set.union(*(files_under(folder) for folder in ("zcrecord", "schema", "tests", "tools", ".github")))
    assert found == expected | {"README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}


@pytest.mark.slow
def test_wheel_from_the_source_distribution_is_the_same(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    assert contents(build("wheel", sdist, tmp_path / "again")) == contents(wheel)


@pytest.mark.slow
def test_editable_install_is_a_path_and_nothing_else(tmp_path: Path) -> None:
    files = contents(build("editable", ROOT, tmp_path / "editable"))
    (path,) = (name for name in files if not name.startswith(INFO))
    assert path.endswith(".pth")
    assert Path(files[path].decode().strip()) == ROOT


def test_metadata_says_who_may_use_it_and_where(metadata: Message) -> None:
    assert (metadata["Name"], metadata["Version"]) == ("zcrecord", zcrecord.__version__)
    assert metadata["License-Expression"] == "Apache-2.0 AND 0BSD"
    assert metadata.get_all("License-File") == LICENSES
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert str(metadata.get_payload()).strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()


def test_every_package_and_the_changelog_have_one_version() -> None:
    python = zcrecord.__version__
    npm = json.loads((ROOT / manifests.NPM).read_text("utf-8"))["version"]
    crate = tomllib.loads((ROOT / manifests.CARGO).read_text("utf-8"))["package"]["version"]
    (cmake,) = re.findall(
        r"^project\(zcrecord VERSION (\S+) ", (ROOT / manifests.CMAKE).read_text("utf-8"), re.MULTILINE
    )
    changelog = re.findall(r"^## (\S+?),? ", (ROOT / "zcrecord/CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert npm == crate == manifests.semantic(python)
    assert cmake == re.split("a|b|rc", python)[0]
    assert changelog[0] == python


def test_readme_and_metadata_name_the_same_versions_of_python(metadata: Message) -> None:
    pattern = r"Programming Language :: Python :: 3\.(\d+)"
    versions = [int(found[1]) for line in metadata.get_all("Classifier", []) if (found := re.fullmatch(pattern, line))]
    first, last = min(versions), max(versions)
    assert versions == list(range(first, last + 1))
    assert metadata["Requires-Python"] == f">=3.{first}"
    named = re.findall(r"Python 3\.(\d+)(?: to 3\.(\d+))?", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert named == [(str(first), str(last))]


def test_plain_install_brings_the_core_alone(metadata: Message) -> None:
    required: dict[str, set[str]] = {name: set() for name in ["", *metadata.get_all("Provides-Extra", [])]}
    for line in metadata.get_all("Requires-Dist", []):
        requirement, _, marker = line.partition(";")
        extra = re.search(r"\bextra == '(\w+)'", marker)
        required[extra[1] if extra else ""].add(re.split(r"[^\w-]", requirement)[0])
    assert required[""] == {"numpy", "flatbuffers", "ml-dtypes", "xxhash", "rich"}
    assert required["all"] == set().union(*(required[name] for name in set(required) - {"", "all", "dev"}))


def test_every_requirement_has_a_lower_bound() -> None:
    requirements = sum(PROJECT["optional-dependencies"].values(), PROJECT["dependencies"])
    bare = [r for r in requirements if not re.search(r"[>=]=\d", r) and not r.startswith("zcrecord[")]
    assert not bare


@pytest.mark.slow
def test_what_errors_say_to_install_is_what_the_extra_they_name_brings() -> None:
    extras = PROJECT["optional-dependencies"]
    calls = [
        (path.name, node)
        for path in (ROOT / "zcrecord").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "missing_package"
    ]
    told = {}
    for file, call in calls:
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        if isinstance(named.get("extra"), ast.Constant):
            told[file, ast.literal_eval(named["extra"])] = {ast.literal_eval(argument) for argument in call.args}
    for package, extra in zcrecord.storage.urls._PACKAGES.values():
        told["urls.py", extra] = told.get(("urls.py", extra), set()) | {package}
    assert len(told) >= 9
    for (file, extra), packages in told.items():
        brought = {re.split(r"[^\w-]", requirement)[0] for requirement in extras[extra]}
        assert packages <= brought, f"{file}: extra {extra}"


def test_nothing_sends_anybody_to_a_package_index_for_zcrecord() -> None:
    """The name may be anybody's there."""
    told = []
    for path in [
        ROOT / "README.md",
        *(p for f in ("schema", "tools", "zcrecord") for p in (ROOT / f).rglob("*")),
    ]:
        if path.is_file() and path.suffix in {".md", ".py", ".cmake", ".rs", ".txt", ".js", ".h", ""}:
            text = path.read_bytes().decode(errors="replace")
            found = re.findall(r"""pip install (?:--?\w+ )*["'`]?zcrecord\b(?![./]).*""", text)
            told += [f"{path.relative_to(ROOT)}: {line}" for line in found]
    assert not told, "\n".join(told)


# Workflows of GitHub.


FOLDER = ROOT / ".github" / "workflows"
TESTS, RELEASE = (yaml.safe_load((FOLDER / name).read_text("utf-8")) for name in ("tests.yml", "release.yml"))
TEXT = (FOLDER / "release.yml").read_text("utf-8")
ID_TOKEN = {"id-token": "write"}
# Each job that publishes to a registry: its package, as tools.release has it, and its rights.
PUBLISHING = {
    "pypi": ("python", ID_TOKEN),
    "npm": ("npm", ID_TOKEN),
    "crates": ("rust", ID_TOKEN | {"contents": "read"}),
}


def steps(workflow: Any, job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = workflow["jobs"][job]["steps"]
    return found


def lines_of(step: dict[str, Any]) -> list[str]:
    return str(step.get("run", "")).splitlines()


def test_tests_run_on_every_python_of_the_metadata_and_on_three_systems() -> None:
    matrix = TESTS["jobs"]["python"]["strategy"]["matrix"]
    classifiers = manifests.project()["classifiers"]
    assert matrix["python"] == [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert {system.partition("-")[0] for system in matrix["os"]} == {"ubuntu", "macos", "windows"}


def test_workflows_run_what_contributors_run() -> None:
    lines = [line.split()[0:3] for job in TESTS["jobs"] for step in steps(TESTS, job) for line in lines_of(step)]
    python = [["python", "-m", "pip"], ["python", "-m", "pytest"]]
    assert lines == [["./tools/test"], *python, [".ci/run"]]
    assert (ROOT / "tools" / "test").is_file()
    assert RELEASE["jobs"]["tests"]["uses"] == "./.github/workflows/tests.yml"
    assert f"cargo publish --manifest-path {manifests.CARGO}" in [step.get("run") for step in steps(RELEASE, "crates")]


def test_everything_that_is_built_is_published() -> None:
    (pypi,) = (
        step["with"]["packages-dir"] for step in steps(RELEASE, "pypi") if "packages-dir" in step.get("with", {})
    )
    (npm,) = (step["run"].split()[2] for step in steps(RELEASE, "npm") if "run" in step)
    (page,) = (step["run"].split()[4] for step in steps(RELEASE, "github") if "run" in step)
    folders = [pypi, npm.removeprefix("./").removesuffix("/*.tgz")]
    assert folders == ["dist/python", "dist/npm"] and page == "dist/*/*"
    packages = [package for package, _ in PUBLISHING.values()]
    assert sorted([*packages, "c"]) == sorted(BUILDERS), "name the job that publishes it in PUBLISHING"


def test_only_jobs_that_publish_have_rights_beyond_reading() -> None:
    assert TESTS["permissions"] == RELEASE["permissions"] == {"contents": "read"}
    assert not any("permissions" in job for job in TESTS["jobs"].values())
    rights = {name: job["permissions"] for name, job in RELEASE["jobs"].items() if "permissions" in job}
    assert rights == {name: due for name, (_, due) in PUBLISHING.items()} | {"github": {"contents": "write"}}
    assert "secrets." not in TEXT


def test_nothing_is_published_before_the_tests_and_a_review() -> None:
    for name in PUBLISHING:
        job = RELEASE["jobs"][name]
        assert set(job["needs"]) == {"tests", "build"}
        assert job["environment"] == "release"
    assert set(RELEASE["jobs"]["github"]["needs"]) == set(PUBLISHING)
    page = RELEASING.read_text("utf-8")
    assert "environment `release`" in page and "workflow `release.yml`" in page


def test_a_release_names_every_action_by_its_commit() -> None:
    actions = re.findall(r"uses: (?!\./)(.*)", TEXT)
    assert len(actions) > 8
    assert [
        action for action in actions if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action)
    ] == []
    versions: dict[str, set[str]] = {}
    for action in actions:
        versions.setdefault(action.partition("@")[0], set()).add(action)
    assert all(len(found) == 1 for found in versions.values())


@pytest.mark.parametrize("name", ["tests.yml", "release.yml"])
def test_no_script_has_an_expression_in_it(name: str) -> None:
    """The name of a tag would be a part of the script; it comes by the environment."""
    for job in yaml.safe_load((FOLDER / name).read_text("utf-8"))["jobs"].values():
        assert not [step["run"] for step in job.get("steps", ()) if "${{" in step.get("run", "")]
