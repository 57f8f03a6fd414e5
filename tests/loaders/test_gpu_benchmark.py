"""The benchmark for machines that have a GPU: what it lacks is named, and each way loads the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import gpu
from tools.bench.cold import cached_fraction
from tools.bench.harness import OURS, Row

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The archive and the file of safetensors, of three tensors of 1 MiB."""
    monkeypatch.setattr(gpu, "MIB_EACH", 1)
    return dict(zip(("ours", "theirs"), map(str, gpu._write(tmp_path, 3)), strict=True))


def test_without_a_gpu_it_says_in_one_line_why_nothing_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.json"
    assert gpu.main(["--json", str(out)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(r"no GPU: torch \S+ is built .*; nothing was measured\n", told.err)
    assert not out.exists()


def test_a_disk_that_is_too_small_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--device", "cpu", "--gib", "1e9"]) == 1
    assert re.search(r"MiB free, this needs [\d,]+ MiB; set TMPDIR .*; nothing was measured\n", capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", [*gpu.OWN, gpu.SAFETENSORS])
def test_every_way_loads_the_same_and_a_word_in_another_place_would_be_noticed(way: str, files: dict[str, str]) -> None:
    told = gpu.loaded_sum(way, "cpu", **files)
    assert told == gpu.loaded_sum(OURS, "cpu", **files) > 0
    data = bytearray(Path(files["ours"]).read_bytes())
    data[MIB : MIB + 8] = data[MIB + 4 : MIB + 8] + data[MIB : MIB + 4]
    Path(files["ours"]).write_bytes(data)
    assert told != gpu.loaded_sum(OURS, "cpu", **files)
    assert gpu.load_seconds(way, "cpu", **files, nbytes=3 * MIB) > 0
    assert gpu.load_seconds(gpu.PINNED, "cpu", **files, nbytes=3 * MIB) > 0
    assert gpu.load_seconds(gpu.PLAIN, "cpu", **files, nbytes=3 * MIB) > 0


def test_packages_that_are_not_installed_are_missing_in_the_result_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "PEERS", {gpu.SAFETENSORS: "safetensors", gpu.RUNAI: "no-such-package"})
    found = gpu._Findings()
    assert list(gpu._installed(found)) == [gpu.SAFETENSORS]
    assert found.missing == {gpu.RUNAI: "not installed: pip install no-such-package"}


def test_onnx_runtime_without_the_provider_is_missing_in_the_result() -> None:
    assert gpu._no_provider("CPUExecutionProvider") is None
    what = r"onnxruntime \S+ has only .*CPUExecutionProvider: pip install onnxruntime-gpu in its place"
    assert re.fullmatch(what, str(gpu._no_provider("CUDAExecutionProvider")))


@pytest.mark.slow
def test_a_way_that_fails_is_named_with_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    found = gpu._Findings()
    assert gpu._asked(found, "this way", "load_seconds", way=OURS, device="no", ours="", theirs="", nbytes=0) is None
    assert re.match("RuntimeError: .*device", found.failed["this way"])
    assert "Traceback" in capfd.readouterr().err


def test_a_load_is_told_as_cold_only_if_nothing_was_left_in_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "half").open("wb") as file:
        file.write(bytes(MIB))
        file.truncate(2 * MIB)  # the rest was never read
    assert cached_fraction(str(tmp_path / "half")) == 0.5
    given = {"device": "cpu", "ours": "", "theirs": ""}
    for left in (0.0, 0.5):
        monkeypatch.setattr(gpu, "_asked", lambda *_, left=left, **__: {"cached": left, "seconds": 2.0})
        found = gpu._Findings()
        rows = list(gpu._cold(found, [gpu.PLAIN, OURS, gpu.SAFETENSORS], given, 4_000_000_000))
        assert [row.work for row in rows] == ([] if left else ["4.0 GB to cpu, cold"] * 2)
        assert found.missing.get("cold files", "").startswith("50.0% of one" if left else "")
        if rows:
            assert rows[0].extra["gigabytes_per_second"] == {gpu.PLAIN: 2, OURS: 2, gpu.SAFETENSORS: 2}
            assert rows[1].values == {OURS: 2, gpu.SAFETENSORS: 2}


@pytest.mark.exhaustive(keep=0)
def test_a_run_writes_a_result_of_the_form_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"MIB_EACH": 1, "TURNS": 1, "COLD_TURNS": 1, "OWN": (OURS,)}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "PEERS", {gpu.SAFETENSORS: "safetensors", gpu.RUNAI: "no-such-package"})
    out = tmp_path / "gpu.json"
    assert gpu.main(["--device", "cpu", "--gib", "0.003", "--json", str(out)]) == 0
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    assert set(result) == {"quick", "machine", "versions", "rows", "missing", "failed"}
    assert result["quick"]
    assert result["missing"].pop("cold files", None) is None or "tmpfs" in result["machine"]["file_system"]
    assert (list(result["missing"]), result["failed"]) == ([gpu.RUNAI], {})
    rows = [Row.from_json(row) for row in result["rows"]]
    warm = [row for row in rows if row.work.endswith(", warm")]
    assert [row.promise.peer for row in warm if row.promise] == [gpu.PINNED, gpu.SAFETENSORS]
    assert {gpu.PINNED, OURS, gpu.SAFETENSORS} == set(warm[0].extra["gigabytes_per_second"])
    assert {OURS, gpu.FILLED, gpu.ONNX} == set(rows[-1].values)
    told = capsys.readouterr().out
    assert f"missing: {gpu.RUNAI}: not installed: pip install no-such-package\n" in told
