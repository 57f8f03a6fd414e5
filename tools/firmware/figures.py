"""Sizes of the images, and comparison of their answers with ONNX Runtime's, as figures for tables and benchmarks.

Knows what is compared with what. How images are built and run is left to `images`, their input to `archives`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import zcrecord
from tools.firmware.archives import DATA
from tools.firmware.images import Image, Run, build, examine, run

BAD = ("bad_index", "bad_name", "bad_header")
TEST_DATA = "heldout_images"  # in flash beside the model, of which it is no part


def reference(model: str) -> npt.NDArray[np.float32]:
    """Return ONNX Runtime's logits of the held-out images, by a model of `tests/data`."""
    import onnxruntime

    session = onnxruntime.InferenceSession(DATA / model, providers=["CPUExecutionProvider"])
    with np.load(DATA / "digits_heldout.npz") as heldout:
        pixels = heldout["images"].reshape(-1, 64).astype(np.float32)
    logits: npt.NDArray[np.float32] = session.run(None, {"pixels": pixels})[0]
    return logits


def expected_words(folder: Path) -> npt.NDArray[np.uint32]:
    """Return the logits that ONNX Runtime computes of the quantized model, as the uint8 values they had before."""
    with zcrecord.load_record(folder / "digits_int8.zcr") as record:
        steps = reference("digits_int8.onnx") / record["logits_scale"]
        return np.asarray(np.rint(steps) + record["logits_zero_point"]).astype(np.uint32)


def measure(folder: Path) -> dict[str, dict[str, Any]]:
    """Build and run everything in a folder, and return the figures of each image.

    Bytes of flash are without the held-out images; those of runtime.elf are with the archive that it opens.
    Instructions are the mean of 360 images.

    Raises:
        FirmwareError: A tool is missing or failed.
    """
    build(folder)
    images = {name: examine(folder / f"{name}.elf") for name in ("float", "int8", "runtime")}
    digits = folder / "digits.zcr"
    runs = {
        "float": run(folder / "float.elf"),
        "int8": run(folder / "int8.elf"),
        "runtime": run(folder / "runtime.elf", digits),
    }
    logits = {"float": reference("digits.onnx"), "int8": reference("digits_int8.onnx")}
    logits["runtime"] = logits["float"]
    figures = {name: _figures(image, runs[name], logits[name]) for name, image in images.items()}
    figures["int8"]["logits_that_differ"] = int((runs["int8"].logits != expected_words(folder)).sum())
    figures["float"]["largest_difference"] = float(
        np.abs(runs["float"].logits.view(np.float32) - logits["float"]).max()
    )
    figures["runtime"]["flash"] += digits.stat().st_size
    figures["runtime"]["archive"] = digits.stat().st_size
    figures["runtime"] |= _reading(runs["runtime"], run(folder / "runtime16k.elf", folder / "thousand.zcr"))
    for name in BAD:
        figures["runtime"][name] = _told(run(folder / "runtime.elf", folder / f"{name}.zcr"))
    return figures


def _told(ran: Run) -> str:
    """Return how far an archive came: `open OK, verify FORMAT (R38)`."""
    rules = {what: f" (R{status})" for what, status in ran.statuses.items() if 0 < status < 128}
    return ", ".join(f"{what} {kind}{rules.get(what, '')}" for what, kind in ran.outcomes.items())


def _figures(image: Image, ran: Run, logits: npt.NDArray[np.float32]) -> dict[str, Any]:
    test_data = image.symbols[TEST_DATA].nbytes
    return {
        "flash": len(image.flash) - test_data,
        "code": image.sections[".text"].nbytes,
        "ram": image.ram,
        "stack": ran.values["stack"],
        "instructions_per_inference": round(ran.instructions("inference")),
        "images": len(ran.classes),
        "equal_classes": int((np.array(ran.classes) == logits.argmax(axis=1)).sum()),
    }


def _reading(digits: Run, thousand: Run) -> dict[str, int]:
    """Return the instructions that opening, verifying and finding take, in both archives."""
    return {
        "open": round(digits.instructions("open")),
        "verify": round(digits.instructions("verify")),
        "find": round(digits.instructions("find")),
        "verify_1000": round(thousand.instructions("verify")),
        "find_1000": round(thousand.instructions("find")),
        "find_1000_slowest": round(thousand.instructions("slowest")),
    }
