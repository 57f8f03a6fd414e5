"""A training run that is saved, loaded and gone on with is the run in one go, bit for bit."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
import torch
from exhaustive import some
from torch.optim import lr_scheduler as schedules

import zcrecord
from zcrecord.formats import convert

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.9)),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups[0]["params"] + groups[1]["params"], lr=0.1, max_iter=2),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=12, cycle_momentum=False),
    "milestones": lambda o: schedules.MultiStepLR(o, milestones=[2, 4, 4, 7]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 3), schedules.CosineAnnealingLR(o, 8)], milestones=[6]
    ),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "none": lambda o: None,
}
KINDS = some([
    ("adam", "one cycle"), ("adamw", "lambda"), ("sgd", "milestones"), ("lbfgs", "none"), ("adam", "plateau"),
    ("sgd", "sequence"),
], 2)  # fmt: skip
PARTS = ["", "model", "optimizer", "schedule", "scaler", "torch", "python", "numpy", "generator"]


class Run:
    """A run that draws random numbers of all four generators."""

    def __init__(self, optimizer: str, schedule: str) -> None:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        self.generator = np.random.default_rng(4)
        hidden = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2)
        self.net = torch.nn.Sequential(torch.nn.Embedding(16, 8), *hidden, torch.nn.Linear(8, 16, bias=False))
        self.net[-1].weight = self.net[0].weight
        decayed, others = ([p for p in self.net.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
        groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.losses: list[float] = []

    def loss(self, tokens: Any) -> Any:
        self.optimizer.zero_grad()
        return torch.nn.functional.cross_entropy(self.net(tokens), tokens)

    def closure(self, tokens: Any) -> Any:
        loss = self.loss(tokens)
        loss.backward()
        return loss

    def go(self, steps: int) -> Run:
        for _ in range(steps):
            noise = [random.randrange(16), int(np.random.randint(16)), int(self.generator.integers(16))]
            tokens = torch.cat([torch.randint(16, (13,)), torch.tensor(noise)])
            if isinstance(self.optimizer, torch.optim.LBFGS):
                loss = self.optimizer.step(lambda tokens=tokens: self.closure(tokens))
            else:
                loss = self.loss(tokens)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
            if self.schedule is not None:
                plateau = isinstance(self.schedule, schedules.ReduceLROnPlateau)
                self.schedule.step(*([loss.item()] if plateau else []))
            self.losses.append(loss.item())
        return self

    def state(self) -> dict[str, Any]:
        return {
            "model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(), "losses": self.losses, "best": np.float64(min(self.losses)),
            "torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate(),
            "generator": self.generator.bit_generator.state,
        }  # fmt: skip

    def load(self, path: Path, without: str = "") -> Run:
        record = zcrecord.load_record(path)
        state = record.tree("torch")
        self.losses = state["losses"]
        loads: dict[str, Callable[[Any], Any]] = {
            "model": self.net.load_state_dict, "optimizer": self.optimizer.load_state_dict,
            "schedule": lambda saved: self.schedule and self.schedule.load_state_dict(saved),
            "scaler": self.scaler.load_state_dict, "torch": torch.set_rng_state, "python": random.setstate,
            "numpy": lambda _: np.random.set_state(record.tree()["numpy"]),
            "generator": lambda saved: setattr(self.generator.bit_generator, "state", saved),
        }  # fmt: skip
        for part, load in loads.items():
            if part != without:
                load(state[part])
        return self


def exact(value: Any) -> Any:
    """Return everything with its types, tensors by their bytes: equal only if every bit is."""
    if isinstance(value, dict):
        return [[repr(key), exact(inner)] for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(exact, value)]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        return [str(value.dtype), str(value.shape), hashlib.sha256(np.asarray(value).tobytes()).hexdigest()]
    return repr(value)


@pytest.fixture(autouse=True)
def random_states() -> Iterator[None]:
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_run_that_goes_on_from_a_file_is_the_run_in_one_go(kind: tuple[str, str], tmp_path: Path) -> None:
    """Of an archive, and of one that was converted from what torch saved, which is the same."""
    whole, state = exact(Run(*kind).go(10).state()), Run(*kind).go(5).state()
    torch.save(state, tmp_path / "m.pt")
    saved, converted = tmp_path / "m.zcr", tmp_path / "converted.zcr"
    zcrecord.save_record(state, saved)
    convert(tmp_path / "m.pt", converted)
    assert [exact(Run(*kind).load(path).go(5).state()) for path in (saved, converted)] == [whole, whole]
    first, second = zcrecord.load_record(saved), zcrecord.load_record(converted)
    assert first.content_digest() == second.content_digest() and list(first) == list(second)


def test_each_part_of_the_state_is_needed(tmp_path: Path) -> None:
    """A part that is left out makes another run, so the test above would notice."""
    whole = exact(Run(*KINDS[0]).go(10).state())
    zcrecord.save_record(Run(*KINDS[0]).go(5).state(), tmp_path / "m.zcr")
    for part in PARTS:
        run = Run(*KINDS[0]).load(tmp_path / "m.zcr", part).go(5)
        assert (exact(run.state()) == whole) == (part == ""), part


def stepped() -> tuple[Any, Any]:
    """Return a module with tied weights and its optimizer after one step."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25, betas=(0.5, 0.75))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_tied_tensors_of_the_tree_are_one_memory_and_a_step_changes_neither_the_file_nor_another_tree(
    tmp_path: Path,
) -> None:
    net, optimizer = stepped()
    zcrecord.save_record({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "m.zcr")
    data = (tmp_path / "m.zcr").read_bytes()
    record = zcrecord.load_record(tmp_path / "m.zcr")
    first, second = record.tree("torch"), record.tree("torch")
    first["model"]["0.weight"].fill_(7)
    assert torch.equal(first["model"]["1.weight"], torch.full((3, 3), 7.0))
    assert torch.equal(second["model"]["0.weight"], net[0].weight), "another call has pages of its own"
    assert record["model.0.weight"].tolist() == net[0].weight.tolist(), "and so has the record"
    net.load_state_dict(second["model"], assign=True)
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict({**second["optimizer"], "param_groups": optimizer.state_dict()["param_groups"]})
    optimizer.step()
    assert (tmp_path / "m.zcr").read_bytes() == data


def test_tree_of_torch_lies_on_the_device_that_is_named() -> None:
    found = r.round_trip({"a": {0: torch.ones(2)}, "n": 1}).tree("torch", device="meta")
    assert (found["a"][0].device.type, found["n"]) == ("meta", 1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tensors": "tensorflow"}, "tensors='tensorflow' is not known; 'numpy', 'torch' or 'jax'"),
        ({"tensors": None}, "tensors=None is not known"),
        ({"device": "cpu"}, r"device= is for tree\('torch'\)"),
        ({"tensors": "torch", "like": {}}, r"like= is for tree\('jax'\)"),
        ({"tensors": "torch", "device": "nowhere"}, "torch has no device 'nowhere' here"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=message):
        r.round_trip({"w": torch.ones(1)}).tree(**arguments)
