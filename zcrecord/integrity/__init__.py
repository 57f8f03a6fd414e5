"""Compares two records by content; signs records, and checks signatures."""

from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.record.signatures import check_signature, signed_message, signers

from .comparing import Change, compare
from .signing import SignReport, is_encrypted_key, make_signature, sign

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
