"""The tools keep their word: the models they make, what they measure, and the table that README shows."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

import zcrecord
from tools.bench.__main__ import AREAS, README, RESULTS
from tools.bench.__main__ import main as bench
from tools.bench.harness import OURS, Promise, Row
from tools.bench.sparse import write_holes
from tools.bench.table import BEGIN, END, markdown, readme_matches, readme_with_table
from tools.measure import MIB, memory, peak_rss
from tools.models import gpt
from tools.worker import ROOT, Worker, WorkerError, call_alone

DATA = ROOT / "tests" / "data"
# Of every weight of the 1 MiB model, in order. Another value means that the same size no longer gives the same bytes.
GPT_WEIGHTS_SHA256 = "38ca47b5b76bf5a992f4629917d0df280807ae6769cc03b10981f62cfa7541ae"

linux = pytest.mark.skipif(sys.platform != "linux", reason="platform: /proc/PID/smaps_rollup is Linux's")
posix = pytest.mark.skipif(os.name != "posix", reason="platform: signals and bash scripts")


class Pipe(io.BytesIO):
    """A sink that cannot seek, and remembers the largest single write."""

    largest = 0

    def seekable(self) -> bool:
        return False

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("seek")

    def write(self, data: Any) -> int:
        self.largest = max(self.largest, memoryview(data).nbytes)
        return super().write(data)


def gpt_bytes(mib: int) -> bytes:
    pipe = Pipe()
    gpt.write_gpt(pipe, mib)
    return pipe.getvalue()


@pytest.fixture(scope="module")
def small_gpt() -> bytes:
    return gpt_bytes(1)


def test_gpt_model_passes_the_checker(small_gpt: bytes) -> None:
    onnx.checker.check_model(onnx.load_from_string(small_gpt), full_check=True)


def test_gpt_model_answers_with_finite_logits_that_depend_on_earlier_tokens_only(small_gpt: bytes) -> None:
    session = onnxruntime.InferenceSession(small_gpt, providers=["CPUExecutionProvider"])
    vocabulary = gpt.plan(1).vocabulary
    tokens = np.random.default_rng(0).integers(0, vocabulary, (3, 9))
    (logits,) = session.run(None, {"input_ids": tokens})
    (shorter,) = session.run(None, {"input_ids": tokens[:, :5]})
    assert logits.shape == (3, 9, vocabulary)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1
    np.testing.assert_allclose(logits[:, :5], shorter, atol=1e-4)


def test_gpt_model_of_one_size_has_the_same_bytes_every_time(small_gpt: bytes) -> None:
    assert gpt_bytes(1) == small_gpt
    digest = hashlib.sha256()
    for tensor in onnx.load_from_string(small_gpt).graph.initializer:
        digest.update(tensor.raw_data)
    assert digest.hexdigest() == GPT_WEIGHTS_SHA256


def test_gpt_model_has_no_two_equal_weights_and_the_size_asked_for() -> None:
    weights = [t.raw_data for t in onnx.load_from_string(gpt_bytes(8)).graph.initializer if t.raw_data]
    assert len(set(weights)) == len(weights) > 30
    assert 0.99 * 8 * MIB < sum(map(len, weights)) <= 8 * MIB


def test_gpt_model_is_written_in_chunks_to_what_cannot_seek() -> None:
    pipe = Pipe()
    gpt.write_gpt(pipe, 16)
    assert pipe.largest <= 4 * MIB


@pytest.mark.parametrize("mib", [0, 1901])
def test_gpt_model_of_a_size_that_protobuf_cannot_hold_is_refused(mib: int, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        gpt.main(["--mib", str(mib), "-"])
    assert f"size {mib} MiB is not from 1 to 1900" in capsys.readouterr().err


def test_digits_model_is_small_and_classifies_the_held_out_images() -> None:
    assert (DATA / "digits.onnx").stat().st_size <= MIB
    with np.load(DATA / "digits_heldout.npz") as held_out:
        images, labels = held_out["images"], held_out["labels"]
    assert images.shape == (360, 8, 8)
    assert images.dtype == labels.dtype == np.uint8
    session = onnxruntime.InferenceSession(DATA / "digits.onnx", providers=["CPUExecutionProvider"])
    (logits,) = session.run(None, {"pixels": images.reshape(-1, 64).astype(np.float32)})
    assert (logits.argmax(axis=1) == labels).mean() >= 0.95


def test_digits_model_names_its_weights_as_an_exporter_would() -> None:
    names = {t.name for t in onnx.load(DATA / "digits.onnx").graph.initializer}
    assert {"features.0.weight", "features.0.bias", "features.2.weight", "classifier.weight"} <= names


# -- what is measured ------------------------------------------------------------------------------------------------


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


@linux
def test_memory_of_a_process_adds_up() -> None:
    held = np.ones(4 * MIB)
    now = memory()
    assert now is not None
    assert now.pss is not None
    assert now.private is not None
    assert now.file_backed is not None
    assert held.nbytes < now.private < now.rss
    assert now.private + now.file_backed == now.rss
    assert now.pss <= now.rss


@linux
def test_peak_memory_is_the_child_s_own_and_notices_what_it_held(tmp_path: Path) -> None:
    held = np.ones(64 * MIB)  # 512 MiB: getrusage would have the child inherit them
    source = tmp_path / "gpt.onnx"
    source.write_bytes(gpt_bytes(64))
    own, peak = peak_rss(), call_alone("tools.serving:onnx_load", source=str(source))["peak_rss"]
    assert own is not None
    assert own > held.nbytes
    assert 64 * MIB < peak < held.nbytes


def test_worker_tells_what_went_wrong_in_it(capfd: Any) -> None:
    with Worker() as worker:
        with pytest.raises(WorkerError, match=r"FileNotFoundError: .*no-such-file"):
            worker.call("tools.serving:onnx_load", source="no-such-file")
        assert worker.call("tools.measure:free_bytes", folder=".") > 0
    assert "Traceback" in capfd.readouterr().err


def test_worker_that_dies_is_noticed() -> None:
    with Worker() as worker, pytest.raises(WorkerError, match="ended with status"):
        worker.call("os:_exit", status=3)


def test_archive_of_holes_is_what_save_record_would_write(tmp_path: Path) -> None:
    write_holes(tmp_path / "holes.zcr", 10_000_000)
    with zcrecord.load_record(tmp_path / "holes.zcr", verify="full") as holes:
        record = {name: np.zeros(view.shape, view.dtype) for name, view in holes.items()}
    zcrecord.save_record(record, tmp_path / "zeros.zcr", digest="none")
    assert (tmp_path / "zeros.zcr").read_bytes() == (tmp_path / "holes.zcr").read_bytes()


@linux
def test_archive_of_holes_takes_no_disk(tmp_path: Path) -> None:
    write_holes(tmp_path / "holes.zcr", 1 << 30)
    status = (tmp_path / "holes.zcr").stat()
    assert status.st_size > 1 << 30
    assert status.st_blocks * 512 < 4 * MIB  # the index, and what rounds each payload up to a page


@linux
def test_producing_a_record_holds_one_chunk_and_holding_all_would_be_noticed(tmp_path: Path) -> None:
    target, arguments = "tools.bench.exchange:produce", {"path": str(tmp_path / "m.zcr"), "mib": 128}
    assert call_alone(target, **arguments)["growth"] < 32 * MIB
    assert call_alone(target, **arguments, keep=True)["growth"] > 96 * MIB


# -- the benchmarks' results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("promise", "ours", "peer", "reached"),
    [
        (Promise("faster", 5, "peer"), 1.0, 5.0, True),
        (Promise("faster", 5, "peer"), 1.0, 4.9, False),
        (Promise("within", 1.1, "peer"), 1.1, 1.0, True),
        (Promise("within", 1.1, "peer"), 1.2, 1.0, False),
        (Promise("under", 4), 3.9, 0.0, True),
        (Promise("under", 4), 4.0, 9.0, False),
    ],
)
def test_promise_knows_whether_it_was_kept(promise: Promise, ours: float, peer: float, reached: bool) -> None:
    row = Row("area", "some work", "s", {OURS: ours, "peer": peer}, promise)
    assert promise.reached(row.values) is reached
    assert row.as_json()["reached"] is reached
    assert Row.from_json(json.loads(json.dumps(row.as_json()))) == row


def results_of(*rows: Row) -> dict[str, Any]:
    machine = {"date": "2026-01-01", "cpu": "some CPU", "cores": 2, "memory_mib": 2048, "file_system": "ext4"}
    return {"machine": machine, "versions": {"python": "3.11"}, "rows": [row.as_json() for row in rows]}


def test_table_says_what_was_missed_and_where_a_peer_wins() -> None:
    row = Row("area", "some work", "s", {OURS: 0.25, "peer": 0.5, "rival": 0.1}, Promise("faster", 5, "peer"))
    text = markdown(results_of(row))
    assert "| some work | 250 ms | peer 500 ms, rival 100 ms | 2.0x faster | 5x faster | **no** |" in text
    assert "- some work: rival 100 ms, zcrecord 250 ms\n" in text


def test_table_replaces_only_what_is_between_the_markers() -> None:
    results = results_of(Row("area", "some work", "s", {OURS: 1.0, "peer": 2.0}))
    readme = f"# Title\n{BEGIN}\nold\n{END}\nrest\n"
    made = readme_with_table(readme, results)
    assert made.startswith(f"# Title\n{BEGIN}\n| work")
    assert made.endswith(f"{END}\nrest\n")
    assert "old" not in made
    assert readme_with_table(made, results) == made
    with pytest.raises(ValueError, match=r"README\.md has no lines"):
        readme_with_table("# Title\n", results)


def test_readme_shows_the_table_of_the_results_file() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert not results["quick"]
    assert {row["area"] for row in results["rows"]} == set(AREAS)
    assert readme_matches(README, results), "run: python -m tools.bench --readme"


@linux
@pytest.mark.parametrize("area", AREAS)
def test_benchmark_runs_at_a_small_size_and_leaves_no_files(
    area: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    out = tmp_path / "results.json"
    assert bench(["--quick", "--only", area, "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert results["quick"]
    assert results["rows"]
    assert markdown(results)
    assert list(scratch.iterdir()) == []


# -- the entry scripts -----------------------------------------------------------------------------------------------


def quickstart(scratch: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch)}
    command = [sys.executable, "-m", "tools.quickstart", *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)


def test_quickstart_shows_both_acts_and_leaves_no_files(tmp_path: Path) -> None:
    with quickstart(tmp_path, "--mib", "4") as process:
        told, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    for expected in (
        "97.2% of 360 held-out images right",
        "features.0.weight",
        "4 processes serve it",
        "What it saved",
    ):
        assert expected in told
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_quickstart_that_is_interrupted_leaves_no_files(number: int, status: int, tmp_path: Path) -> None:
    with quickstart(tmp_path, "--mib", "256") as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("*/gpt.onnx")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == status
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize("script", ["quickstart", "test"])
def test_entry_script_without_a_python_says_so_in_one_line(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": str(tmp_path / "python3")}
    done = subprocess.run([ROOT / "tools" / script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"tools/{script}: needs Python 3.11 or later")
    assert done.stderr.count("\n") == 1
