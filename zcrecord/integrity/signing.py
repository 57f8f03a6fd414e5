"""Ed25519 signatures over a record's content digest, stored in the metadata of its archive.

The content digest is the same for every layout and does not cover metadata, so a signature stays valid when the archive
is aligned anew, packed, converted and converted back. CONVENTIONS.md has the signed bytes. `record.signatures` checks
them.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from typing import Any

from zcrecord.archive.archive import Progress, require_archive
from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.errors import UnsupportedError, printable
from zcrecord.record.edit import add_metadata, add_metadata_to_catalogue, noncanonical_attribute
from zcrecord.record.load import load_record
from zcrecord.record.own_shards import check_no_shard
from zcrecord.record.record import Record
from zcrecord.record.save import save_record
from zcrecord.record.signatures import (
    key_bytes,
    key_id,
    load_private_key,
    require_cryptography,
    signed_message,
    takes_passphrase,
)
from zcrecord.storage.files import check_destination, path_of, place_for


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
        >>> zcrecord.load_record("model.zcr", trusted_keys=[key.public_key()]).names
        ('w',)
    """
    source = path_of(path)
    private = load_private_key(key, passphrase)
    out = source if dest is None else path_of(dest)
    new = check_destination(source, None if dest is None else out, force)
    with load_record(source) as record:
        require_archive(record.archive, "sign")
        if record.archive.embedded is not None:
            raise UnsupportedError("is attached to a program; detach it, sign it, and attach it again", path=source)
        if dest is None and not record.archive.source.is_mapped:
            raise UnsupportedError("is packed, or remote; name a file for the signed archive", path=source)
        if dest is None:
            check_no_shard(source)
        if (attribute := noncanonical_attribute(record.archive)) is not None:
            fault = f"attribute '{printable(attribute)}' is not in the form that saving gives it"
            advice = "so the content digest would change; load the archive, save it, and sign that"
            raise UnsupportedError(f"{fault}, {advice}", path=record.archive.path)
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
    return _make_signature(record, load_private_key(key, passphrase), None)[:2]


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
    data, _ = key_bytes(key)
    require_cryptography()
    return takes_passphrase(data)


def _make_signature(record: Record, private: Any, progress: Progress | None) -> tuple[str, str, str]:
    """Return a signature's name and value, and the content digest."""
    name, digest = key_id(private.public_key()), record.content_digest(progress=progress)
    value = base64.b64encode(private.sign(signed_message(name, digest))).decode()
    return SIGNATURE_PREFIX + name, value, digest
