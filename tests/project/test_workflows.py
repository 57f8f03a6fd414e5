"""The workflows of GitHub run what README promises, with no more rights than they need."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from guides import RELEASING, ROOT

from tools.generate import manifests
from tools.release import BUILDERS

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
