"""vLLM's load format: found by its entry point, imported when it is chosen, options and errors that say what is wrong.

vLLM is a stand-in here; `./tools/vllm` serves models with vLLM itself.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stand_in_vllm as stand_in
import torch

import zcrecord
from tools.range_server import serving
from zcrecord.errors import FormatError, IntegrityError, LimitError, MismatchError, SourceError, UnsupportedError
from zcrecord.vllm import FORMAT, weights

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {"layers.0.up": (8, 6), "layers.0.down": (6, 8), "norm": (6,), "embed_tokens": (10, 6)}
TENSORS = {name: np.random.default_rng(i).random(shape, np.float32) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, under vLLM's name."""
    from zcrecord.vllm.loader import loader_class

    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    loader_class.cache_clear()
    zcrecord.vllm.register()
    yield
    loader_class.cache_clear()
    stand_in.LOADERS.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder."""
    zcrecord.save_record(TENSORS, tmp_path / "model.zcr", durable=False)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


def load(folder: Any, extra: Any = None, *, make: Callable[..., Any] | None = None, **config: Any) -> Any:
    """Load a model as vLLM does; returns it."""
    made = stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT, model_loader_extra_config=extra or {}))
    make = make or (lambda _: stand_in.Model(SHAPES))
    return made.load_model(SimpleNamespace(make=make), stand_in.model_config(folder, **config))


def same(model: Any, tensors: dict[str, Any]) -> bool:
    return all(torch.equal(parameter, torch.tensor(tensors[name])) for name, parameter in model.parameters.items())


# How vLLM finds it.


def test_entry_point_names_a_function_of_this_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(name, value)] = project["entry-points"]["vllm.general_plugins"].items()
    assert name == FORMAT
    assert EntryPoint(name, value, "vllm.general_plugins").load() is zcrecord.vllm.register


REGISTERED = """
import sys
sys.path.insert(0, "tests/support")
import tqdm, zcrecord
import stand_in_vllm
stand_in_vllm.install()
before = set(sys.modules)
from zcrecord.vllm import register
register()
register()
print(*sorted(set(sys.modules) - before))
{then}
print(*(name for name in ("torch", "zcrecord.vllm.weights", "zcrecord.frameworks.torch") if name in sys.modules))
"""
CHOSEN = "stand_in_vllm.LOADERS['zcrecord'](stand_in_vllm.LoadConfig('zcrecord'))"


@pytest.mark.slow
@pytest.mark.parametrize("then, imported", [("", []), (CHOSEN, ["torch", "zcrecord.vllm.weights"])])
def test_registering_imports_two_small_modules_and_choosing_the_format_the_rest(then: str, imported: list[str]) -> None:
    code = REGISTERED.replace("{then}", then)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()
    assert first.split() == ["zcrecord.vllm", "zcrecord.vllm.loader"]
    assert set(second.split()) <= {"torch", "zcrecord.vllm.weights", "zcrecord.frameworks.torch"}
    assert bool(second) == bool(imported)


def test_without_vllm_registering_is_an_import_error() -> None:
    assert not any(name.startswith("vllm.") for name in sys.modules)
    with pytest.raises(ImportError, match="vllm"):
        zcrecord.vllm.register()


# Loads.


def test_model_has_the_archive_s_weights(vllm: None, folder: Path) -> None:
    assert same(load(folder), TENSORS)


@pytest.mark.parametrize("rank", range(2))
def test_rank_has_its_rows_and_columns(rank: int, vllm: None, folder: Path) -> None:
    model = load(folder, make=lambda _: stand_in.Model(SHAPES, rank, 2))
    rows, columns = slice(4 * rank, 4 * rank + 4), slice(4 * rank, 4 * rank + 4)
    cut = {"layers.0.up": TENSORS["layers.0.up"][rows], "layers.0.down": TENSORS["layers.0.down"][:, columns]}
    assert same(model, TENSORS | cut)


def test_model_of_a_hub_is_downloaded_as_archives(vllm: None, folder: Path) -> None:
    loader = stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT, download_dir=str(folder.parent)))
    config = stand_in.model_config(folder.name)
    loader.download_model(config)
    assert same(loader.load_model(SimpleNamespace(make=lambda _: stand_in.Model(SHAPES)), config), TENSORS)


def test_tensors_that_a_model_does_not_use_are_left_out(vllm: None, folder: Path) -> None:
    class Part(stand_in.Model):
        def is_unused_checkpoint_weight(self, name: str) -> bool:
            return name.startswith("layers.")

    shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("layers.")}
    assert same(load(folder, make=lambda _: Part(shapes)), TENSORS)


def test_further_files_of_a_model_are_read_by_vllm_itself(vllm: None, folder: Path) -> None:
    class Joint(stand_in.Model):
        secondary_weights = (SimpleNamespace(prefix="head.", weights={"w": torch.ones(3)}),)

    model = load(folder, make=lambda _: Joint({**SHAPES, "head.w": (3,)}))
    assert same(model, {**TENSORS, "head.w": np.ones(3, np.float32)})


def test_weights_can_be_asked_for_again(vllm: None, folder: Path) -> None:
    loader = stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT))
    model = stand_in.Model(SHAPES)
    for _ in range(2):
        found = dict(loader.get_all_weights(stand_in.model_config(folder), model))
        assert list(found) == list(SHAPES)


def test_progress_is_told_where_vllm_wants_it(
    vllm: None, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for told in (False, True):
        loader = stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT, use_tqdm_on_load=told))
        loader.load_weights(stand_in.Model(SHAPES), stand_in.model_config(folder))
        assert ("Loading zcrecord: 100% of 4 tensors" in capsys.readouterr().err) == told


# Tied embeddings.

EMBEDDING = TENSORS["embed_tokens"]
HEADS = {"tied": (EMBEDDING, True), "equal": (EMBEDDING.copy(), False), "another": (EMBEDDING + 1, False)}


@pytest.mark.parametrize("head", HEADS)
def test_embeddings_are_untied_for_a_head_of_its_own(head: str, vllm: None, tmp_path: Path) -> None:
    tensor, stays_tied = HEADS[head]
    zcrecord.save_record({**TENSORS, "lm_head.weight": tensor}, tmp_path / "model.zcr")
    seen = []

    def make(config: Any) -> Any:
        seen.append(config.tie_word_embeddings)
        return stand_in.Model({**SHAPES, "lm_head.weight": EMBEDDING.shape})

    load(tmp_path, make=make, tie_word_embeddings=True)
    assert seen == [stays_tied]


def test_embeddings_stay_tied_without_a_head(vllm: None, folder: Path) -> None:
    config = stand_in.model_config(folder, tie_word_embeddings=True)
    loader = stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT))
    loader.load_model(SimpleNamespace(make=lambda _: stand_in.Model(SHAPES)), config)
    assert config.hf_config.tie_word_embeddings
    assert not config.word_embeddings_untied_by_checkpoint


# URLs.


def test_weights_of_a_url_are_fetched_once_in_few_requests(vllm: None, folder: Path) -> None:
    with serving(folder) as server:
        model = load("nowhere", {"url": f"{server.url}/model.zcr", "storage_options": {}, "cache": False})
        assert len(server.requests) <= 4
    assert same(model, TENSORS)


def test_tied_tensors_of_a_url_are_not_fetched_out_of_proportion(tmp_path: Path) -> None:
    tied = dict.fromkeys((f"w{i}" for i in range(1200)), np.zeros(1 << 20, np.uint8))
    zcrecord.save_record(tied, tmp_path / "model.zcr", durable=False)
    with serving(tmp_path) as server, zcrecord.load_record(f"{server.url}/model.zcr") as record:
        asked = len(server.requests)
        with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
            next(weights.torch_weights(record))
        assert len(server.requests) == asked


def test_ranks_of_a_machine_share_what_one_of_them_fetched(vllm: None, folder: Path) -> None:
    extra = {"cache": str(folder / "cache")}
    with serving(folder) as server:
        extra["url"] = f"{server.url}/model.zcr"
        load("nowhere", extra)
        first = server.sent
        assert same(load("nowhere", extra), TENSORS)
        assert server.sent - first < 200


def test_batches_have_every_tensor_once_and_at_most_their_size(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    infos = list(zcrecord.load_record(folder / "model.zcr").infos())
    monkeypatch.setattr(weights, "_BATCH", 250)
    batches = list(weights._batches(infos))
    assert [sorted(batch) for batch in batches] == [["layers.0.up", "norm"], ["layers.0.down"], ["embed_tokens"]] or [
        sorted(batch) for batch in batches
    ] == [["layers.0.up"], ["layers.0.down", "norm"], ["embed_tokens"]]
    assert set().union(*batches) == set(SHAPES)


# What is refused.

OPTIONS = {
    "unknown": ({"ulr": "x"}, "has 'ulr', which is not known; it takes url, storage_options, cache"),
    "no text": ({"url": 3}, "url is a text, not a int"),
    "no object": ({"url": "x", "storage_options": "key"}, "storage_options is an object, not a str"),
    "no folder": ({"url": "x", "cache": True}, "cache is a folder, or false, not a bool"),
    "without url": ({"cache": "x"}, "cache without url; leave it out for an archive in the folder"),
    "no mapping": (["url"], "takes a JSON object with url, storage_options, cache, not a list"),
}


@pytest.mark.parametrize("fault", OPTIONS)
def test_option_that_means_nothing_is_refused_by_name(fault: str, vllm: None, folder: Path) -> None:
    extra, message = OPTIONS[fault]
    with pytest.raises(UnsupportedError, match="--model-loader-extra-config") as caught:
        load(folder, extra)
    assert message in str(caught.value)


def test_folder_without_an_archive_is_refused(vllm: None, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is a folder without an archive"):
        load(tmp_path)


def test_damaged_archive_is_refused(vllm: None, folder: Path) -> None:
    octets = bytearray((folder / "model.zcr").read_bytes())
    octets[-40] ^= 1
    (folder / "model.zcr").write_bytes(octets)
    with pytest.raises(FormatError, match=r"model\.zcr"):
        load(folder)


def damaged(folder: Path, name: str) -> None:
    """Change one byte of a tensor's payload."""
    with zcrecord.load_record(folder / "model.zcr") as record:
        at = record.info(name).offset
    octets = bytearray((folder / "model.zcr").read_bytes())
    octets[at] ^= 1
    (folder / "model.zcr").write_bytes(octets)


@pytest.mark.parametrize(("name", "ranks"), [(name, 1) for name in SHAPES] + [("norm", 2)])
def test_tensor_that_is_copied_whole_is_checked_by_its_digest(name: str, ranks: int, vllm: None, folder: Path) -> None:
    damaged(folder, name)
    model = stand_in.Model(SHAPES, 0, ranks)
    with pytest.raises(IntegrityError, match=rf"model\.zcr: tensor '{name}': its payload's digest does not match"):
        load(folder, make=lambda _: model)
    assert not model.parameters[name].any()


STRANGE = {
    "int4": (zcrecord.PackedTensor(np.zeros(2, np.uint8), "int4", (4,)), "int4"),
    "strings": (zcrecord.StringTensor.from_strings(["a"]), "string"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_elements_that_torch_has_no_type_for_are_refused_before_anything_is_loaded(
    kind: str, vllm: None, tmp_path: Path
) -> None:
    tensor, word = STRANGE[kind]
    zcrecord.save_record({**TENSORS, "vocabulary": tensor}, tmp_path / "model.zcr")
    model = stand_in.Model(SHAPES)
    with pytest.raises(UnsupportedError, match=rf"model\.zcr: tensor 'vocabulary': .*{word}.*record\.select"):
        load(tmp_path, make=lambda _: model)
    assert not any(parameter.any() for parameter in model.parameters.values())


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"wte": EMBEDDING}, "tensor 'wte': Model does not take these weights: There is no module"),
    "another shape": ({**TENSORS, "norm": np.ones(5)}, "tensor 'norm': Model does not take these weights: Attempted"),
    "one too few": ({**TENSORS, "norm": None}, "Model does not take these weights: .* not initialized .*'norm'"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_weights_of_another_model_are_a_mismatch_that_names_the_tensor(case: str, vllm: None, tmp_path: Path) -> None:
    tensors, message = MISMATCHES[case]
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    zcrecord.save_record(kept, tmp_path / "model.zcr")
    with pytest.raises(MismatchError, match=rf"model\.zcr: {message}"):
        load(tmp_path)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("too much"), KeyboardInterrupt()])
def test_errors_that_are_not_about_the_weights_stay_what_they_are(error: Any, vllm: None, folder: Path) -> None:
    class Failing(stand_in.Model):
        def load_weights(self, weights: Any) -> set[str]:
            next(iter(weights))
            raise error

    with pytest.raises(type(error)) as caught:
        load(folder, make=lambda _: Failing(SHAPES))
    assert caught.value is error
