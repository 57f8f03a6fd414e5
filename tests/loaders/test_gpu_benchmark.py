"""The benchmark for machines that have a GPU names what the machine lacks, and loads the same each way."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import gpu
from tools.bench.harness import OURS, Row

MIB = 1 << 20


@pytest.mark.parametrize("options, reason", [
    ([], r"no GPU: torch \S+ is built .*; nothing was measured\n"),
    (["--device", "cpu", "--gib", "1e9"], r".*MiB free, this needs [\d,]+ MiB; set TMPDIR .*; nothing was measured\n"),
])  # fmt: skip
def test_a_machine_that_is_too_small_is_told_in_one_line(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([*options, "--json", str(tmp_path / "gpu.json")]) == 1
    assert re.fullmatch(reason, capsys.readouterr().err)
    assert not (tmp_path / "gpu.json").exists()


@pytest.mark.slow
@pytest.mark.exhaustive(keep=2)
@pytest.mark.parametrize("way", [*gpu.OWN, gpu.SAFETENSORS])
def test_every_way_loads_the_same_and_a_word_in_another_place_would_be_noticed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "MIB_EACH", 1)
    files = dict(zip(("ours", "theirs"), map(str, gpu._write(tmp_path, 3)), strict=True))
    total = gpu.loaded_sum(way, "cpu", **files)
    assert total == gpu.loaded_sum(OURS, "cpu", **files) > 0
    data = bytearray(Path(files["ours"]).read_bytes())
    data[MIB : MIB + 8] = data[MIB + 4 : MIB + 8] + data[MIB : MIB + 4]
    Path(files["ours"]).write_bytes(data)
    assert total != gpu.loaded_sum(OURS, "cpu", **files)
    for timed in (way, gpu.PINNED, gpu.PLAIN):
        assert gpu.load_seconds(timed, "cpu", **files, nbytes=3 * MIB) > 0


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
    assert f"missing: {gpu.RUNAI}: not installed: pip install no-such-package\n" in capsys.readouterr().out
