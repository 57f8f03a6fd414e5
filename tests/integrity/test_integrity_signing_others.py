"""Lookalikes of signed archives are refused: other trees, other forms, other keys, other files."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from forge import Forge
from records import saved

import zcrecord
from zcrecord import IntegrityError, SourceError, UnsupportedError, integrity

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key()
KEY_ID = hashlib.sha256(PUBLIC.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A signed archive."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record({"layers": [{"w": np.arange(5), "heads": 3}, {"w": np.arange(5)}]}, path)
    integrity.sign(path, KEY)
    return path


def test_list_in_another_order_is_not_what_was_signed(path: Path) -> None:
    f = Forge(path.read_bytes()).set("modules", "layers.0", place=1).set("modules", "layers.1", place=0)
    turned = zcrecord.load_record(f.seal(), verify="full")
    assert "heads" in turned.tree()["layers"][1]
    with pytest.raises(IntegrityError, match="is not what was signed by the key"):
        integrity.check_signature(turned, PUBLIC)


FORMS: dict[str, dict[str, int]] = {"a small UINT": {"type": 3}, "an empty list of INT": {"form": 1, "value": 0}}


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS)
def test_what_saving_would_write_in_another_form_is_not_signed(fields: dict[str, int], tmp_path: Path) -> None:
    """A writer of another's may do so; signed, and saved in the form of R69, it would be what nobody signed."""
    path = tmp_path / "m.zcr"
    path.write_bytes(before := Forge(saved({"n": 5, "w": np.ones(3)})).set("attributes", "n", **fields).seal())
    with pytest.raises(
        UnsupportedError, match="'n' is not in the form that saving gives it, so the content digest would"
    ):
        integrity.sign(path, KEY)
    assert path.read_bytes() == before
    zcrecord.save_record(zcrecord.load_record(path), path)
    integrity.sign(path, KEY)
    assert integrity.check_signature(zcrecord.load_record(path), PUBLIC) == KEY_ID


def test_an_edit_that_changes_such_a_form_leaves_the_signature_out(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(Forge(saved({"n": 5, "w": np.ones(3)})).set("attributes", "n", **FORMS["a small UINT"]).seal())
    name, value = integrity.make_signature(zcrecord.load_record(path), KEY)
    zcrecord.save_record({"n": 5, "w": np.ones(3)}, path, metadata={name: value})
    path.write_bytes(Forge(path.read_bytes()).set("attributes", "n", **FORMS["a small UINT"]).seal())
    assert integrity.check_signature(zcrecord.load_record(path), PUBLIC) == KEY_ID
    with zcrecord.edit(path) as model:
        model.metadata["license"] = "mit"
    assert model.report is not None
    assert model.report.lapsed == (KEY_ID,)
    assert integrity.signers(zcrecord.load_record(path)) == ()


def test_words_of_every_float_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    path.write_bytes(Forge(saved({"n": 5.0})).set("attributes", "n", value=0x7FF0_0000_0000_0001).seal())
    integrity.sign(path, KEY)
    assert integrity.check_signature(zcrecord.load_record(path), PUBLIC) == KEY_ID


def test_what_another_put_there_in_the_meantime_is_not_replaced(path: Path) -> None:
    def meanwhile(done: int, total: int) -> None:
        zcrecord.save_record({"newer": np.ones(3)}, path)

    with pytest.raises(SourceError, match="was replaced meanwhile; start again"):
        integrity.sign(path, KEY, progress=meanwhile)
    assert list(zcrecord.load_record(path)) == ["newer"]


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.OpenSSH], ids=str)
def test_passphrase_that_a_key_does_not_take_is_not_in_its_way(form: PrivateFormat, path: Path) -> None:
    """The environment may have one, for another key."""
    data = KEY.private_bytes(Encoding.PEM, form, NoEncryption())
    assert integrity.sign(path, data, passphrase=b"pass").key == KEY_ID


def test_key_of_a_kind_that_is_not_known_is_called_so(path: Path, tmp_path: Path) -> None:
    """A key on a token, as OpenSSH keeps it."""

    def field(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    public = field(field(b"sk-ssh-ed25519@openssh.com") + field(bytes(32)) + field(b"ssh:"))
    data = b"openssh-key-v1\0" + 2 * field(b"none") + field(b"") + (1).to_bytes(4, "big") + public + field(bytes(64))
    key = tmp_path / "token"
    lines = (b"-----BEGIN OPENSSH PRIVATE KEY-----", base64.b64encode(data), b"-----END OPENSSH PRIVATE KEY-----\n")
    key.write_bytes(b"\n".join(lines))
    assert not integrity.is_encrypted_key(key)
    with pytest.raises(UnsupportedError, match="is a key of a kind that cryptography does not know"):
        integrity.sign(path, key)


def test_what_is_no_path_is_a_typed_error(path: Path) -> None:
    with pytest.raises(SourceError, match="contains NUL"):
        integrity.sign(path, "a\0b")
    with pytest.raises(UnsupportedError, match="a int is neither a path"):
        integrity.sign(5, KEY)  # type: ignore[arg-type]
