"""OpenSSF model-signing over our files: its signature verifies, notices each byte, and leaves ours as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import command_line as c
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from guides import ROOT
from node_packages import cached
from processes import output

import zcrecord
from zcrecord import formats

PACKAGES = ("model-signing==1.1.1", "pyOpenSSL==26.4.0")
TREE = {"a": np.arange(600, dtype=np.float32), "b": np.ones(64, np.float32)}
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def install(folder: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    output(*pip, "--target", folder, *PACKAGES)


def archive(folder: Path) -> None:
    zcrecord.save_record(TREE, folder / "model.zcr", durable=False)


def catalogue(folder: Path) -> None:
    zcrecord.save_record(TREE, folder / "model.zcr", max_shard_size=500, durable=False)


def indexed(folder: Path) -> None:
    zcrecord.save_record(TREE, folder.parent / "given.zcr", durable=False)
    formats.convert(folder.parent / "given.zcr", folder / "model.safetensors", max_shard_size=500, durable=False)
    zcrecord.index(folder, folder / "model.zcr", durable=False)


@pytest.mark.slow
@pytest.mark.needs("openssl")
@pytest.mark.parametrize("make", [archive, catalogue, indexed])
def test_both_signatures_of_a_folder_hold_until_a_byte_changes(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = cached(f"{PACKAGES[0].replace('==', '-')}-{sys.implementation.cache_tag}", install)
    (tmp_path / "bin").mkdir()
    (command := tmp_path / "bin" / "model_signing").write_text(
        f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" -m model_signing "$@"\n', encoding="utf-8"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    Path("key.pem").write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    Path("pub.pem").write_bytes(KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    Path("release").mkdir()
    make(Path("release"))
    guide = (ROOT / "schema" / "INTEGRITY.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"test_model_signing\.py runs it -->\n```console\n(.*?)```", guide, re.DOTALL)
    assert c.run_console(block) == 6

    line = ["model_signing", "verify", "key", "release", "--public_key", "ec.pub.pem"]
    weights = max(Path("release").glob("model*.*[rs]"), key=lambda path: path.stat().st_size)
    data = weights.read_bytes()
    weights.write_bytes(bytes([*data[:-100], data[-100] ^ 1, *data[-99:]]))
    done = subprocess.run([*line, "--signature", "release/model.sig"], capture_output=True, text=True)
    assert done.returncode == 1 and f"Hash mismatch for '{weights.name}'" in done.stdout + done.stderr
    weights.write_bytes(data)
    formats.convert("release/model.zcr", "aligned.zcr", alignment=4096, durable=False)
    assert zcrecord.load_record("aligned.zcr", trusted_keys=["pub.pem"]).names == ("a", "b")
