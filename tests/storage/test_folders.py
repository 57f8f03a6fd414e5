"""The archive of a model folder is found by its name, or by being the only one."""

from __future__ import annotations

from pathlib import Path

import pytest

from zcrecord.errors import SourceError
from zcrecord.storage.folders import archive_in


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).touch()
    return folder


def test_model_zcr_comes_before_other_archives(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "config.json", "model.zcr", "other.zcr")
    assert archive_in(folder) == str(tmp_path / "model.zcr")


def test_the_only_archive_may_have_any_name(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "weights.zcr", "weights-00001-of-00002.zcr", "weights-00002-of-00002.zcr")
    assert archive_in(str(folder)) == str(tmp_path / "weights.zcr")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("a.zcr", "b.zcr"), r"several archives: a\.zcr, b\.zcr; name one, or call one model\.zcr"),
        (("config.json", "model-00001-of-00002.zcr"), r"without an archive \(model\.zcr\); zcrecord convert"),
    ],
)
def test_a_folder_without_one_archive_says_so(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        archive_in(folder_with(tmp_path, *names))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        archive_in(tmp_path / "none")
