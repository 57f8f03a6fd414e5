"""A tuned graph runs where ONNX Runtime, machine and CPU features equal those it was made for, and nowhere else."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from onnx_graphs import PACKS, conv, converted_in, graph_model, value
from other_processors import run_on_processor

from zcrecord.errors import FormatError
from zcrecord.onnx import session, tuning
from zcrecord.onnx import target as targets
from zcrecord.onnx.target import CONVENTION, TuningTarget, this_target

AVX2 = ["avx", "avx2", "f16c", "fma", "pni", "sse2", "sse4_1", "ssse3"]
AVX512 = sorted([*AVX2, "avx512_vnni", "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"])
MADE = TuningTarget("1.32.0", "fab30a4-00000000", "CPUExecutionProvider", "linux-x86_64", tuple(AVX512), 16)

X86_PROCESSOR = """processor	: {number}
vendor_id	: GenuineIntel
cpu family	: 6
model		: {model}
model name	: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
cpu MHz		: {mhz}
flags		: fpu vme de pse tsc msr {flags} hypervisor
bugs		: spectre_v1
power management:

"""
ARM_PROCESSOR = """processor	: {number}
BogoMIPS	: 2000.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp {more}
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: {part}
CPU revision	: 1

"""
RISCV = "processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdcv{long}\nmmu\t\t: sv39\nuarch\t\t: thead,c910\n\n"


def x86(*flags: str, processors: int = 2, model: int = 143) -> str:
    """The text of /proc/cpuinfo."""
    each = [X86_PROCESSOR.format(number=n, model=model, mhz=2000 + n, flags=" ".join(flags)) for n in range(processors)]
    return "".join(each)


def arm(*parts: str, more: str = "") -> str:
    each = [ARM_PROCESSOR.format(number=n, part=part, more=more) for n, part in enumerate(parts)]
    return "".join(each)


def features(machine: str, cpuinfo: str, table: dict[str, bool] | None = None, name: str = "") -> list[str]:
    return list(targets._cpu_features(machine, cpuinfo, table or {}, name))


def test_flags_that_no_kernel_looks_at_are_left_out_and_the_rest_are_sorted() -> None:
    assert features("x86_64", x86(*reversed(AVX512), "rdrand", "avx512_bitalg", "sha_ni")) == AVX512


def test_a_processor_whose_unlisted_features_could_differ_counts_by_its_model() -> None:
    found = features("x86_64", x86(*AVX512, "avx_vnni", "amx_tile", "amx_int8"))
    assert {"avx_vnni", "amx_tile", "amx_int8", "model:GenuineIntel-6-143"} <= set(found)
    assert features("x86_64", x86(*AVX2, "avx_vnni", model=198)) != features("x86_64", x86(*AVX2, "avx_vnni"))
    assert features("x86_64", x86(*AVX2, model=63)) == features("x86_64", x86(*AVX2, model=79)), "these have no such"


def test_a_feature_counts_only_if_every_core_has_it() -> None:
    assert features("x86_64", x86(*AVX512) + x86(*AVX2, model=151)) == AVX2


def test_an_emulated_processor_has_the_features_that_numpy_finds() -> None:
    table = {"SSE2": True, "AVX": True, "AVX2": True, "FMA3": True, "AVX512F": False, "AVX512BF16": False}
    assert features("x86_64", x86(*AVX512, "amx_tile"), table) == ["avx", "avx2", "emulation", "fma", "sse2"]
    same = {"AVX2": True, "AVX512F": True, "AVX512FP16": False, "VSX": False}
    assert features("x86_64", x86(*AVX512), same) == AVX512


def test_on_arm_every_part_counts_beside_the_features() -> None:
    found = features("aarch64", arm("0xd40", "0xd40", "0xd8e", more="i8mm bf16 sve rng"))
    flags = ["asimd", "asimddp", "asimdhp", "bf16", "fphp", "i8mm", "sve"]
    assert found == sorted([*flags, "part:0x41-0xd40", "part:0x41-0xd8e"])
    assert features("aarch64", arm("0xd49")) != features("aarch64", arm("0xd0c"))


def test_of_other_processors_all_that_the_system_tells_counts() -> None:
    short, long = features("riscv64", RISCV.format(long="")), features("riscv64", RISCV.format(long="_zicbom" * 50))
    assert short == ["model:rv64imafdcv", "model:thead,c910"]
    assert long != features("riscv64", RISCV.format(long="_zicbom" * 49 + "_zicboz")), "also at the end of a long line"
    assert max(map(len, long)) <= 100


def test_without_proc_cpuinfo_numpys_table_and_the_processors_name_count() -> None:
    table = {"AVX2": True, "FMA3": True, "AVX512F": False, "NEON": False}
    name = "Intel64 Family 6 Model 85 Stepping 7, GenuineIntel"
    assert features("AMD64", "", table, name) == ["avx2", "fma", f"model:{name}"]
    assert features("arm64", "", {"ASIMD": True, "ASIMDDP": True}, "Apple M4") == ["asimd", "asimddp", "model:Apple M4"]


def test_a_mac_that_does_not_name_its_processor_has_the_name_that_python_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "processor", lambda: "arm")
    for told, name in (("Apple M4\n", "Apple M4"), ("", "arm")):
        answer = subprocess.CompletedProcess([], int(not told), told)
        monkeypatch.setattr(subprocess, "run", lambda *_, answer=answer, **__: answer)
        assert targets._processor_name() == name


def test_the_blocks_of_channels_are_those_that_onnxruntime_makes(tmp_path: Path) -> None:
    channels = 100  # of which any size of blocks fills up the last
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"])]
    model = graph_model(nodes, [value("x", 1, 4, 8, 8)], [value("y")], {"w": np.ones((channels, 4, 3, 3), "f4")})
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    blocked = onnx.load(tmp_path / "optimised.onnx").graph
    block = this_target(ort).nchwc_block
    assert block in (0, 8, 16)
    assert bool(block) == any(node.domain == "com.microsoft.nchwc" for node in blocked.node)
    assert blocked.initializer[0].dims[0] == (channels + block - 1) // block * block if block else channels


def test_an_onnxruntime_without_blocks_or_a_described_build_has_a_target_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert onnx.load_from_string(targets._REORDER).graph.node[0].op_type == "ReorderInput"
    with monkeypatch.context() as patch:
        patch.setattr(targets, "_REORDER", targets._REORDER.replace(b"Reorder", b"Rewrite"))
        targets._nchwc_block.cache_clear()
        without = this_target(ort)
    targets._nchwc_block.cache_clear()  # what is asked for next is remembered for all later tests
    assert without.nchwc_block == 0
    assert TuningTarget.decode(without.encode()) == without
    monkeypatch.delattr(ort, "get_build_info")
    assert this_target(ort).build == "unknown"


@pytest.mark.parametrize("change, sentence", [
    ({"onnxruntime": "1.31.0"}, "made for onnxruntime 1.32.0, this is 1.31.0"),
    ({"build": "unknown"}, "made for build fab30a4-00000000 of onnxruntime 1.32.0, this is unknown"),
    ({"machine": "linux-aarch64"}, "made for linux-x86_64, this is linux-aarch64"),
    ({"provider": "CUDAExecutionProvider"}, "made for CPUExecutionProvider, this is CUDAExecutionProvider"),
    ({"nchwc_block": 8}, "made for blocks of 16 channels in convolutions, here they have 8"),
    ({"convention": 2}, "made by convention 1 of tuning, this zcrecord has 2"),
    ({"cpu": tuple(AVX2)}, "the CPU lacks avx512_vnni, avx512bw, avx512cd, avx512dq, avx512f, avx512vl"),
    ({"cpu": ("amx_int8", "amx_tile", *AVX512)}, "the CPU has amx_int8, amx_tile"),
    ({"cpu": ("amx_int8", *AVX512[:-1])}, "the CPU lacks ssse3, and the CPU has amx_int8"),
])  # fmt: skip
def test_a_misfit_is_told_in_a_sentence(change: dict[str, Any], sentence: str) -> None:
    assert MADE.misfit(replace(MADE, **change)) == sentence


def test_the_target_of_a_later_convention_is_read_and_fits_nowhere_here() -> None:
    later = TuningTarget.decode(replace(MADE, convention=CONVENTION + 1).encode())
    assert later.misfit(MADE) == "made by convention 2 of tuning, this zcrecord has 1"


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(MADE.encode()), **fields}, sort_keys=True, separators=(",", ":"))


@pytest.mark.parametrize("text, why", [
    ("", "is not JSON"),
    ("[" * 8000, "is not JSON"),
    ("[" * 8193, "has 8193 characters, at most 8192 are allowed"),
    ("null", "does not have exactly the fields"),
    (changed(more=1), "does not have exactly the fields"),
    (changed(convention=True), "a convention that is no number"),
    (changed(convention=0), "a convention that is no number"),
    (changed(convention=1.0), "a convention that is no number"),
    (changed(nchwc_block=-1), "a nchwc_block that is no number"),
    (changed(onnxruntime=132), "characters as onnxruntime"),
    (changed(build=""), "characters as build"),
    (changed(cpu="avx"), "no list of at most 256 features"),
    (changed(cpu=[f"{n:03}" for n in range(257)]), "no list of at most 256 features"),
    (changed(cpu=["avx", 1]), "a CPU feature that is not"),
    (changed(cpu=["avx\x1b[31m"]), "a CPU feature that is not"),
    (changed(cpu=["sse2", "avx"]), "not sorted, or twice"),
    (changed(cpu=["avx", "avx"]), "not sorted, or twice"),
    (MADE.encode() + " ", "not written as"),
    (MADE.encode().replace("linux", "\\u006cinux"), "not written as"),
    (MADE.encode().replace("{", '{"build":"other",', 1), "not written as"),
])  # fmt: skip
def test_a_damaged_target_is_refused(text: str, why: str) -> None:
    with pytest.raises(FormatError, match=why) as caught:
        TuningTarget.decode(text)
    assert "tune it again" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_no_changed_character_is_taken_for_the_target_it_was() -> None:
    text = MADE.encode()
    for place in range(len(text)):
        damaged = text[:place] + ("X" if text[place] != "X" else "Y") + text[place + 1 :]
        try:
            found = TuningTarget.decode(damaged)
        except FormatError:
            continue
        assert found.misfit(MADE) is not None, f"character {place} does not count"


# Sessions on two processors.

# The reason why an archive's tuned part is not used, and whether the answers are right, compared on the same processor.
ANSWERS = """
from pathlib import Path
import numpy as np
import onnxruntime
from zcrecord import load_record
from zcrecord.onnx import session, tuning

def answered(onnx, archive):
    feed = {"x": np.random.default_rng(0).standard_normal((1, 3, 8, 8), dtype=np.float32)}
    plain = onnxruntime.InferenceSession(onnx, providers=["CPUExecutionProvider"])
    untuned = session(load_record(Path(archive).read_bytes()))  # of bytes a tuned part is never used
    made = session(archive)
    found, answer = tuning(made), made.run(None, feed)[0]
    return found.reason, np.array_equal(answer, (plain if found.used else untuned).run(None, feed)[0])
"""
THERE = """
import json, logging, sys
from zcrecord.onnx import tune
from zcrecord.onnx.target import this_target

logging.getLogger("zcrecord").setLevel("ERROR")  # of that process
before = answered(*sys.argv[1:])
tune(sys.argv[2])
print(json.dumps([this_target(onnxruntime).encode(), before, answered(*sys.argv[1:])]))
"""
exec(ANSWERS, here := dict[str, Any]())


@pytest.mark.needs("qemu-x86_64")
def test_an_archive_tuned_here_answers_right_on_another_processor_and_may_be_tuned_for_both(tmp_path: Path) -> None:
    archive = str(converted_in(tmp_path, conv(), tuned=True))
    model = str(tmp_path / "model.onnx")
    told, before, after = json.loads(run_on_processor(ANSWERS + THERE, model, archive))
    ours, theirs = this_target(ort), TuningTarget.decode(told)
    assert set(theirs.cpu) <= {"emulation", "pni", "sse2", "sse4_1", "ssse3"}, "of that processor alone"
    assert before == [ours.misfit(theirs), True], "blocks of channels of another size would answer wrong"
    for reason, as_the_onnx in (after, here["answered"](model, archive)):
        assert reason is None and (as_the_onnx or not PACKS)
    assert set(tuning(session(archive)).targets) == {ours.encode(), theirs.encode()}
