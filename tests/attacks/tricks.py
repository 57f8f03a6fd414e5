"""Archives that break no single rule on its own terms, or none at all: claims, loops, twins, traps, and the budget.

What is legal has to be harmless: answered within the same time and memory as what is refused. Whatever takes entries
pair by pair, or repeats for each what they share, shows.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
from forge import Forge, build_index, end_bytes
from malformed import plain, rich, saved, sequence

from attacks.broken import HARMLESS as HARMLESS
from attacks.broken import sealed
from attacks.catalogue import Attack, Doors, attack, file
from attacks.doors import ARCHIVE_DOORS
from zcrecord import FormatError, IntegrityError, LimitError, RecordError

DOORS = ARCHIVE_DOORS
MANY = 5000  # entries of legal archives: 25 million pairs
FLOOD = 200_000  # entries of archives that are refused
LONG = 1 << 20
TABLE = 40  # where `build_index` lays the root table


def trick(
    name: str, rules: str, make: Callable[[], bytes], error: type[RecordError] | None = None, message: str = "",
    doors: Doors = None,
) -> Attack:  # fmt: skip
    return attack(name, rules, file(make), error, message, doors)


def numbers(count: int) -> np.ndarray[Any, Any]:
    """Return 7 bytes for each number, NUL included."""
    return np.frombuffer(b"".join(b"%06d\0" % i for i in range(count)), np.uint8)


def tensors(count: int, data: bytes = b"1234", **fields: Any) -> Forge:
    """Return a legal archive of that many uint8 tensors of one payload."""
    f = Forge(saved({"a": np.frombuffer(data, np.uint8)}))
    start = f.add("text", numbers(count))
    column = f.columns["tensors"] = np.repeat(f.columns["tensors"], count)
    column["name"], column["name_size"], column["key_size"] = start + 7 * np.arange(count), 6, 6
    column["place"] = np.arange(count)
    for field, value in fields.items():
        column[field] = value
    f.columns["by_name"] = np.arange(count, dtype="<u4")
    return f


def modules(count: int) -> Forge:
    f = Forge(saved({"m": {}}))
    start = f.add("text", numbers(count))
    rows = f.columns["modules"] = np.repeat(f.columns["modules"], [1, count])
    rows["end"] = np.arange(count + 1) + 1
    rows["end"][0] = count + 1
    rows["name"][1:], rows["name_size"][1:], rows["key_size"][1:] = start + 7 * np.arange(count), 6, 6
    rows["place"][1:] = np.arange(count)
    return f


def attributes(count: int, record: dict[str, Any]) -> Forge:
    f = Forge(saved(record))
    start = f.add("text", numbers(count))
    rows = f.columns["attributes"] = np.repeat(f.columns["attributes"], count)
    rows["name"], rows["name_size"], rows["place"] = start + 7 * np.arange(count), 6, np.arange(count)
    return f


def named_bytes(count: int, nbytes: int, *, listed: bool) -> Forge:
    """Return a legal archive of one range of bytes that so many attributes have, or the items of a list."""
    if not listed:
        return attributes(count, {"n": bytes(nbytes)})
    f = Forge(saved({"n": [bytes(nbytes)]}))
    f.columns["attributes"]["value"] = f.add("words", [0] * count) | count << 32
    return f


def below_a_long_name(size: int = LONG, count: int = FLOOD // 100) -> bytes:
    """Let attributes have a module whose name is long: every full name would be."""
    f = attributes(count, {"m": {"n": 1}})
    start, size = f.text(b"x" * size)
    return f.set("modules", 1, name=start, name_size=size, key_size=size).seal()


def used_up(f: Forge) -> bytes:
    index = len(build_index(f.columns, f.digest_kind))
    assert 0 <= f.budget_left() < index
    return f.seal()


def lists_of_texts() -> bytes:
    """Let lists share words, and words a text, as far as the budget goes."""
    f = attributes(MANY, {"n": ["a", "b"]})
    start, size = f.text(b"x" * 45)
    f.columns["attributes"]["value"] = f.add("words", np.full(10, start | size << 32, "<u8")) | 10 << 32
    return used_up(f)


def lists_of_numbers() -> bytes:
    """Let lists share numbers that are an object each to Python, as far as the budget goes."""
    f = attributes(MANY, {"n": [2**62, 2**63]})
    f.columns["attributes"]["value"] = f.add("words", np.full(38, 2**63 + 1, "<u8")) | 38 << 32
    return used_up(f)


def alike(f: Forge, vector: str) -> bytes:
    """Let all names, in ascending order, be ends of a few long ones: they differ in length or in their last bytes."""
    rows = f.columns[vector][int(vector == "modules") :]
    rows["name_size"], runs = 0, len(rows) // 1000
    shorter, run = np.arange(len(rows))[::-1] // runs, np.arange(len(rows)) % runs
    longest = (f.budget_left() + int(shorter.sum()) - 6 * len(rows)) // (len(rows) - 16 * runs)
    begin = f.add("text", np.frombuffer(b"".join(b"x" * longest + b"%06d\0" % i for i in range(runs)), np.uint8))
    rows["name"], rows["name_size"] = begin + run * (longest + 7) + shorter, longest + 6 - shorter
    if vector != "attributes":
        rows["key_size"] = rows["name_size"]
    return used_up(f)


def nested_alike(chains: int = MANY // 1000, depth: int = 31, size: int = 1000) -> bytes:
    """Let modules be nested whose full names are all ends of the innermost one's."""
    f = modules(chains * depth)
    rows = f.columns["modules"][1:]
    chain, level = np.divmod(np.arange(len(rows)), depth)
    keys = [b"x" * (size - 6) + b"%06d" % i for i in range(chains)]
    begin = f.add("text", np.frombuffer(b"".join(b".".join([key] * depth) + b"\0" for key in keys), np.uint8))
    sizes, ends = (level + 1) * (size + 1) - 1, (chain + 1) * depth
    names = begin + ends * (size + 1) - 1 - sizes
    rows["name"], rows["name_size"], rows["key_size"] = names, sizes, size
    rows["parent"], rows["end"] = np.where(level, np.arange(len(rows)), 0), ends + 1
    rows["place"] = np.where(level, 0, chain)
    return used_up(f)


def same_shape_of_zero() -> bytes:
    """Give empty tensors all that a shape may claim."""
    f = Forge(saved({"e": np.zeros((0, 3), np.uint8)}))
    return f.set("tensors", "e", dims=f.add("dims", [0, 2**56]), rank=2).seal()


def prefixes_of_one_payload() -> bytes:
    """Let every tensor be a strided view of another length of one payload of a MiB."""
    f = tensors(MANY, bytes(LONG), rank=1, strides=0)
    f.add("strides", [1])
    f.columns["tensors"]["dims"] = f.add("dims", LONG - np.arange(MANY)) + np.arange(MANY)
    return f.seal()


def strings_of_one_payload() -> bytes:
    f = tensors(MANY, bytes(LONG), dtype=64, bits=0)
    f.columns["tensors"]["dims"] = f.add("dims", [LONG // 8 - 1])
    return f.digest().seal()


def twins() -> bytes:
    f = tensors(MANY, payload=np.arange(MANY))
    f.columns["payloads"] = np.repeat(f.columns["payloads"], MANY)
    return f.seal()


def flood_of_twins() -> bytes:
    f = Forge(twins())
    f.columns["payloads"] = np.repeat(f.columns["payloads"][:1], FLOOD)
    f.columns["payloads"]["digest"] = np.arange(FLOOD)
    return f.seal()


def one_name() -> bytes:
    f = tensors(FLOOD)
    f.columns["tensors"]["name"] = f.columns["tensors"]["name"][0]
    return f.seal()


def descending_modules() -> bytes:
    f = modules(FLOOD // 4)
    f.columns["modules"]["parent"][1:] = np.arange(FLOOD // 4)
    return f.seal()


def chained_modules() -> bytes:
    f = modules(FLOOD // 4)
    rows = f.columns["modules"]
    rows["end"], rows["place"] = len(rows), 0
    rows["parent"][1:] = np.arange(len(rows) - 1)
    return f.seal()


def one_module_name() -> bytes:
    f = modules(FLOOD // 4)
    f.columns["modules"]["name"][1:] = f.columns["modules"]["name"][1]
    return f.seal()


def shared_vectors(f: Forge) -> None:
    f.columns["strides"] = f.columns["words"] = f.columns["dims"]
    index = build_index(f.columns, f.digest_kind)
    at = {number: TABLE + 4 + 4 * number for number in (2, 3, 4)}
    there = {n: int(np.frombuffer(index, "<u4", 1, a)[0]) + a for n, a in at.items()}
    for place in at.values():
        index[place : place + 4] = np.uint32(there[4] - place).tobytes()
    f.index = index


def pointed(at: int, value: int) -> Callable[[], bytes]:
    """Return a function that makes an archive with another offset at a place of its index."""

    def change(f: Forge) -> None:
        f.index = build_index(f.columns, f.digest_kind)
        f.index[at : at + 4] = np.int32(value).tobytes()

    return sealed(plain, change)


def text_is_the_index(f: Forge) -> None:
    """Let the pool be all that follows its count, the tensors' own bytes included."""
    f.index = build_index(f.columns, f.digest_kind)
    at = TABLE + 4 + 4 * 1
    there = at + int(np.frombuffer(f.index, "<u4", 1, at)[0])
    f.index[there : there + 4] = np.uint32(len(f.index) - there - 4).tobytes()


def zip_file() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr("w.npy", b"1234")
    return out.getvalue()


def whole() -> bytes:
    return plain().seal()


def inner_at_the_end() -> bytes:
    """Cut an archive off where the one inside its last payload ends: the last 64 bytes are a trailer, but another's."""
    outer = Forge(saved({"w": np.frombuffer(whole(), np.uint8)}), front=False, sealed=False).seal()
    return outer[: outer.rindex(whole()) + len(whole())]


def crossed_ends() -> bytes:
    """Join the first half of an archive and the second of another of the same size."""
    other = Forge(whole())
    other.columns["dims"][0] ^= 1
    one, two = whole(), other.seal()
    assert len(one) == len(two)
    return one[: len(one) // 2] + two[len(two) // 2 :]


def crossed_crcs() -> bytes:
    """Let the header have the CRC of another."""
    f = plain()
    f.header["crc"] = int(np.frombuffer(f.seal()[-64:][56:60], "<u4")[0])
    return f.seal()


def crossed_index() -> bytes:
    """Put the index of one archive into another: everything fits but the CRC."""
    f, other = plain(), plain()
    other.columns["dims"][0] ^= 1
    other.ends["index_crc"] = int(np.frombuffer(f.seal(), "<u4", 1, 56)[0])
    return other.seal()


def two_halves_of_a_header() -> bytes:
    """Unseal the header, and give the trailer an archive of another size."""
    f = plain(front=False, sealed=False)
    f.trailer.update(archive_size=len(f.seal()) - 64)
    return f.seal()


def only_ends() -> bytes:
    """Join two trailers that claim one another's room."""
    fields = {"magic": b"\x89ZCR\r\n\x1a\n", "alignment_log2": 4, "base_alignment_log2": 4, "archive_size": 128,
              "index_offset": 64, "index_size": 2**31 - 8, "payload_offset": 64}  # fmt: skip
    return end_bytes(fields) * 2


def named(*names: str) -> Callable[[], bytes]:
    def made() -> bytes:
        record: dict[str, Any] = {name: np.zeros(1, np.uint8) for name in names}
        record["inner"] = {name: {"n": 1} for name in names} | {f"{name}!": name for name in names}
        return saved(record, metadata={name: name for name in names})

    return made


LOADING = frozenset(name for name in DOORS if name.startswith("load_record"))  # they ask for all there is
LOOKS = r"not a zcrecord archive"
OTHERS = "with a zcrecord archive attached, whose tensors other readers of this file do not see"
LONGER = "it is followed by other bytes"
ATTACKS: tuple[Attack, ...] = (
    # Claims
    trick("128 bytes that claim an index of 2 GiB", "R10 R12", only_ends, FormatError, "^header: "),
    trick("an empty tensor of 2^56 bytes a row", "R49 R50", same_shape_of_zero),
    trick("100 MB of zeros for an index", "R19",
          sealed(plain, lambda f: setattr(f, "index", bytes(100_000_000))), FormatError,
          "^index: its identifier is not"),
    trick("5 MB of text that nothing refers to", "R27 R28", sealed(plain, lambda f: f.text(bytes(5_000_000)))),
    # Many over one
    trick("tensors of one payload", "R50 R58", lambda: tensors(MANY).seal()),
    trick("payloads of one range", "R58 R60 R61", twins),
    trick("200,000 payloads of one range, and of all digests", "R60", flood_of_twins, FormatError, "of another digest"),
    trick("200,000 tensors of one name", "R32", one_name, FormatError, "not strictly ascending"),
    trick("strided views of one payload, no two alike", "R53 R55 R76", prefixes_of_one_payload, LimitError,
          "different views of the same bytes", LOADING),
    trick("string tensors of one payload", "R71", strings_of_one_payload),
    trick("attributes of one payload", "R68 R76", lambda: attributes(MANY, {"n": bytes(LONG)}).seal()),
    trick("attributes below a name of a MiB", "R30", below_a_long_name, LimitError, "64 times", LOADING),
    # At the budget, which is 16 times the index
    trick("names of tensors at the budget", "R30 R32", lambda: alike(tensors(MANY), "tensors")),
    trick("names of modules at the budget", "R30 R35", lambda: alike(modules(MANY), "modules")),
    trick("names of nested modules at the budget", "R30 R34", nested_alike),
    trick("names of attributes at the budget", "R30 R36", lambda: alike(attributes(MANY, {"n": 1}), "attributes")),
    trick("type names at the budget", "R30", lambda: modules(MANY).use_up("modules", "type_name").seal()),
    trick("type names a byte over the budget", "R30", lambda: modules(MANY).use_up("modules", "type_name", 1).seal(),
          LimitError, "^index: its names, texts and lists take"),
    trick("texts at the budget", "R30", lambda: attributes(MANY, {"n": "a"}).use_up("attributes", "value").seal()),
    trick("lists of texts at the budget", "R30 R31", lists_of_texts),
    trick("lists of numbers at the budget", "R30 R31", lists_of_numbers),
    # Traps for loops within loops
    trick("names that differ in their last bytes", "R32 R36",
          lambda: saved({f"{'a' * 250}{i:06}": np.zeros(1, np.uint8) for i in range(MANY)})),
    trick("modules side by side", "R35 R43 R44", lambda: modules(MANY).seal()),
    trick("50,000 modules of one name", "R35", one_module_name, FormatError, "another module has its name"),
    trick("50,000 modules, each in the one before", "R40", chained_modules, LimitError, "nested more than 100 deep"),
    trick("50,000 modules, each claiming the one before", "R38 R39", descending_modules, FormatError, "^modules"),
    # FlatBuffers
    trick("dims, strides and words are one vector", "R22", sealed(plain, shared_vectors)),
    trick("a vector whose count is its own field", "R22", pointed(TABLE + 8, 0), FormatError),
    trick("a table that is its own vtable", "R20", pointed(TABLE, 0), FormatError, "^index: "),
    trick("a vtable that runs into its table", "R20 R21", pointed(TABLE, TABLE - 10), FormatError, "^index: "),
    trick("a text pool over all that follows it", "R22 R28", sealed(plain, text_is_the_index), FormatError, "UTF-8"),
    # Files that are two things
    trick("archive, then zip", "R14", lambda: whole() + zip_file(), FormatError, LONGER),
    trick("npz, then archive", "R1", lambda: zip_file() + whole(), FormatError, OTHERS),
    trick("npz, then archive that is aligned", "R1", lambda: zip_file().ljust(65536, b"\0") + whole(), FormatError,
          OTHERS),
    trick("PNG, then archive", "R1", lambda: b"\x89PNG\r\n\x1a\n" + bytes(57) + whole(), FormatError, LOOKS),
    trick("ELF, then archive", "R1 R18", lambda: b"\x7fELF" + bytes(77) + whole(), FormatError, LOOKS),
    trick("cut off by a byte", "R14", lambda: whole()[:-1], FormatError, "the archive has"),
    trick("archive, then archive", "R14", lambda: whole() * 2, FormatError, LONGER),
    trick("archive in a payload", "R13", lambda: saved({"w": np.frombuffer(whole(), np.uint8)})),
    trick("cut off behind the archive in a payload", "R14", inner_at_the_end, FormatError, "the archive has"),
    trick("halves of two archives", "R8", crossed_ends, FormatError, "header and trailer differ"),
    trick("CRC of the index in place of the header's", "R3", crossed_crcs, IntegrityError, "^header: its CRC"),
    trick("index of another archive", "R17", crossed_index, IntegrityError, "^index: its CRC"),
    trick("unsealed header, trailer of less", "R8 R14", two_halves_of_a_header, FormatError, "^trailer: "),
    # Names
    trick("names that are paths", "R29", named("../../etc/passwd", "/dev/sda", "C:\\x", "..", ".", "a//b", "~", "CON")),
    trick("names of control characters", "R29", named("\x1b[2J\x1b]0;x\x07", "a\r\nb", "\u202eabc", "\u200b", "\x7f")),
    trick("names of a MiB", "R29 R30", named("x" * LONG, "y" * LONG)),
    # Legal, and unknown
    trick("module of a kind that is not known", "R41", sealed(rich, lambda f: f.set("modules", "bare", kind=9))),
    trick("vectors left out", "R23", sealed(lambda: sequence(3), lambda f: f.columns.pop("strides", None))),
)  # fmt: skip
