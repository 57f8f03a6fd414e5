"""Output and exit status of verify, info, diff, sign and check, into a pipe and as JSON."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import command_line as c
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from exchange import file_of, tensor

import zcrecord
from zcrecord import integrity
from zcrecord.cli.dispatch import main

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PASSPHRASE = "ZCRECORD_PASSPHRASE"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder with an archive, and a pair of keys."""
    c.enter(tmp_path, monkeypatch)
    monkeypatch.delenv(PASSPHRASE, raising=False)
    c.make_archive()
    Path("key.pem").write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    secret = BestAvailableEncryption(b"pass")
    Path("secret.pem").write_bytes(KEY.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, secret))
    public = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    Path("pub.pem").write_bytes(public)
    other = Ed25519PrivateKey.from_private_bytes(bytes(32)).public_key()
    Path("other.pem").write_bytes(other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return tmp_path


def told(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


# verify


def damage(*texts: bytes) -> list[int]:
    data = bytearray(Path("model.zcr").read_bytes())
    offsets = [data.index(text) for text in texts]
    for at in offsets:
        data[at] ^= 1
    Path("model.zcr").write_bytes(data)
    return offsets


def test_verify_lists_all_that_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    record = zcrecord.load_record("model.zcr")
    turned = record.info("encoder.turned")
    lo, hi = turned.offset, turned.offset + turned.nbytes
    scalar = record.info("scalar")
    c.damage(Path("model.zcr"))
    (blob,) = damage(b"12345")
    data = bytearray(Path("model.zcr").read_bytes())
    data[scalar.offset + 8] = 1
    Path("model.zcr").write_bytes(data)
    assert main(["verify", "model.zcr"]) == 1
    out, err = capsys.readouterr()
    assert sorted(out.splitlines()) == sorted([
        f"model.zcr: [{lo:#x}, {hi:#x}) of tensor 'encoder.turned': its digest does not match",
        f"model.zcr: [{scalar.offset + 8:#x}, {scalar.offset + 64:#x}): bytes between payloads that are not zero",
        f"model.zcr: [{blob:#x}, {blob + 5:#x}) of attribute 'blob': its digest does not match",
    ])  # fmt: skip
    assert err.count("\n") == 1
    assert "the file is damaged there and in 2 more places, copy it again" in err
    assert main(["verify", "-q", "model.zcr"]) == 1
    assert capsys.readouterr().out == ""


def test_verify_tells_all_damage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    weight = zcrecord.load_record("model.zcr").info("encoder.weight")
    data = bytearray(Path("model.zcr").read_bytes())
    data[weight.offset] ^= 1
    Path("model.zcr").write_bytes(data)
    assert main(["verify", "--json", "model.zcr"]) == 1
    found = told(capsys)
    assert found["ok"] is False
    names = ["encoder.weight", "encoder.tied"]
    what = {"what": "its digest does not match", "offset": weight.offset, "nbytes": 48}
    assert found["damage"] == [{**what, "tensors": names, "attributes": [], "metadata": [], "path": None}]


# info


def test_info_prints_the_content_digest_of_what_is_small(capsys: pytest.CaptureFixture[str]) -> None:
    digest = zcrecord.load_record("model.zcr").content_digest()
    assert main(["info", "model.zcr"]) == 0
    assert f"\ncontent: {digest}\n" in capsys.readouterr().out
    assert main(["info", "model.zcr", "--json"]) == 0
    assert told(capsys)["content_digest"] == digest
    assert main(["info", "model.zcr", "--json", "--no-digest"]) == 0
    assert told(capsys)["content_digest"] is None


# diff


def test_diff_of_the_same_content_is_silent_and_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "model.zcr", "again.zcr", "--alignment", "4096", "--quiet"]) == 0
    assert main(["diff", "model.zcr", "again.zcr"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["diff", "model.zcr", "again.zcr", "--json"]) == 0
    assert told(capsys) == {"before": "model.zcr", "after": "again.zcr", "same": True, "changes": []}


@pytest.fixture
def changed() -> str:
    """Another archive, with a difference of each kind."""
    with zcrecord.load_record("model.zcr", mode="c") as record:
        tree = record.tree()
        tree["encoder"]["turned"][0, 0] += 2
        tree["encoder"]["heads"] = 3
        tree["scalar"] = np.array([0.5])
        del tree["packed"]
        tree["new"] = {"w\n": np.ones(2, np.int8)}
        zcrecord.save_record(tree, "changed.zcr", metadata={"author": "me"})
    return "changed.zcr"


def test_diff_tells_a_difference_a_line_and_returns_1(changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "model.zcr", changed]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "!\ttensor\tencoder.turned\t\t\t1 of 12 elements, by 2 at most",
        "-\ttensor\tpacked\tint4 [3]\t\t",
        "!\ttensor\tscalar\tfloat64 []\tfloat64 [1]\t",
        "+\ttensor\tnew.w\\n\t\tint8 [2]\t",
        "+\tmodule\tnew\t\tmapping\t",
        "!\tattribute\tencoder.heads\t2\t3\t",
        "-\tmetadata\ttags\t['x', 'y']\t\t",
    ]
    assert main(["diff", "-q", "model.zcr", changed]) == 1
    assert capsys.readouterr() == ("", "")


def test_diff_as_json_has_every_number(changed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "--json", "--no-metadata", "model.zcr", changed]) == 1
    found = told(capsys)
    assert found["same"] is False
    assert found["changes"][0] == {
        "what": "tensor", "name": "encoder.turned", "change": "contents", "before": None, "after": None,
        "differing": 1, "elements": 12, "largest": 2.0,
    }  # fmt: skip
    assert [change["what"] for change in found["changes"]] == ["tensor"] * 4 + ["module", "attribute"]


def test_diff_of_what_cannot_be_read_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.zcr").write_bytes(b"no archive" * 100)
    for arguments in (["model.zcr", "bad.zcr"], ["bad.zcr", "model.zcr"], ["model.zcr", "none.zcr"]):
        assert main(["diff", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"zcrecord: error: {next(a for a in arguments if a != 'model.zcr')}: ")
    with pytest.raises(SystemExit, match="2"):
        main(["diff", "-", "-"])


# sign and check


def test_signed_archive_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    digest = zcrecord.load_record("model.zcr").content_digest()
    assert main(["sign", "model.zcr", "--key", "key.pem"]) == 0
    key = integrity.signers(zcrecord.load_record("model.zcr"))[0]
    assert capsys.readouterr() == (f"model.zcr: {digest} signed by the key {key}\n", "")
    assert main(["check", "model.zcr", "--key", "pub.pem"]) == 0
    assert capsys.readouterr() == (f"model.zcr: OK, signed by the key {key} (pub.pem)\n", "")
    assert main(["sign", "model.zcr", "--key", "key.pem", "--json", "--no-sync"]) == 0
    again = {"path": "model.zcr", "dest": "model.zcr", "key": key, "content_digest": digest, "replaced": True}
    assert told(capsys) == again
    assert main(["check", "model.zcr", "--key", "pub.pem", "--json"]) == 0
    checked = [{"file": "pub.pem", "key": key}]
    assert told(capsys) == {"file": "model.zcr", "ok": True, "signed_by": [key], "checked": checked}
    assert main(["check", "model.zcr", "--key", "pub.pem", "-q"]) == 0
    assert capsys.readouterr() == ("", "")


def test_sign_leaves_the_archive_as_it_is_where_another_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("model.zcr").read_bytes()
    assert main(["sign", "model.zcr", "--key", "key.pem", "-o", "signed.zcr"]) == 0
    assert Path("model.zcr").read_bytes() == before
    capsys.readouterr()
    c.fails(capsys, main(["sign", "model.zcr", "--key", "key.pem", "-o", "signed.zcr"]), "exists already")
    assert main(["sign", "model.zcr", "--key", "key.pem", "-o", "signed.zcr", "--force", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    c.fails(capsys, main(["check", "model.zcr", "--key", "pub.pem"]), r"model\.zcr: is not signed$")
    assert main(["check", "signed.zcr", "--key", "pub.pem"]) == 0


def test_check_says_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    main(["sign", "model.zcr", "--key", "key.pem", "-q"])
    c.fails(capsys, main(["check", "model.zcr", "--key", "other.pem"]), r"model\.zcr: is not signed by this key \(.*\)")
    c.fails(capsys, main(["check", "model.zcr", "--key", "pub.pem", "--key", "other.pem"]), "is not signed by this key")
    c.fails(capsys, main(["check", "model.zcr", "--key", "key.pem"]), r"key\.pem: is a private key")
    c.fails(capsys, main(["check", "model.zcr", "--key", "none.pem"]), r"none\.pem: cannot read")
    c.damage(Path("model.zcr"))
    c.fails(
        capsys, main(["check", "model.zcr", "--key", "pub.pem"]), r"is not what was signed by the key .* its content"
    )
    assert main(["check", "model.zcr", "--key", "pub.pem", "--json"]) == 1
    found = told(capsys)
    assert (found["ok"], found["error"]["type"]) == (False, "IntegrityError")


def test_encrypted_key_takes_its_passphrase_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    sign = ["sign", "model.zcr", "--key", "secret.pem", "-q"]
    c.fails(capsys, main(sign), r"secret\.pem: is encrypted; set \$ZCRECORD_PASSPHRASE to its passphrase$")
    monkeypatch.setenv(PASSPHRASE, "wrong")
    c.fails(capsys, main(sign), r"secret\.pem: is a private key that needs another passphrase, or is damaged$")
    monkeypatch.setenv(PASSPHRASE, "pass")
    assert main(sign) == 0


def test_passphrase_is_asked_for_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "pass"

    monkeypatch.setattr("getpass.getpass", answer)
    monkeypatch.setattr(sys, "stdin", c.Terminal())
    assert main(["sign", "model.zcr", "--key", "secret.pem", "-q"]) == 0
    assert asked == ["Passphrase of secret.pem: "]
    assert main(["sign", "model.zcr", "--key", "key.pem", "-q"]) == 0
    assert len(asked) == 1, "that one is not encrypted"


def test_archive_in_a_model_of_another_format_is_checked_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sign", "model.zcr", "--key", "key.pem", "--quiet"]) == 0
    model = file_of({"w": tensor(0, 4096 - 512)}, bytes(4096 - 512), length=504).ljust(4096, b"\0")
    Path("m.safetensors").write_bytes(model + Path("model.zcr").read_bytes())
    told = "m.safetensors: this is a safetensors file, with a zcrecord archive attached, whose tensors other readers"
    for command in (["ls"], ["info"], ["tree"], ["verify"], ["report"], ["check", "--key", "pub.pem"]):
        assert main([*command, "m.safetensors"]) == 1
        assert f"{told} of this file do not see: --embedded suffix of ls," in capsys.readouterr().err
    for command in (["ls"], ["info"], ["tree"], ["verify"], ["check", "--key", "pub.pem"]):
        assert main([*command, "m.safetensors", "--embedded", "suffix"]) == 0
    assert "m.safetensors: OK, signed by the key" in capsys.readouterr().out
    assert main(["diff", "model.zcr", "m.safetensors"]) == 2
