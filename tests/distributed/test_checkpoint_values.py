"""A state dict that DCP saved in one process: the files, the loaded values, and refusals."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import tracemalloc
import warnings
from collections import OrderedDict, deque
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import records as r
import torch
import torch.distributed.checkpoint as dcp
from attacks import tricks
from forge import Forge
from rank_checkpoints import WEIGHT, a_state, assert_equal, load, refused, save, shards_in
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict, _load_state_dict_from_keys

import zcrecord
from zcrecord.distributed import ZcrStorageReader, ZcrStorageWriter, load_views
from zcrecord.distributed.checkpoint import Checkpoint
from zcrecord.errors import DestinationExistsError, FormatError, LimitError, SourceError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


class Custom:
    """A class that torch's weights_only does not load."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.number == other.number

    __hash__ = None  # type: ignore[assignment]


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def zeros(value: Any) -> Any:
    """Return a state of the same structure with other values."""
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1)
    if isinstance(value, dict):
        return {key: zeros(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, dict | torch.Tensor) for item in value):
        return [zeros(item) for item in value]
    return "another"


def rebuilt(folder: Path) -> dict[str, Any]:
    """Return the state that a checkpoint's own paths make."""
    found: dict[str, Any] = {}
    _load_state_dict(found, ZcrStorageReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return found


def forge(folder: Path, tree: Any, **metadata: Any) -> None:
    """Save a record as a checkpoint whose metadata say what they like."""
    named = {f"zcrecord.checkpoint.{name}": value for name, value in metadata.items()}
    zcrecord.save_record(tree, folder / "checkpoint.zcr", metadata={"zcrecord.checkpoint": 1, **named})


def test_a_state_comes_back_equal_and_the_catalogue_is_the_record_that_save_record_would_give(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    save(a_state(), folder)
    assert_equal(load(zeros(a_state()), folder), a_state())
    found, one = zcrecord.load_record(folder / "checkpoint.zcr"), r.round_trip(a_state())
    assert found.names == one.names and list(found.modules) == list(one.modules)
    assert {m.name: m.kind for m in found.modules.values()} == {m.name: m.kind for m in one.modules.values()}
    assert found.attributes == one.attributes
    assert found.content_digest() == one.content_digest()
    assert found.info("model.head").tied == ("model.layers.0.weight", "model.head")
    found.verify()
    record = zcrecord.load_record(folder / shards_in(folder)[0], verify="full")
    assert record["model.layers.0.weight"].tolist() == WEIGHT.tolist(), "a rank's archive is one by itself"
    assert "model.empty" not in record


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64], ids=str)
def test_elements_are_converted_as_by_torchs_own_storage(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {"w": torch.tensor([[0.0, 1.7], [-3.2, 1e2]]), "bf": torch.full((3,), 1.7, dtype=torch.bfloat16)}
    save(saved, tmp_path)
    dcp.save(saved, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"), no_dist=True)
    found, expected = ({name: torch.ones_like(value, dtype=dtype) for name, value in saved.items()} for _ in range(2))
    dcp.load(expected, storage_reader=dcp.FileSystemReader(tmp_path / "torch"), no_dist=True)
    assert_equal(load(found, tmp_path), expected)


def test_tied_tensors_are_stored_once_and_stay_tied_and_equal_ones_do_not_become_so(tmp_path: Path) -> None:
    state = {"a": WEIGHT, "b": WEIGHT, "c": WEIGHT.clone(), "view": WEIGHT[1:], "part": WEIGHT[:, :2]}
    save(state, tmp_path)
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    assert record.info("a").tied == ("a", "b") and not record.info("c").tied and not record.info("view").tied
    assert np.shares_memory(record["a"], record["b"])
    [shard] = shards_in(tmp_path)
    rows = zcrecord.load_record(tmp_path / shard).archive.index.payloads
    assert sum(rows["nbytes"][np.unique(rows["offset"], return_index=True)[1]]) == 48 + 32 + 24
    assert_equal(load(zeros(state), tmp_path), state)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 2**64 - 1, 2**100, float("inf"), "", b"bytes", [], (), [1, 2], (1.0, 2.0), [1, "mixed", None],
        (1, ("nested", [2.5])), ({"a": 1}, {}), [[1], [2, 3]], 1 + 2j, torch.float16, torch.device("cpu"),
        "na\u00efve\0",
    ],
    ids=repr,
)  # fmt: skip
def test_a_plain_value_is_no_pickle_and_comes_back(tmp_path: Path, value: Any) -> None:
    save({"outer": {"value": value}}, tmp_path)
    assert b"torch_save" not in (tmp_path / "checkpoint.zcr").read_bytes()
    assert os.listdir(tmp_path) == ["checkpoint.zcr"], "a rank without tensors writes no file"
    assert_equal(load({"outer": {"value": "another"}}, tmp_path), {"outer": {"value": value}})


@pytest.mark.parametrize("value", [torch.Size([2, 3]), (torch.ones(2), 3), "lone \ud800", (OrderedDict(a=1),), {1, 2}])
def test_an_object_that_weights_only_loads_needs_no_leave(tmp_path: Path, value: Any) -> None:
    save({"value": value, "w": WEIGHT}, tmp_path)
    assert_equal(load({"value": None, "w": torch.zeros(3, 4)}, tmp_path)["value"], value)


@pytest.mark.parametrize(
    "value", [Path("runs/a"), deque([1, "b"], 3), date(2026, 1, 2), SimpleNamespace(out=Path("b"), seen={(1, None)})]
)
def test_a_value_that_a_record_holds_needs_no_pickle(tmp_path: Path, value: Any) -> None:
    save({"value": value, "list": [value], "w": WEIGHT}, tmp_path)
    found = load({"value": None, "list": None, "w": torch.zeros(3, 4)}, tmp_path)
    assert found["value"] == value and type(found["value"]) is type(value) and found["list"] == [value]
    assert zcrecord.load_record(tmp_path / "checkpoint.zcr").tree()["value"] == value


def test_an_object_that_needs_pickle_is_refused_unless_allowed(tmp_path: Path) -> None:
    save({"odd": Custom(3), "w": WEIGHT}, tmp_path)
    zcrecord.load_record(tmp_path / "checkpoint.zcr").verify()
    message = r"checkpoint\.zcr: tensor 'odd': is a pickled object, .*weights_only=True .*allow_pickle=True"
    refused(UnsupportedError, message, lambda: load({"odd": None}, tmp_path))
    with pytest.raises(UnsupportedError, match=message):
        load_views(tmp_path, {"odd": None})
    assert load({"odd": None}, tmp_path, allow_pickle=True) == {"odd": Custom(3)}
    assert load_views(tmp_path, {"odd": None}, allow_pickle=True) == {"odd": Custom(3)}
    assert torch.equal(load({"w": torch.zeros(3, 4)}, tmp_path)["w"], WEIGHT), "what is beside it loads"


def test_no_pickle_of_the_file_reaches_the_planner(tmp_path: Path) -> None:
    """The planner unpickles all it is given, so a forged object must not get there."""

    class Evil:
        def __reduce__(self) -> Any:
            return warnings.warn, ("unpickled",)

    save({"evil": Evil()}, tmp_path)
    refused(UnsupportedError, "is a pickled object", lambda: load({"evil": None}, tmp_path))


def test_a_state_is_rebuilt_without_a_model(tmp_path: Path) -> None:
    save(a_state(), tmp_path)
    found = rebuilt(tmp_path)
    torch.save(found, tmp_path / "model.pt")
    assert_equal(torch.load(tmp_path / "model.pt")["optim"]["param_groups"], a_state()["optim"]["param_groups"])
    assert torch.equal(found["model"]["layers.0.weight"], WEIGHT)
    part = _load_state_dict_from_keys({"model.head", "step"}, storage_reader=ZcrStorageReader(tmp_path))
    assert list(part) == ["model", "step"] and list(part["model"]) == ["head"] and part["step"] == 500


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": {"c": torch.ones(1)}, "a": {"b": {"d": torch.ones(2)}, "": torch.ones(3)}, "l": [torch.ones(4), 5]},
        {"l.0": {"y": torch.ones(3)}, "l": [{"x": torch.ones(1)}, {"x": torch.ones(2)}, 5],
         "m": {"0": torch.ones(4), "1": 2}},
    ],
    ids=["names with dots", "an item elsewhere"],
)  # fmt: skip
def test_paths_that_no_module_tree_has_come_back(tmp_path: Path, state: dict[str, Any]) -> None:
    save(state, tmp_path)
    found = rebuilt(tmp_path)
    assert_equal({key: found[key] for key in state}, state)


@pytest.mark.parametrize("text", ['["l",1000000000000]', '["l",-1]', '["l",1.5]', "[]", "{", '["l",true]'])
def test_a_forged_path_makes_no_list_of_its_length(tmp_path: Path, text: str) -> None:
    forge(tmp_path, {"l": {"1000000000000": np.ones(2, np.float32)}}, paths=[text])
    assert rebuilt(tmp_path)["l"]["1000000000000"].tolist() == [1, 1]


def known_paths(folder: Path, *paths: list[Any]) -> set[str]:
    """Return the names of forged paths, of tensors that are not there, that planners are given."""
    forge(folder, {"w": np.ones(2)}, paths=[json.dumps(path, separators=(",", ":")) for path in paths])
    return set(Checkpoint(folder).other_paths())


def test_lists_that_forged_paths_make_are_bounded_together(tmp_path: Path) -> None:
    assert known_paths(tmp_path, ["l", 60_000]) == set(), "60,001 items, to each of which two keys lead"
    assert known_paths(tmp_path, ["l", 30_000], ["m", 30_000], ["l", 30_001]) == {"l.30000", "l.30001"}
    deep = ["l", *[60] * 60]
    assert known_paths(tmp_path, deep, [*deep[:-1], 1000], ["k", 3]) == {"k.3"}
    assert known_paths(tmp_path, ["a"] * 500, ["a"] * 501, ["b", -1]) == {".".join(["a"] * 500)}


NOT_TEXTS = "that are not of texts and integers"
FORGED = [
    *((path, "with places in lists") for path in [("l", 60_000), ["l", 10**12], ("l", -1)]),
    *((("l", place), NOT_TEXTS) for place in (1e12, True, None, torch.tensor(10**12))),
    *((path, NOT_TEXTS) for path in (torch.tensor([1, 10**12]), b"\xff" * 9, "w", {0: "l", 1: 10**12}, 7, None)),
]


@pytest.mark.parametrize("path, fault", FORGED, ids=str)
def test_a_forged_pickle_of_paths_is_refused_unless_it_is_allowed(tmp_path: Path, path: Any, fault: str) -> None:
    """A list grows while its length is at most the place, and that may be any number."""
    forge(tmp_path, {"w": np.ones(2)}, planner_data=pickled({"w": path, "no name": b"other data"}))
    with pytest.raises(UnsupportedError, match=rf"planner_data' has paths {fault}.*; .*allow_pickle=True$"):
        ZcrStorageReader(tmp_path).read_metadata()
    allowed = ZcrStorageReader(tmp_path, allow_pickle=True).read_metadata().planner_data
    assert str(allowed["w"]) == str(path)


def test_paths_of_a_forged_pickle_are_bounded_together(tmp_path: Path) -> None:
    """A pickle has one list for as many names as refer to it, and planners go through it for each."""
    names = [*map(str, range(1000))]
    forge(tmp_path, dict.fromkeys(names, True), planner_data=pickled(dict.fromkeys(names, ["a"] * 499)))
    with pytest.raises(UnsupportedError, match=r"planner_data' has paths that are together longer than the checkpoint"):
        ZcrStorageReader(tmp_path).read_metadata()


def test_a_place_of_a_million_digits_is_not_added_to(tmp_path: Path) -> None:
    forge(tmp_path, {"w": np.ones(2)})
    checkpoint, place = Checkpoint(tmp_path), 1 << 8_000_000
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedError, match="has paths with places in lists"):
            checkpoint.check_planner_data({"w": ["l", place]})
        assert tracemalloc.get_traced_memory()[1] < 500_000 < sys.getsizeof(place)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("listed", [False, True])
def test_bytes_that_many_values_name_are_not_copied_for_each(tmp_path: Path, listed: bool) -> None:
    (tmp_path / "checkpoint.zcr").write_bytes(tricks.named_bytes(2000, 1 << 20, listed=listed).seal())
    message = r"checkpoint\.zcr: tensors that share their bytes would take 2\.1e\+09 bytes"
    refused(LimitError, message, lambda: load({"n": 0}, tmp_path))


@pytest.mark.parametrize("value", [-1, 1.5, "pickle", [1, 2], True])
def test_data_of_a_planner_that_are_not_bytes_are_refused(tmp_path: Path, value: Any) -> None:
    forge(tmp_path, {"w": np.ones(2)}, planner_data=value)
    kind = type(value).__name__
    message = rf"checkpoint\.zcr: metadata 'zcrecord\.checkpoint\.planner_data' is a {kind}, not bytes; "
    with pytest.raises(FormatError, match=message):
        ZcrStorageReader(tmp_path).read_metadata()


def test_an_unknown_element_type_is_told_by_its_tensor(tmp_path: Path) -> None:
    forged = Forge(r.saved({"new": np.ones(3, np.uint8), "w": np.ones(2, np.float32)}))
    (tmp_path / "checkpoint.zcr").write_bytes(forged.set("tensors", 0, dtype=200).seal())
    assert load({"w": torch.zeros(2)}, tmp_path)["w"].tolist() == [1, 1]
    message = r"checkpoint\.zcr: tensor 'new': dtype code 200 is not known; upgrade zcrecord, or leave the tensor out"
    refused(UnsupportedError, message, lambda: load({"new": torch.zeros(3)}, tmp_path))
    with pytest.raises(UnsupportedError, match=message):
        load_views(tmp_path, {"new": torch.zeros(3)})


def test_the_record_itself_is_no_value_of_a_checkpoint(tmp_path: Path) -> None:
    forge(tmp_path, {"n": 3}, objects=["", "none"])
    assert list(Checkpoint(tmp_path).values) == ["n"]


def test_a_value_that_is_named_often_is_marked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else names and modules of a large index would take time in proportion to their product."""
    forge(tmp_path, {"a": {"b": {}, "n": 3}}, objects=["a"] * 1000)
    checkpoint, zeros, marked = Checkpoint(tmp_path), np.zeros, []

    class Marks(np.ndarray):
        def __setitem__(self, at: Any, value: Any) -> None:
            marked.append(at)
            super().__setitem__(at, value)

    with monkeypatch.context() as patched:
        patched.setattr(np, "zeros", lambda *given: zeros(*given).view(Marks))
        assert list(checkpoint.values) == ["a"]
    assert len(marked) == 1


@pytest.mark.slow
def test_lists_of_many_named_items_are_not_forged_ones(tmp_path: Path) -> None:
    items = [["l", i, "x"] for i in range(40_000)]
    assert len(known_paths(tmp_path, *items)) == 40_000


def test_metadata_are_pickled_whole(tmp_path: Path) -> None:
    save(a_state(), tmp_path)
    lazy = ZcrStorageReader(tmp_path).read_metadata()
    found = pickle.loads(pickle.dumps(lazy))
    assert found == lazy and dict(lazy.state_dict_metadata) == found.state_dict_metadata
    assert found.state_dict_metadata["model.turned"].size == (4, 3)
    assert found.planner_data["optim.param_groups.1.lr"] == ("optim", "param_groups", 1, "lr")


def test_writer_and_reader_are_pickled_for_saves_by_another_process(tmp_path: Path) -> None:
    writer = pickle.loads(pickle.dumps(ZcrStorageWriter(tmp_path, digest=None)))
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    out = {"n": 0}
    dcp.load(out, storage_reader=pickle.loads(pickle.dumps(ZcrStorageReader(tmp_path))), no_dist=True)
    assert out == {"n": 1}


def test_a_planner_that_does_not_flatten_is_served(tmp_path: Path) -> None:
    planner = DefaultSavePlanner(flatten_state_dict=False)
    save({"a.b": WEIGHT, "n": 3}, tmp_path, planner=planner)
    reader = ZcrStorageReader(tmp_path)
    assert reader.read_metadata().planner_data is None
    assert zcrecord.load_record(tmp_path / "checkpoint.zcr").names == ("a.b",)
    loading = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    out = {"a.b": torch.zeros(3, 4), "n": 0}
    dcp.load(out, storage_reader=reader, planner=loading, no_dist=True)
    assert torch.equal(out["a.b"], WEIGHT) and out["n"] == 3


def test_a_planner_that_changes_the_plan_is_heeded(tmp_path: Path) -> None:
    """Items that DCP sends from rank to rank are unpickled for a planner that looks at them."""

    class Fewer(dcp.DefaultLoadPlanner):  # type: ignore[misc]  # mypy takes torch for Any
        def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
            plans: list[Any] = pickle.loads(pickle.dumps(global_plan))
            return plans

        def finish_plan(self, new_plan: Any) -> Any:
            sent = pickle.loads(pickle.dumps(new_plan))
            assert [item.dest_index.fqn for item in sent.items] == ["v", "w"]
            del sent.items[0]
            return sent

    save({"v": WEIGHT, "w": WEIGHT}, tmp_path)
    out = {"v": torch.zeros(3, 4), "w": torch.zeros(3, 4)}
    dcp.load(out, storage_reader=ZcrStorageReader(tmp_path), planner=Fewer(), no_dist=True)
    assert torch.equal(out["w"], WEIGHT) and not out["v"].any()


def test_a_planner_that_converts_is_heeded(tmp_path: Path) -> None:
    """Its tensors are new ones, whose memory is used again: none may be taken for tied."""

    class Doubling(DefaultSavePlanner):  # type: ignore[misc]  # mypy takes torch for Any
        def resolve_data(self, write_item: Any) -> Any:
            found = super().resolve_data(write_item)
            return found if isinstance(found, io.BytesIO) else found * 2

    state: dict[str, Any] = {f"w{i}": torch.full((64, 64), float(i)) for i in range(8)} | {"n": (1, 2)}
    save(state, tmp_path, planner=Doubling())
    record = zcrecord.load_record(tmp_path / "checkpoint.zcr")
    assert [record[f"w{i}"][0, 0] for i in range(8)] == [2.0 * i for i in range(8)]
    assert not any(info.tied for info in record.infos())
    assert record.attributes["n"] == (1, 2)


def test_the_folder_is_named_by_the_save_or_by_the_writer(tmp_path: Path) -> None:
    writer, reader = ZcrStorageWriter(tmp_path / "a"), ZcrStorageReader(tmp_path / "a")
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    dcp.save({"n": 2}, storage_writer=writer, checkpoint_id=tmp_path / "b", no_dist=True)
    out = {"n": 0}
    dcp.load(out, storage_reader=reader, no_dist=True)
    assert out == {"n": 1}
    dcp.load(out, storage_reader=reader, checkpoint_id=str(tmp_path / "b"), no_dist=True)
    assert out == {"n": 2} and reader.checkpoint_id == str(tmp_path / "b")
    assert isinstance(writer, dcp.StorageWriter) and isinstance(reader, dcp.StorageReader)
    assert type(writer).validate_checkpoint_id(tmp_path) and type(writer).validate_checkpoint_id("s3://b/c")
    assert type(reader).validate_checkpoint_id(tmp_path / "b")
    assert not type(reader).validate_checkpoint_id(tmp_path / "none")
    assert not any(type(storage).validate_checkpoint_id("abc://b/c") for storage in (reader, writer))
    nowhere = ZcrStorageWriter()
    refused(UnsupportedError, "no folder to save to", lambda: dcp.save({}, storage_writer=nowhere, no_dist=True))
    with pytest.raises(UnsupportedError, match="no checkpoint to load"):
        ZcrStorageReader().read_metadata()


def test_a_checkpoint_is_replaced_only_if_that_is_allowed(tmp_path: Path) -> None:
    first = ZcrStorageWriter(tmp_path / "a", overwrite=False)
    dcp.save({"n": 1}, storage_writer=first, no_dist=True)
    before = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    again = ZcrStorageWriter(tmp_path / "a", overwrite=False)
    refused(DestinationExistsError, "has a checkpoint already; save to another folder, or with overwrite=True",
            lambda: dcp.save({"n": 2}, storage_writer=again, no_dist=True))  # fmt: skip
    assert {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()} == before
    dcp.save({"n": 2}, storage_writer=ZcrStorageWriter(tmp_path / "a"), no_dist=True)


def test_saves_and_loads_have_ids_of_their_own(tmp_path: Path) -> None:
    writer = ZcrStorageWriter(tmp_path)
    one, two = writer.storage_meta(), writer.storage_meta()
    writer.reset(tmp_path / "b")
    assert one.save_id == two.save_id != writer.storage_meta().save_id
    dcp.save({"n": 1}, storage_writer=writer, no_dist=True)
    reader = ZcrStorageReader(tmp_path / "b")
    first = reader.read_metadata().storage_meta
    reader.reset()
    assert first.checkpoint_id == tmp_path / "b" and first.load_id not in (
        None,
        reader.read_metadata().storage_meta.load_id,
    )


def test_wrong_options_and_places_are_refused_at_once(tmp_path: Path) -> None:
    options: Any
    for options in ({"digest": "md5"}, {"alignment": 3}):
        with pytest.raises(LimitError):
            ZcrStorageWriter(tmp_path, **options)
    with pytest.raises(UnsupportedError, match="verify='all' is not known; 'index' or 'full'"):
        ZcrStorageReader(tmp_path, verify=cast(Any, "all"))
    with pytest.raises(UnsupportedError, match="https://host/x: HTTP servers are for reading"):
        ZcrStorageWriter("https://host/x")
    (tmp_path / "file").write_bytes(b"")
    message = "file: is a file; a checkpoint is saved to a folder"
    refused(SourceError, message, lambda: save({"n": 1}, tmp_path / "file"))
