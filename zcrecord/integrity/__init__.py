"""Compares two records by content; signs records, and checks signatures."""

from zcrecord.codec.conventions import SIGNATURE_PREFIX

from .comparing import Change, compare
from .signing import (
    SignReport,
    check_signature,
    is_encrypted_key,
    make_signature,
    sign,
    signed_message,
    signers,
)

__all__ = [
    "SIGNATURE_PREFIX",
    "Change",
    "SignReport",
    "check_signature",
    "compare",
    "is_encrypted_key",
    "make_signature",
    "sign",
    "signed_message",
    "signers",
]
