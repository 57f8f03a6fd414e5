"""Signatures in a record's metadata: Ed25519 keys, and the check that one of some keys signed a record's content.

CONVENTIONS.md has the signed bytes. `zcrecord.integrity` signs. The package `cryptography` reads keys and verifies.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from zcrecord.archive.archive import Progress
from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.errors import IntegrityError, RecordError, UnsupportedError, missing_package, printable
from zcrecord.storage.files import path_of, read_start

from .record import Record

_SCHEME = "zcrecord signature 1 ed25519"
_LARGEST_KEY = 1 << 16  # bytes of a file that may hold a key


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
    return check_signed(record, public_keys([key]), progress=progress)[0]


def public_keys(keys: Any) -> dict[str, Any]:
    """Return Ed25519 public keys by their ids; UnsupportedError unless it is a list of one or more of them."""
    if not isinstance(keys, list | tuple) or not keys:
        actual = "an empty one" if isinstance(keys, list | tuple) else f"a {type(keys).__name__}"
        raise UnsupportedError(f"trusted_keys= takes a list of public keys, not {actual}; None checks no signature")
    return {key_id(public): public for public in map(load_public_key, keys)}


def check_signed(record: Record, keys: Mapping[str, Any], *, progress: Progress | None = None) -> tuple[str, str]:
    """Check that the owner of one of several keys signed a record's content; returns the key's id and the digest.

    `keys` are those of `public_keys`. Nothing is hashed unless there is a signature by one of them.
    """
    path, metadata = record.archive.path, record.metadata
    values = {name: metadata[SIGNATURE_PREFIX + name] for name in keys if SIGNATURE_PREFIX + name in metadata}
    if not values:
        others, trusted = signers(record), "this key" if len(keys) == 1 else "one of the keys"
        by = f" by {trusted} ({', '.join(keys)}) but by {', '.join(map(printable, others[:3]))}" if others else ""
        raise IntegrityError(f"is not signed{by}", path=path)
    signed = {name: octets for name, value in values.items() if (octets := _decode_signature(value)) is not None}
    if not signed:
        raise IntegrityError(f"metadata '{SIGNATURE_PREFIX}{min(values)}' is no signature", path=path)
    from cryptography.exceptions import InvalidSignature

    digest = record.content_digest(progress=progress)
    for name, octets in signed.items():
        with contextlib.suppress(InvalidSignature):
            keys[name].verify(octets, signed_message(name, digest))
            return name, digest
    fault = f"its content is {digest}, or the signature is forged; zcrecord verify names damaged tensors"
    raise IntegrityError(f"is not what was signed by the key {', '.join(signed)}: {fault}", path=path)


def signers(record: Record) -> tuple[str, ...]:
    """Return the ids of the keys of a record's signatures, unchecked.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
        >>> signers(zcrecord.load_record("model.zcr"))
        ()
    """
    return tuple(name.removeprefix(SIGNATURE_PREFIX) for name in record.metadata if name.startswith(SIGNATURE_PREFIX))


def signed_message(key: str, digest: str) -> bytes:
    """Return the bytes that a signature covers: the scheme, the key's id and the content digest, a line each.

    Example:
        >>> signed_message("00ff", "sha256:0123")
        b'zcrecord signature 1 ed25519\\n00ff\\nsha256:0123\\n'
    """
    return f"{_SCHEME}\n{key}\n{digest}\n".encode()


def _decode_signature(value: Any) -> bytes | None:
    """Return the 64 bytes of a signature from metadata; None unless the value is their canonical base64 text."""
    with contextlib.suppress(ValueError):
        signed = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
        if len(signed) == 64 and base64.b64encode(signed).decode() == value:
            return signed
    return None


def key_id(public: Any) -> str:
    """Return the SHA-256 of a public key in its DER form (SubjectPublicKeyInfo), in hexadecimal."""
    import hashlib  # here, because it takes 3 ms

    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def load_private_key(key: Any, passphrase: bytes | None) -> Any:
    """Return a private Ed25519 key from a path, bytes or a key of cryptography's."""
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key

    def load(data: bytes) -> Any:
        encrypted = takes_passphrase(data)
        if encrypted and passphrase is None:
            raise UnsupportedError("is encrypted; give its passphrase")
        decode: Any = load_ssh_private_key if data.startswith(b"-----BEGIN OPENSSH") else load_pem_private_key
        return decode(data, password=passphrase if encrypted else None)  # the package refuses an unneeded one

    return _load_key(key, Ed25519PrivateKey, load, "private")


def load_public_key(key: Any) -> Any:
    """Return a public Ed25519 key from a path, bytes or a key of cryptography's."""
    require_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key, load_ssh_public_key

    def load(data: bytes) -> Any:
        if b"PRIVATE KEY" in data:
            raise UnsupportedError("is a private key; to check a signature give the public one")
        ssh = data.lstrip().startswith((b"ssh-", b"ecdsa-", b"sk-"))
        return (load_ssh_public_key if ssh else load_pem_public_key)(data)

    return _load_key(key, Ed25519PublicKey, load, "public")


def _load_key(key: Any, key_type: type, load: Callable[[bytes], Any], role: str) -> Any:
    """Return a key as it is, or loaded by `load` from bytes or a file; UnsupportedError, without its bytes, else."""
    from cryptography.exceptions import UnsupportedAlgorithm

    if isinstance(key, key_type):
        return key
    data, path = key_bytes(key)
    try:
        loaded = load(data)
    except RecordError as error:
        raise error.located(path=path) from None
    except UnsupportedAlgorithm as error:
        if "bcrypt" in str(error):
            why = "is an encrypted OpenSSH key, which takes bcrypt"
            raise missing_package("bcrypt", why=why).located(path=path) from error
        raise UnsupportedError("is a key of a kind that cryptography does not know; use Ed25519", path=path) from error
    except (ValueError, TypeError) as error:
        fault = f"is no {role} key in PEM or OpenSSH's form"
        if role == "private" and (b"PUBLIC KEY" in data or data.startswith(b"ssh-")):
            fault = "is a public key; to sign give the private one"
        elif role == "private" and takes_passphrase(data):
            fault = "is a private key that needs another passphrase, or is damaged"
        raise UnsupportedError(fault, path=path) from error
    if not isinstance(loaded, key_type):
        raise UnsupportedError("the key is not an Ed25519 one; give one of that kind", path=path)
    return loaded


def takes_passphrase(data: bytes) -> bool:
    """Return True if the bytes are a private key that is encrypted."""
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


def key_bytes(key: Any) -> tuple[bytes, str | None]:
    """Return the bytes of a key, and the path of its file, if it has one."""
    if isinstance(key, bytes):
        return key, None
    if not isinstance(key, str | os.PathLike):
        kind = type(key).__name__
        raise UnsupportedError(f"a key is a path, bytes or an Ed25519 key of cryptography's, not a {kind}")
    path = path_of(key)
    return read_start(path, _LARGEST_KEY), path


def require_cryptography() -> None:
    """Raise DependencyError unless cryptography is installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise missing_package("cryptography", extra="sign") from error
