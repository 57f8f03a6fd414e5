"""Bytes of another's choice that have the XXH3 of given ones: what digests of 64 bits are worth against people.

XXH3 adds 64-bit words of the input to eight sums, and to each the product of the two halves of another sum's word, both
halves mixed with constants. A word whose one half is made to vanish adds nothing but itself. Two stripes of such words
make any sums there are: one of each pair of words brings the lower half, the other the upper.

Source: the constants and the sums are those of the specification, xxHash's doc/xxhash_spec.md, "XXH3 (large inputs)".
"""

from __future__ import annotations

import struct

import xxhash

BLOCK = 1024  # bytes between two scrambles of the sums: 16 stripes of 64 bytes
JUNK = 128  # the first bytes of a block, which are what they have to be; the others are chosen
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_WORD, _HALF = (1 << 64) - 1, (1 << 32) - 1


def colliding(genuine: bytes, wanted: bytes) -> bytes:
    """Return bytes of `genuine`'s length and XXH3 that are `wanted` but for the first JUNK bytes of each BLOCK.

    What does not fill a block, and the end, stays as it is.
    """
    assert len(genuine) == len(wanted) > 2 * BLOCK
    out = bytearray(genuine)
    for at in range(0, len(genuine) - BLOCK - 63, BLOCK):  # the last 64 are taken once more, with other constants
        if genuine[at : at + BLOCK] != wanted[at : at + BLOCK]:
            out[at : at + BLOCK] = _forged(genuine[at : at + BLOCK], wanted[at : at + BLOCK])
    assert xxhash.xxh3_64_digest(out) == xxhash.xxh3_64_digest(genuine)
    return bytes(out)


def _forged(genuine: bytes, wanted: bytes) -> bytes:
    before, after = _sums(genuine, 0), _sums(wanted, JUNK)
    lower, upper = bytearray(), bytearray()
    for lane in range(8):
        missing = before[lane ^ 1] - after[lane ^ 1] & _WORD  # what this lane's two words have to add there
        keys = _key(0, lane), _key(1, lane)
        first = keys[0] & ~_HALF | (missing - keys[1] & _HALF)  # the upper half of it, mixed, is 0
        second = missing - first & _WORD
        assert (second ^ keys[1]) & _HALF == 0
        lower += struct.pack("<Q", first)
        upper += struct.pack("<Q", second)
    return bytes(lower + upper + wanted[JUNK:])


def _sums(block: bytes, start: int) -> list[int]:
    """Return the sums that the stripes of a block from `start` on add."""
    sums = [0] * 8
    for stripe in range(start // 64, BLOCK // 64):
        for lane, word in enumerate(struct.unpack_from("<8Q", block, 64 * stripe)):
            mixed = word ^ _key(stripe, lane)
            sums[lane] += (mixed & _HALF) * (mixed >> 32)
            sums[lane ^ 1] += word
    return [value & _WORD for value in sums]


def _key(stripe: int, lane: int) -> int:
    return int.from_bytes(_SECRET[8 * (stripe + lane) : 8 * (stripe + lane) + 8], "little")
