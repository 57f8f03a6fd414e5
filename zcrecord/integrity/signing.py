"""Ed25519 signatures over a record's content digest, stored in the metadata of its archive.

The content digest is the same for every layout and does not cover metadata, so a signature stays valid when the archive
is aligned anew, packed, converted and converted back. CONVENTIONS.md has the signed bytes. The package `cryptography`
reads keys, signs and verifies.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zcrecord.archive.archive import takes_archive
from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.errors import IntegrityError, RecordError, UnsupportedError, missing_package, printable
from zcrecord.record.edit import add_metadata, add_metadata_to_catalogue, reformed_attribute
from zcrecord.record.load import load_record
from zcrecord.record.own_shards import check_no_shard
from zcrecord.record.record import Record
from zcrecord.record.save import save_record
from zcrecord.storage.files import check_destination, path_of, place_for, read_start

Progress = Callable[[int, int], None]

_SCHEME = "zcrecord signature 1 ed25519"
_LARGEST_KEY = 1 << 16  # bytes of a file that may hold a key


@dataclass(frozen=True, slots=True)
class SignReport:
    """The result of signing an archive.

    Attributes:
        path: the archive that was signed.
        dest: the signed archive; the same path unless another was given.
        key: the id of the key.
        content_digest: the digest that was signed.
        replaced: True if the archive had a signature by this key before.
    """

    path: str
    dest: str
    key: str
    content_digest: str
    replaced: bool


def sign(
    path: str | os.PathLike[str],
    key: Any,
    dest: str | os.PathLike[str] | None = None,
    *,
    passphrase: bytes | None = None,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> SignReport:
    """Add a signature to an archive's metadata, in place or to a new file; whole or not at all.

    The archive is verified in full first. Its payloads keep their offsets, as with `zcrecord.edit`. Signatures by other
    keys stay; one by the same key is replaced. The shards of a catalogue stay as they are; with `dest` a catalogue
    becomes one archive.

    Args:
        key: an Ed25519 private key: the path of a PEM file (PKCS #8, or OpenSSH's own form), its bytes, or a
            `cryptography` key.
        dest: a path; by default the archive itself is replaced.
        passphrase: the passphrase of an encrypted key.
        force: replace `dest` if it exists.

    Raises:
        IntegrityError: the archive is damaged. FormatError: the file is not an archive. UnsupportedError: the key
        cannot sign; the archive is attached to a program, or is a shard (sign its catalogue); or another writer wrote
        attributes in another form (save it again first). DestinationExistsError: `dest` exists. DependencyError:
        cryptography is not installed. SourceError: the file system refused, or the archive was replaced meanwhile.

    Example:
        >>> import numpy as np, zcrecord
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
        >>> key = Ed25519PrivateKey.generate()
        >>> report = sign("model.zcr", key)
        >>> check_signature(zcrecord.load_record("model.zcr"), key.public_key()) == report.key
        True
    """
    source = path_of(path)
    private = _load_private_key(key, passphrase)
    out = source if dest is None else path_of(dest)
    new = check_destination(source, None if dest is None else out, force)
    with load_record(source) as record:
        takes_archive(record.archive, "sign")
        if record.archive.embedded is not None:
            raise UnsupportedError("is attached to a program; detach it, sign it, and attach it again", path=source)
        if dest is None and not record.archive.source.is_mapped:
            raise UnsupportedError("is packed, or remote; name a file for the signed archive", path=source)
        if dest is None:
            check_no_shard(source)
        if (attribute := reformed_attribute(record.archive)) is not None:
            fault = f"attribute '{printable(attribute)}' is not in the form that saving gives it"
            do = "so the content digest would change; load the archive, save it, and sign that"
            raise UnsupportedError(f"{fault}, {do}", path=record.archive.path)
        record.verify(progress=progress)
        name, value, digest = _make_signature(record, private, progress)
        replaced = name in record.metadata
        _save_signed(record, place_for(out, new), {name: value}, in_place=dest is None, durable=durable)
    return SignReport(source, out, name.removeprefix(SIGNATURE_PREFIX), digest, replaced)


def _save_signed(record: Record, out: Any, signature: dict[str, str], *, in_place: bool, durable: bool) -> None:
    if in_place and record.archive.source.file_names:
        add_metadata_to_catalogue(record, signature, durable=durable)
    elif record.archive.source.file is not None:
        add_metadata(record, None if in_place else out, signature, durable=durable)
    else:
        layout = record.layout
        options: dict[str, Any] = {"alignment": layout.alignment, "digest": layout.digest, "durable": durable}
        save_record(record, out, metadata={**record.metadata, **signature}, **options)


def make_signature(record: Record, key: Any, *, passphrase: bytes | None = None) -> tuple[str, str]:
    """Return the name and value of a signature, to be saved in a record's metadata. Reads the whole record.

    Raises:
        RecordError: as `sign`.

    Example:
        >>> import numpy as np, zcrecord
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
        >>> name, value = make_signature(zcrecord.load_record("model.zcr"), Ed25519PrivateKey.generate())
        >>> name.startswith(SIGNATURE_PREFIX), len(value)
        (True, 88)
    """
    return _make_signature(record, _load_private_key(key, passphrase), None)[:2]


def check_signature(record: Record, key: Any, *, progress: Progress | None = None) -> str:
    """Check that the owner of a key signed a record's content; returns the key's id. Reads the whole record.

    Tensors, modules and attributes are covered; metadata, the order of mappings, ties and layout are not. The result
    holds for `record` itself, not for a later file at its path.

    Args:
        key: an Ed25519 public key: the path of a PEM file or of one line of OpenSSH's, its bytes, or a `cryptography`
            key.

    Raises:
        IntegrityError: the record has no signature by this key, or its content is not the signed one. UnsupportedError:
        the key is not a public Ed25519 key. DependencyError: cryptography is not installed.

    Example:
        >>> import numpy as np, zcrecord
        >>> from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
        >>> check_signature(zcrecord.load_record("model.zcr"), Ed25519PrivateKey.generate().public_key())
        Traceback (most recent call last):
        zcrecord.errors.IntegrityError: model.zcr: is not signed
    """
    public = _load_public_key(key)
    name = _key_id(public)
    metadata = record.metadata
    if SIGNATURE_PREFIX + name not in metadata:
        others = signers(record)
        by = f" by this key ({name}) but by {', '.join(map(printable, others[:3]))}" if others else ""
        raise IntegrityError(f"is not signed{by}", path=record.archive.path)
    signed = _decode_signature(metadata[SIGNATURE_PREFIX + name])
    if signed is None:
        raise IntegrityError(f"metadata '{SIGNATURE_PREFIX}{name}' is no signature", path=record.archive.path)
    from cryptography.exceptions import InvalidSignature

    digest = record.content_digest(progress=progress)
    try:
        public.verify(signed, signed_message(name, digest))
    except InvalidSignature:
        fault = f"is not what was signed by the key {name}: its content is {digest}, or the signature is forged"
        raise IntegrityError(fault, path=record.archive.path) from None
    return name


def signers(record: Record) -> tuple[str, ...]:
    """Return the ids of the keys of a record's signatures, unchecked.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
        >>> signers(zcrecord.load_record("model.zcr"))
        ()
    """
    return tuple(name.removeprefix(SIGNATURE_PREFIX) for name in record.metadata if name.startswith(SIGNATURE_PREFIX))


def is_encrypted_key(key: str | os.PathLike[str]) -> bool:
    """Return True if a file has a private key that needs a passphrase.

    Raises:
        SourceError: the file cannot be read. DependencyError: cryptography is not installed.

    Example:
        >>> from pathlib import Path
        >>> _ = Path("key.pem").write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----")
        >>> is_encrypted_key("key.pem")
        True
    """
    data, _ = _key_bytes(key)
    _require_cryptography()
    return _takes_passphrase(data)


def _takes_passphrase(data: bytes) -> bool:
    if not data.startswith(b"-----BEGIN OPENSSH"):
        return b"ENCRYPTED" in data
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        load_ssh_private_key(data, None)
    except TypeError:  # the package raises it if a passphrase is missing
        return True
    except (ValueError, UnsupportedAlgorithm):  # not a key, or an unknown kind: signing reports it
        return False
    return False


def signed_message(key: str, digest: str) -> bytes:
    """Return the bytes that a signature covers: the scheme, the key's id and the content digest, a line each.

    Example:
        >>> signed_message("00ff", "sha256:0123")
        b'zcrecord signature 1 ed25519\\n00ff\\nsha256:0123\\n'
    """
    return f"{_SCHEME}\n{key}\n{digest}\n".encode()


def _make_signature(record: Record, private: Any, progress: Progress | None) -> tuple[str, str, str]:
    """Return a signature's name and value, and the content digest."""
    name, digest = _key_id(private.public_key()), record.content_digest(progress=progress)
    value = base64.b64encode(private.sign(signed_message(name, digest))).decode()
    return SIGNATURE_PREFIX + name, value, digest


def _decode_signature(value: Any) -> bytes | None:
    """Return the 64 bytes of a signature from metadata; None unless the value is their canonical base64 text."""
    with contextlib.suppress(ValueError, TypeError):
        signed = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
        if len(signed) == 64 and base64.b64encode(signed).decode() == value:
            return signed
    return None


def _key_id(public: Any) -> str:
    """Return the SHA-256 of a public key in its DER form (SubjectPublicKeyInfo), in hexadecimal."""
    import hashlib  # here, because it takes 3 ms

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _load_private_key(key: Any, passphrase: bytes | None) -> Any:
    """Return a private Ed25519 key from a path, bytes or a key of cryptography's."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    def load(data: bytes) -> Any:
        encrypted = _takes_passphrase(data)
        if encrypted and passphrase is None:
            raise UnsupportedError("is encrypted; it takes its passphrase")
        decode: Any = load_ssh_private_key if data.startswith(b"-----BEGIN OPENSSH") else load_pem_private_key
        return decode(data, password=passphrase if encrypted else None)  # the package refuses an unneeded one

    return _load_key(key, Ed25519PrivateKey, load, "private")


def _load_public_key(key: Any) -> Any:
    """Return a public Ed25519 key from a path, bytes or a key of cryptography's."""
    _require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    def load(data: bytes) -> Any:
        if b"PRIVATE KEY" in data:
            raise UnsupportedError("is a private key; to check takes the public one")
        ssh = data.lstrip().startswith((b"ssh-", b"ecdsa-", b"sk-"))
        return (load_ssh_public_key if ssh else load_pem_public_key)(data)

    return _load_key(key, Ed25519PublicKey, load, "public")


def _load_key(key: Any, kind: type, load: Callable[[bytes], Any], which: str) -> Any:
    """Return the loaded key; errors of the package become one typed error, which does not contain the key."""
    from cryptography.exceptions import UnsupportedAlgorithm

    if isinstance(key, kind):
        return key
    data, path = _key_bytes(key)
    try:
        loaded = load(data)
    except RecordError as error:
        raise error.located(path=path) from None
    except UnsupportedAlgorithm as error:
        if "bcrypt" in str(error):
            why = "is an encrypted OpenSSH key, which takes bcrypt"
            raise missing_package("bcrypt", why=why).located(path=path) from error
        raise UnsupportedError("is a key of a kind that cryptography does not know", path=path) from error
    except (ValueError, TypeError) as error:
        fault = f"is no {which} key in PEM or OpenSSH's form"
        if which == "private" and (b"PUBLIC KEY" in data or data.startswith(b"ssh-")):
            fault = "is a public key; to sign takes the private one"
        elif which == "private" and _takes_passphrase(data):
            fault = "is a private key that needs another passphrase, or is damaged"
        raise UnsupportedError(fault, path=path) from error
    if not isinstance(loaded, kind):
        raise UnsupportedError("the key is not an Ed25519 one", path=path)
    return loaded


def _key_bytes(key: Any) -> tuple[bytes, str | None]:
    if isinstance(key, bytes):
        return key, None
    if not isinstance(key, str | os.PathLike):
        kind = type(key).__name__
        raise UnsupportedError(f"a key is a path, bytes or an Ed25519 key of cryptography's, not a {kind}")
    path = path_of(key)
    return read_start(path, _LARGEST_KEY), path


def _require_cryptography() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise missing_package("cryptography", extra="sign") from error
