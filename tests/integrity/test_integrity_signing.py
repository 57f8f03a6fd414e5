"""A signature says who vouches for what a record holds: it survives every layout, and no change of the content."""

from __future__ import annotations

import base64
import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from forge import Forge
from records import saved

import zcrecord
from zcrecord import (
    DependencyError,
    DestinationExistsError,
    FormatError,
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    UnsupportedError,
    formats,
    integrity,
    transport,
)

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC = KEY.public_key()
KEY_ID = hashlib.sha256(PUBLIC.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()
NAME = integrity.SIGNATURE_PREFIX + KEY_ID
PLAIN = NoEncryption()


def tree() -> dict[str, Any]:
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    layers = [{"w": np.arange(5), "heads": 3}, {"w": np.arange(5)}]
    return {"a": a, "tied": a, "turned": np.asfortranarray(a), "layers": layers, "note": "x", "blob": b"12"}


def private(form: PrivateFormat = PrivateFormat.PKCS8, how: KeySerializationEncryption = PLAIN) -> bytes:
    return KEY.private_bytes(Encoding.PEM, form, how)


def pem(key: Any = PUBLIC) -> bytes:
    data: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return data


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A signed archive."""
    path = tmp_path / "m.zcr"
    zcrecord.save_record(tree(), path, metadata={"author": "me"})
    integrity.sign(path, KEY)
    return path


def test_signature_is_the_one_of_the_specification(path: Path) -> None:
    """A signature made by CONVENTIONS.md's text alone is equal."""
    with zcrecord.load_record(path) as record:
        value = record.metadata[f"zcrecord.signature.{KEY_ID}"]
        text = f"zcrecord signature 1 ed25519\n{KEY_ID}\n{record.content_digest()}\n"
    assert value == base64.b64encode(KEY.sign(text.encode())).decode()


def test_signing_reports_what_it_signed_and_says_so_again(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(tree(), path)
    digest = zcrecord.load_record(path).content_digest()
    report = integrity.sign(path, KEY)
    assert report == integrity.SignReport(str(path), str(path), KEY_ID, digest, False)
    first = path.read_bytes()
    assert integrity.sign(path, KEY).replaced
    assert path.read_bytes() == first, "Ed25519 has no dice in it"


def test_signing_keeps_everything_else(tmp_path: Path) -> None:
    path, out = tmp_path / "m.zcr", tmp_path / "signed.zcr"
    zcrecord.save_record(tree(), path, metadata={"author": "me", "n": [1, 2]}, alignment=4096, digest="none")
    before = path.read_bytes()
    integrity.sign(path, KEY, out)
    assert path.read_bytes() == before
    old, new = zcrecord.load_record(path), zcrecord.load_record(out, verify="full")
    assert new.metadata == {**old.metadata, NAME: new.metadata[NAME]}
    assert (new.content_digest(), new.names, new.attributes) == (old.content_digest(), old.names, old.attributes)
    assert (new.layout.alignment, new.layout.digest) == (4096, "none")
    assert [(i.tied, i.strides) for i in new.infos()] == [(i.tied, i.strides) for i in old.infos()]


def test_several_sign_one_archive(path: Path) -> None:
    integrity.sign(path, OTHER)
    with zcrecord.load_record(path) as record:
        assert set(integrity.signers(record)) == {
            integrity.check_signature(record, key.public_key()) for key in (KEY, OTHER)
        }
        assert record.metadata["author"] == "me"


@pytest.mark.parametrize("saves", [1, 2])
def test_a_shard_is_not_signed_in_place_but_its_catalogue_is(tmp_path: Path, saves: int) -> None:
    catalogue, key = tmp_path / "model.zcr", Ed25519PrivateKey.generate()
    for _ in range(saves):  # over the first, shards get other names
        zcrecord.save_record({"a": np.ones(99), "b": np.zeros(99)}, catalogue, max_shard_size=99)
    shard = next(tmp_path.glob("model*-00001-of-00002.zcr"))
    with pytest.raises(UnsupportedError, match=r"is a shard of model\.zcr, which has the digest of its index"):
        integrity.sign(shard, key)
    integrity.sign(shard, key, tmp_path / "signed.zcr")
    integrity.sign(catalogue, key)
    assert integrity.check_signature(zcrecord.load_record(catalogue, verify="full"), key.public_key())


def aligned(path: Path, out: Path) -> None:
    formats.convert(path, out, alignment=4096)


def packed(path: Path, out: Path) -> None:
    transport.pack(path, out)


def through_safetensors(path: Path, out: Path) -> None:
    formats.convert(path, out.with_suffix(".safetensors"))
    formats.convert(out.with_suffix(".safetensors"), out)


@pytest.mark.parametrize("again", [aligned, packed, through_safetensors])
def test_signature_survives_every_layout(again: Callable[[Path, Path], None], path: Path, tmp_path: Path) -> None:
    out = tmp_path / "again.zcr"
    again(path, out)
    with zcrecord.load_record(out) as record:
        assert out.read_bytes() != path.read_bytes()
        assert integrity.check_signature(record, PUBLIC) == KEY_ID


CHANGES: dict[str, Callable[[Any], object]] = {
    "a value": lambda content: content["a"].__setitem__((0, 0), 7),
    "an attribute more": lambda content: content["layers"][1].update(heads=3),
    "a module more": lambda content: content.update(empty={}),
    "nothing": lambda content: None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_no_change_of_the_content_passes(what: str, path: Path) -> None:
    with zcrecord.load_record(path, mode="c") as record:
        content, metadata = record.tree(), record.metadata
        CHANGES[what](content)
        again = zcrecord.load_record(saved(content, metadata=metadata))
    if what == "nothing":
        assert integrity.check_signature(again, PUBLIC) == KEY_ID
    else:
        with pytest.raises(
            IntegrityError, match=rf"is not what was signed by the key {KEY_ID}: its content is sha256:"
        ):
            integrity.check_signature(again, PUBLIC)


def test_unsigned_archive_and_one_signed_by_others_say_so(tmp_path: Path) -> None:
    path = tmp_path / "m.zcr"
    zcrecord.save_record(tree(), path)
    with pytest.raises(IntegrityError, match=r"m\.zcr: is not signed$"):
        integrity.check_signature(zcrecord.load_record(path), PUBLIC)
    other = integrity.sign(path, OTHER).key
    with pytest.raises(IntegrityError, match=rf"is not signed by this key \({KEY_ID}\) but by {other}$"):
        integrity.check_signature(zcrecord.load_record(path), PUBLIC)


def test_names_of_other_signatures_are_strangers_words() -> None:
    record = zcrecord.load_record(saved(tree(), metadata={integrity.SIGNATURE_PREFIX + "\x1b[31m" + "x" * 999: "A"}))
    with pytest.raises(IntegrityError, match=r"but by \\x1b\[31mx+…x+$") as caught:
        integrity.check_signature(record, PUBLIC)
    assert len(str(caught.value)) < 500


def test_signature_of_another_key_or_content_or_purpose_is_none(path: Path) -> None:
    with zcrecord.load_record(path) as record:
        digest = record.content_digest()
        messages = {
            "another key": integrity.signed_message("0" * 64, digest),
            "another content": integrity.signed_message(KEY_ID, "sha256:" + "0" * 64),
            "the digest alone": digest.encode(),
            "another scheme": integrity.signed_message(KEY_ID, digest).replace(b"signature 1", b"signature 2"),
        }
        by_other = OTHER.sign(integrity.signed_message(KEY_ID, digest))
        for value in (*map(KEY.sign, messages.values()), by_other, bytes(64)):
            data = saved(record, metadata={NAME: base64.b64encode(value).decode()})
            with pytest.raises(IntegrityError, match="is not what was signed"):
                integrity.check_signature(zcrecord.load_record(data), PUBLIC)


@pytest.mark.parametrize("value", [5, None, b"x" * 64, ["x"], "", "x", "é" * 88, "A" * 87 + "=", "A" * 86 + "B=",
                                   base64.b64encode(bytes(63)).decode(), base64.b64encode(bytes(64)).decode() + "\n",
                                   base64.b64encode(bytes(64)).decode()[:-3] + "B=="])  # fmt: skip
def test_what_is_no_signature_is_called_so(value: Any) -> None:
    record = zcrecord.load_record(saved(tree(), metadata={NAME: value}))
    with pytest.raises(IntegrityError, match=rf"metadata '{NAME}' is no signature$"):
        integrity.check_signature(record, PUBLIC)


def test_damaged_archive_is_not_signed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[zcrecord.load_record(path).info("a").offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"tensor 'a': .*its digest does not match"):
        integrity.sign(path, OTHER)
    assert path.read_bytes() == data


def test_signing_replaces_nothing_unasked(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "there"
    out.write_bytes(b"there")
    with pytest.raises(DestinationExistsError, match="exists already"):
        integrity.sign(path, KEY, out)
    assert out.read_bytes() == b"there"
    integrity.sign(path, KEY, out, force=True)
    assert integrity.check_signature(zcrecord.load_record(out), PUBLIC)


def test_packed_archive_is_signed_into_another_file_alone(path: Path, tmp_path: Path) -> None:
    there = tmp_path / "m.zcr.zst"
    transport.pack(path, there)
    with pytest.raises(UnsupportedError, match="is packed, or remote; name a file for the signed archive"):
        integrity.sign(there, OTHER)
    integrity.sign(there, OTHER, tmp_path / "out.zcr")
    assert integrity.check_signature(zcrecord.load_record(tmp_path / "out.zcr"), OTHER.public_key())


def test_program_with_an_archive_is_not_replaced_by_the_archive(path: Path, tmp_path: Path) -> None:
    app = tmp_path / "app"
    app.write_bytes(b"\x7fELF".ljust(65536, b"\0") + path.read_bytes())
    with pytest.raises(UnsupportedError, match="is attached to a program; detach it"):
        integrity.sign(app, KEY)
    path.write_bytes(b"not an archive at all" * 100)
    with pytest.raises(FormatError):
        integrity.sign(path, KEY)


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


def test_keys_are_taken_in_every_usual_form(path: Path, tmp_path: Path) -> None:
    secret = BestAvailableEncryption(b"pass")
    file = tmp_path / "key.pem"
    file.write_bytes(private())
    for key in (KEY, file, str(file), private(), private(PrivateFormat.OpenSSH)):
        for passphrase in (None, b"pass"):  # the environment may have one, for another key
            assert integrity.sign(path, key, passphrase=passphrase).key == KEY_ID
    assert integrity.sign(path, private(how=secret), passphrase=b"pass").key == KEY_ID
    (tmp_path / "pub").write_bytes(pem())
    line = PUBLIC.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b" me@home\n"
    with zcrecord.load_record(path) as record:
        for public in (PUBLIC, tmp_path / "pub", pem(), line):
            assert integrity.check_signature(record, public) == KEY_ID
        assert integrity.make_signature(record, KEY) == (NAME, record.metadata[NAME])


ELLIPTIC = generate_private_key(SECP256R1())
NO_PRIVATE, NO_PUBLIC = (f"is no {which} key in PEM or OpenSSH's form$" for which in ("private", "public"))
OPENSSH = private(PrivateFormat.OpenSSH)


@pytest.mark.parametrize(("key", "to_sign", "message"), [
    (pem(), True, "is a public key; to sign give the private one$"),
    (b"ssh-ed25519 AAAA", True, "is a public key; to sign give the private one$"),
    (b"", True, NO_PRIVATE),
    (private().replace(b"MC4C", b"MC4D"), True, NO_PRIVATE),
    (OPENSSH[:90] + OPENSSH[94:], True, NO_PRIVATE),
    (private(how=BestAvailableEncryption(b"pass")), True, "is encrypted; give its passphrase$"),
    (ELLIPTIC.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, PLAIN), True, "not an Ed25519 one; give one"),
    (5, True, "a key is a path, bytes or an Ed25519 key of cryptography's, not a int$"),
    (private(), False, "is a private key; to check a signature give the public one$"),
    (b"", False, NO_PUBLIC),
    (b"ssh-ed25519 AAAA", False, NO_PUBLIC),
    (pem(ELLIPTIC.public_key()), False, "not an Ed25519 one; give one"),
])  # fmt: skip
def test_what_is_no_such_key_is_refused(key: Any, to_sign: bool, message: str, path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message), zcrecord.load_record(path) as record:
        integrity.sign(path, key) if to_sign else integrity.check_signature(record, key)


def test_errors_name_the_file_of_a_key_and_hold_nothing_of_it(path: Path, tmp_path: Path) -> None:
    file = tmp_path / "secret.pem"
    with pytest.raises(SourceNotFoundError, match=r"secret\.pem: cannot read: "):
        integrity.sign(path, file)
    with pytest.raises(SourceError, match="cannot read: "):
        integrity.sign(path, tmp_path)
    file.write_bytes(private()[:-40])
    with pytest.raises(UnsupportedError, match=r"secret\.pem: is no private key") as caught:
        integrity.sign(path, file)
    assert private().splitlines()[1].decode()[:20] not in repr(caught.value) + str(caught.value.__cause__)


def test_without_cryptography_the_error_says_how_to_get_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cryptography", None)
    how = r"cryptography is not installed; pip install cryptography, or in a checkout .*'\.\[sign\]'"
    with pytest.raises(DependencyError, match=how):
        integrity.sign(path, private())
    with pytest.raises(DependencyError, match=how):
        integrity.check_signature(zcrecord.load_record(path), pem())


@pytest.mark.needs("openssl")
def test_openssl_agrees(path: Path, tmp_path: Path) -> None:
    """The guide's commands check a signature without zcrecord."""
    (tmp_path / "pub.pem").write_bytes(pem())
    with zcrecord.load_record(path) as record:
        (tmp_path / "signed").write_bytes(integrity.signed_message(KEY_ID, record.content_digest()))
        (tmp_path / "signature").write_bytes(base64.b64decode(record.metadata[NAME]))
    command = "openssl pkey -pubin -in pub.pem -outform DER"
    der = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, check=True)
    assert hashlib.sha256(der.stdout).hexdigest() == KEY_ID
    command = "openssl pkeyutl -verify -pubin -inkey pub.pem -rawin -in signed -sigfile signature"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "Verified Successfully" in done.stdout
