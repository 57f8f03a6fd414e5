"""vLLM's load format: found by its entry point, imported when it is chosen, options and errors that say what is wrong.

vLLM is a stand-in here; `./tools/vllm` serves models with vLLM itself.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records as r
import stand_in_vllm as stand_in
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import zcrecord
from tools.range_server import serving
from zcrecord import integrity
from zcrecord.codec import blocks
from zcrecord.errors import FormatError, IntegrityError, LimitError, MismatchError, SourceError, UnsupportedError
from zcrecord.vllm import FORMAT, weights
from zcrecord.vllm.loader import loader_class
from zcrecord.writing import equal

SHAPES = {"layers.0.up": (8, 6), "layers.0.down": (6, 8), "norm": (6,), "embed_tokens": (10, 6)}
TENSORS = {name: np.random.default_rng(i).random(shape, np.float32) for i, (name, shape) in enumerate(SHAPES.items())}


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The stand-in, under vLLM's name."""
    for name, module in stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    loader_class.cache_clear()
    zcrecord.vllm.register()
    yield
    loader_class.cache_clear()
    stand_in.LOADERS.clear()


@pytest.fixture
def folder(tmp_path: Path, vllm: None) -> Path:
    """A model's folder."""
    zcrecord.save_record(TENSORS, tmp_path / "model.zcr", durable=False)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    return tmp_path


@pytest.fixture(params=[None, "NFS"], ids=["local", "network"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system of a model's folder."""
    monkeypatch.setattr("zcrecord.storage.memory._network_file_system", lambda _: request.param)
    monkeypatch.setattr("zcrecord.vllm.weights._BATCH", 100)


def loader(**options: Any) -> Any:
    return stand_in.LOADERS[FORMAT](stand_in.LoadConfig(FORMAT, **options))


def load(folder: Any, extra: Any = None, *, model: Any = None, **config: Any) -> Any:
    """Load a model, or the one that a function makes of its configuration, as vLLM does; returns it."""
    made = model or stand_in.Model(SHAPES)
    make = made if callable(made) else lambda _: made
    options = loader(model_loader_extra_config=extra or {})
    return options.load_model(SimpleNamespace(make=make), stand_in.model_config(folder, **config))


def same(model: Any, tensors: dict[str, Any]) -> bool:
    return all(torch.equal(parameter, torch.tensor(tensors[name])) for name, parameter in model.parameters.items())


# Registration.


def test_entry_point_names_a_function_of_this_package() -> None:
    project = tomllib.loads((r.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
stand_in_vllm.LOADERS['zcrecord'](stand_in_vllm.LoadConfig('zcrecord'))
print("zcrecord.vllm.weights" in sys.modules)
"""


@pytest.mark.slow
def test_registering_imports_two_small_modules_and_choosing_the_format_the_rest() -> None:
    assert r.run_python(REGISTERED).stdout == "zcrecord.vllm zcrecord.vllm.loader\nTrue\n"


def test_without_vllm_registering_is_an_import_error() -> None:
    assert not any(name.startswith("vllm.") for name in sys.modules)
    with pytest.raises(ImportError, match="vllm"):
        zcrecord.vllm.register()


# Loads.


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("rank, ranks", [(0, 1), (0, 2), (1, 2)])
def test_rank_has_its_rows_and_columns_of_the_archives_weights(rank: int, ranks: int, folder: Path) -> None:
    model = load(folder, model=stand_in.Model(SHAPES, rank, ranks))
    mine = slice(8 // ranks * rank, 8 // ranks * (rank + 1))
    cut = {"layers.0.up": TENSORS["layers.0.up"][mine], "layers.0.down": TENSORS["layers.0.down"][:, mine]}
    assert same(model, TENSORS | cut)


def test_model_of_a_hub_is_downloaded_as_archives(folder: Path) -> None:
    ours, config = loader(download_dir=str(folder.parent)), stand_in.model_config(folder.name)
    ours.download_model(config)
    assert same(ours.load_model(SimpleNamespace(make=lambda _: stand_in.Model(SHAPES)), config), TENSORS)


def test_tensors_that_a_model_does_not_use_are_left_out(folder: Path) -> None:
    class Part(stand_in.Model):
        def is_unused_checkpoint_weight(self, name: str) -> bool:
            return name.startswith("layers.")

    shapes = {name: shape for name, shape in SHAPES.items() if not name.startswith("layers.")}
    assert same(load(folder, model=Part(shapes)), TENSORS)


class Joint(stand_in.Model):
    secondary_weights = (SimpleNamespace(prefix="head.", weights={"w": torch.ones(3)}),)


def test_further_files_of_a_model_are_read_by_vllm_itself(folder: Path) -> None:
    model = load(folder, model=Joint({**SHAPES, "head.w": (3,)}))
    assert same(model, {**TENSORS, "head.w": np.ones(3, np.float32)})


@pytest.mark.parametrize("by_url", [False, True])
def test_only_archives_that_a_trusted_key_signed_are_loaded(by_url: bool, folder: Path) -> None:
    keys = []
    for number in (1, 2):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number] * 32))
        keys.append(str(folder / f"{number}.pub"))
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        Path(keys[-1]).write_bytes(public)
    integrity.sign(folder / "model.zcr", key)
    with serving(folder) as server:
        source = {"url": f"{server.url}/model.zcr"} if by_url else {}
        assert same(load(folder, {"trusted_keys": keys, **source}), TENSORS)
        with pytest.raises(IntegrityError, match="is not signed by this key"):
            load(folder, {"trusted_keys": keys[:1], **source})
        with pytest.raises(UnsupportedError, match="takes a list of public keys, not an empty one"):
            load(folder, {"trusted_keys": [], **source})
        with pytest.raises(UnsupportedError, match="Joint has further files of weights, which vLLM reads itself"):
            load(folder, {"trusted_keys": keys, **source}, model=Joint({**SHAPES, "head.w": (3,)}))


@pytest.mark.parametrize("told", [False, True])
def test_weights_can_be_asked_for_again_with_progress_where_vllm_wants_it(
    told: bool, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, model = loader(use_tqdm_on_load=told), stand_in.Model(SHAPES)
    for _ in range(2):
        assert list(dict(ours.get_all_weights(stand_in.model_config(folder), model))) == list(SHAPES)
        assert ("Loading zcrecord: 100% of 4 tensors" in capsys.readouterr().err) == told


# Tied embeddings.

EMBEDDING = TENSORS["embed_tokens"]
HEADS = {"tied": (EMBEDDING, True), "equal": (EMBEDDING.copy(), False), "another": (EMBEDDING + 1, False)}


@pytest.mark.parametrize("head", [*HEADS, "none"])
def test_embeddings_are_untied_for_a_head_of_its_own(head: str, folder: Path) -> None:
    tensor, stays_tied = HEADS.get(head, (None, True))
    extra = {} if tensor is None else {"lm_head.weight": tensor}
    zcrecord.save_record({**TENSORS, **extra}, folder / "model.zcr")
    seen = []

    def make(config: Any) -> Any:
        seen.append(config.tie_word_embeddings)
        return stand_in.Model(SHAPES | dict.fromkeys(extra, EMBEDDING.shape))

    load(folder, model=make, tie_word_embeddings=True)
    assert seen == [stays_tied]


# URLs.


def test_weights_of_a_url_are_fetched_once_in_few_requests(folder: Path) -> None:
    with serving(folder) as server:
        extra = {"url": f"{server.url}/model.zcr", "storage_options": {}, "cache": False}
        assert same(load("nowhere", extra), TENSORS)
        assert len(server.requests) <= 4
        extra["cache"] = str(folder / "cache")
        load("nowhere", extra)
        first = server.sent
        assert same(load("nowhere", extra), TENSORS)
        assert server.sent - first < 200, "ranks of a machine share the cache"


def test_tied_tensors_of_a_url_are_not_fetched_out_of_proportion(tmp_path: Path) -> None:
    tied = dict.fromkeys((f"w{i}" for i in range(1200)), np.zeros(1 << 20, np.uint8))
    zcrecord.save_record(tied, tmp_path / "model.zcr", durable=False)
    with serving(tmp_path) as server, zcrecord.load_record(f"{server.url}/model.zcr") as record:
        asked = len(server.requests)
        with pytest.raises(LimitError, match=r"tensors that share their bytes would take 1\.26e\+09 bytes"):
            next(weights.torch_weights(record))
        assert len(server.requests) == asked


def test_batches_have_every_tensor_once_and_at_most_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_BATCH", 250)
    sizes = {"a": 192, "b": 24, "c": 400, "d": 9}
    tensors: Any = [SimpleNamespace(name=name, nbytes=nbytes) for name, nbytes in sizes.items()]
    assert [set(batch) for batch in weights._batches(tensors)] == [{"a", "b"}, {"c"}, {"d"}]
    assert list(weights._batches([])) == []


# Refusals.

OPTIONS = {
    "unknown": ({"ulr": "x"}, "has 'ulr', which is not known; it takes url, storage_options, cache, trusted_keys"),
    "no text": ({"url": 3}, "url is a text, not a int"),
    "no object": ({"url": "x", "storage_options": "key"}, "storage_options is an object, not a str"),
    "no folder": ({"url": "x", "cache": True}, "cache is a folder, or false, not a bool"),
    "no bool": ({"verify": 1}, "verify is true or false, not a int"),
    "without url": ({"cache": "x", "verify": True}, "cache without url; leave it out for an archive in the folder"),
    "no mapping": (["url"], "takes a JSON object with url, storage_options, cache, trusted_keys, verify, not a list"),
    "no list": ({"trusted_keys": "pub.pem"}, "trusted_keys is a list of files, not a str"),
    "no files": ({"trusted_keys": ["pub.pem", None]}, "trusted_keys is a list of files, not a list"),
}


@pytest.mark.parametrize("fault", OPTIONS)
def test_wrong_option_is_refused_by_name(fault: str, folder: Path) -> None:
    extra, message = OPTIONS[fault]
    with pytest.raises(UnsupportedError, match=f"--model-loader-extra-config:? {message}"):
        load(folder, extra)


def damaged(folder: Path, offset: int | None) -> None:
    """Change one byte of the archive."""
    r.damage(folder / "model.zcr", -40 if offset is None else offset)


def test_damaged_or_missing_archive_is_refused(folder: Path) -> None:
    damaged(folder, None)
    with pytest.raises(FormatError, match=r"model\.zcr"):
        load(folder)
    (folder / "model.zcr").unlink()
    with pytest.raises(SourceError, match="is a folder without a model"):
        load(folder)


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(("name", "ranks"), [(name, 1) for name in SHAPES] + [("norm", 2)])
def test_tensor_that_is_copied_whole_is_checked_by_its_digest(name: str, ranks: int, folder: Path) -> None:
    with zcrecord.load_record(folder / "model.zcr") as record:
        offset = record.info(name).offset
    damaged(folder, offset)
    model = stand_in.Model(SHAPES, 0, ranks)
    with pytest.raises(IntegrityError, match=rf"model\.zcr: tensor '{name}': its payload's digest does not match"):
        load(folder, model=model)
    assert not model.parameters[name].any()


@pytest.mark.parametrize("verify", [True, False])
def test_part_that_a_rank_copies_is_checked_by_its_blocks(
    verify: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (blocks, equal):
        monkeypatch.setattr(module, "LEAST", 1)
    zcrecord.save_record(TENSORS, folder / "model.zcr", durable=False)
    name = "layers.0.down"
    with zcrecord.load_record(folder / "model.zcr") as record:
        offset = record.info(name).offset
    damaged(folder, offset)
    model = stand_in.Model(SHAPES, 0, 2)
    bad: Any = pytest.raises(IntegrityError, match=rf"tensor '{name}': bytes \[.*their checksum does not match")
    with bad if verify else nullcontext():
        load(folder, {"verify": verify}, model=model)
    assert model.parameters[name].any() != verify


@pytest.mark.parametrize("tensor, kind", [
    (zcrecord.PackedTensor(np.zeros(2, np.uint8), "int4", (4,)), "int4"),
    (zcrecord.StringTensor.from_strings(["a"]), "string"),
], ids=["int4", "strings"])  # fmt: skip
def test_elements_that_torch_has_no_type_for_are_refused_before_anything_is_loaded(
    tensor: Any, kind: str, folder: Path
) -> None:
    zcrecord.save_record({**TENSORS, "vocabulary": tensor}, folder / "model.zcr")
    model = stand_in.Model(SHAPES)
    with pytest.raises(UnsupportedError, match=rf"model\.zcr: tensor 'vocabulary': .*{kind}.*record\.select"):
        load(folder, model=model)
    assert not any(parameter.any() for parameter in model.parameters.values())


MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"wte": EMBEDDING}, "tensor 'wte': Model does not take these weights: There is no module"),
    "another shape": ({**TENSORS, "norm": np.ones(5)}, "tensor 'norm': Model does not take these weights: Attempted"),
    "one too few": (
        {name: value for name, value in TENSORS.items() if name != "norm"},
        "Model does not take these weights: .* not initialized .*'norm'",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_weights_of_another_model_are_a_mismatch_that_names_the_tensor(case: str, folder: Path) -> None:
    tensors, message = MISMATCHES[case]
    zcrecord.save_record(tensors, folder / "model.zcr")
    with pytest.raises(MismatchError, match=rf"model\.zcr: {message}"):
        load(folder)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("too much"), KeyboardInterrupt()])
def test_errors_that_are_not_about_the_weights_stay_the_same(error: Any, folder: Path) -> None:
    class Failing(stand_in.Model):
        def load_weights(self, weights: Any) -> set[str]:
            next(iter(weights))
            raise error

    with pytest.raises(type(error)) as caught:
        load(folder, model=Failing(SHAPES))
    assert caught.value is error
