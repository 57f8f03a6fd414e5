"""Names of tensors as identifiers: legal in every language, unlike each other, and the same each time."""

from __future__ import annotations

import keyword
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zcrecord
from zcrecord.embed.comments import commented, literal
from zcrecord.embed.identifiers import DERIVED, PER_FILE, check_prefix, cleaned, identifiers, stem_of

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
