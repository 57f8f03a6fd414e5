"""The demonstration on a Cortex-M3 keeps its word: weights used where they are flashed, answers as ONNX Runtime's.

Images run in QEMU, which counts instructions; what they are made of is read from their ELF files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import zcrecord
from tools.firmware import images as images_module
from tools.firmware.__main__ import main
from tools.firmware.figures import expected_words, reference
from tools.firmware.images import HERE, MODEL_ADDRESS, Image, Run, build, examine, run
from zcrecord.errors import FormatError, IntegrityError

on_the_board = pytest.mark.needs("make", "arm-none-eabi-gcc", "arm-none-eabi-nm", "qemu-system-arm")

FLASH_END, RAM_START, KIB = 0x00200000, 0x20000000, 1024
IMAGES = ("float", "int8", "runtime")
ALLOCATORS = {"malloc", "calloc", "realloc", "free", "_sbrk", "sbrk", "_malloc_r", "operator new"}
COPIERS = {"memcpy", "memmove", "__aeabi_memcpy", "__aeabi_memcpy4", "__aeabi_memcpy8"}
FLOATING = ("__aeabi_f", "__aeabi_d", "__aeabi_i2f", "__aeabi_ui2f", "__aeabi_l2f", "__aeabi_cf", "__aeabi_cd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything built, once."""
    folder = tmp_path_factory.mktemp("firmware")
    build(folder)
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> Callable[..., Run]:
    """Run an image with an archive, each pair once."""

    @cache
    def once(name: str, archive: str | None = None) -> Run:
        return run(folder / f"{name}.elf", None if archive is None else folder / f"{archive}.zcr")

    return once


@pytest.fixture(scope="module")
def examined(folder: Path) -> dict[str, Image]:
    return {name: examine(folder / f"{name}.elf") for name in IMAGES}


@on_the_board
@pytest.mark.parametrize("name, archive", [("float", None), ("runtime", "digits")])
def test_float_images_classify_as_onnxruntime(ran: Callable[..., Run], name: str, archive: str | None) -> None:
    done, logits = ran(name, archive), reference("digits.onnx")
    assert done.status == 0, done.text[-500:]
    assert len(done.classes) == len(logits) == 360
    np.testing.assert_array_equal(done.classes, logits.argmax(axis=1))
    np.testing.assert_allclose(done.logits.view(np.float32), logits, rtol=1e-4, atol=1e-4)


@on_the_board
def test_int8_image_classifies_every_image_as_onnxruntime_does(ran: Callable[..., Run], folder: Path) -> None:
    done, logits = ran("int8"), reference("digits_int8.onnx")
    assert done.status == 0, done.text[-500:]
    np.testing.assert_array_equal(done.classes, logits.argmax(axis=1))
    # ONNX Runtime rounds twice, to float32 and to an integer: very seldom that is another integer than the nearest.
    off = np.abs(done.logits.astype(np.int64) - expected_words(folder))
    assert off.max() <= 1
    assert np.count_nonzero(off) <= 4


def weights(folder: Path, archive: str) -> dict[str, bytes]:
    """Return the bytes of an archive's tensors by the symbols they have."""
    with zcrecord.load_record(folder / f"{archive}.zcr") as record:
        return {f"{archive}_{name.replace('.', '_').lower()}": array.tobytes() for name, array in record.items()}


@on_the_board
@pytest.mark.parametrize("name, archive, number", [("float", "digits", 7), ("int8", "digits_int8", 6)])
def test_weights_lie_in_flash_alone_and_once(
    folder: Path, examined: dict[str, Image], name: str, archive: str, number: int
) -> None:
    image = examined[name]
    kept = {symbol: data for symbol, data in weights(folder, archive).items() if symbol in image.symbols}
    assert len(kept) == number
    for symbol, data in kept.items():
        entry = image.symbols[symbol]
        assert 0 < entry.address < entry.address + entry.nbytes <= FLASH_END
        assert entry.kind == "R"
        assert image.bytes_of(symbol) == data
        assert len(data) < 40 or image.flash.count(data) == 1


@on_the_board
def test_images_need_less_than_8_kib_of_ram(examined: dict[str, Image], ran: Callable[..., Run]) -> None:
    for name, archive in (("float", None), ("int8", None), ("runtime", "digits")):
        data = examined[name].sections.get(".data")
        assert data is None or data.nbytes == 0
        stack = ran(name, archive).values["stack"]
        assert 64 < stack < 2 * KIB
        assert examined[name].ram > 100
        assert examined[name].ram + stack < 8 * KIB


@on_the_board
def test_no_allocator_copier_or_floating_point_is_linked(examined: dict[str, Image], tmp_path: Path) -> None:
    source = "".join(f"void *{name}(void) {{ return 0; }}\n" for name in ("malloc", "_sbrk", "memcpy"))
    hosted = compiled(tmp_path, source + "int main(void) { return 0; }\n", "-nostdlib", "-ffreestanding", "-Wl,-e,main")
    assert {"malloc", "_sbrk", "memcpy"} <= set(examine(hosted).symbols)  # it would be noticed
    for image in examined.values():
        assert "main" in image.symbols
        assert not (ALLOCATORS | COPIERS) & set(image.symbols)
    floating = {name: {s for s in image.symbols if s.startswith(FLOATING)} for name, image in examined.items()}
    assert {"__aeabi_fmul", "__aeabi_fadd"} <= floating["float"] and not floating["int8"]


@on_the_board
def test_a_write_to_flash_is_a_fault(tmp_path: Path) -> None:
    board = ["-ffreestanding", "-nostdlib", f"-I{HERE}", "-T", str(HERE / "board.ld"), str(HERE / "board.c"), "-lgcc"]
    program = """
        #include "board.h"
        const uint32_t weight = 7;
        uint32_t initialised = 8;
        int main(void) { volatile uint32_t *at = (uint32_t *)(uintptr_t)&weight; %s; return (int)(*at + initialised); }
    """
    reads = compiled(tmp_path, program % "initialised++", *board)
    assert run(reads).status == 16
    writes = compiled(tmp_path, program % "*at = 9", *board)
    assert (run(writes).status, run(writes).text) == (99, "fault\n")


def compiled(folder: Path, source: str, *options: str) -> Path:
    (folder / "program.c").write_text(source, encoding="utf-8")
    command = ["arm-none-eabi-gcc", "-mcpu=cortex-m3", "-mthumb", "-Os", "program.c", *options, "-o", "program.elf"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "program.elf"


@on_the_board
def test_tensors_are_found_where_they_were_flashed(ran: Callable[..., Run], folder: Path) -> None:
    done = ran("runtime", "digits")
    assert done.outcomes == {"open": "OK", "verify": "OK", "digits": "OK"}
    with zcrecord.load_record(folder / "digits.zcr") as record:
        expected = {name: MODEL_ADDRESS + record.info(name).offset for name in record}
    assert done.addresses == expected


@on_the_board
def test_a_tensor_is_found_in_under_5000_instructions_and_opening_takes_as_long_for_1000_as_for_7(
    ran: Callable[..., Run],
) -> None:
    few, many = ran("runtime", "digits"), ran("runtime", "thousand")
    assert many.values["tensors"] == 1000
    assert 100 < many.instructions("find") <= many.instructions("slowest") < 5000
    assert 0.9 < many.instructions("open") / few.instructions("open") < 1.1


@on_the_board
@pytest.mark.parametrize("archive, outcomes", [
    ("bad_index", {"open": "OK", "verify": "INTEGRITY"}), ("bad_name", {"open": "OK", "verify": "FORMAT"}),
    ("bad_header", {"open": "INTEGRITY"}),
])  # fmt: skip
def test_a_damaged_archive_in_flash_is_an_error_code_and_the_program_goes_on(
    ran: Callable[..., Run], folder: Path, archive: str, outcomes: dict[str, str]
) -> None:
    done = ran("runtime", archive)
    assert (done.outcomes, done.status, done.classes) == (outcomes, 1, [])
    assert done.text.endswith("went on without a model\n")
    with pytest.raises(FormatError) as refusal:
        zcrecord.load_record(folder / f"{archive}.zcr")
    assert isinstance(refusal.value, IntegrityError) == ("INTEGRITY" in outcomes.values())


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(images_module, "TOOLS", {"no-such-tool": "its-package"})
    assert main([]) == 1
    line = "tools/firmware: needs no-such-tool; on Debian and Ubuntu: apt-get install its-package\n"
    assert capsys.readouterr().err == line
