"""Models as torch's two exporters write them: real architectures with random weights, each exported once.

What an architecture is chosen for stands at its class. What the exporters do with a weight that has two users, and
with small tensors of branches, changes with their options, so those are given with each architecture.
"""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch._higher_order_ops import while_loop

EXPORTERS = ("torchscript", "dynamo")
WIDTH = 40  # of most layers; 40 x 40 floats are more than the dynamo exporter merges or keeps inside the model

# What torch and transformers warn of inside an export: how torch itself does it, and what does not matter here.
_WARNINGS = (
    # About the exporter that this is to show, and what it calls.
    (DeprecationWarning, "You are using the legacy TorchScript-based ONNX export"),
    (DeprecationWarning, "The feature will be removed. Please remove usage of this function"),
    (DeprecationWarning, "`torch.jit.script` is deprecated"),
    # torch.export copies a tree specification the old way.
    (FutureWarning, "`isinstance.treespec, LeafSpec.` is deprecated"),
    # torch.nn.LSTM sets its list of weights anew when it is traced.
    (UserWarning, "The tensor attributes self.lstm._flat_weights"),
    # transformers asks for the sizes of a mask, which are those of the inputs that the models are run with, too.
    (torch.jit.TracerWarning, "Converting a tensor to a Python boolean"),
    # It is run with the batch size that it was exported with.
    (UserWarning, "Exporting a model to ONNX with a batch_size other than 1"),
    # No index here is negative.
    (UserWarning, "Exporting aten::index operator of advanced indexing"),
)


@dataclass(frozen=True)
class Exported:
    """One export: the model in one piece, the files of the same model with external data, and what torch computes.

    Attributes:
        data: the ModelProto.
        files: name -> bytes; "model.onnx" and its external data. Empty where the exporter writes none.
        weights: torch's own, by the names of its `state_dict`.
        requests: inputs by name, and what torch answers to them.
    """

    data: bytes
    files: dict[str, bytes]
    weights: dict[str, np.ndarray]
    requests: list[tuple[dict[str, np.ndarray], np.ndarray]]

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        """The model, to be looked at and not changed."""
        return onnx.ModelProto.FromString(self.data)


# Architectures.


class Residual(torch.nn.Module):  # type: ignore[misc]
    """A block of a ResNet, with a convolution beside it where sizes change."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = torch.nn.Conv2d(before, after, 3, 2, 1, bias=False)
        self.bn1 = torch.nn.BatchNorm2d(after)
        self.conv2 = torch.nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = torch.nn.BatchNorm2d(after)
        self.downsample = torch.nn.Sequential(
            torch.nn.Conv2d(before, after, 1, 2, bias=False), torch.nn.BatchNorm2d(after)
        )

    def forward(self, x: Any) -> Any:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(torch.nn.Module):  # type: ignore[misc]
    """A small ResNet: both exporters fold the batch normalisation into weights that torch does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn = torch.nn.BatchNorm2d(16)
        self.layers = torch.nn.Sequential(Residual(16, 24), Residual(24, 32))
        self.fc = torch.nn.Linear(32, 40)

    def forward(self, x: Any) -> Any:
        x = torch.nn.functional.max_pool2d(torch.relu(self.bn(self.stem(x))), 3, 2, 1)
        return self.fc(self.layers(x).mean((2, 3)))


class Lstm(torch.nn.Module):  # type: ignore[misc]
    """Two layers in both directions, whose weights both exporters lay out anew for ONNX's LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 32)
        self.lstm = torch.nn.LSTM(32, WIDTH, 2, batch_first=True, bidirectional=True)
        self.out = torch.nn.Linear(2 * WIDTH, 50)

    def forward(self, tokens: Any) -> Any:
        return self.out(self.lstm(self.embedding(tokens))[0])


class Gpt2(torch.nn.Module):  # type: ignore[misc]
    """transformers' own GPT-2, small; its embedding is its output matrix too."""

    def __init__(self) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes: dict[str, Any] = {"vocab_size": 100, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, use_cache=False, bos_token_id=0, eos_token_id=0))

    def forward(self, tokens: Any, mask: Any) -> Any:
        # Given a mask, transformers does not look for packed sequences, which TorchScript could not export.
        return self.model(input_ids=tokens, attention_mask=mask).logits


class Twins(torch.nn.Module):  # type: ignore[misc]
    """Two layers that happen to have equal weights, as after a copy that training will tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.second(torch.relu(self.first(x)))


class Steps(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.positive = torch.nn.Linear(WIDTH, WIDTH)
        self.negative = torch.nn.Linear(WIDTH, WIDTH)
        self.again = torch.nn.Linear(WIDTH, WIDTH)


class ScriptedSteps(Steps):
    """An If and a Loop, as TorchScript reads them from Python's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.positive(x) if bool(x.sum() > 0) else self.negative(x) * 2.0
        for _ in range(int(x.shape[0])):
            y = torch.relu(self.again(y)) + torch.full([40], 0.25)
        return y


class TracedSteps(Steps):
    """An If and a Loop, as torch.export has them said."""

    def forward(self, x: Any) -> Any:
        y = torch.cond(x.sum() > 0, lambda x: self.positive(x), lambda x: self.negative(x) * 2.0, (x,))

        def step(i: Any, y: Any) -> Any:
            return i + 1, torch.relu(self.again(y)) + torch.full([WIDTH], 0.25)

        return while_loop(lambda i, y: i < 3, step, (torch.tensor(0), y))[1]


# How each is exported.


@dataclass(frozen=True)
class _Export:
    """A model, the inputs it is traced with first and run with, and options of the exporters."""

    build: Callable[[str], Any]
    inputs: Callable[[], list[tuple[Any, ...]]]
    names: tuple[str, ...]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)


def _normal(*shape: int, shift: float = 0.0) -> Any:
    return torch.randn(*shape) + shift


def _stirred(model: Any) -> Any:
    """The model with values of their own in normalisations, all of which torch starts with ones and zeros."""
    for value in model.state_dict().values():
        if value.dim() == 1:
            value.add_(torch.rand_like(value))
    return model


def _twins(exporter: str) -> Any:
    model = Twins()
    model.second.load_state_dict(model.first.state_dict())
    return model


def _steps(exporter: str) -> Any:
    return TracedSteps() if exporter == "dynamo" else torch.jit.script(ScriptedSteps().eval())


EXPORTS = {
    "resnet": _Export(lambda _: _stirred(ResNet()), lambda: [(_normal(2, 3, 32, 32),)], ("image",)),
    "lstm": _Export(lambda _: Lstm(), lambda: [(torch.randint(0, 50, (2, 7)),)], ("tokens",)),
    "gpt2": _Export(
        lambda _: _stirred(Gpt2()),
        lambda: [(torch.randint(0, 100, (2, 9)), torch.ones(2, 9, dtype=torch.int64))],
        ("tokens", "mask"),
        # Otherwise both write the output matrix again, transposed.
        {"torchscript": {"do_constant_folding": False}, "dynamo": {"optimize": False}},
    ),
    "twins": _Export(
        _twins,
        lambda: [(_normal(3, WIDTH),)],
        ("x",),
        {"torchscript": {"keep_initializers_as_inputs": True}},  # otherwise it makes one of them an Identity
    ),
    "steps": _Export(
        _steps,
        lambda: [(_normal(3, WIDTH, shift=1.0),), (_normal(3, WIDTH, shift=-1.0),)],
        ("x",),
        {"dynamo": {"optimize": False}},  # otherwise constants move out of the branches
    ),
}


@functools.cache
def exported(name: str, exporter: str) -> Exported:
    """Return an architecture of EXPORTS as one of EXPORTERS writes it; the same object each time."""
    how = EXPORTS[name]
    with torch.random.fork_rng(), _tolerated(), torch.no_grad():
        torch.manual_seed(0)
        model = how.build(exporter).eval()
        inputs = how.inputs()
        answers = [model(*given).numpy() for given in inputs]
        weights = {key: value.numpy().copy() for key, value in model.state_dict().items()}
        export = _dynamo if exporter == "dynamo" else _torchscript
        data, files = export(model, inputs[0], input_names=list(how.names), **how.options.get(exporter, {}))
    feeds = [dict(zip(how.names, (t.numpy() for t in given), strict=True)) for given in inputs]
    return Exported(data, files, weights, list(zip(feeds, answers, strict=True)))


@contextlib.contextmanager
def _tolerated() -> Iterator[None]:
    with warnings.catch_warnings():
        for category, message in _WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        yield


def _torchscript(model: Any, given: tuple[Any, ...], **options: Any) -> tuple[bytes, dict[str, bytes]]:
    out = io.BytesIO()
    torch.onnx.export(model, given, out, dynamo=False, **options)
    return out.getvalue(), {}


def _dynamo(model: Any, given: tuple[Any, ...], **options: Any) -> tuple[bytes, dict[str, bytes]]:
    program: Any = torch.onnx.export(model, given, dynamo=True, verbose=False, **options)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program.save(folder / "whole.onnx", external_data=False)
        data = (folder / "whole.onnx").read_bytes()
        (folder / "whole.onnx").unlink()
        program.save(folder / "model.onnx", external_data=True)
        return data, {path.name: path.read_bytes() for path in folder.iterdir()}
