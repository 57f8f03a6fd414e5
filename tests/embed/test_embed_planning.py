"""The plan that every generator works from: the bytes of each constant, and how generated files reach a folder."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as r
from hypothesis import given
from hypothesis import strategies as st

import zcrecord
from zcrecord import dtypes, embed
from zcrecord.embed.comments import commented, literal
from zcrecord.embed.identifiers import DERIVED, PER_FILE, check_prefix, cleaned, identifiers, stem_of
from zcrecord.embed.plan import Constant, Plan, plan
from zcrecord.embed.write_files import write
from zcrecord.errors import DestinationExistsError, RecordError, UnsupportedError

GOLDEN = Path(__file__).parents[1] / "conformance" / "valid"
WHOLE = sorted(p.stem for p in GOLDEN.glob("*.zcr") if p.stem not in ("prefix", "suffix"))


def planned(tmp_path: Path, record: Any, **options: Any) -> dict[str, Constant]:
    zcrecord.save_record(record, tmp_path / "m.zcr")
    return {c.name: c for c in plan(tmp_path / "m.zcr", **options).constants}


def bytes_of(plan: Plan) -> dict[str, bytes]:
    """Return each constant's bytes, by the plan alone."""
    archive, packed = Path(plan.archive).read_bytes(), b"".join(plan.packed_chunks())
    assert len(archive) == plan.archive_size and len(packed) == plan.packed_size
    files = {"archive": archive, "packed": packed, None: b""}
    return {c.name: files[c.place][c.offset :][: c.nbytes] for c in plan.constants}


def logical(value: Any) -> bytes:
    """Return a tensor's bytes in C order."""
    if isinstance(value, zcrecord.PackedTensor):
        return value.packed.tobytes()
    if isinstance(value, zcrecord.StringTensor):
        return value.data.tobytes()
    return np.ascontiguousarray(value).tobytes()


@pytest.mark.parametrize("name", WHOLE)
def test_plan_has_every_tensor_s_bytes_in_c_order_and_shared_ones_in_another_constant_s(name: str) -> None:
    record = zcrecord.load_record(GOLDEN / f"{name}.zcr")
    found = plan(GOLDEN / f"{name}.zcr")
    octets = bytes_of(found)
    assert [c.name for c in found.constants] == list(record)
    own = {c.identifier: c for c in found.constants if c.base is None}
    for c in found.constants:
        info = record.info(c.name)
        want = bytes(record.raw(c.name)) if info.dtype.name.startswith("unknown") else logical(record[c.name])
        assert octets[c.name] == want, c
        assert (c.shape, c.nbytes, c.bits, c.dtype.code) == (info.shape, info.nbytes, info.bits, info.dtype.code)
        assert (c.base is None) == (c.shared is None)
        if c.base is not None:
            base = own[c.base]
            assert c.place == base.place and c.offset == base.offset + c.base_offset
            assert c.base_offset + c.nbytes <= base.nbytes
            assert c.base_offset % c.alignment == 0 and base.alignment % c.alignment == 0
        elif c.place is not None:
            assert c.offset % c.alignment == 0


def test_ties_equal_bytes_and_views_say_what_they_are(tmp_path: Path) -> None:
    big = np.arange(24, dtype=np.float32).reshape(6, 4)
    twin = np.full(8, 7, np.float32)
    record = {"rows": big[2:4], "big": big, "tied": big, "a": twin, "b": twin.copy(), "t": big.T, "t2": big.T,
              "one": big[5, 3:]}  # fmt: skip
    found = planned(tmp_path, record)
    shared = {name: (c.shared, c.base, c.base_offset, c.repacked) for name, c in found.items()}
    assert shared == {
        "rows": ("view", "m_big", 32, False),
        "big": (None, None, 0, False),
        "tied": ("tied", "m_big", 0, False),
        "a": (None, None, 0, False),
        "b": ("equal", "m_a", 0, False),
        "t": (None, None, 0, True),
        "t2": ("tied", "m_t", 0, True),
        "one": ("view", "m_big", 92, False),
    }
    assert [found[name].alignment for name in ("rows", "one", "big")] == [32, 4, 64]


def test_names_do_not_depend_on_the_selection_and_have_no_prefix_in_a_namespace(tmp_path: Path) -> None:
    record = {"a": {"b": np.ones(1)}, "a_b": np.zeros(1), "int": np.ones(2)}
    everything = planned(tmp_path, record)
    assert [(c.identifier, c.local) for c in everything.values()] == [
        ("m_a_b", "a_b"), ("m_a_b_2", "a_b_2"), ("m_int", "t_int"),
    ]  # fmt: skip
    assert [c.name for c in everything.values() if c.renamed] == ["a_b"]
    assert [c.name for c in everything.values() if c.renamed_locally] == ["a_b", "int"]
    assert planned(tmp_path, record, select="a_b") == {"a_b": everything["a_b"]}
    assert plan(tmp_path / "m.zcr", exclude="int").left_out == 1
    assert [c.local for c in planned(tmp_path, record, prefix="p_").values()] == ["p_a_b", "p_a_b_2", "p_int"]


@pytest.mark.parametrize("select, exclude, names", [
    (None, None, ["e.0.w", "e.0.b", "e.1.w", "x[0]"]), ("e.*", None, ["e.0.w", "e.0.b", "e.1.w"]),
    ("e.0", None, ["e.0.w", "e.0.b"]), (["*.w", "x[0]"], "e.1", ["e.0.w", "x[0]"]), (None, "e", ["x[0]"]),
])  # fmt: skip
def test_patterns_choose_tensors_and_modules(tmp_path: Path, select: Any, exclude: Any, names: list[str]) -> None:
    record = {"e": [{"w": np.ones(1), "b": np.ones(2)}, {"w": np.ones(3)}], "x[0]": np.ones(4)}
    assert list(planned(tmp_path, record, select=select, exclude=exclude)) == names


@pytest.mark.parametrize("options, message", [
    ({"select": "nothing*"}, r"'nothing\*': not in this record"), ({"select": ["w", "W"]}, "'W': not in this record"),
    ({"exclude": "b"}, "'b': not in this record"), ({"exclude": "w"}, r"exclude \(\* without w\) leave no tensor"),
    ({"alignment": 48}, "alignment 48 is not a power of two"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        planned(tmp_path, {"w": np.ones(3)}, **options)


def test_another_name_may_stand_for_the_file_s(tmp_path: Path) -> None:
    zcrecord.save_record({"w": np.ones(1)}, tmp_path / "MobileNet-v2.zcr")
    assert plan(tmp_path / "MobileNet-v2.zcr").stem == "mobilenet_v2"
    found = plan(tmp_path / "MobileNet-v2.zcr", name="net")
    assert (found.stem, found.constants[0].identifier) == ("net", "net_w")
    for name in ("Net", "int", "7b", "a b", ""):
        with pytest.raises(zcrecord.UnsupportedError, match=r"not a reserved word; '.+' would do"):
            plan(tmp_path / "MobileNet-v2.zcr", name=name)


@pytest.mark.parametrize("asked, small, large", [(None, 64, 16384), (16, 64, 16384), (256, 256, 16384),
                                                 (65536, 65536, 65536)])  # fmt: skip
def test_alignment_is_raised_and_never_lowered(tmp_path: Path, asked: int | None, small: int, large: int) -> None:
    found = planned(tmp_path, {"s": np.ones(3), "l": np.ones(1 << 17)}, alignment=asked)
    assert [found["s"].alignment, found["l"].alignment] == [small, large]


def test_part_of_a_record_is_planned_under_its_names(tmp_path: Path) -> None:
    zcrecord.save_record({"e": {"w": np.ones(3), "t": np.ones((3, 2)).T}}, tmp_path / "m.zcr")
    whole = plan(tmp_path / "m.zcr")
    part = plan(zcrecord.load_record(tmp_path / "m.zcr").module("e"), prefix="")
    assert [(c.name, c.identifier) for c in part.constants] == [("w", "w"), ("t", "t")]
    assert list(bytes_of(part).values()) == list(bytes_of(whole).values())


def test_unknown_elements_are_bytes_unless_strided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zcrecord.save_record({"w": np.ones((2, 3), np.float32), "t": np.ones((3, 2), np.float32).T}, tmp_path / "m.zcr")
    monkeypatch.delitem(dtypes.by_code, 18)
    (found,) = plan(tmp_path / "m.zcr", exclude="t").constants
    assert (found.dtype.name, found.dtype.c, found.nbytes) == ("unknown 18", None, 24)
    with pytest.raises(
        zcrecord.UnsupportedError, match=r"'t': it is strided, and of an element type \(unknown 18\) not"
    ):
        plan(tmp_path / "m.zcr")


@pytest.mark.parametrize("lang", ["c", "cpp", "asm", "rust"])
def test_comments_name_the_tensor_whose_bytes_are_shared_as_the_archive_does(tmp_path: Path, lang: Any) -> None:
    shared = np.arange(4, dtype=np.float32)
    zcrecord.save_record({"a": {"w": shared}, "b": shared, "part": shared[1:]}, tmp_path / "m.zcr")
    files = embed.generate(tmp_path / "m.zcr", tmp_path, lang=lang).files
    text = "".join(Path(path).read_text(encoding="utf-8") for path in files)
    assert "b: float32 [4], tied to a.w" in text and "part: float32 [3], a part of a.w" in text


def test_empty_tensors_have_no_place(tmp_path: Path) -> None:
    found = planned(tmp_path, {"e": np.ones((0, 3), np.float32)})["e"]
    assert (found.place, found.nbytes, found.base, found.alignment) == (None, 0, None, 4)


def test_archives_that_are_no_file_of_their_own_are_refused(tmp_path: Path) -> None:
    data = r.saved({"w": np.ones(3)})
    (tmp_path / "m.zcr").write_bytes(data)
    refused: dict[str, list[Any]] = {
        "part of another file; take it out first: zcrecord detach": [
            GOLDEN / "suffix.zcr", zcrecord.load_record(GOLDEN / "suffix.zcr", embedded="suffix")
        ],
        "followed by other bytes": [GOLDEN / "prefix.zcr"],
        "no such file": [tmp_path / "none.zcr"],
        "made of an archive's own file; give its path, or save the record": [
            zcrecord.load_record(data), zcrecord.load_record(tmp_path / "m.zcr", mode="c")
        ],
        "neither a path nor": [3],
    }  # fmt: skip
    for message, sources in refused.items():
        for source in sources:
            with pytest.raises(RecordError, match=message):
                plan(source)


MEASURED = """
import sys
from tools.measure import peak_rss
from zcrecord.embed import blob, c
from zcrecord.embed.plan import plan

before = peak_rss()
found = plan(sys.argv[1])
made = {form}
total = sum(len(piece) for pieces in made.values() for piece in pieces)
print(total, peak_rss() - before)
"""
# Form, size of the archive in MiB, and the least MiB that are made of it.
FORMS = {
    "strided": ("c.files(found, '.')", 64, 64),
    "incbin": ("blob.files(found, '.', form='incbin')", 64, 0),
    "string": ("blob.files(found, '.', form='string')", 16, 48),
    "all at once": ("{'x': [b''.join(b''.join(p) for p in blob.files(found, '.', form='string').values())]}", 16, 48),
}


@pytest.mark.measured
@pytest.mark.exhaustive(keep=2)
@pytest.mark.skipif(sys.platform != "linux", reason="platform: VmHWM is Linux's")
@pytest.mark.parametrize("form", FORMS)
def test_generators_hold_a_piece_of_the_archive_at_a_time(tmp_path: Path, form: str) -> None:
    made, mib, least = FORMS[form]
    wide = np.random.default_rng(0).standard_normal((mib << 8, 1024)).astype(np.float32)
    zcrecord.save_record({"w": wide.T if form == "strided" else wide}, tmp_path / "m.zcr", durable=False)
    done = r.run_python(MEASURED.replace("{form}", made), tmp_path / "m.zcr")
    total, grown = (int(number) / 2**20 for number in done.stdout.split())
    assert total >= least
    if form == "all at once":
        assert grown > 48, "this test would not notice"
    else:
        assert grown < (40 if form == "strided" else 16)


def text(*lines: bytes) -> list[bytes]:
    return [b"/* SPDX-License-Identifier: 0BSD\n * Generated by zcrecord embed */\n", *lines]


def test_what_was_generated_is_replaced(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = {"m.S": text(b'#define M_PACKED "m_packed.bin"\n'), "m_packed.bin": [b"\1\2", b"\3"]}
    assert write(first, folder) == [str(folder / name) for name in first]
    write({"m.S": text(b"two"), "m_packed.bin": [b"\4"]}, folder)
    assert (folder / "m.S").read_bytes().endswith(b"two") and (folder / "m_packed.bin").read_bytes() == b"\4"
    write({"m.rs": text(b'"m_packed.bin"'), "m_packed.bin": [b"\5"]}, folder)
    assert (folder / "m_packed.bin").read_bytes() == b"\5"


def test_a_url_is_refused_and_no_folder_of_its_name_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    zcrecord.save_record({"w": np.ones(3)}, "m.zcr")
    with pytest.raises(UnsupportedError, match=r"memory://sources: is a URL, .* name one, and upload its files"):
        embed.generate("m.zcr", "memory://sources", lang="c")
    assert [path.name for path in tmp_path.iterdir()] == ["m.zcr"]


def test_a_folder_in_the_place_of_a_file_is_refused_without_advice_that_does_not_help(tmp_path: Path) -> None:
    (tmp_path / "m.S").mkdir()
    with pytest.raises(DestinationExistsError, match=r"m\.S: is a directory; choose another folder$"):
        write({"m.S": text(b"one")}, tmp_path)


@pytest.mark.parametrize("name", ["m.S", "m_packed.bin"])
def test_what_somebody_wrote_is_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"int precious;\n")
    files = {"m.S": text(b'"m_packed.bin"'), "m_packed.bin": [b"\1"]}
    with pytest.raises(DestinationExistsError, match="was not generated by zcrecord; choose another folder"):
        write(files, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"int precious;\n"
    write(files, tmp_path, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.S", "m_packed.bin"]


def test_failure_on_the_way_leaves_every_file_as_it_was(tmp_path: Path) -> None:
    write({"a.h": text(b"one"), "b.h": text(b"one")}, tmp_path)
    (tmp_path / "c.h").mkdir()
    before = {p.name: p.is_file() and p.read_bytes() for p in tmp_path.iterdir()}

    def fails() -> Any:
        yield from text(b"two")
        raise zcrecord.IntegrityError("as a damaged archive does")

    with pytest.raises(zcrecord.IntegrityError):
        write({"a.h": text(b"two"), "b.h": fails()}, tmp_path)
    with pytest.raises(zcrecord.SourceError, match=r"c\.h: is a directory; name a file in it"):
        write({"a.h": text(b"two"), "c.h": text(b"two"), "d.h": text(b"two")}, tmp_path, force=True)
    assert {p.name: p.is_file() and p.read_bytes() for p in tmp_path.iterdir()} == before


FULL = """
import resource, signal, sys
from zcrecord import SourceError
from zcrecord.embed.write_files import write
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write({"large.c": [bytes(300)] * 9, "small.h": [b"x"]}, sys.argv[1])
except SourceError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="platform: has limits of a file's size")
def test_full_disk_leaves_none_of_the_files(tmp_path: Path) -> None:
    """Small pieces are gathered and fail only when they are handed on: before another file takes their place."""
    assert "large.c: cannot write" in r.run_python(FULL, tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


# Names.


LEGAL = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def named(*names: str, prefix: str = "m_", stem: str = "m") -> list[str]:
    return [found.text for found in identifiers(names, prefix=prefix, stem=stem)]


@pytest.mark.parametrize("name, identifier", [
    ("/conv1/Conv_output:0", "conv1_conv_output_0"), ("__init__", "init"), ("a__b", "a_b"), ("café", "cafe"),
    ("βeta", "u3b2_eta"), ("重み", "u91cd_u307f"), ("\U0001f600", "u1f600"), ("ﬁ", "fi"), ("a\nb\0c*/d", "a_b_c_d"),
    ("...", ""),
])  # fmt: skip
def test_name_is_cleaned(name: str, identifier: str) -> None:
    assert cleaned(name) == identifier


def test_long_names_are_cut_and_stay_different() -> None:
    found = named("x" * 100_000 + "a", "x" * 100_000 + "b", "y" * 150)
    assert [len(name) for name in found] == [162, 162, 152]
    assert len(set(found)) == 3


AVOIDED = "0.weight class register fn lambda linux i386 gamma main eax r0 w1 x none self sin index string f32 Pass fmal"


@pytest.mark.parametrize("name", AVOIDED.split())
def test_what_is_no_identifier_or_a_reserved_word_is_avoided_where_there_is_no_prefix(name: str) -> None:
    if name == "x":
        assert identifiers([name], prefix="", stem="model") == [("x", False)]
    else:
        assert identifiers([name], prefix="", stem="model") == [(f"t_{cleaned(name)}", True)]
        assert named(name, prefix="net_") == [f"net_{cleaned(name)}"]


@pytest.mark.parametrize("names, found", [
    (("a.b", "a_b", "A.B"), ["m_a_b", "m_a_b_2", "m_a_b_3"]), (("w", "w_shape"), ["m_w", "m_w_shape_2"]),
    (("a.b", "a_b", "a_b_2"), ["m_a_b", "m_a_b_3", "m_a_b_2"]), (("w_shape", "w"), ["m_w_shape", "m_w_2"]),
    (("w", "w.dim0", "w.dim10", "w.dimension"), ["m_w", "m_w_dim0_2", "m_w_dim10_2", "m_w_dimension"]),
    (("blob", "is_current", "zcr"), ["m_blob_2", "m_is_current_2", "m_zcr_2"]), (("", "."), ["m_tensor", "m_tensor_2"]),
])  # fmt: skip
def test_names_that_collide_are_numbered(names: tuple[str, ...], found: list[str]) -> None:
    assert named(*names) == found


def test_identifier_of_the_file_itself_is_numbered_and_more_than_cleaning_is_told() -> None:
    assert named("model", prefix="", stem="model") == ["model_2"]
    changed = [found.changed for found in identifiers(["a.b", "A-c", "a_b", "é", "plain"], prefix="m_", stem="m")]
    assert changed == [False, False, True, True, False]


NAMES = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.text(alphabet="aA_.0é", max_size=5),
        st.sampled_from(["w", "W", "w_shape", "w.rank", "w_2", "w_rank_2", "w_dim3", "class", "0", "r1"]),
        st.sampled_from([*keyword.kwlist, *keyword.softkwlist]),
    ),
    max_size=12,
)


@given(NAMES, st.sampled_from(["", "m_", "w", "net_1_"]))
def test_identifiers_are_legal_and_unlike_each_other_and_what_is_derived(names: list[str], prefix: str) -> None:
    found = named(*names, prefix=prefix, stem="w")
    assert found == named(*names, prefix=prefix, stem="w") and len(found) == len(names)
    assert all(LEGAL.fullmatch(name) and name.startswith(prefix) for name in found)
    assert not any(keyword.iskeyword(name) or keyword.iskeyword(name.upper()) for name in found)
    every = [*found, *(f"w_{word}" for word in PER_FILE)]
    every += [f"{name}_{word}" for name in found for word in (*DERIVED, "dim0", "dim3")]
    assert len(every) == len(set(every)), "two things have one name"


@pytest.mark.parametrize("path, stem", [
    ("/a/b.c/Digits-v2.fp16.zcr", "digits_v2_fp16"), ("7b.zcr", "t_7b"), ("math.zcr", "t_math"), ("noext", "noext"),
    (".zcr", "t_zcr"), ("重.zcr", "u91cd"), ("C:\\x\\net.zcr", "net"),
])  # fmt: skip
def test_stem_is_an_identifier_and_no_header_of_the_standard_library(path: str, stem: str) -> None:
    assert stem_of(path) == stem


@pytest.mark.parametrize("prefix, proposed", [
    ("Net_", "net_"), ("_x", "x_"), ("a__", "a_"), ("0", "t_0_"), ("a b", "a_b_"), ("é", "e_"), ("*/", "model_"),
    ("x" * 200, ""),
])  # fmt: skip
def test_prefix_that_is_no_identifier_is_refused(prefix: str, proposed: str) -> None:
    with pytest.raises(zcrecord.UnsupportedError, match=f"prefix '.*'{proposed}.* would do"):
        check_prefix(prefix)
    for legal in ("", "m", "model_", "net_2_"):
        assert check_prefix(legal) == legal


@given(st.text())
def test_comments_end_where_they_should(text: str) -> None:
    found = commented(text)
    assert found.isascii() and found.isprintable() and len(found) < 1200
    assert not any(bad in found for bad in ("*", "?", "\n", '"'))


@given(st.binary())
def test_literals_say_the_same_bytes(data: bytes) -> None:
    found = literal(data)
    assert found[0] == found[-1] == '"' and found.isascii() and "?" not in found
    inside = found[1:-1]
    assert '"' not in inside
    assert re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), inside).encode("latin-1") == data
