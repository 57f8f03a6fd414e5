"""Engines run the guide's recipes: a killed worker loses nothing, a second run converts nothing, bytes are equal."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import pytest
from guides import ROOT

from tools.bench.fleet import FLAG, convert_or_die, write_models
from tools.worker import call_alone
from zcrecord.fleet import convert_one, plan

GUIDE = ROOT / "zcrecord" / "fleet" / "README.md"
COUNT = 20  # of which one is truncated


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every archive below a folder, by its path from there."""
    found = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.zcr")}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(found.items())}


def recipe(engine: str) -> str:
    """Return the program that the guide has for an engine."""
    found = re.search(
        rf"^\*\*{engine}\.\*\*.*?^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    return found[1]


@pytest.mark.skipif(os.name != "posix", reason="platform: SIGKILL")
@pytest.mark.exhaustive(keep=0)
def test_engines_lose_nothing_and_write_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = sorted(write_models(tmp_path / "models", COUNT, 1))
    jobs = plan(tmp_path / "models", tmp_path / "pool", durable=False)
    monkeypatch.setenv(FLAG, str(tmp_path / "killed"))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(convert_or_die, job) for job in jobs]
        assert any(isinstance(future.exception(), BrokenProcessPool) for future in futures)
    done = [job.dest for job in jobs if os.path.exists(job.dest)]
    assert 0 < len(done) < len(whole)
    assert [path for path in (tmp_path / "pool").rglob(".*") if path.name.endswith(".zcr-scratch")]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        outcomes = list(pool.map(convert_one, jobs))
    assert {o.job.dest for o in outcomes if o.state == "kept"} == set(done)
    assert [o.state for o in outcomes].count("refused") == 1
    assert list(digests(tmp_path / "pool")) == whole
    assert not list((tmp_path / "pool").rglob(".*"))

    arguments = {"source": str(tmp_path / "models"), "options": {}, "flag": str(tmp_path / "killed-by-dask")}
    told = call_alone("tools.bench.fleet:with_dask", dest=str(tmp_path / "dask"), **arguments)
    assert (tmp_path / "killed-by-dask").exists()
    kept = ["kept"] * told["states"].count("kept")  # converted, and run again: the outcome died with the worker
    assert sorted(told["states"]) == ["converted"] * (len(whole) - len(kept)) + kept + ["refused"]
    assert digests(tmp_path / "dask") == digests(tmp_path / "pool")

    program = recipe("Dask").replace("s3://bucket/models", f"{tmp_path}/models")
    program = program.replace("s3://bucket/archives", f"{tmp_path}/dask") + "    print(*[o.state for o in outcomes])\n"
    (tmp_path / "recipe.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, tmp_path / "recipe.py"], capture_output=True, text=True, env=environment)
    assert sorted(ran.stdout.split()) == ["kept"] * len(whole) + ["refused"], ran.stderr
