"""Lightning, orbax, transformers' Trainer, accelerate, PEFT and flax save and load by archives.

With the engines themselves, by programs/engines, in processes that have them; without them, what errors say.
"""

from __future__ import annotations

import abc
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from node_packages import PROGRAMS, python_packages
from processes import ROOT, output

import zcrecord
import zcrecord.orbax
from zcrecord import DependencyError, FormatError, SourceError, formats
from zcrecord.lightning import ZcrCheckpointIO

ENGINES = (
    "orbax-checkpoint==0.12.8", "tensorstore==0.1.86", "simplejson==4.3.0", "prometheus-client==0.26.0",
    "aiofiles==25.1.0", "humanize==4.17.0", "uvloop==0.23.0", "etils==1.15.0",
    "lightning==2.6.6", "pytorch-lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0",
    "flax==0.12.8", "treescope==0.1.10", "accelerate==1.15.0", "peft==0.21.2",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["guide", "lightning", "orbax"])
def test_engine_saves_and_loads_by_archives(engine: str, tmp_path: Path) -> None:
    paths = [python_packages(ENGINES), ROOT, ROOT / "tests" / "support"]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    pytest_ = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        "-c",
        os.devnull,
        "-W",
        "ignore",
    ]
    program = PROGRAMS / "engines" / f"check_{engine}.py"
    said = output(*pytest_, f"--basetemp={tmp_path / 'base'}", program, cwd=tmp_path, env={**os.environ, **environment})
    assert " passed" in said and "skipped" not in said


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("lightning")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("lightning", "orbax", "orbax.checkpoint", "tensorstore"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> type:
    """Stands for Lightning: the class that its Trainer asks a plugin for."""
    kind = type("CheckpointIO", (abc.ABC,), {})
    fabric = ModuleType("lightning.fabric")
    fabric.plugins = SimpleNamespace(CheckpointIO=kind)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning.fabric", fabric)
    return kind


def test_engines_that_are_missing_are_errors_that_say_how_to_install_them(
    without_engines: None, tmp_path: Path
) -> None:
    (tmp_path / "_METADATA").write_text('{"tree_metadata": {}}', encoding="utf-8")
    for use, package, extra in (
        (ZcrCheckpointIO, "lightning", "lightning"),
        (lambda: zcrecord.orbax.ZcrSave, "orbax-checkpoint", "orbax"),
        (lambda: formats.convert(tmp_path, tmp_path / "m.zcr"), "tensorstore", "orbax"),
    ):
        with pytest.raises(DependencyError, match=rf"{package} is not installed; pip install .*'\.\[{extra}\]'"):
            use()


def test_plugin_of_lightning_saves_loads_and_removes(lightning: type, tmp_path: Path) -> None:
    plugin, path = ZcrCheckpointIO(), tmp_path / "new" / "folder" / "m.ckpt"
    assert isinstance(plugin, lightning)
    saved = {"state_dict": {"a.b": torch.arange(3)}, "loops": {"fit_loop": {"epoch": 2}}, "callbacks": {"{'x': 1}": ()}}
    plugin.save_checkpoint(saved, path)
    torch.save(saved, tmp_path / "theirs.ckpt")
    for file in (path, str(path), tmp_path / "theirs.ckpt"):
        found = plugin.load_checkpoint(file, weights_only=True)
        assert found["state_dict"]["a.b"].tolist() == [0, 1, 2]
        assert {**found, "state_dict": saved["state_dict"]} == saved
    places: list[Any] = [None, "cpu", torch.device("meta"), {"cpu": "meta"}, {"cuda:0": "cpu"}]
    places += [lambda storage, _: storage, lambda storage, _: None, lambda *_: torch.UntypedStorage(0, device="meta")]
    devices = [plugin.load_checkpoint(path, place)["state_dict"]["a.b"].device.type for place in places]
    assert devices == ["cpu", "cpu", "meta", "meta", "cpu", "cpu", "cpu", "meta"]
    with pytest.raises(zcrecord.UnsupportedError, match=r"'hyper\.act': .*; 'hyper\.kind': "):
        plugin.save_checkpoint({"hyper": {"act": print, "kind": Path}}, path)
    assert plugin.load_checkpoint(path)["loops"] == saved["loops"], "the old file stays"
    for _ in range(2):  # the second one finds none
        plugin.remove_checkpoint(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="no such file"):
        plugin.load_checkpoint(path)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ("{", "is not that of a tree of orbax"),
        ('{"tree_metadata": 5}', "is not that of a tree of orbax"),
        ('{"tree_metadata": {"a": {"key_metadata": [{"key": "a"}]}}}', "KeyError"),
        ('{"tree_metadata": ' + "[" * 99_999, "Recursion"),
    ],
)
def test_metadata_that_is_none_of_orbax_is_refused(metadata: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "_METADATA").write_text(metadata, encoding="utf-8")
    with pytest.raises(FormatError, match=message):
        formats.convert(tmp_path, tmp_path / "m.zcr", source_format="orbax")


def test_folder_of_several_trees_of_orbax_is_refused_by_their_names(tmp_path: Path) -> None:
    for item in ("ema", "state"):
        (tmp_path / "step" / item).mkdir(parents=True)
        (tmp_path / "step" / item / "_METADATA").write_text('{"tree_metadata": {}}', encoding="utf-8")
    with pytest.raises(SourceError, match="several models: ema/_METADATA, state/_METADATA; name a file"):
        formats.convert(tmp_path / "step", tmp_path / "m.zcr")
