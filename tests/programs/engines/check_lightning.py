"""Lightning trains, stops and goes on by archives as by its own files, bit for bit."""

import hashlib
import os
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

import zcrecord
from tools.faults.kills import kill_saves
from zcrecord.lightning import ZcrCheckpointIO


class Net(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, rate: float = 0.01, activation: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 100)}


def fit(folder: Path, epochs: int, plugins: Any = (), resume: Path | None = None, **hyper: Any) -> Any:
    """Return a digest of what the training has at its end."""
    torch.manual_seed(0)
    net, saver = Net(**hyper), ModelCheckpoint(folder, save_top_k=2, monitor="loss", save_last=True)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", plugins=list(plugins), callbacks=[saver, EarlyStopping("loss")], **quiet
    )
    data = torch.utils.data.DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=4)
    trainer.fit(net, data, ckpt_path=resume)
    states = [*net.state_dict().values(), *trainer.optimizers[0].state_dict()["state"][0].values()]
    octets = b"".join(state.numpy().tobytes() for state in states)
    return hashlib.sha256(octets).hexdigest(), trainer.global_step, sorted(os.listdir(folder))


def test_training_goes_on_from_archives_as_from_lightnings_own_files(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 4)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    fit(theirs, 2)
    fit(ours, 2, [AsyncCheckpointIO(ZcrCheckpointIO())])
    assert zcrecord.load_record(ours / "last.ckpt", verify="full")["state_dict.layers.0.weight"].shape == (8, 4)
    assert fit(ours, 4, [ZcrCheckpointIO()], ours / "last.ckpt") == whole
    assert fit(tmp_path / "moved", 4, [ZcrCheckpointIO()], theirs / "last.ckpt")[:2] == whole[:2]
    assert fit(theirs, 4, (), theirs / "last.ckpt") == whole


def test_functions_among_hyperparameters_are_one_error_that_names_them(tmp_path: Path) -> None:
    expected = "'hyper_parameters.activation.0': a .*; 'hyper_parameters.activation.1': "
    with pytest.raises(zcrecord.UnsupportedError, match=expected):
        fit(tmp_path, 1, [ZcrCheckpointIO()], activation=[torch.relu, Net])
    assert os.listdir(tmp_path) == []


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", plugins=[ZcrCheckpointIO()])
    net = torch.nn.Linear(2, 2)
    fabric.save(tmp_path / "fabric" / "m.ckpt", {"net": net, "step": 3})
    state = {"net": torch.nn.Linear(2, 2), "step": 0}
    fabric.load(tmp_path / "fabric" / "m.ckpt", state)
    assert state["step"] == 3 and torch.equal(state["net"].weight, net.weight)


def test_hundred_kills_leave_one_checkpoint_whole(tmp_path: Path) -> None:
    kills = kill_saves(tmp_path / "m.ckpt", 100, seed=3, save=ZcrCheckpointIO().save_checkpoint)
    assert (kills.whole, kills.left) == (100, 0) and kills.new and kills.scratches
