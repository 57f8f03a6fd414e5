"""A training run that is saved, loaded in a new process and gone on with is the run in one go, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import records as r
import torch
from exhaustive import some
from forked import run_torch

import zcrecord

# What runs in processes of their own. A run of each kind draws random numbers of all four generators.
RUN = """
import hashlib, json, random, sys
import numpy as np
import torch
import zcrecord
from torch.optim import lr_scheduler as schedules

torch.use_deterministic_algorithms(True)


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens)))


OPTIMIZERS = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.9)),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "lbfgs": lambda groups: torch.optim.LBFGS(groups[0]["params"] + groups[1]["params"], lr=0.1, max_iter=2),
}
SCHEDULES = {
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=12, cycle_momentum=False),
    "milestones": lambda o: schedules.MultiStepLR(o, milestones=[2, 4, 4, 7]),
    "lambda": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.5, 3), schedules.CosineAnnealingLR(o, 8)], milestones=[6]
    ),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "none": lambda o: None,
}


class Run:
    def __init__(self, optimizer, schedule):
        torch.manual_seed(1); np.random.seed(2); random.seed(3)
        self.generator = np.random.default_rng(4)
        self.net = Tied()
        decayed = [p for p in self.net.parameters() if p.ndim > 1]
        groups = [{"params": decayed, "weight_decay": 0.01},
                  {"params": [p for p in self.net.parameters() if p.ndim < 2], "weight_decay": 0.0}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
        self.losses = []

    def loss(self, tokens):
        self.optimizer.zero_grad()
        return torch.nn.functional.cross_entropy(self.net(tokens), tokens)

    def step(self):
        noise = [random.randrange(16), int(np.random.randint(16)), int(self.generator.integers(16))]
        tokens = torch.cat([torch.randint(16, (13,)), torch.tensor(noise)])
        if isinstance(self.optimizer, torch.optim.LBFGS):
            def closure():
                loss = self.loss(tokens)
                loss.backward()
                return loss
            loss = self.optimizer.step(closure)
        else:
            loss = self.loss(tokens)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if isinstance(self.schedule, schedules.ReduceLROnPlateau):
            self.schedule.step(loss.item())
        elif self.schedule is not None:
            self.schedule.step()
        self.losses.append(loss.item())

    def state(self):
        return {
            "model": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(), "losses": self.losses, "best": np.float64(min(self.losses)),
            "torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate(),
            "generator": self.generator.bit_generator.state,
        }

    def load(self, record, without=""):
        state = record.tree("torch")
        self.losses = state["losses"]
        loads = {
            "model": self.net.load_state_dict, "optimizer": self.optimizer.load_state_dict,
            "schedule": lambda saved: self.schedule and self.schedule.load_state_dict(saved),
            "scaler": self.scaler.load_state_dict, "torch": torch.set_rng_state, "python": random.setstate,
            "numpy": lambda _: np.random.set_state(record.tree()["numpy"]),
            "generator": lambda saved: setattr(self.generator.bit_generator, "state", saved),
        }
        for part, load in loads.items():
            if part != without:
                load(state[part])


def exact(value):
    # Everything with its types, tensors by their bytes: equal only if every bit is.
    if isinstance(value, dict):
        return [[repr(key), exact(inner)] for key, inner in value.items()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(exact, value)]
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)):
        return [str(value.dtype), str(value.shape), hashlib.sha256(np.asarray(value).tobytes()).hexdigest()]
    return repr(value)


def run(kind, steps, start=None, without=""):
    made = Run(*kind)
    if start is not None:
        made.load(zcrecord.load_record(start), without)
    for _ in range(steps):
        made.step()
    return made


def name(kind):
    return f"{folder}/{'-'.join(kind).replace(' ', '_')}"


folder, kinds = sys.argv[1], json.loads(sys.argv[2])
"""
WHOLE = "print(json.dumps([exact(run(kind, 10).state()) for kind in kinds]))"
HALF = """
for kind in kinds:
    state = run(kind, 5).state()
    torch.save(state, name(kind) + ".pt")
    zcrecord.save_record(state, name(kind) + ".zcr")
"""
REST = """
from zcrecord.formats import convert
for kind in kinds:
    convert(name(kind) + ".pt", name(kind) + "-converted.zcr")
ends = (".zcr", "-converted.zcr")
print(json.dumps([[exact(run(kind, 5, name(kind) + end).state()) for end in ends] for kind in kinds]))
"""
WITHOUT = """
parts = json.loads(sys.argv[3])
print(json.dumps([exact(run(kinds[0], 5, name(kinds[0]) + ".zcr", part).state()) for part in parts]))
"""
KINDS = some([
    ("adam", "one cycle"), ("adamw", "lambda"), ("sgd", "milestones"), ("lbfgs", "none"),
    ("adam", "plateau"), ("sgd", "sequence"),
], 2)  # fmt: skip
PARTS = ["", "model", "optimizer", "schedule", "scaler", "torch", "python", "numpy", "generator"]


class Ends(NamedTuple):
    """States of all kinds of runs after ten steps, the last five of them in new processes."""

    whole: list[Any]
    rest: list[list[Any]]
    without: list[Any]
    folder: Path


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """One process for each half of all runs: torch takes long to start."""
    folder = tmp_path_factory.mktemp("runs")

    def told(code: str) -> Any:
        out = run_torch(RUN + code, folder, json.dumps(KINDS), json.dumps(PARTS)).stdout
        return json.loads(out) if out else None

    whole = told(WHOLE + HALF)
    return Ends(whole, told(REST), told(WITHOUT), folder)


@pytest.mark.parametrize("kind", KINDS, ids=" ".join)
def test_run_that_goes_on_from_a_file_is_the_run_in_one_go(kind: tuple[str, str], ends: Ends) -> None:
    """Of an archive, and of one that was converted from what torch saved, which is the same."""
    number = KINDS.index(kind)
    assert ends.rest[number] == [ends.whole[number]] * 2
    stem = "-".join(kind).replace(" ", "_")
    saved, converted = (zcrecord.load_record(ends.folder / f"{stem}{end}.zcr") for end in ("", "-converted"))
    assert saved.content_digest() == converted.content_digest()
    assert list(saved) == list(converted)


@pytest.mark.parametrize("part", PARTS)
def test_each_part_of_the_state_is_needed(part: str, ends: Ends) -> None:
    """A part that is left out makes another run, so the test above would notice."""
    found = ends.without[PARTS.index(part)]
    assert (found == ends.whole[0]) == (part == "")


def stepped() -> tuple[Any, Any]:
    """Return a module with tied weights and its optimizer after one step."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.25, betas=(0.5, 0.75))
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_state_of_an_optimizer_is_all_there_with_its_types() -> None:
    net, optimizer = stepped()
    saved = optimizer.state_dict()
    state = r.round_trip({"model": net.state_dict(), "optimizer": saved, "epoch": 3}).tree("torch")
    assert list(state) == ["model", "optimizer", "epoch"]
    assert list(state["model"]) == ["0.weight", "1.weight"], "names stay whole"
    moments = state["optimizer"]["state"][0]
    assert list(moments) == ["step", "exp_avg", "exp_avg_sq"]
    assert all(torch.equal(moments[key], value) for key, value in saved["state"][0].items())
    assert state["optimizer"]["param_groups"] == saved["param_groups"]
    (group,) = state["optimizer"]["param_groups"]
    assert (group["betas"], group["foreach"], group["maximize"]) == ((0.5, 0.75), None, False)


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


def test_a_vocabulary_beside_weights_comes_back_in_every_tree() -> None:
    record = r.round_trip({"w": torch.ones(2), "vocab": np.array(["a", "bb"])})
    for found in (record.torch(), record.jax(), record.tree("torch"), record.tree("jax"), record.tree()):
        assert found["vocab"].unpack().tolist() == ["a", "bb"]
        assert found["w"].tolist() == [1, 1]


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
