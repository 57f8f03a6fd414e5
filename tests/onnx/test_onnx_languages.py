"""Programs in five languages serve models from archives by the lines of the guide, zcrecord/onnx/README.md.

ONNX Runtime in Python, C++, Node and Java runs a small model over an archive; onnxruntime-genai, Optimum and
transformers.js run a Llama, by those of README.generation.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import onnx_runtimes
import onnxruntime as ort
import pytest
from onnx_graphs import PACKS, READS_INNER, request
from optimum_folders import copy_folder

from tools.models.branches import write_branches
from tools.models.quantized import write_quantized
from tools.models.tied import write_dequantized, write_tied
from zcrecord.cli.dispatch import main
from zcrecord.onnx import convert, to_onnx, tune
from zcrecord.onnx.external_data import ONE_COPY

SOURCES = Path(__file__).parents[1] / "programs"
PAGE = (c.ROOT / "zcrecord" / "onnx" / "README.md").read_text(encoding="utf-8")
(PROGRAM_LINES,) = re.findall(r"^## Other languages.*?\n(.*?)^## ", PAGE, re.M | re.S)
LLAMA_LINES = (c.ROOT / "zcrecord" / "onnx" / "README.generation.md").read_text(encoding="utf-8")
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]
PLACE = re.compile(r"^ *// the guide's lines\n", re.MULTILINE)
MIB = 48  # of the weight that both branches share

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="platform: libraries and /proc as Linux has them")

Feed = dict[str, np.ndarray]
Change = Callable[[str], str]
Program = Callable[..., list[str]]  # builds the program in a folder, of changed lines; its command line


def lines(language: str, number: int = 0, text: str = PROGRAM_LINES) -> str:
    """The guide's lines in a language."""
    return str(re.findall(rf"^```{language}\n(.*?)^```$", text, re.M | re.S)[number])


def without_options(text: str) -> str:
    """Lines that make a session, as a tuned model needs them."""
    return re.sub(r"^.*disable_.*\n", "", text, flags=re.MULTILINE)


def with_lines(source: Path, used: str, dest: Path) -> Path:
    """A program with lines that make a session in the place that is marked."""
    text, count = PLACE.subn(lambda _: used, source.read_text(encoding="utf-8"))
    assert count == 1, source
    dest.write_text(text, encoding="utf-8")
    return dest


def build(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, f"{' '.join(command)}\n{done.stderr}"


PYTHON = """
import sys
import numpy as np, onnxruntime
from tools.measure import private_bytes
before = private_bytes()
# the guide's lines
for number, run in enumerate("\\0".join(sys.argv[1:]).split("--")[1:]):
    feed = {}
    for text in filter(None, run.split("\\0")):
        name, kind, dims, path = text.split(":")
        kind = {"float": "f4", "int64": "i8", "bool": "?"}[kind]
        feed[name] = np.fromfile(path, kind).reshape([int(dim) for dim in dims.split("x") if dim])
    session.run(None, feed)[0].tofile(f"output{number}")
print(onnxruntime.__version__, private_bytes() - before)
"""


def python(folder: Path, change: Change = str) -> list[str]:
    (folder / "session.py").write_text(
        PYTHON.replace("# the guide's lines\n", change(lines("python"))), encoding="utf-8"
    )
    return [sys.executable, str(folder / "session.py")]


def cpp(folder: Path, change: Change = str) -> list[str]:
    library = folder / "libonnxruntime.so.1"
    library.symlink_to(onnx_runtimes.shared_library())
    (folder / "session.inc").write_text(change(lines("cpp")), encoding="utf-8")
    include = ["-isystem", str(onnx_runtimes.cpp_headers()), f"-I{folder}", "-DORT_API_MANUAL_INIT"]
    link = [str(library), f"-Wl,-rpath,{folder}"]
    source = str(SOURCES / "cpp" / "session.cpp")
    build(["g++", "-std=c++17", *STRICT, *include, source, *link, "-o", str(folder / "session")])
    return [str(folder / "session")]


def node(folder: Path, change: Change = str) -> list[str]:
    (folder / "node_modules").symlink_to(onnx_runtimes.node_modules() / "node_modules")
    return ["node", str(with_lines(SOURCES / "js" / "session.mjs", change(lines("js")), folder / "session.mjs"))]


def java(folder: Path, change: Change = str) -> list[str]:
    classes = onnx_runtimes.java_classes()
    library = folder / "libonnxruntime.so.1.17.0"
    (folder / "versions").write_text("VERS_1.17.0 { global: Ort*; local: *; };\n", encoding="utf-8")
    link = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}", f"-Wl,--version-script={folder}/versions"]
    build(["gcc", *STRICT, *link, str(SOURCES / "java" / "onnxruntime_1_17.c"), "-o", str(library)])
    source = with_lines(SOURCES / "java" / "Session.java", change(lines("java")), folder / "Session.java")
    build(["javac", "-Xlint:all", "-Werror", "-cp", str(classes), "-d", str(folder), str(source)])
    options = ["-XX:+UseSerialGC", "-Xmx32m", f"-Donnxruntime.native.onnxruntime.path={library}"]
    return ["java", *options, "-cp", f"{folder}:{classes}", "Session"]


PROGRAMS = [
    pytest.param(python, id="Python"),
    pytest.param(cpp, id="C++", marks=pytest.mark.needs("g++", "npm", "node")),
    pytest.param(node, id="Node", marks=pytest.mark.needs("node", "npm")),
    pytest.param(java, id="Java", marks=pytest.mark.needs("java", "javac", "gcc")),
]


@pytest.fixture(scope="module")
def branches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model of two branches, its archive, and the small model over it."""
    folder = tmp_path_factory.mktemp("branches")
    with open(folder / "model.onnx", "wb") as sink:
        write_branches(sink, MIB)
    return converted(folder)


def converted(folder: Path) -> Path:
    convert(folder / "model.onnx", folder / "model.zcr", durable=False)
    to_onnx(folder / "model.zcr", folder / "small.onnx", external=True, durable=False)
    return folder


def feeds_of_branches(folder: Path) -> list[Feed]:
    """Inputs of both branches."""
    (_, side) = ort.InferenceSession(folder / "small.onnx").get_inputs()[2].shape
    x = np.random.default_rng(0).standard_normal((2, side), "f4")
    return [{"gather": np.array(gather), "rows": np.array([3, 5]), "x": x} for gather in (False, True)]


def run(command: list[str], folder: Path, feeds: list[Feed]) -> tuple[list[np.ndarray], int]:
    """Run a program beside small.onnx; return the first output of each run, flat, and the growth of private memory."""
    arguments = []
    for number, feed in enumerate(feeds):
        arguments.append("--")
        for name, value in feed.items():
            value.tofile(folder / f"{name}{number}")
            kind = {"float32": "float", "int64": "int64", "bool": "bool"}[value.dtype.name]
            arguments.append(f"{name}:{kind}:{'x'.join(map(str, value.shape))}:{name}{number}")
    told = {**os.environ, "ONNXRUNTIME_LIBRARY": str(onnx_runtimes.shared_library())}
    done = subprocess.run([*command, *arguments], cwd=folder, env=told, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [np.fromfile(folder / f"output{n}", "f4") for n in range(len(feeds))], int(done.stdout.split()[1])


def assert_equal(make: Program, found: np.ndarray, expected: np.ndarray) -> None:
    if make is node:  # whose ONNX Runtime is another version
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert found.tobytes() == expected.tobytes()


def test_the_guide_and_the_command_line_give_the_options_that_are_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    c.enter(tmp_path, monkeypatch)
    convert("model.onnx", "model.zcr")
    assert main(["to-onnx", "model.zcr", "small.onnx", "--external"]) == 0
    told = dict(re.findall(r"^  (\S+) = (\S+)$", capsys.readouterr().out, re.MULTILINE))
    assert told == ONE_COPY
    assert main(["to-onnx", "model.zcr", "small.onnx", "--external", "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["session_options"] == ONE_COPY
    assert main(["to-onnx", "model.zcr", "whole.onnx"]) == 0
    assert "prepacking" not in capsys.readouterr().out  # a model that has its weights copies them anyway
    for language in ("python", "cpp", "csharp", "java", "js"):
        assert all(f'"{key}"' in lines(language) and f'"{value}"' in lines(language) for key, value in told.items())


@pytest.mark.measured
@pytest.mark.exhaustive(keep=("Python",))  # the others' packages have 400 MB
@pytest.mark.parametrize("make", PROGRAMS)
def test_outputs_equal_those_of_the_onnx_in_python_and_no_weight_is_copied(
    make: Program, branches: Path, tmp_path: Path
) -> None:
    """The measurement would notice the weight of two branches, which a process has to read without an archive."""
    command = make(tmp_path)
    shutil.copy(c.DIGITS, tmp_path / "model.onnx")
    converted(tmp_path)
    digits = {"pixels": np.random.default_rng(0).uniform(0, 16, (5, 64)).astype("f4")}
    both = feeds_of_branches(branches)
    for folder, feeds in ((tmp_path, [digits]), (branches, both)):
        options = ort.SessionOptions()
        for key, value in ONE_COPY.items():
            options.add_session_config_entry(key, value)
        reference = ort.InferenceSession(folder / "model.onnx", options)
        got, grown = run(command, folder, feeds)
        for found, feed in zip(got, feeds, strict=True):
            expected = reference.run(None, feed)[0].ravel()
            assert found.any()
            assert_equal(make, found, expected)
    assert grown <= (32 if make is java else 16) << 20  # half of Java's are its own
    shutil.copy(branches / "model.onnx", tmp_path / "small.onnx")
    assert run(command, tmp_path, both)[1] > (MIB - 4) << 20


@pytest.mark.skipif(not PACKS, reason="packed weights are compared from ONNX Runtime 1.32 on")
@pytest.mark.exhaustive(keep=("Python",))
@pytest.mark.parametrize("make", PROGRAMS)
def test_a_tuned_model_needs_no_options(make: Program, tmp_path: Path) -> None:
    with open(tmp_path / "model.onnx", "wb") as sink:
        write_quantized(sink, MIB)
    convert(tmp_path / "model.onnx", tmp_path / "model.zcr", durable=False)
    tune(tmp_path / "model.zcr")
    to_onnx(tmp_path / "model.zcr", tmp_path / "small.onnx", external=True, durable=False)
    reference = ort.InferenceSession(tmp_path / "model.onnx")
    feed = request(reference, 4)
    command = make(tmp_path, without_options)
    assert not any(b"disable_" in path.read_bytes() for path in tmp_path.glob("[sS]ession.*"))
    ((found,), grown) = run(command, tmp_path, [feed])
    assert_equal(make, found, reference.run(None, feed)[0].ravel())
    assert grown <= (32 if make is java else 24) << 20  # the largest packed weight is held once meanwhile
    to_onnx(tmp_path / "model.zcr", tmp_path / "small.onnx", external=True, tuned=False, force=True)
    _, copied = run(command, tmp_path, [feed])
    assert copied > (MIB - 4) << 20


@pytest.mark.skipif(not PACKS, reason="platform: earlier versions have not all of the operators")
@pytest.mark.measured
@pytest.mark.parametrize("write", [write_tied, write_dequantized])
@pytest.mark.parametrize("make", PROGRAMS[:3])  # Java's ONNX Runtime is too old
def test_a_quantized_matrix_of_two_operators_is_in_memory_once(make: Program, write: Any, tmp_path: Path) -> None:
    with open(tmp_path / "model.onnx", "wb") as sink:
        write(sink, MIB // 2)
    converted(tmp_path)
    feeds = [{"tokens": np.array([[3, 5]])}] if write is write_tied else feeds_of_branches(tmp_path)
    for tuned in (False, True):
        options = ort.SessionOptions()
        if tuned:
            tune(tmp_path / "model.zcr", durable=False)
        else:
            for key, value in ONE_COPY.items():
                options.add_session_config_entry(key, value)
        reference = ort.InferenceSession(tmp_path / "model.onnx", options)
        (folder := tmp_path / str(tuned)).mkdir()
        command = make(folder, without_options if tuned else str)
        got, grown = run(command, tmp_path, feeds)
        for found, feed in zip(got, feeds, strict=True):
            assert_equal(make, found, reference.run(None, feed)[0].ravel())
        if tuned or write is write_tied:  # an untuned product makes floats of the matrix
            assert grown <= 16 << 20


# A Llama.

MAPPED = "\n".join(["", "with open('/proc/self/maps') as maps:", "    print('model.zcr' in maps.read())"])
MAPPED_JS = 'console.log((await import("node:fs")).readFileSync("/proc/self/maps", "utf8").includes("model.zcr"));'
llama_lines = partial(lines, text=LLAMA_LINES)


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as Optimum exports it, with what onnxruntime-genai wants besides, in the one to work in."""
    monkeypatch.chdir(tmp_path)
    folder = copy_folder("text-generation", tmp_path / "llama")
    (folder / "genai_config.json").write_text(json.dumps(genai_config(folder)), encoding="utf-8")
    return folder


def genai_config(folder: Path) -> dict[str, Any]:
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    inputs = {name: name for name in ("input_ids", "attention_mask", "position_ids")}
    inputs |= {f"past_{what}_names": f"past_key_values.%d.{what}" for what in ("key", "value")}
    outputs = {"logits": "logits", **{f"present_{what}_names": f"present.%d.{what}" for what in ("key", "value")}}
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    decoder = {"filename": "model.onnx", "head_size": told["head_dim"], "inputs": inputs, "outputs": outputs}
    decoder |= {name: told[name] for name in names}
    model = {name: told[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    model |= {"type": "llama", "context_length": told["max_position_embeddings"], "decoder": decoder}
    return {"model": model, "search": {"past_present_share_buffer": False}}


def printed(*command: str | Path, **environment: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not READS_INNER, reason="platform: these want a later onnxruntime")
@pytest.mark.parametrize(("number", "packages"), [(0, onnx_runtimes.genai), (1, onnx_runtimes.optimum)])
def test_programs_in_python_choose_the_same_tokens_from_an_archive(
    number: int, packages: Callable[[], Path], llama: Path
) -> None:
    assert c.run_console(llama_lines("console")) == 2
    found = []
    for folder in ("llama", "served"):
        program = llama_lines("python", number).replace('"served"', repr(folder)) + MAPPED
        found.append(printed(sys.executable, "-c", program, PYTHONPATH=str(packages()), HF_HUB_OFFLINE="1"))
    (tokens, before), (again, mapped) = found
    assert tokens == again and len(tokens.split()) == 16 and tokens.startswith("30 41 52 ")
    assert (before, mapped) == ("False", "True")


@pytest.mark.needs("node", "npm")
def test_transformers_js_writes_the_same_text_from_an_archive(llama: Path) -> None:
    assert c.run_console(llama_lines("console", 1)) == 3
    shutil.copytree("hub", "plain", ignore=shutil.ignore_patterns("model.*"))
    for name in ("model.onnx", "model.onnx_data"):
        shutil.copy(llama / name, f"plain/onnx/{name}")
    Path("node_modules").symlink_to(onnx_runtimes.transformers_js() / "node_modules")
    program = llama_lines("js")
    plain = program.replace('"hub"', '"plain"').replace('"fp32" }', '"fp32", use_external_data_format: true }')
    found = []
    for text in (plain, program):
        Path("program.mjs").write_text(text + MAPPED_JS, encoding="utf-8")
        found.append(printed("node", "program.mjs"))
    (told, before), (again, mapped) = found
    assert told == again and len(told.split()) == 11 and told.startswith("w30 w41 w52 ")
    assert (before, mapped) == ("false", "true")
