"""`trusted_keys=`: a record is given only if the owner of a trusted key signed all of its content, however it lies."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

import zcrecord
from tools.range_server import serving
from zcrecord import FormatError, IntegrityError, SourceError, UnsupportedError, formats, integrity, transport

KEY, OTHER = (Ed25519PrivateKey.from_private_bytes(bytes([n] * 32)) for n in (1, 2))
PUBLIC = KEY.public_key()
TREE: dict[str, Any] = {"a": np.arange(600, dtype=np.float32), "b": [np.ones(64, np.float32), b"blob"], "n": 5}
EVIL = {**TREE, "b": [np.zeros(64, np.float32), b"blob"]}
OPTIONS: list[dict[str, Any]] = [{}, {"mode": "c"}, {"mmap": False}, {"verify": "touch"}, {"verify": "full"}]


def plain(folder: Path, tree: Any, metadata: Any, **options: Any) -> Path:
    zcrecord.save_record(tree, folder / "m.zcr", metadata=metadata, durable=False, **options)
    return folder / "m.zcr"


def catalogue(folder: Path, tree: Any, metadata: Any) -> Path:
    return plain(folder, tree, metadata, max_shard_size=500)


def packed(folder: Path, tree: Any, metadata: Any) -> Path:
    transport.pack(plain(folder, tree, metadata), folder / "m.zcr.zst", force=True, durable=False)
    return folder / "m.zcr.zst"


def converted(folder: Path, tree: Any, metadata: Any, **options: Any) -> Path:
    path = folder / "m.safetensors"
    formats.convert(plain(folder, tree, metadata), path, force=True, durable=False, **options)
    return path


def safetensors(folder: Path, tree: Any, metadata: Any) -> Path:
    return converted(folder, tree, metadata)


def shards(folder: Path, tree: Any, metadata: Any) -> Path:
    converted(folder, tree, metadata, max_shard_size=500)
    return folder / "m.safetensors.index.json"


def indexed(folder: Path, tree: Any, metadata: Any) -> Path:
    zcrecord.index(shards(folder, tree, metadata), folder / "index.zcr", force=True, durable=False)
    return folder / "index.zcr"


def based(folder: Path, tree: Any, metadata: Any) -> Path:
    """Return an archive that has nothing of its own but the metadata; its base is not signed."""
    zcrecord.save_record(tree, folder / "base.zcr", durable=False)
    return plain(folder, tree, metadata, base=folder / "base.zcr")


def attached(folder: Path, tree: Any, metadata: Any) -> Path:
    octets = plain(folder, tree, metadata).read_bytes()
    (folder / "app").write_bytes(b"\x7fELF".ljust(65536, b"\0") + octets)
    return folder / "app"


Make = Callable[[Path, Any, Any], Path]
OTHER_KINDS: list[Make] = [catalogue, packed, safetensors, shards, indexed, based, attached]
KINDS = [plain, *(pytest.param(make, marks=pytest.mark.slow) for make in OTHER_KINDS)]


def signature(key: Ed25519PrivateKey = KEY) -> dict[str, str]:
    return dict([integrity.make_signature(zcrecord.load_record(r.saved(TREE)), key)])


def honest(record: Any) -> bool:
    return bool(np.array_equal(record["a"], TREE["a"]) and record["b.0"].all())


@pytest.mark.parametrize("make", KINDS)
def test_signed_content_opens_and_every_other_is_refused(make: Make, tmp_path: Path) -> None:
    path = make(tmp_path, TREE, signature())
    for options in OPTIONS:
        assert honest(zcrecord.load_record(path, trusted_keys=[OTHER.public_key(), PUBLIC], **options))
        assert zcrecord.load_record(path, trusted_keys=[PUBLIC], names="b", **options)["b.0"].all()
        with pytest.raises(IntegrityError, match="is not signed by this key"):
            zcrecord.load_record(path, trusted_keys=[OTHER.public_key()], **options)
    for content, metadata, fault in (
        (TREE, {}, "is not signed$"),
        (TREE, signature(OTHER), r"is not signed by this key \(\w+\) but by"),
        (EVIL, signature(), "is not what was signed by the key"),
    ):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        path = make(tmp_path, content, metadata)
        for part in (None, "a"):  # which would be the same
            with pytest.raises(IntegrityError, match=rf"{path.name}: {fault}"):
                zcrecord.load_record(path, trusted_keys=[PUBLIC], names=part)


def honest_or_refused(look: Callable[[], Any]) -> bool:
    try:
        return bool(look().all())
    except (IntegrityError, SourceError, FormatError):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, catalogue, shards, indexed, based])
@pytest.mark.parametrize("names", [None, "b"])
def test_files_that_were_checked_stay_in_use_when_others_take_their_places(
    make: Make, names: str | None, tmp_path: Path
) -> None:
    (there := tmp_path / "there").mkdir()
    (evil := tmp_path / "evil").mkdir()
    path = make(there, TREE, signature())
    make(evil, EVIL, signature())
    record = zcrecord.load_record(path, trusted_keys=[PUBLIC], names=names)
    for file in there.iterdir():
        os.replace(evil / file.name, file)
    assert record["b.0"].all()
    assert honest_or_refused(lambda: record.torch()["b.0"]), "it maps the file again"
    assert honest_or_refused(lambda: record.load_into("read")["b.0"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, catalogue, safetensors, shards, indexed, based, packed, attached])
@pytest.mark.parametrize("names", [None, "b"])
def test_files_that_were_read_into_memory_are_not_read_again(make: Make, names: str | None, tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    (evil := tmp_path / "evil").mkdir()
    path = make(there, TREE, signature())
    make(evil, EVIL, signature())
    record = zcrecord.load_record(path, trusted_keys=[PUBLIC], mmap=False, names=names)
    for file in there.iterdir():
        before = file.stat()
        file.write_bytes((evil / file.name).read_bytes())
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    for look in (
        record.__getitem__,
        lambda name: record.torch()[name],
        lambda name: record.load_into("read")[name],
        lambda name: record.select("b").load_into("host")[name],
        zcrecord.Record(record.archive.private()).get,
    ):
        assert np.asarray(look("b.0")).all()


@pytest.mark.slow
@pytest.mark.parametrize("make", [catalogue, shards, indexed, based])
def test_no_file_of_others_is_joined_with_signed_ones(make: Make, tmp_path: Path) -> None:
    (there := tmp_path / "there").mkdir()
    (evil := tmp_path / "evil").mkdir()
    path = make(there, TREE, signature())
    make(evil, EVIL, signature())
    exchanged = 0
    for file in there.iterdir():
        before, other = file.read_bytes(), (evil / file.name).read_bytes()
        file.write_bytes(other)
        try:
            assert honest(zcrecord.load_record(path, trusted_keys=[PUBLIC]))
        except (IntegrityError, FormatError):
            exchanged += 1
        file.write_bytes(before)
    assert exchanged, "the others' values lie in one of the files"


@pytest.mark.parametrize("how", ["expect", "trusted_keys"])
@pytest.mark.parametrize("make", [plain, catalogue])
def test_pickled_record_is_that_content_or_an_error_in_every_process(make: Make, how: str, tmp_path: Path) -> None:
    """An archive without digests has the same header and index whatever its values are."""
    options: dict[str, Any] = {"digest": "none"} | ({} if make is plain else {"max_shard_size": 500})
    path = plain(tmp_path, TREE, signature(), **options)
    asked: dict[str, Any] = {"expect": zcrecord.load_record(path).content_digest(), "trusted_keys": [PUBLIC]}
    pickled = pickle.dumps(zcrecord.load_record(path, **{how: asked[how]}).select("b"))
    assert pickle.loads(pickled)["b.0"].all()
    plain(tmp_path, EVIL, signature(), **options)
    assert not zcrecord.load_record(path)["b.0"].any()
    with pytest.raises(IntegrityError):
        pickle.loads(pickled)


@pytest.mark.slow
@pytest.mark.parametrize("make", [plain, catalogue, packed, safetensors, indexed])
def test_urls_are_checked_before_anything_is_given_and_what_comes_later_too(make: Make, tmp_path: Path) -> None:
    (served := tmp_path / "served").mkdir()
    path = make(served, TREE, signature())
    with serving(served) as server:
        url = f"{server.url}/{path.name}"
        record = zcrecord.load_record(url, trusted_keys=[PUBLIC], cache=tmp_path / "cache")
        kept = zcrecord.load_record(url, trusted_keys=[PUBLIC], cache=False)
        pickled = pickle.dumps(kept)
        with pytest.raises(IntegrityError, match="is not signed by this key"):
            zcrecord.load_record(url, trusted_keys=[OTHER.public_key()], cache=tmp_path / "cache")
        assert honest(record)
        make(served, EVIL, signature())
        with pytest.raises(IntegrityError, match="is not what was signed by the key"):
            zcrecord.load_record(url, trusted_keys=[PUBLIC], cache=tmp_path / "cache", names="a")
        assert honest_or_refused(lambda: kept["b.0"])
        assert honest_or_refused(lambda: pickle.loads(pickled)["b.0"])


@pytest.mark.parametrize("change", [{"n": 6}, {"b": [TREE["b"][0], b"blot"]}])
def test_values_in_the_header_of_another_format_are_those_that_were_checked(change: Any, tmp_path: Path) -> None:
    path = safetensors(tmp_path, TREE, signature())
    with serving(tmp_path) as server:
        record = zcrecord.load_record(f"{server.url}/{path.name}", trusted_keys=[PUBLIC], cache=False)
        pickled, local = pickle.dumps(record), pickle.dumps(zcrecord.load_record(path))
        safetensors(tmp_path, {**TREE, **change}, signature())
        for each in (pickled, local):
            with pytest.raises(IntegrityError, match="it was replaced since"):
                pickle.loads(each)


def test_bytes_and_file_objects_are_checked(tmp_path: Path) -> None:
    path = plain(tmp_path, TREE, signature())
    with path.open("rb") as file:
        for source in (path.read_bytes(), memoryview(path.read_bytes()), file, io.BytesIO(path.read_bytes())):
            assert honest(zcrecord.load_record(source, trusted_keys=[PUBLIC]))
    with pytest.raises(IntegrityError, match=r"is not signed$"):
        zcrecord.load_record(r.saved(TREE), trusted_keys=[PUBLIC])


def test_an_expected_digest_is_compared_besides(tmp_path: Path) -> None:
    path = plain(tmp_path, TREE, signature())
    digest = zcrecord.load_record(path).content_digest()
    assert honest(zcrecord.load_record(path, trusted_keys=[PUBLIC], expect=digest))
    with pytest.raises(IntegrityError, match="was expected, it has"):
        zcrecord.load_record(path, trusted_keys=[PUBLIC], expect="sha256:" + 64 * "0")


def test_a_signature_that_is_broken_beside_a_sound_one_does_not_count(tmp_path: Path) -> None:
    forged = dict.fromkeys(signature(OTHER), "A" * 86 + "==")
    path = plain(tmp_path, TREE, {**forged, **signature()})
    keys = [OTHER.public_key(), PUBLIC]
    assert honest(zcrecord.load_record(path, trusted_keys=keys))
    assert honest(zcrecord.load_record(path, trusted_keys=keys[::-1]))
    for value in ("A" * 86 + "==", "none"):
        path = plain(tmp_path, TREE, dict.fromkeys({**forged, **signature()}, value))
        with pytest.raises(IntegrityError, match=r"is not what was signed by the key|is no signature"):
            zcrecord.load_record(path, trusted_keys=keys)


LINE = PUBLIC.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
PEM = PUBLIC.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def test_keys_may_be_of_different_forms(tmp_path: Path) -> None:
    path = plain(tmp_path, TREE, signature())
    (tmp_path / "pub.pem").write_bytes(PEM)
    other = OTHER.public_key()
    for keys in ([other, LINE], [other, PEM, LINE], (str(tmp_path / "pub.pem"), other), [tmp_path / "pub.pem"]):
        assert honest(zcrecord.load_record(path, trusted_keys=keys))


@pytest.mark.parametrize(("keys", "message"), [
    ([], "^trusted_keys= takes a list of public keys, not an empty one; None checks no signature$"),
    ((), "not an empty one"),
    ("pub.pem", "not a str"),
    (PEM, "not a bytes"),
    (PUBLIC, "not a .*Ed25519PublicKey"),
    (False, "not a bool"),
    ([[PUBLIC]], "a key is a path, bytes or an Ed25519 key of cryptography's, not a list"),
    ([None], "not a NoneType"),
    ([PUBLIC, b""], "^is no public key in PEM or OpenSSH's form$"),
    ([PUBLIC, b"-----BEGIN PRIVATE KEY-----"], "^is a private key; to check a signature give the public one$"),
])  # fmt: skip
def test_what_is_no_list_of_public_keys_is_refused_before_anything_is_opened(keys: Any, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        zcrecord.load_record("/none", trusted_keys=keys)
