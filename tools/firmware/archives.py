"""Make the archives that the firmware images hold or open.

    python -m tools.firmware.archives FOLDER

Knows what each is for and how a QDQ model's scales become integers. What an archive is, is left to zcrecord.

    digits         the classifier, converted from ONNX
    digits_int8    its quantized form, likewise
    heldout        the images to classify, and their labels, converted from npz
    fixed          the scales of digits_int8 as integers
    thousand       1,000 tiny tensors, to measure how long it takes to find one
    bad_index      digits with one byte of a tensor's name changed
    bad_name       the same with both CRCs put right again, so that nothing else is wrong
    bad_header     digits with one byte of its header changed
"""

from __future__ import annotations

import math
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from zcrecord.codec.layout import HEADER_SIZE, decode_header
from zcrecord.onnx import convert

DATA = Path(__file__).resolve().parents[2] / "tests" / "data"
# The scale of what comes into each layer is that of what comes out of the one before.
LAYERS = {"features.0": "features.0/relu", "features.2": "features.2/relu", "classifier": "logits"}
GREY_VALUES = 17  # a pixel is from 0 to 16
CHANGED_NAME = b"scale\0"
ALIGNMENT = 16  # this processor has neither cache lines nor vectors, and flash to save
MANTISSA_BITS = 24  # of a float32: its value is a multiplier of that many bits, divided by a power of two


def multiplier_and_shift(scale: np.float32) -> tuple[int, int]:
    """Return integers with multiplier / 2**shift == scale, exactly.

    Raises:
        ValueError: no shift from 1 to 62, which a 64-bit product can be shifted by, does that.
    """
    fraction, exponent = math.frexp(float(scale))
    multiplier, shift = int(fraction * (1 << MANTISSA_BITS)), MANTISSA_BITS - exponent
    if not 1 <= shift <= 62 or multiplier <= 0:
        raise ValueError(f"scale {scale!r}: expected a number above 2**-38 and below 2**23")
    return multiplier, shift


def fixed_point(record: zcrecord.Record) -> dict[str, Any]:
    """Return a QDQ model's scales as the device needs them: each layer's multiplier, shift and zero point; the greys.

    A layer's sums, of products of uint8 and int8, have the scale input x weight; ONNX Runtime multiplies them by
    input * weight / output, computed in float32 as here, and rounds to even. The pixels' own scaling is a table.
    """
    greys = np.arange(GREY_VALUES, dtype=np.float32) * record["scale"] / record["scaled_scale"]
    zero = int(record["scaled_zero_point"])
    grey = np.clip(np.rint(greys) + zero, 0, 255).astype(np.uint8)
    fixed: dict[str, Any] = {"grey": grey, "grey.zero_point": np.int32(zero)}
    incoming = record["scaled_scale"]
    for layer, output in LAYERS.items():
        outgoing = record[f"{output}_scale"]
        scale = np.float32(np.float32(incoming * record[f"{layer}.weight_scale"]) / outgoing)
        multiplier, shift = multiplier_and_shift(scale)
        fixed[f"{layer}.multiplier"] = np.int32(multiplier)
        fixed[f"{layer}.shift"] = np.int32(shift)
        fixed[f"{layer}.zero_point"] = np.int32(record[f"{output}_zero_point"])
        incoming = outgoing
    return fixed


def damaged(archive: bytes, at: int) -> bytes:
    return archive[:at] + bytes([archive[at] ^ 0x80]) + archive[at + 1 :]


def with_crcs(archive: bytes) -> bytes:
    """Return the archive, whose header is sound, with the CRCs of its index and of both ends made right."""
    header = decode_header(archive[:HEADER_SIZE])
    assert header is not None, "sealed: save_record writes no other"
    index = archive[header.index_offset : header.index_offset + header.index_size]
    end = header._replace(index_crc=zlib.crc32(index)).encode()
    return end + archive[HEADER_SIZE:-HEADER_SIZE] + end


def make(folder: Path) -> None:
    """Write all archives into a folder; those that are there are replaced."""
    for name, source in (("digits", "digits.onnx"), ("digits_int8", "digits_int8.onnx")):
        convert(DATA / source, folder / f"{name}.zcr", alignment=ALIGNMENT, force=True, durable=False)
    with np.load(DATA / "digits_heldout.npz") as heldout:
        _save(dict(heldout), folder / "heldout.zcr")
    with zcrecord.load_record(folder / "digits_int8.zcr") as record:
        _save(fixed_point(record), folder / "fixed.zcr")
    thousand = {f"layers.{i}.weight": np.full(4, i, np.float32) for i in range(1000)}
    _save(thousand, folder / "thousand.zcr")
    digits = (folder / "digits.zcr").read_bytes()
    bad_index = damaged(digits, digits.index(CHANGED_NAME))
    (folder / "bad_index.zcr").write_bytes(bad_index)
    (folder / "bad_name.zcr").write_bytes(with_crcs(bad_index))
    (folder / "bad_header.zcr").write_bytes(damaged(digits, HEADER_SIZE // 2))


def _save(tensors: dict[str, Any], path: Path) -> None:
    zcrecord.save_record(tensors, path, alignment=ALIGNMENT, durable=False)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
