"""A catalogue goes wherever an archive goes: every public function and every command takes it, or refuses it by name.

Each row of the tables says which, and the answer of one that takes it is compared with that of the same record as one
archive. Both are called model.zcr, so that answers may name them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import itertools
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import records as r

import zcrecord
from tools.generate import reference
from tools.range_server import serving
from zcrecord import PackedTensor, Record, StringTensor, embed, formats, integrity, loaders, onnx, report, transport
from zcrecord.cli.dispatch import main
from zcrecord.compat import safetensors as compat
from zcrecord.compat.safetensors import torch as torch_compat
from zcrecord.errors import (
    DestinationExistsError,
    FormatError,
    IntegrityError,
    SourceNotFoundError,
    UnsupportedError,
)

DIGITS = Path(__file__).resolve().parents[1] / "data" / "digits.onnx"
REFUSAL = (
    "is a catalogue of shards, and {} takes one archive; zcrecord convert model.zcr one.zcr makes one archive of it"
)


@dataclasses.dataclass
class Pair:
    """A class to load a module as."""

    weight: Any
    bias: Any


@dataclasses.dataclass
class Plain:
    """A class to load a record as."""

    encoder: dict[str, Any]
    decoder: list[Any]
    linear: Pair
    scalar: Any


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(7)
    a = rng.standard_normal((32, 24)).astype(np.float32)
    return {
        "encoder": {"weight": a, "tied": a, "turned": np.asfortranarray(a + 1), "half": a[::2], "heads": 2},
        "decoder": [{"bias": np.full(500, 3, np.int32)}, {"bias": np.full(500, 3, np.int32)}],
        "linear": {"weight": a + 2, "bias": a[0] + 2},
        "narrow": PackedTensor.pack(np.array([1, -2, 3, 4]).astype("int4")),
        "texts": StringTensor.from_strings(["some", "texts"]),
        "brain": a.astype(ml_dtypes.bfloat16),
        "scalar": np.array(0.5, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "rate": 0.5,
        "blob": b"bytes",
    }


class Models(NamedTuple):
    """Folders with the same record as one archive and as a catalogue, both named model.zcr."""

    one: Path
    shards: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Models]:
    """Tensors of every kind, with attributes and metadata; those that every framework has; and an ONNX model."""
    base = tmp_path_factory.mktemp("catalogues")
    found = {of: Models(base / f"one {of}", base / f"shards {of}") for of in ("all", "plain", "digits")}
    for folder in itertools.chain(*found.values()):
        folder.mkdir()
    plain = {name: value for name, value in tree().items() if name in ("encoder", "decoder", "linear", "scalar")}
    del plain["encoder"]["turned"], plain["encoder"]["half"], plain["encoder"]["heads"]
    zcrecord.save_record(tree(), found["all"].one / "model.zcr", metadata={"author": "me", "raw": b"raw"})
    zcrecord.save_record(plain, found["plain"].one / "model.zcr")
    onnx.convert(DIGITS, base / "behind.zcr")
    formats.convert(base / "behind.zcr", found["digits"].one / "model.zcr")  # with its index in front
    for one, shards in found.values():
        formats.convert(one / "model.zcr", shards / "model.zcr", max_shard_size=4000)
        assert len(os.listdir(shards)) > 3
    return found


def told(value: Any) -> Any:
    """Return a value in a form that can be compared: arrays as dtype, shape and bytes."""
    if isinstance(value, Record):
        return told(dict(value.items())), told(value.attributes), told(value.metadata)
    if isinstance(value, dict):
        return {key: told(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [told(item) for item in value]
    if isinstance(value, PackedTensor | StringTensor):
        return type(value).__name__, value.shape, told(value.unpack().tolist())
    if isinstance(value, memoryview):
        return bytes(value)
    if type(value).__module__.startswith("torch") and hasattr(value, "detach"):
        return told(bits_of(value)), tuple(value.shape), str(value.dtype)
    if hasattr(value, "__array__") and not isinstance(value, str | np.generic):
        array = np.asarray(value)
        return array.dtype.name, array.shape, array.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {f.name: told(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def bits_of(tensor: Any) -> Any:
    """Return the bytes of a torch tensor, of whatever type and strides."""
    import torch

    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy()


class Row(NamedTuple):
    """One thing that takes an archive: what to do with its path, and the message if it refuses a catalogue."""

    run: Callable[[Path], Any]
    refused: str | None = None
    of: str = "all"  # of which models


def rec(run: Callable[[Record], Any]) -> Row:
    """Return the row of what takes a record."""
    return Row(lambda path: run(zcrecord.load_record(path)))


def method(name: str, *arguments: Any, **options: Any) -> Row:
    def run(record: Record) -> Any:
        found = getattr(record, name)
        if callable(found):
            found = found(*arguments, **options)
        return list(found) if isinstance(found, Iterator) or name in ("items", "values") else found

    return rec(run)


def written(name: str, run: Callable[[Path, Path], Any], of: str = "all") -> Row:
    """Return the row of what writes a file; the answer is its bytes."""

    def work(path: Path) -> bytes:
        with scratch() as folder:
            run(path, folder / name)
            return (folder / name).read_bytes()

    return Row(work, None, of)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def refused(run: Callable[[Path], Any], what: str, of: str = "all") -> Row:
    return Row(run, REFUSAL.format(what) if " " not in what else what, of)


def private_key() -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def signed(path: Path) -> Any:
    """Sign a copy of a folder; returns what is known of it."""
    with scratch() as folder:
        copy = shutil.copytree(path.parent, folder / "copy") / "model.zcr"
        made = integrity.sign(copy, private_key())
        assert (
            integrity.check_signature(zcrecord.load_record(copy, verify="full"), private_key().public_key()) == made.key
        )
        others = [name for name in os.listdir(copy.parent) if name != "model.zcr"]
        assert all((copy.parent / name).read_bytes() == (path.parent / name).read_bytes() for name in others)
        again = integrity.sign(copy, private_key())
        whole = integrity.sign(copy, private_key(), folder / "whole.zcr")
        assert again.replaced and whole.replaced
        record = zcrecord.load_record(folder / "whole.zcr", verify="full")
        assert not record.archive.source.file_names
        return made.key, made.content_digest, made.replaced, told(zcrecord.load_record(copy)), told(record)


def filled(record: Record) -> Any:
    made = record.hollow()
    made.fill_by("read")
    return made.seal()


def loaded_model(path: Path) -> Any:
    import torch

    layer = torch.nn.Module()
    layer.linear = torch.nn.Linear(24, 32)
    layer.linear.bias = torch.nn.Parameter(torch.zeros(24))
    missing, _ = torch_compat.load_model(layer, path, strict=False)
    return list(missing), layer.linear.weight, layer.linear.bias


def opened(path: Path) -> Any:
    answers: list[Any] = []
    for framework in ("np", "pt", "jax"):
        with compat.safe_open(path, framework) as file:
            answers.append((file.keys(), file.offset_keys(), file.metadata(), "x" in file, len(file)))
            answers.append((file.get_slice("linear.weight")[1:3, ::2], file.get_tensors(), file["scalar"]))
    return answers


def session_answers(made: Any) -> Any:
    (pixels,) = made.get_inputs()
    return made.run(None, {pixels.name: np.linspace(0, 1, 128, dtype=np.float32).reshape(2, 64)})


def prefetched(record: Record) -> Any:
    record.prefetch()
    record.prefetch("encoder.*")


def closed(record: Record) -> Any:
    view = record["scalar"].copy()
    record.close()
    with pytest.raises(UnsupportedError, match="the record is closed"):
        record["scalar"]
    return view


def described(path: Path) -> Any:
    found = report.describe_archive(zcrecord.load_record(path))
    assert found["archive"].pop("shards", []) == zcrecord.load_record(path).archive.source.file_names
    return found


def plain(info: Any) -> bool:
    """Choose the tensors that each of torch, jax and numpy has."""
    return info.dtype.name not in ("int4", "string")


def of_file(path: Path, work: Callable[[Any], Any]) -> Any:
    with open(path, "rb") as file:
        return work(file)


def attached(path: Path) -> Any:
    with scratch() as folder:
        embed.attach(Path(shutil.copy("/bin/true", folder / "app")), path)


def generated(path: Path) -> Any:
    with scratch() as folder:
        embed.generate(path, folder, lang="c")


def edited(path: Path) -> Any:
    with zcrecord.edit(path) as model:
        model.metadata["new"] = 1


def resaved(path: Path) -> Any:
    file = io.BytesIO()
    zcrecord.save_record(zcrecord.load_record(path), file)
    with scratch() as folder:
        zcrecord.save_record(zcrecord.load_record(path), folder / "m.zcr", max_shard_size=3000)
        return file.getvalue(), {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def streamed(record: Record) -> Record:
    made = record.hollow()
    made.stream(record)
    sealed: Record = made.seal()
    return sealed


def verified_external(path: Path) -> Any:
    """Check a model that was written for one archive, at whose path lies this one."""
    with scratch() as folder:
        copy = shutil.copytree(path.parent, folder / "copy")
        shutil.copy(path.parent.with_name("one digits") / "model.zcr", copy / "model.zcr")
        onnx.to_onnx(copy / "model.zcr", copy / "small.onnx", external=True)
        shutil.copy(path, copy / "model.zcr")
        return onnx.verify_external(copy / "small.onnx").tensors


ALONE = (  # of these a record is asked without arguments
    *("archive_nbytes", "attributes", "content_digest", "infos", "items", "layout", "metadata", "mode", "modules"),
    *("names", "nbytes", "tree", "values", "verify", "walk"),
)
RECORD = {
    **{name: method(name) for name in ALONE},
    "array": method("array", "encoder.half"),
    "close": rec(closed),
    "get": method("get", "brain"),
    "hollow": rec(filled),
    "info": method("info", "encoder.half"),
    "into": rec(lambda r: r.module("linear").into(Pair)),
    "jax": method("jax", plain),
    "load_into": method("load_into", "host", plain, slices={"linear.weight": slice(3, 9)}),
    "module": method("module", "encoder"),
    "path": rec(lambda r: os.path.basename(r.path or "")),
    "prefetch": rec(prefetched),
    "raw": method("raw", "narrow"),
    "select": method("select", "*.weight", {"encoder": "first"}),
    "torch": method("torch", "cpu", plain),
}
FUNCTIONS: dict[str, Row] = {
    "zcrecord.load_record": Row(lambda path: zcrecord.load_record(path, verify="full")),
    "zcrecord.save_record": Row(resaved),
    "zcrecord.edit": refused(edited, "is a catalogue of shards; make one archive of it, edit that"),
    "zcrecord.compat.safetensors.deserialize": refused(
        lambda path: compat.deserialize(path.read_bytes()),
        "is a catalogue, whose shards lie beside it in files; load it",
    ),
    "zcrecord.compat.safetensors.load_file": Row(compat.load_file, of="plain"),
    "zcrecord.compat.safetensors.safe_open": Row(opened, of="plain"),
    "zcrecord.compat.safetensors.torch.load_model": Row(loaded_model, of="plain"),
    "zcrecord.embed.attach": refused(attached, "attach"),
    "zcrecord.embed.generate": refused(generated, "embed"),
    "zcrecord.formats.convert": written(
        "m.safetensors", lambda path, dest: formats.convert(path, dest, durable=False), "plain"
    ),
    "zcrecord.hollow.hollow_of": rec(lambda r: filled(r.module("encoder"))),
    "zcrecord.integrity.check_signature": Row(signed),
    "zcrecord.integrity.compare": Row(
        lambda path: list(
            integrity.compare(zcrecord.load_record(path), zcrecord.load_record(path.parents[1] / "one all/model.zcr"))
        )
    ),
    "zcrecord.integrity.make_signature": rec(lambda r: integrity.make_signature(r, private_key())),
    "zcrecord.integrity.sign": Row(signed),
    "zcrecord.integrity.signers": rec(integrity.signers),
    "zcrecord.loaders.load_into": rec(lambda r: [loaders.load_into(r, by, plain) for by in ("cpu", "read", "host")]),
    "zcrecord.loaders.plan_load": refused(
        lambda path: loaders.plan_load(zcrecord.load_record(path), raw=True),
        r"its tensors lie in \d+ shards, and a plan is for one file; load_into loads from all of them",
    ),
    "zcrecord.onnx.fill_session": Row(
        lambda path: session_answers(onnx.fill_session(path, loader="host")), of="digits"
    ),
    "zcrecord.onnx.session": Row(lambda path: session_answers(onnx.session(path)), of="digits"),
    "zcrecord.onnx.to_onnx": written("m.onnx", onnx.to_onnx, "digits"),
    "zcrecord.onnx.tune": refused(onnx.tune, "tuning", "digits"),
    "zcrecord.onnx.tuning": Row(lambda path: onnx.tuning(path).used, of="digits"),
    "zcrecord.onnx.untune": refused(onnx.untune, "tuning", "digits"),
    "zcrecord.onnx.verify_external": refused(verified_external, REFUSAL.format("a model's external data"), "digits"),
    "zcrecord.report.describe_archive": Row(described),
    "zcrecord.report.report": Row(lambda path: report.report(path, io.BytesIO()).tensors),
    "zcrecord.transport.pack": refused(lambda path: transport.pack(path, io.BytesIO()), "pack"),
}
# They take no archive, but tensors, keys, packed archives, programs and models; or their row stands for them.
OTHERS = """
zcrecord: ArchiveLayout DType EditReport LazyTensor ModuleInfo PackedTensor Record RecordEditor RecordWriter SaveReport
    StringTensor TensorInfo index
zcrecord.compat.safetensors: TensorSpec load save save_file serialize serialize_file
zcrecord.compat.safetensors.flax: load load_file save save_file
zcrecord.compat.safetensors.numpy: load load_file save save_file
zcrecord.compat.safetensors.torch: load load_file save save_file save_model storage_ptr storage_size
zcrecord.embed: AttachReport DetachReport EmbedReport detach reader_source
zcrecord.fleet: Job Outcome convert_one plan
zcrecord.formats: ConvertReport FORMATS Format
zcrecord.hollow: HollowRecord
zcrecord.integrity: Change SIGNATURE_PREFIX SignReport is_encrypted_key signed_message
zcrecord.loaders: LoadPlan Loader PayloadRef RangeSource Target loader_for shard
zcrecord.onnx: ConvertReport ExternalReport OnnxTensorInfo OnnxTensors TuneReport Tuning convert scan
zcrecord.remote: trim_cache
zcrecord.report: PageReport report_page
zcrecord.transport: PackReport unpack
"""
# Their tests have catalogues: tests/distributed, tests/frameworks, tests/transformers, tests/vllm.
ELSEWHERE = (
    "zcrecord.distributed", "zcrecord.lightning", "zcrecord.orbax", "zcrecord.transformers", "zcrecord.vllm",
)  # fmt: skip
WAYS: dict[str, Row] = {
    "names=": Row(lambda path: zcrecord.load_record(path, names="encoder.*")),
    "rename=": Row(lambda path: zcrecord.load_record(path, rename={"encoder": "e"})),
    "names= and rename=": Row(lambda path: zcrecord.load_record(path, names="linear", rename={"linear": ""})),
    "expect=": Row(lambda path: zcrecord.load_record(path, expect=zcrecord.load_record(path).content_digest())),
    "trusted_keys=": refused(
        lambda path: zcrecord.load_record(path, trusted_keys=[private_key().public_key()]), "is not signed"
    ),
    "verify='touch'": Row(lambda path: zcrecord.load_record(path, verify="touch")["brain"]),
    "mmap=False": Row(lambda path: zcrecord.load_record(path, mmap=False)),
    "into=": Row(lambda path: zcrecord.load_record(path, into=Plain), of="plain"),
    "mode='c'": Row(lambda path: zcrecord.load_record(path, mode="c")),
    "a file object": Row(lambda path: of_file(path, zcrecord.load_record)),
    "embedded=": refused(
        lambda path: zcrecord.load_record(path, embedded="prefix"), "is a catalogue, whose shards lie beside it"
    ),
    "a part of a part": rec(lambda r: r.module("encoder").select("*t")),
    "a part's digest": rec(lambda r: r.module("encoder").content_digest()),
    "dst=": rec(lambda r: r.load_into("host", "scalar", dst={"scalar": np.zeros((), np.float32)})),
    "raw=": rec(lambda r: r.load_into("host", raw=True)),
    "a pickled part": rec(lambda r: pickle.loads(pickle.dumps(r.select("encoder.*")))),
    "jax tree": rec(lambda r: r.select("decoder.*").tree("jax")),
    "torch, read-only": rec(lambda r: r.torch(names="encoder.*", writable=False)),
    "to npz": written("m.npz", lambda path, dest: formats.convert(path, dest, durable=False), "plain"),
    "to one archive": written("m.zcr", lambda path, dest: formats.convert(path, dest, durable=False)),
    "a folder": written("m.zcr", lambda path, dest: formats.convert(path.parent, dest, durable=False)),
    "to_onnx, external": refused(
        lambda path: onnx.to_onnx(path, path.with_name("small.onnx"), external=True),
        "a model with external weights",
        "digits",
    ),
    "hollow, of the file": refused(
        lambda path: of_file(path, zcrecord.load_record(path).hollow().stream),
        "the file is not the archive that the hollow record is of",
    ),
    "hollow, of another record": rec(streamed),
}
ROWS = {
    **{f"Record.{name}": row for name, row in RECORD.items()},
    **FUNCTIONS,
    **{f"way: {name}": row for name, row in WAYS.items()},
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
@pytest.mark.parametrize("name", ROWS)
def test_what_takes_an_archive_takes_a_catalogue_or_refuses_it_by_name(name: str, models: dict[str, Models]) -> None:
    row = ROWS[name]
    one, catalogue = (folder / "model.zcr" for folder in models[row.of])
    before = {path.name: path.read_bytes() for path in catalogue.parent.iterdir()}
    if row.refused is None:
        assert told(row.run(catalogue)) == told(row.run(one))
    else:
        with pytest.raises((UnsupportedError, IntegrityError), match=row.refused):
            row.run(catalogue)
    assert {path.name: path.read_bytes() for path in catalogue.parent.iterdir()} == before


def test_no_public_name_is_forgotten() -> None:
    others = {
        f"{module}.{name}"
        for line in OTHERS.replace("\n    ", " ").strip().splitlines()
        for module, _, names in [line.partition(": ")]
        for name in names.split()
    }
    public = {
        f"{prefix}.{name}"
        for prefix in reference.MODULES
        for module in [importlib.import_module(prefix)]
        for name in module.__all__
        if prefix not in (*ELSEWHERE, "zcrecord.errors")
        and not (isinstance(kind := getattr(module, name), type) and issubclass(kind, Exception))
    }
    assert public == others | FUNCTIONS.keys(), "say in a table here whether it takes a catalogue"
    assert not others & FUNCTIONS.keys()
    assert {name for name in vars(Record) if not name.startswith("_")} == RECORD.keys() | {"archive"}


# Commands.


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(arguments)
    return status, *capsys.readouterr()


@pytest.fixture
def folders(models: dict[str, Models], tmp_path: Path) -> Models:
    """Copies of the folders with one archive and with a catalogue, and keys beside them."""
    from cryptography.hazmat.primitives import serialization as s

    pem = private_key().private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    (tmp_path / "private.pem").write_bytes(pem)
    public = private_key().public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(public)
    one, shards = models["digits"]
    return Models(shutil.copytree(one, tmp_path / "one"), shutil.copytree(shards, tmp_path / "shards"))


Answer = Callable[..., list[str]]


@pytest.fixture
def answers(folders: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answer:
    """Runs a command over the one archive and the catalogue, each in its folder; returns what it prints."""

    def both(*arguments: str) -> list[str]:
        found = []
        for folder in folders:
            monkeypatch.chdir(folder)
            status, out, err = run(capsys, *arguments)
            assert (status, err) == (0, "")
            found.append(out)
        return found

    return both


def test_info_tells_of_shards_and_else_the_same(answers: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    found = list(map(json.loads, answers("info", "--json", "model.zcr")))
    one, several = (facts.pop("catalogue") for facts in found)
    assert found[0] == found[1]
    assert one is None
    sizes = {name: os.path.getsize(name) for name in os.listdir()}
    assert several["nbytes"] == sum(sizes.values())
    assert {shard["name"]: shard["nbytes"] for shard in several["shards"]} | {"model.zcr": sizes["model.zcr"]} == sizes
    _, out, _ = run(capsys, "info", "model.zcr")
    assert f"catalogue: of 5 shards, {several['nbytes']} bytes in all files\n" in out


def test_ls_as_json_tells_the_shard_of_each_tensor(answers: Answer) -> None:
    one, catalogue = map(json.loads, answers("ls", "--json", "model.zcr"))
    shards = {row["name"]: row.pop("shard") for row in catalogue}
    assert one == catalogue
    assert all(name in zcrecord.load_record(shard) for name, shard in shards.items())


def test_report_tells_of_shards(answers: Answer) -> None:
    answers("report", "model.zcr", "-q")
    assert "model-00001-of-00005.zcr" in Path("model.html").read_text(encoding="utf-8")


# Damage.


@pytest.fixture
def broken(models: dict[str, Models], tmp_path: Path) -> Path:
    return shutil.copytree(models["all"].shards, tmp_path / "broken") / "model.zcr"


def shard(path: Path, number: int) -> Path:
    return sorted(path.parent.glob("model-*.zcr"))[number - 1]


def damage(path: Path) -> str:
    """Change a byte of an archive's first tensor; return its name."""
    with zcrecord.load_record(path) as record:
        (name, *_) = record
        offset = record.info(name).offset
    r.damage(path, offset)
    return name


def test_verify_goes_on_to_all_shards_and_names_what_is_wrong_with_each(
    broken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = len(list(broken.parent.glob("model-*.zcr")))
    names = [str(shard(broken, number)) for number in range(1, count + 1)]
    first, other = damage(Path(names[0])), damage(Path(names[3]))
    os.unlink(names[1])
    shutil.copy(names[4], names[2])
    message = f"{names[0]}: tensor '{first}': payload .* digest does not match"
    with pytest.raises(IntegrityError, match=message) as caught:
        zcrecord.load_record(broken).verify()
    assert [found.path for found in caught.value.damage] == names[:4]
    status, out, err = run(capsys, "verify", str(broken))
    assert status == 1 and names[0] in err
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.search(rf"^{names[0]}: \[0x.*\) of tensor '{first}'.*: its digest does not match$", lines[0])
    assert lines[1].startswith(f"{names[1]}: no such file; it is shard 2 of {count} of {broken}; copy the catalogue")
    assert lines[2].startswith(f"{names[2]}: is another archive than the one that the catalogue names")
    assert f"of tensor '{other}'" in lines[3]
    status, out, _ = run(capsys, "verify", "--json", str(broken))
    assert [found["path"] for found in json.loads(out)["damage"]] == names[:4]


@pytest.mark.parametrize(
    "work", [lambda path: integrity.sign(path, private_key()), lambda path: filled(zcrecord.load_record(path))]
)
def test_damage_in_shards_is_refused_wherever_payloads_are_copied(work: Callable[[Path], Any], broken: Path) -> None:
    damage(shard(broken, 1))
    with pytest.raises(FormatError, match="digest does not match"):
        work(broken)


# A record in the course of its life.


@pytest.mark.parametrize(
    "work",
    [
        lambda record, **options: record.load_into("host", plain, **options),
        lambda record, **options: record.verify(**options),
        lambda record, **options: record.content_digest(**options),
    ],
)
def test_work_over_all_shards_tells_its_progress(work: Callable[..., Any], models: dict[str, Models]) -> None:
    seen: list[tuple[int, int]] = []
    record = zcrecord.load_record(models["all"].shards / "model.zcr")
    work(record, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] and len({total for _, total in seen}) == 1


# Behind a URL.


def test_only_shards_that_are_needed_are_fetched(models: dict[str, Models]) -> None:
    local = zcrecord.load_record(models["all"].shards / "model.zcr")
    with serving(models["all"].shards) as server:
        record = zcrecord.load_record(f"{server.url}/model.zcr", cache=False)
        assert {request.path for request in server.requests} == {"/model.zcr"}
        number = local.archive.row(local.archive.find("brain")).payload
        assert told(record["brain"]) == told(local["brain"])
        file = f"/{local.archive.source.file_name(number)}"
        assert {request.path for request in server.requests} == {"/model.zcr", file}


@pytest.mark.parametrize(
    "work",
    [
        lambda url, **options: zcrecord.load_record(url, verify="full", **options),
        lambda url, **options: zcrecord.load_record(url, names="linear.*", verify="touch", **options),
        lambda url, **options: zcrecord.load_record(url, mode="c", **options).content_digest(),
        lambda url, **options: zcrecord.load_record(url, **options).torch(names="encoder.*"),
        lambda url, **options: zcrecord.load_record(url, **options).load_into("host", "linear.*"),
        lambda url, **options: zcrecord.load_record(url, **options).prefetch("encoder.*"),
        lambda url, **options: filled(zcrecord.load_record(url, **options)),
        lambda url, **options: pickle.loads(pickle.dumps(zcrecord.load_record(url, **options))),
    ],
)
def test_a_url_gives_what_the_path_gives(work: Any, models: dict[str, Models]) -> None:
    with serving(models["all"].shards) as server:
        found = told(work(f"{server.url}/model.zcr", cache=False))
    assert found == told(work(models["all"].one / "model.zcr"))


def test_a_missing_remote_shard_is_named(broken: Path) -> None:
    os.unlink(gone := shard(broken, 2))
    with serving(broken.parent) as server:
        record = zcrecord.load_record(f"{server.url}/model.zcr", cache=False)
        with pytest.raises(SourceNotFoundError, match=f"{gone.name}: .*it is shard 2 of") as caught:
            record.verify()
        assert [os.path.basename(found.path) for found in caught.value.damage] == [gone.name]


# Conversions.


def test_a_shard_of_the_source_is_no_destination(broken: Path) -> None:
    dest = shard(broken, 3)
    before = dest.read_bytes()
    with pytest.raises(DestinationExistsError, match="source and destination are the same file; name another"):
        formats.convert(broken, dest, force=True)
    assert dest.read_bytes() == before


def test_the_tuned_part_of_a_model_is_left_out_of_shards(models: dict[str, Models], tmp_path: Path) -> None:
    """It is for one file, and has places in it."""
    one = models["digits"].one / "model.zcr"
    shutil.copy(one, tmp_path / "tuned.zcr")
    before = onnx.tune(tmp_path / "tuned.zcr").content_digest_before
    formats.convert(tmp_path / "tuned.zcr", tmp_path / "m.zcr", max_shard_size=4000)
    record = zcrecord.load_record(tmp_path / "m.zcr", verify="full")
    assert record.archive.source.file_names and record.content_digest() == before
    assert not [name for name in record.modules if name.startswith("onnx.tuned")]
    assert told(session_answers(onnx.session(record))) == told(session_answers(onnx.session(one)))
