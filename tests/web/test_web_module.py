"""zcrecord.js reads what Python writes: its own suite, run in Node against a server that misbehaves when asked to.

The suite (tests/programs/js/web) runs in browsers as well: what it is given is a URL, and archives under it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_packages import node_packages
from web_archives import READER, SUITE, everything_served, names_in

from tools.range_server import Server
from zcrecord.dtypes import DTYPES

pytestmark = pytest.mark.needs("node")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of everything the suite reads."""
    with everything_served(tmp_path_factory.mktemp("web")) as server:
        yield server


@pytest.fixture(scope="module")
def results(served: Server) -> dict[str, str | None]:
    """Result of each test of the suite, run in one process: None, or why it failed."""
    command: list[str | Path] = ["node", "--expose-gc", SUITE / "run.mjs", served.url, served.folder]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


def test_the_suite_passes_in_node(results: dict[str, str | None]) -> None:
    failed = {name: why for name, why in results.items() if why is not None}
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
    files = ("reading.mjs", "serving.mjs", "uploading.mjs", "hollowing.mjs", "onnx.mjs", "files.mjs")
    assert len(results) >= sum(map(names_in, files)) > 40


def test_a_test_that_fails_is_noticed(tmp_path: Path) -> None:
    """The test before would pass with a harness that catches everything."""
    harness = (SUITE / "harness.mjs").as_uri()
    script = f"""
        import {{ equal, rejects, run, test }} from "{harness}";
        test("wrong", () => equal(new Map([["a", 1n]]), new Map([["a", 2n]])));
        test("silent", () => rejects(() => 5, "Error", /x/));
        test("other", () => rejects(() => {{ throw new TypeError("y"); }}, "TypeError", /x/));
        test("right", () => equal([1, Uint8Array.of(2)], [1, Uint8Array.of(2)]));
        console.log(JSON.stringify((await run({{}})).map(({{ error }}) => error !== null)));
    """
    (tmp_path / "failing.mjs").write_text(script, encoding="utf-8")
    done = subprocess.run(["node", tmp_path / "failing.mjs"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [True, True, True, False]


def asked(expression: str) -> Any:
    """Return the value of an expression over the exports of format.js, `all`, in Node."""
    script = f'import * as all from "{(READER / "format.js").as_uri()}"; console.log(JSON.stringify({expression}));'
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_knows_the_element_types_of_the_table() -> None:
    found = asked("[...all.KINDS].map(([code, { name, bits }]) => [code, name, bits])")
    assert found == [[d.code, d.name, d.bits] for d in DTYPES]


@pytest.mark.needs("npm")
def test_what_is_declared_compiles_as_it_is_meant_to(tmp_path: Path) -> None:
    compiler = node_packages() / "typescript" / "bin" / "tsc"
    options = ["--strict", "--noEmit", "--target", "es2022", "--module", "nodenext", "--lib", "es2022,dom,dom.iterable"]
    command: list[str | Path] = ["node", compiler, *options, SUITE / "types.ts"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    of_pages = {"HeadersInit", "RequestCache", "RequestInit", "BodyInit", "GPUDevice", "GPUBuffer"}  # Node has none
    code = re.sub(r"/\*.*?\*/|//.*", "", (READER / "zcrecord.d.ts").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert not of_pages & set(re.findall(r"\w+", code))


@pytest.mark.needs("npm")
@pytest.mark.parametrize("options", [["--format=esm"], ["--format=iife", "--minify"]], ids=["module", "script"])
def test_a_bundle_for_browsers_has_all_of_it(options: list[str], served: Server, tmp_path: Path) -> None:
    """Modules that are loaded later are in it, too, and Node's files are no obstacle."""
    program = f"""
        import {{ open }} from "{READER / "zcrecord.js"}";
        (async () => {{
          const record = await open("{served.url}/things.zcr", {{ verify: "full" }});
          const tensor = await record.tensor("turned", {{ verify: true }});
          console.log((await record.modules()).size > 1, tensor.contiguous().data.join());
        }})();
    """
    (tmp_path / "app.mjs").write_text(program, encoding="utf-8")
    bundle = tmp_path / "bundle.mjs"
    done = bundled("esbuild", tmp_path / "app.mjs", bundle, *options)
    assert "[WARNING]" not in done.stderr, done.stderr
    done = subprocess.run(["node", bundle], capture_output=True, text=True)
    assert done.stdout == "true 0,3,1,4,2,5\n", done.stderr


def bundled(bundler: str, program: Path, bundle: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Bundle a program for browsers."""
    packages = node_packages()
    commands: dict[str, list[str | Path]] = {
        "esbuild": [packages / "esbuild" / "bin" / "esbuild", program, "--bundle", f"--outfile={bundle}"],
        "vite": ["node", packages / "vite" / "bin" / "vite.js", "build", "--config", bundle.parent / "vite.config.mjs"],
        "bun": [*packages.glob("@oven/bun-*/bin/bun"), "build", program, "--target=browser", f"--outfile={bundle}"],
    }
    library = f'{{ entry: "{program}", formats: ["es"], fileName: () => "{bundle.name}" }}'
    output = f'{{ lib: {library}, minify: "oxc", outDir: "{bundle.parent}", emptyOutDir: false }}'
    (bundle.parent / "vite.config.mjs").write_text(f"export default {{ build: {output} }};", encoding="utf-8")
    done = subprocess.run([*commands[bundler], *options], capture_output=True, text=True, cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.needs("npm")
@pytest.mark.parametrize(
    ("bundler", "options"),
    [("esbuild", ["--minify", "--format=esm"]), ("vite", []), ("bun", ["--minify"])],
    ids=["esbuild", "vite", "bun"],
)
def test_errors_keep_their_names_when_minified(bundler: str, options: list[str], tmp_path: Path) -> None:
    program = f"""
        import * as all from "{READER / "zcrecord.js"}";
        const short = await all.open(new Uint8Array(5)).catch((error) => error);
        console.log(JSON.stringify([[short.name, String(short)], ...Object.entries(all)
          .filter(([name]) => name.endsWith("Error"))
          .map(([name, Kind]) => [name, new Kind("what").name, Kind.name, String(new Kind("what"))])]));
    """
    (tmp_path / "app.mjs").write_text(program, encoding="utf-8")
    bundled(bundler, tmp_path / "app.mjs", tmp_path / "bundle.mjs", *options)
    minified = (tmp_path / "bundle.mjs").read_text(encoding="utf-8")
    assert "class RecordError" not in minified  # or nothing would be shown
    done = subprocess.run(["node", tmp_path / "bundle.mjs"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    short, *names = json.loads(done.stdout)
    assert short[0] == "FormatError" and short[1].startswith("FormatError: the file: ")
    assert len(names) == 12
    for name, *found in names:
        assert found == [name, name, f"{name}: what"]


def test_the_folder_is_one_of_modules_wherever_it_is_copied(tmp_path: Path) -> None:
    """A project whose package.json says that it is CommonJS would have its own way else."""
    (tmp_path / "package.json").write_text('{"type": "commonjs"}', encoding="utf-8")
    shutil.copytree(READER, tmp_path / "lib")
    (tmp_path / "p.mjs").write_text(
        'import { open } from "./lib/zcrecord.js"; console.log(typeof open);', encoding="utf-8"
    )
    done = subprocess.run(["node", tmp_path / "p.mjs"], capture_output=True, text=True)
    assert done.stdout == "function\n", done.stderr
    told = json.loads((READER / "package.json").read_text(encoding="utf-8"))
    assert (READER / told["main"]).is_file() and (READER / told["types"]).is_file()


def test_what_is_declared_is_there(served: Server) -> None:
    """Every member of a class or interface in zcrecord.d.ts is one of the objects that it stands for, and no other."""
    text = (READER / "zcrecord.d.ts").read_text(encoding="utf-8")
    declared = {}
    for name in ("Record", "Tensor", "HollowRecord", "Writer"):
        body = re.search(rf"export (?:class|interface) {name}(?:<[^{{]+>)? {{\n(.*?)\n}}", text, re.DOTALL)
        assert body is not None
        declared[name] = sorted(set(re.findall(r"^  (?:readonly )?(\w+)(?=[(:<])", body[1], re.MULTILINE)))
        declared[name] = [member for member in declared[name] if member != "constructor"]
    script = f"""
        import {{ open }} from "{(READER / "zcrecord.js").as_uri()}";
        const record = await open("{served.url}/things.zcr");
        const hollow = await record.hollow();
        const objects = {{ Record: record, Tensor: await record.tensor("scalar"), HollowRecord: hollow,
          Writer: await hollow.open("scalar") }};
        const members = (object) => [...new Set([...Object.keys(object),
          ...Object.getOwnPropertyNames(Object.getPrototypeOf(object))])];
        const open_ = (name) => !name.startsWith("_") && name !== "constructor";
        console.log(JSON.stringify(Object.fromEntries(Object.entries(objects).map(([name, object]) =>
          [name, members(object).filter(open_).sort()]))));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == {name: sorted(members) for name, members in declared.items()}


def test_what_the_module_exports_is_declared_and_nothing_else() -> None:
    text = (READER / "zcrecord.d.ts").read_text(encoding="utf-8")
    declared = re.findall(r"^export (?:declare )?(?:function|class|const) (\w+)", text, re.MULTILINE)
    script = f'console.log(JSON.stringify(Object.keys(await import("{(READER / "zcrecord.js").as_uri()}"))))'
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout)) == sorted(set(declared))
