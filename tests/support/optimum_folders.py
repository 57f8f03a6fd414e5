"""Folders as Optimum exports them, each exported once, and answers of the models in one."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tools.models import optimum

__all__ = ["QUESTION", "copy_folder", "generate"]

QUESTION = [30, 41, 52, 16, 1]


@functools.cache
def _files(task: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "folder")
        optimum.write_folder(task, "small", folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}


def copy_folder(task: str, folder: Path) -> Path:
    """Write the folder of a task, which is exported at the first call; return it."""
    folder.mkdir()
    for name, data in _files(task).items():
        (folder / name).write_bytes(data)
    return folder


def generate(make: Callable[[str], Any], steps: int = 8) -> tuple[list[int], list[np.ndarray]]:
    """Return the tokens that the models of a seq2seq folder choose greedily, and the logits they were chosen by.

    `make` gives the session of a model by its name.
    """
    names = ("encoder_model", "decoder_model", "decoder_with_past_model")
    encoder, first, later = map(make, names)
    mask = np.ones((1, len(QUESTION)), np.int64)
    states = encoder.run(None, {"input_ids": np.array([QUESTION]), "attention_mask": mask})[0]
    given = {"encoder_attention_mask": mask, "encoder_hidden_states": states}
    tokens, logits, decoder = [optimum.START], [], first
    for _ in range(steps):
        logits.append(_step(decoder, given, tokens[-1]))
        tokens.append(int(logits[-1][0, -1].argmax()))
        decoder = later
    return tokens[1:], logits


def _step(decoder: Any, given: dict[str, Any], token: int) -> np.ndarray:
    """Run a decoder on one more token; its keys and values join what is given. Return the logits."""
    given["input_ids"] = np.array([[token]])
    taken = {value.name: given[value.name] for value in decoder.get_inputs()}
    names = [value.name.replace("present", "past_key_values") for value in decoder.get_outputs()]
    given |= dict(zip(names, decoder.run(None, taken), strict=True))
    found: np.ndarray = given.pop("logits")
    return found
