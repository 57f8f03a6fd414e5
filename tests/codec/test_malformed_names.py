"""Names and other text: spans of one pool, UTF-8, NUL, order and uniqueness, full names made of module and key."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest
from forge import NONE, Forge
from malformed import Case, broken, cases, plain, refused, rich, saved, sequence
from malformed_names import FULL_NAMES, TARGETS, Target, sort_names, tensor

import zcrecord
from zcrecord import FormatError, TensorNotFoundError
from zcrecord.codec.index import TextPool
from zcrecord.errors import printable

TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.what.replace(" ", "_"))


def refuse_span(target: Target, span: Callable[[Forge], tuple[int, int]], why: str) -> None:
    """Check that a span in the target's place is refused, at `index` when opened and at `touch` with the first tree."""
    archive = rich()
    target.put(archive, *span(archive))
    data = archive.seal()
    for action in (lambda: zcrecord.load_record(data), lambda: zcrecord.load_record(data, verify="touch").tree()):
        with pytest.raises(FormatError, match=target.message + why):
            action()


PAST = r"is past the end of the text pool \(\d+ bytes\)"
SPANS: dict[str, tuple[Callable[[Forge], tuple[int, int]], str]] = {
    "the last NUL": (lambda f: (len(f.columns["text"]) - 1, 1), PAST),
    "past the end, empty": (lambda f: (len(f.columns["text"]), 0), PAST),
    "far past the end": (lambda f: (len(f.columns["text"]) + 2**31, 9), PAST),
    "start + size is 2^32": (lambda _: (2**32 - 2, 2), PAST),  # which 32 bits hold as 0
    "ends with the pool": (lambda f: f.text(b"abc", nul=False), PAST),
    "not followed by NUL": (lambda f: (f.text(b"abc")[0], 2), "is not followed by NUL"),
    "starts inside a character": (lambda f: (f.text("é".encode())[0] + 1, 1), "is not UTF-8"),
}


@TARGET
@pytest.mark.parametrize("span", SPANS)
def test_refuses_span_that_is_no_text_of_the_pool(target: Target, span: str) -> None:
    """R27, R28."""
    refuse_span(target, *SPANS[span])


@pytest.mark.parametrize("count", [1, 2, 4, 300])
def test_refuses_nul_in_one_of_many_names_side_by_side(count: int) -> None:
    """R29: as a writer lays them down, each followed by the NUL before the next."""
    for row in {0, count // 2, count - 1}:
        archive = sequence(count)
        archive.columns["text"][archive.get("tensors", row, "name") + 1] = 0
        with pytest.raises(FormatError, match=rf"^tensors\[{row}\]: its name contains NUL$"):
            zcrecord.load_record(archive.seal())


@TARGET
@pytest.mark.parametrize("text", [b"", b"\0", b"a\0"], ids=repr)
def test_refuses_empty_text_and_nul_in_names_alone(target: Target, text: bytes) -> None:
    """R29."""
    if not (target.may_hold_nul if text else target.may_be_empty):
        refuse_span(target, lambda f: f.text(text), "contains NUL" if text else "is empty")
        return
    archive = rich()
    target.put(archive, *archive.text(text))
    record = zcrecord.load_record(archive.seal())
    texts = [*record.attributes.values(), *record.attributes["texts"], *record.metadata.values()]
    assert not text or text.decode() in texts


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (lambda f: (len(f.columns["text"]), 1), "is past the end of the text pool"),
        (lambda f: (f.text(b"www")[0], 1), "is not followed by NUL"),
        (lambda f: f.text(b"\xc3"), "is not UTF-8"),
        (lambda f: f.text(b"w\0w"), "contains NUL"),
        (lambda f: f.text(b""), "is empty"),
    ],
    ids=["past the end", "no NUL behind", "not UTF-8", "NUL inside", "empty"],
)
def test_touch_gives_no_tensor_whose_name_is_none(span: Callable[[Forge], tuple[int, int]], why: str) -> None:
    """R27, R28, R29: a search may miss the name; but it is never listed, and its tensor never seen."""
    archive = plain()
    start, size = span(archive)
    archive.set("tensors", "w", name=start, name_size=size)
    data = archive.seal()
    with pytest.raises((FormatError, TensorNotFoundError), match=why + "|not in this record"):
        zcrecord.load_record(data, verify="touch")["w"]
    for action in (list, lambda r: list(r.values()), lambda r: list(r.items()), lambda r: r.names):
        with pytest.raises(FormatError, match=r"^(tensors\[0\]: its name|index: text at \d+) " + why):
            action(zcrecord.load_record(data, verify="touch"))


@pytest.mark.parametrize(("name", "why"), [("", "is empty"), ("w\0w", "contains NUL")], ids=["empty", "NUL inside"])
def test_touch_refuses_name_that_is_searched_for_and_found(name: str, why: str) -> None:
    """R29."""
    archive = plain()
    tensor("w", name.encode(), 1)(archive)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    for action in (record.get, record.__getitem__, record.__contains__, record.info, record.raw):
        with pytest.raises(FormatError, match=rf"^tensors\[0\]: its name {why}$"):
            action(name)


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (lambda f: (NONE, NONE), "is past the end of the text pool"),
        (lambda f: (f.text(b"bbb")[0], 1), "is not followed by NUL"),
    ],
    ids=["past the end", "no NUL behind"],
)
@pytest.mark.parametrize("name", ["a", "b", "absent"])
def test_touch_refuses_names_that_it_cannot_read(span: Callable[[Forge], tuple[int, int]], why: str, name: str) -> None:
    """R27: the order is broken, so that the search cannot say that there is no such tensor."""
    archive = middle(span)
    for action in ("get", "__getitem__", "__contains__", "info", "raw"):
        record = zcrecord.load_record(archive, verify="touch")
        with pytest.raises(FormatError, match=rf"^tensors\[1\]: its name {why}"):
            getattr(record, action)(name)


@pytest.mark.parametrize("met", [b"b\xff", b"b\0", b"b\xc3"], ids=["not UTF-8", "NUL inside", "cut off"])
def test_touch_goes_on_past_a_name_that_is_none_but_has_its_place_in_the_order(met: bytes) -> None:
    """R28, R29: a search compares bytes; only the tensor that is found is checked."""
    archive = middle(lambda f: f.text(met))
    record = zcrecord.load_record(archive, verify="touch")
    assert (record["a"].tolist(), record["c"].tolist(), "b" in record) == ([1], [3], False)
    with pytest.raises(FormatError):
        zcrecord.load_record(archive)


def middle(span: Callable[[Forge], tuple[int, int]]) -> bytes:
    """Return an archive of a, b and c; the name of b, which every search meets first, is another span."""
    archive = Forge(saved({name: np.full(1, 1 + i, np.uint8) for i, name in enumerate("abc")}))
    start, size = span(archive)
    return archive.set("tensors", "b", name=start, name_size=size).seal()


@pytest.mark.parametrize("size", [1, 2, 9])
def test_touch_refuses_name_that_only_looks_found(size: int) -> None:
    """R27: a search compares the bytes that are there; here they are the name, but the pool ends with it."""
    archive = plain()
    start, _ = archive.text(b"w", nul=False)
    archive.set("tensors", "w", name=start, name_size=size, key_size=size)
    record = zcrecord.load_record(archive.seal(), verify="touch")
    with pytest.raises(FormatError, match=r"^tensors\[0\]: its name is past the end of the text pool"):
        record["w"]


# Lists of names, in ascending order, that make comparisons go on for more than a few bytes, and for many names.
NAMES = {
    "few": ["a", "b", "c"],
    "prefixes of each other": ["a" * n for n in range(1, 150)],
    "a long beginning in common": [f"{'x' * 100}{n:03}" for n in range(300)],
    "several long beginnings": sorted(f"{'x' * (n % 9 * 16)}{n:05}" for n in range(2500)),
    "long": [f"{'y' * 3000}{n}" for n in range(9)],
    "thousands": [f"n{n:05}" for n in range(5000)],
    "not ASCII": sorted(("\x01", "a\x01", "a", "é", "ü.é", "√", "𝄞", "\uffff", "~"), key=str.encode),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_refuses_names_out_of_order_or_twice_wherever_that_is(names: list[str]) -> None:
    """R32."""
    data = saved({name: np.zeros(0, np.uint8) for name in names})
    assert list(zcrecord.load_record(data)) == names
    for at in sorted({0, len(names) // 2, len(names) - 2}):
        name = names[at].encode()
        twice = Forge(data).rename("tensors", at + 1, name).set("tensors", at + 1, key_size=len(name))
        swapped = Forge(data)
        swapped.columns["by_name"][[at, at + 1]] = swapped.columns["by_name"][[at + 1, at]]
        for archive in (twice, swapped):
            message = rf"by_name\[{at + 1}\]: names are not strictly ascending after '"
            with pytest.raises(FormatError, match=message) as caught:
                zcrecord.load_record(archive.seal())
        assert caught.value.tensor == names[at + 1]


@cases(FULL_NAMES)
def test_refuses_names_that_do_not_fit_together(case: Case) -> None:
    data = broken(case, rich())
    refused(case, zcrecord.load_record, data)
    refused(case, lambda: zcrecord.load_record(data, verify="touch").tree())


@pytest.mark.parametrize("at", [0, 31, 32, 99, 100])
@pytest.mark.parametrize("row", [0, 149])
def test_refuses_any_other_byte_in_a_modules_part_of_a_name(at: int, row: int) -> None:
    """R34."""
    archive = Forge(saved({"m" * 100: {f"k{n:03}": np.zeros(0, np.uint8) for n in range(150)}}))
    name = bytearray(b"m" * 100 + b".k%03d" % row)
    name[at] ^= 1
    archive.rename("tensors", row, bytes(name))
    sort_names(archive)
    with pytest.raises(
        FormatError, match=f"^tensors: '{re.escape(name.decode())}' is not its module's name, a dot and its key"
    ):
        zcrecord.load_record(archive.seal())


@pytest.mark.parametrize("size", [1, 31, 32, 33, 256, 257])
def test_tells_keys_apart_that_differ_in_the_last_byte_alone(size: int) -> None:
    """R36."""
    key, other = "k" * size, "k" * (size - 1) + "l"
    data = saved({**{f"{n}": n for n in range(100)}, key: 1, other: np.ones(2), "m": {key: 1, other: 2}})
    assert zcrecord.load_record(data).attributes[key] == 1
    archive = Forge(data)
    archive.rename("attributes", key, other.encode())
    message = rf"^modules\[0\]: two of its children have the key '{printable(other)}'$"
    with pytest.raises(FormatError, match=message):
        zcrecord.load_record(archive.seal())


def test_refuses_one_key_twice_where_there_are_no_attributes() -> None:
    """R36."""
    archive = Forge(saved({"w": np.ones(1), "m": {"x": np.ones(1)}}))
    tensor("w", b"m", 1)(archive)
    with pytest.raises(FormatError, match=r"^modules\[0\]: two of its children have the key 'm'$"):
        zcrecord.load_record(archive.seal())


def test_a_name_is_compared_without_the_bytes_behind_it() -> None:
    """It ends before the part in which the others differ, and NUL alone tells it from them until there."""
    names = [b"x" * 10, *(b"x" * 10 + bytes(30) + b"%03d" % i for i in range(100))]
    text = memoryview(b"".join(name + b"\xff" * 64 for name in names))
    sizes = np.array([len(name) for name in names], np.uint32)
    starts = np.cumsum(sizes + 64, dtype=np.uint32) - (sizes + 64)
    assert TextPool(text, text).first_not_ascending(starts, sizes) is None
