"""Programs with archives attached are still programs: compiled, frozen, running meanwhile, stripped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import records as r
from embedded import quiet, wine_environment

import zcrecord
from zcrecord import FormatError, UnsupportedError
from zcrecord.embed import attach, detach

HERE = Path(__file__).parents[1] / "programs" / "attached"
HEADERS = r.ROOT / "zcrecord" / "embed"
TREE = {"weight": np.arange(6, dtype=np.float32), "large": np.ones(1 << 18, np.float32), "n": np.arange(3)}
PRINTED = "0\n1\n2\n3\n4\n5\naligned to 64: 1\n"
WARNINGS = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attached") / "model.zcr"
    zcrecord.save_record(TREE, path, durable=False)
    return path


def built(compiler: str, source: str, out: Path) -> bytes:
    quiet(compiler, *WARNINGS, f"-I{HEADERS}", "-o", out, HERE / source)
    return out.read_bytes()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The program of own_weights.c."""
    return built("gcc", "own_weights.c", tmp_path_factory.mktemp("compiled") / "own_weights")


@pytest.fixture
def program(compiled: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "app"
    path.write_bytes(compiled)
    path.chmod(0o755)
    return path


def run(program: Path, *arguments: str, status: int = 0) -> str:
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == status, done.stderr
    return done.stdout if not status else done.stderr


@pytest.mark.needs("gcc")
def test_compiled_program_runs_as_before_and_maps_its_own_weights(program: Path, archive: Path) -> None:
    assert run(program) == "ready\n"
    assert run(program, "weight", status=2) == "no archive is attached to this program\n"
    attach(program, archive)
    assert run(program) == "ready\n"
    assert run(program, "weight") == PRINTED
    assert run(program, "n", status=3) == "no float32 tensor is named n\n"
    r.assert_same(zcrecord.load_record(program, verify="full").tree(), TREE)


@pytest.mark.needs("gcc", "strip")
def test_detached_and_stripped_programs_are_the_compiler_s(program: Path, archive: Path, compiled: bytes) -> None:
    attach(program, archive)
    attach(program, archive)
    detach(program, discard=True)
    assert program.read_bytes() == compiled and run(program) == "ready\n"
    attach(program, archive)
    quiet("strip", program)
    assert run(program) == "ready\n"
    with pytest.raises(FormatError, match=r"app: this is an ELF program with no archive at its end; `strip` takes an"):
        zcrecord.load_record(program)
    stripped = program.read_bytes()
    attach(program, archive)
    assert run(program, "weight") == PRINTED
    detach(program, discard=True)
    assert program.read_bytes() == stripped


AGAIN = """
import sys
from zcrecord.embed import attach
for _ in range(30):
    attach(sys.argv[1], sys.argv[2], durable=False)
"""


@pytest.mark.needs("gcc")
def test_program_can_be_started_at_every_moment_of_attaching(program: Path, archive: Path) -> None:
    attach(program, archive)
    runs = 0
    with subprocess.Popen([sys.executable, "-c", AGAIN, program, archive], cwd=r.ROOT) as attaching:
        while attaching.poll() is None:
            assert run(program, "weight") == PRINTED
            runs += 1
    assert attaching.returncode == 0
    assert runs > 5


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of PyInstaller's programs of own_weights.py: `single`, and `folder/folder`."""
    folder = tmp_path_factory.mktemp("frozen")
    options = ["--distpath", "dist", "--workpath", "build", "--log-level", "ERROR"]
    command: list[str | Path] = [sys.executable, "-m", "PyInstaller", *options, HERE / "own_weights.spec"]
    environment = {**os.environ, "PYINSTALLER_CONFIG_DIR": str(folder / "config")}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "dist"


@pytest.mark.needs("file", "ldd", "objcopy", "objdump")
@pytest.mark.parametrize("name", ["single", "folder/folder"])
def test_frozen_python_program_maps_its_own_weights(name: str, frozen: Path, archive: Path) -> None:
    program = frozen / name
    before = program.read_bytes()
    assert "with no archive at its end" in run(program, status=1)
    attach(program, archive, durable=False)
    facts = json.loads(run(program))
    assert facts["mapped"] and facts["inside"] and facts["address"] % 64 == 0
    assert facts["sum"] == 15
    detach(program, discard=True, durable=False)
    assert program.read_bytes() == before


def osslsigncode(*arguments: str | Path) -> str:
    done = subprocess.run(["osslsigncode", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.needs("x86_64-w64-mingw32-gcc", "openssl", "osslsigncode", "wine")
def test_signed_windows_program_maps_its_own_weights_which_the_signature_covers(archive: Path, tmp_path: Path) -> None:
    app, signed, unsigned = tmp_path / "app.exe", tmp_path / "signed.exe", tmp_path / "unsigned.exe"
    compiled = built("x86_64-w64-mingw32-gcc", "own_weights_windows.c", app)

    def ran(program: Path, *arguments: str) -> tuple[int, str]:
        command: list[str | Path] = ["wine", program, *arguments]
        done = subprocess.run(command, env=wine_environment(), capture_output=True, text=True, check=False, timeout=300)
        return done.returncode, done.stdout.replace("\r\n", "\n")

    assert ran(app) == (0, "ready\n") and ran(app, "weight")[0] == 2
    attach(app, archive)
    assert ran(app, "weight") == (0, PRINTED)
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    command += ["-subj", "/CN=test", "-addext", "extendedKeyUsage=codeSigning"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    osslsigncode("sign", "-certs", certificate, "-key", key, "-in", app, "-out", signed)
    assert "Signature verification: ok" in osslsigncode("verify", "-CAfile", certificate, "-in", signed)
    assert ran(signed) == (0, "ready\n") and ran(signed, "weight") == (0, PRINTED)
    r.assert_same(zcrecord.load_record(signed, verify="full").tree(), TREE)
    detach(signed, tmp_path / "again.zcr", keep=True)
    assert (tmp_path / "again.zcr").read_bytes() == archive.read_bytes()
    with pytest.raises(UnsupportedError, match="take the signature off first"):
        detach(signed)
    osslsigncode("remove-signature", "-in", signed, "-out", unsigned)
    assert detach(unsigned).exact
    data = unsigned.read_bytes()
    checksum = int.from_bytes(data[60:64], "little") + 24 + 64  # of the optional header, which signing set
    assert data[:checksum] == compiled[:checksum] and data[checksum + 4 :] == compiled[checksum + 4 :]
