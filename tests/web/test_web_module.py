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
from embedded import put
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


def test_the_suite_passes_in_node(served: Server) -> None:
    told = node("--expose-gc", SUITE / "run.mjs", served.url, served.folder)
    results = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    failed = [f"{result['name']}: {result['error']}" for result in results if result["error"] is not None]
    assert not failed, "\n".join(failed)
    files = ("reading.mjs", "serving.mjs", "uploading.mjs", "hollowing.mjs", "onnx.mjs", "webnn.mjs", "files.mjs")
    assert len({result["name"] for result in results}) >= sum(map(names_in, files)) > 40


def node(*arguments: str | Path) -> str:
    done = subprocess.run(["node", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def evaluated(expression: str, statements: str = "") -> Any:
    """Return the value of an expression in Node over the exports of format.js, `all`, and of zcrecord.js, `api`."""
    modules = {"all": "format.js", "api": "zcrecord.js"}
    imports = "".join(f'import * as {name} from "{(READER / file).as_uri()}";' for name, file in modules.items())
    script = f"{imports}{statements}console.log(JSON.stringify({expression}))"
    return json.loads(node("--input-type=module", "-e", script))


def test_knows_the_element_types_of_the_table() -> None:
    found = evaluated("[...all.KINDS].map(([code, { name, bits }]) => [code, name, bits])")
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
    bundle = tmp_path / "bundle.mjs"
    done = bundled("esbuild", put(tmp_path / "app.mjs", program), bundle, *options)
    assert "[WARNING]" not in done.stderr, done.stderr
    assert node(bundle) == "true 0,3,1,4,2,5\n"


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
    put(bundle.parent / "vite.config.mjs", f"export default {{ build: {output} }};")
    done = subprocess.run([*commands[bundler], *options], capture_output=True, text=True, cwd=bundle.parent)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.needs("npm")
@pytest.mark.parametrize(
    "bundler, options", [("esbuild", ["--minify", "--format=esm"]), ("vite", []), ("bun", ["--minify"])]
)
def test_errors_keep_their_names_when_minified(bundler: str, options: list[str], tmp_path: Path) -> None:
    program = f"""
        import * as all from "{READER / "zcrecord.js"}";
        const short = await all.open(new Uint8Array(5)).catch((error) => error);
        console.log(JSON.stringify([[short.name, String(short)], ...Object.entries(all)
          .filter(([name]) => name.endsWith("Error"))
          .map(([name, Kind]) => [name, new Kind("what").name, Kind.name, String(new Kind("what"))])]));
    """
    bundled(bundler, put(tmp_path / "app.mjs", program), tmp_path / "bundle.mjs", *options)
    minified = (tmp_path / "bundle.mjs").read_text(encoding="utf-8")
    assert "class RecordError" not in minified  # or nothing would be shown
    short, *names = json.loads(node(tmp_path / "bundle.mjs"))
    assert short[0] == "FormatError" and short[1].startswith("FormatError: the file: ")
    assert len(names) == 12
    for name, *found in names:
        assert found == [name, name, f"{name}: what"]


def test_the_folder_is_one_of_modules_wherever_it_is_copied(tmp_path: Path) -> None:
    """A project whose package.json says that it is CommonJS would have its own way else."""
    put(tmp_path / "package.json", '{"type": "commonjs"}')
    shutil.copytree(READER, tmp_path / "lib")
    program = 'import { open } from "./lib/zcrecord.js"; console.log(typeof open);'
    assert node(put(tmp_path / "p.mjs", program)) == "function\n"
    package = json.loads((READER / "package.json").read_text(encoding="utf-8"))
    assert (READER / package["main"]).is_file() and (READER / package["types"]).is_file()


def test_what_is_declared_is_there(served: Server) -> None:
    """Members of classes and interfaces in zcrecord.d.ts are those of the objects; exports are those of the module."""
    text = (READER / "zcrecord.d.ts").read_text(encoding="utf-8")
    declared = {}
    for name in ("Record", "Tensor", "HollowRecord", "Writer"):
        body = re.search(rf"export (?:class|interface) {name}(?:<[^{{]+>)? {{\n(.*?)\n}}", text, re.DOTALL)
        assert body is not None
        members = set(re.findall(r"^  (?:readonly )?(\w+)(?=[(:<])", body[1], re.MULTILINE))
        declared[name] = sorted(members - {"constructor"})
    statements = f"""
        const record = await api.open("{served.url}/things.zcr");
        const hollow = await record.hollow();
        const objects = {{ Record: record, Tensor: await record.tensor("scalar"), HollowRecord: hollow,
          Writer: await hollow.open("scalar") }};
        const members = (object) => [...new Set([...Object.keys(object),
          ...Object.getOwnPropertyNames(Object.getPrototypeOf(object))])];
        const isOpen = (name) => !name.startsWith("_") && name !== "constructor";
    """
    found = "Object.fromEntries(Object.entries(objects).map(([name, o]) => [name, members(o).filter(isOpen).sort()]))"
    assert evaluated(found, statements) == declared
    exported = re.findall(r"^export (?:declare )?(?:function|class|const) (\w+)", text, re.MULTILINE)
    assert sorted(evaluated("Object.keys(api)")) == sorted(set(exported))
