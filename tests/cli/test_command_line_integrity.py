"""Output and exit status of verify, info, diff, sign and check, into a pipe and as JSON."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import command_line as c
import numpy as np
import pytest
import records as r
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


# verify


def test_verify_lists_all_that_is_damaged(run: c.Commands) -> None:
    record = zcrecord.load_record("model.zcr")
    turned, scalar = record.info("encoder.turned"), record.info("scalar")
    data = bytearray(Path("model.zcr").read_bytes())
    blob = data.index(b"12345")
    for at in (turned.offset, blob, scalar.offset + 8):
        data[at] ^= 1
    Path("model.zcr").write_bytes(data)
    status, out = run.ended("verify model.zcr")
    lo, hi = turned.offset, turned.offset + turned.nbytes
    assert status == 1 and sorted(out.splitlines()) == sorted([
        f"model.zcr: [{lo:#x}, {hi:#x}) of tensor 'encoder.turned': its digest does not match",
        f"model.zcr: [{scalar.offset + 8:#x}, {scalar.offset + 64:#x}): bytes between payloads that are not zero",
        f"model.zcr: [{blob:#x}, {blob + 5:#x}) of attribute 'blob': its digest does not match",
    ])  # fmt: skip
    assert run.err.count("\n") == 1
    assert "the file is damaged there and in 2 more places, copy it again" in run.err
    assert run.ended("verify -q model.zcr") == (1, "")


def test_verify_tells_all_damage_as_json(run: c.Commands) -> None:
    weight = zcrecord.load_record("model.zcr").info("encoder.weight")
    r.damage(Path("model.zcr"), weight.offset)
    found = run.json("verify model.zcr", status=1)
    assert (found["ok"], found["error"]["type"], found["error"]["tensor"]) == (
        False,
        "IntegrityError",
        "encoder.weight",
    )
    names = ["encoder.weight", "encoder.tied"]
    what = {"what": "its digest does not match", "offset": weight.offset, "nbytes": 48}
    assert found["damage"] == [{**what, "tensors": names, "attributes": [], "metadata": [], "path": None}]
    run.fails("verify model.zcr", "model.zcr: tensor 'encoder.weight': .*digest does not match")
    run("verify model.zcr --level index")


# info


def test_info_prints_the_content_digest_of_what_is_small(run: c.Commands) -> None:
    digest = zcrecord.load_record("model.zcr").content_digest()
    assert f"\ncontent: {digest}\n" in run("info model.zcr")
    assert run.json("info model.zcr --digest")["content_digest"] == digest
    assert run.json("info model.zcr --no-digest")["content_digest"] is None


# diff


def test_diff_of_the_same_content_is_silent_and_0(run: c.Commands) -> None:
    run.quietly("convert model.zcr again.zcr --alignment 4096")
    assert (run("diff model.zcr again.zcr"), run.err) == ("", "")
    same = {"before": "model.zcr", "after": "again.zcr", "same": True, "changes": []}
    assert run.json("diff model.zcr again.zcr") == same


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


def test_diff_tells_a_difference_a_line_and_returns_1(changed: str, run: c.Commands) -> None:
    status, out = run.ended(f"diff model.zcr {changed}")
    assert (status, run.err) == (1, "")
    assert out.splitlines() == [
        "!\ttensor\tencoder.turned\t\t\t1 of 12 elements, by 2 at most",
        "-\ttensor\tpacked\tint4 [3]\t\t",
        "!\ttensor\tscalar\tfloat64 []\tfloat64 [1]\t",
        "+\ttensor\tnew.w\\n\t\tint8 [2]\t",
        "+\tmodule\tnew\t\tmapping\t",
        "!\tattribute\tencoder.heads\t2\t3\t",
        "-\tmetadata\ttags\t['x', 'y']\t\t",
    ]
    assert (run.ended(f"diff -q model.zcr {changed}"), run.err) == ((1, ""), "")


def test_diff_as_json_has_every_number(changed: str, run: c.Commands) -> None:
    found = run.json(f"diff --no-metadata model.zcr {changed}", status=1)
    assert found["same"] is False
    assert found["changes"][0] == {
        "what": "tensor", "name": "encoder.turned", "change": "contents", "before": None, "after": None,
        "differing": 1, "elements": 12, "largest": 2.0,
    }  # fmt: skip
    assert [change["what"] for change in found["changes"]] == ["tensor"] * 4 + ["module", "attribute"]


def test_diff_of_what_cannot_be_read_is_2(run: c.Commands) -> None:
    Path("bad.zcr").write_bytes(b"no archive" * 100)
    for bad, arguments in (("bad", "model.zcr bad.zcr"), ("bad", "bad.zcr model.zcr"), ("none", "model.zcr none.zcr")):
        assert (run.ended(f"diff {arguments}"), run.err.count("\n")) == ((2, ""), 1)
        assert run.err.startswith(f"zcrecord: error: {bad}.zcr: ")


# sign and check


def test_signed_archive_is_checked(run: c.Commands) -> None:
    digest = zcrecord.load_record("model.zcr").content_digest()
    out = run("sign model.zcr --key key.pem")
    key = integrity.signers(zcrecord.load_record("model.zcr"))[0]
    assert (out, run.err) == (f"model.zcr: {digest} signed by the key {key}\n", "")
    assert run("check model.zcr --key pub.pem") == f"model.zcr: OK, signed by the key {key} (pub.pem)\n"
    again = {"path": "model.zcr", "dest": "model.zcr", "key": key, "content_digest": digest, "replaced": True}
    assert run.json("sign model.zcr --key key.pem --no-sync") == again
    checked = [{"file": "pub.pem", "key": key}]
    found = run.json("check model.zcr --key pub.pem")
    assert found == {"file": "model.zcr", "ok": True, "signed_by": [key], "checked": checked}
    run.quietly("check model.zcr --key pub.pem")


def test_check_says_what_is_wrong(run: c.Commands) -> None:
    run.quietly("sign model.zcr --key key.pem")
    run.fails("check model.zcr --key other.pem", r"model\.zcr: is not signed by this key \(.*\)")
    run.fails("check model.zcr --key pub.pem --key other.pem", "is not signed by this key")
    run.fails("check model.zcr --key key.pem", r"key\.pem: is a private key")
    run.fails("check model.zcr --key none.pem", r"none\.pem: cannot read")
    c.damage(Path("model.zcr"))
    run.fails("check model.zcr --key pub.pem", "is not what was signed by the key .* its content")
    found = run.json("check model.zcr --key pub.pem", status=1)
    assert (found["ok"], found["error"]["type"]) == (False, "IntegrityError")
    found = run.json("check none.zcr --key pub.pem", status=1)
    assert (found["signed_by"], found["error"]["type"]) == ([], "SourceNotFoundError")


def test_commands_that_read_refuse_what_no_trusted_key_signed(run: c.Commands) -> None:
    for command in ("info", "ls", "tree", "verify", "verify --level touch"):
        run.fails(f"{command} model.zcr --key pub.pem", r"model\.zcr: is not signed$")
    run.quietly("sign model.zcr --key key.pem")
    for command in ("info", "ls", "tree", "verify"):
        assert run(f"{command} model.zcr --key other.pem --key pub.pem") == run(f"{command} model.zcr")
        run.fails(f"{command} model.zcr --key other.pem", "is not signed by this key")


def test_encrypted_key_takes_its_passphrase_from_the_environment(
    run: c.Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    sign = "sign model.zcr --key secret.pem"
    run.fails(sign, r"secret\.pem: is encrypted; set \$ZCRECORD_PASSPHRASE to its passphrase$")
    monkeypatch.setenv(PASSPHRASE, "wrong")
    run.fails(sign, r"secret\.pem: is a private key that needs another passphrase, or is damaged$")
    monkeypatch.setenv(PASSPHRASE, "pass")
    run.quietly(sign)


def test_passphrase_is_asked_for_on_a_terminal(run: c.Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def answer(prompt: str) -> str:
        asked.append(prompt)
        return "pass"

    monkeypatch.setattr("getpass.getpass", answer)
    monkeypatch.setattr(sys, "stdin", c.Terminal())
    run.quietly("sign model.zcr --key secret.pem")
    run.quietly("sign model.zcr --key key.pem")  # that one is not encrypted
    assert asked == ["Passphrase of secret.pem: "]


def test_archive_in_a_model_of_another_format_is_checked_only_if_asked_for(run: c.Commands) -> None:
    run.quietly("sign model.zcr --key key.pem")
    model = file_of({"w": tensor(0, 4096 - 512)}, bytes(4096 - 512), length=504).ljust(4096, b"\0")
    Path("m.safetensors").write_bytes(model + Path("model.zcr").read_bytes())
    for command in ("ls", "verify", "check --key pub.pem"):
        run.fails(f"{command} m.safetensors", "this is a safetensors file, with a zcrecord archive attached")
    for command in ("ls", "info", "tree", "verify", "check --key pub.pem"):
        assert run(f"{command} m.safetensors --embedded suffix")
    assert run.ended("diff model.zcr m.safetensors") == (2, "")
