"""`ZcrStorageWriter`: saves of torch.distributed.checkpoint as archives, one for each rank, and a catalogue.

Planning, deduplication of replicated tensors and all communication are DCP's. `rank_archive` writes, `join` makes the
catalogue of the ranks' reports, `folder` knows the files.

Source: `StorageWriter` and the calls of `_save_state_dict` in torch 2.13.
"""

from __future__ import annotations

import inspect
import io
import os
import uuid
from collections import ChainMap
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from zcrecord.codec.entries import digest_kind
from zcrecord.codec.layout import ALIGNMENT, check_alignment
from zcrecord.errors import DestinationExistsError, RecordError, UnsupportedError
from zcrecord.frameworks.torch import import_torch
from zcrecord.storage.sink import Sink

from .folder import CheckpointFolder, checkpoint_folder, is_known
from .join import join_reports
from .rank_archive import Chunk, RankReport, RankWriter
from .values import PickledValue, is_plain, paths_of

if TYPE_CHECKING:
    StorageWriter = Any
else:
    StorageWriter = object  # torch's comes after it, in `__getattr__` of the package


class ZcrStorageWriter(StorageWriter):  # type: ignore[misc]  # mypy takes torch for Any
    """Saves a distributed state dict as one archive for each rank and a catalogue, `checkpoint.zcr`, written last.

        dcp.save(state_dict, storage_writer=ZcrStorageWriter("checkpoints/100"))

    The folder has the old checkpoint or the new one at any time, whole: replacing the catalogue is what commits.
    Archives are never overwritten, but get new names in each save. Those of the checkpoint before are removed after the
    commit, if trailer and index prove them to be its own, so that during a save the folder needs room for both; on a
    disk those of saves that were killed are, too. Nothing depends on clocks. Of two saves to one folder at a time the
    one that would end last is refused. If a rank fails, its own file is removed, the old checkpoint stays, and DCP
    raises CheckpointException in every rank, with the error of the rank that failed.

    `zcrecord.load_record("checkpoints/100/checkpoint.zcr")` has the state dict as one record, its tensors whole.
    Tensors are written from their own memory; those of a device, and those not in C order, through 8 MiB. Tied ones
    are stored once in a rank and stay tied, if every chunk is; equal ones are stored once in a rank. None, bool, int,
    float, str, bytes and lists, tuples and dicts of these are attributes; all other objects the bytes of torch.save.

    Args:
        path: the folder, or a URL of one (see the guide of URLs); made if it is not there. None if each `dcp.save`
            gives a `checkpoint_id`.
        overwrite: False refuses a folder that has a checkpoint, before a byte is written.
        durable: fsync files and folder, so that a finished checkpoint survives power loss.
        digest: 'xxh3' for a checksum of each chunk; 'none' for none.
        alignment: of every chunk in bytes, a power of two from 16 to 65536. Those of 1 MiB and more lie on 16384.
        storage_options: for fsspec, if `path` is a URL: credentials, the endpoint of an S3 server.

    Raises:
        DependencyError: torch is not installed, or what a URL needs. LimitError: another digest or alignment.
        UnsupportedError: a URL that is not written to.

    Errors of a save, in CheckpointException: SourceError, which is DestinationExistsError for lack of `overwrite`,
    UnsupportedError for a tensor that no archive holds, MismatchError for chunks that do not fit together.
    """

    def __init__(
        self,
        path: Any = None,
        *,
        overwrite: bool = True,
        durable: bool = True,
        digest: str | None = "xxh3",
        alignment: int = ALIGNMENT,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        import_torch()
        super().__init__()
        digest_kind(digest)
        self._durable, self._digest, self._alignment = durable, digest, check_alignment(alignment)
        self._path: Any = None
        self._options, self._overwrite = storage_options, overwrite
        self._rank, self._is_coordinator = 0, True
        self._ranks: Any = None  # DCP's process group, if each rank plans by itself
        self._version: Any = None  # of the catalogue that the save replaces
        self._current_folder: CheckpointFolder | None = None
        self.reset(path)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_current_folder": None, "_ranks": None}  # files of a save under way stay here

    @property
    def checkpoint_id(self) -> Any:
        """The folder, or its URL."""
        return self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True for a path, and for a URL of a kind that is known."""
        return isinstance(checkpoint_id, str | os.PathLike) and is_known(checkpoint_id)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Set the folder of the next save, if one is given."""
        self.save_id = str(uuid.uuid4())  # for DCP's logs; the catalogue has the coordinator's
        if checkpoint_id is not None:
            checkpoint_folder(checkpoint_id, durable=self._durable, options=self._options)
            self._close()
            self._path = checkpoint_id

    def storage_meta(self) -> Any:
        """Return DCP's description of where the checkpoint is."""
        from torch.distributed.checkpoint.metadata import StorageMeta

        return StorageMeta(checkpoint_id=self._path, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **kwargs: Any) -> None:
        """Note this rank's number and role, and remove its archive of an earlier save that failed."""
        self._rank, self._is_coordinator = kwargs.get("rank") or 0, is_coordinator
        self._ranks = None
        if not kwargs.get("use_collectives", True):
            self._ranks = inspect.stack(0)[1].frame.f_locals.get("distW")  # DCP tells nowhere else which ranks save
            if self._ranks is None:
                message = "this version of DCP does not tell which ranks save; save with use_collectives=True"
                raise UnsupportedError(message, path=None if self._path is None else str(self._path))
        self._close()

    def prepare_local_plan(self, plan: Any) -> Any:
        """Make the folder; the coordinator notes the catalogue's version. DestinationExistsError if it has to stay."""
        folder = self._folder()
        folder.make()
        if self._is_coordinator:
            self._version = folder.version()
            if not self._overwrite and (self._version or self._version is None):  # None: the store has no versions
                fault = "has a checkpoint already" if self._version else "does not tell whether it has a checkpoint"
                advice = "save to another folder, or with overwrite=True"
                raise DestinationExistsError(f"{fault}; {advice}", path=folder.path)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Return the plans as they are: DCP may keep them for later saves, so no name of a file is in them."""
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's archive, if it has any values; return a finished future of its RankReport, for `finish`."""
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.checkpoint.storage import WriteResult
        from torch.futures import Future

        report = self._write(plan, planner)
        nbytes = 0 if report.shard is None else report.shard.nbytes
        done: Any = Future()
        done.set_result([WriteResult(MetadataIndex(""), nbytes, report)])  # one for all items: they may be a million
        return done

    def _write(self, plan: Any, planner: Any) -> RankReport:
        """Write this rank's chunks to an archive of its own; return the report of them and of the rank's values."""
        torch = import_torch()
        folder, values, chunks = self._folder(), {}, []
        for item in plan.items:
            name, data = item.index.fqn, item.tensor_data
            if data is None:
                values[name] = _value_of(torch, planner, item)
            else:
                box = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
                chunks.append((item, Chunk(name, tuple(data.size), *box)))

        def write_chunks(file_name: str, sink: Sink | None) -> RankReport:
            names = {chunk.name for _, chunk in chunks}
            out = RankWriter(torch, sink, names, alignment=self._alignment, digest=self._digest)
            for item, chunk in chunks:
                out.add(chunk, planner.resolve_data(item))
            return out.finish(file_name, values)

        if not any(prod(chunk.extent) for _, chunk in chunks):
            return write_chunks("", None)
        processes = torch.distributed
        count = processes.get_world_size() if processes.is_available() and processes.is_initialized() else 1
        file_name = folder.shard_name(self._rank, count)
        with folder.new_shard(file_name) as sink:
            report = write_chunks(file_name, sink)
        return report._replace(scratch=folder.scratch)

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commit: replace the catalogue, then remove the files that nothing names any more. Runs in the coordinator.

        After an error the checkpoint there before is untouched, and this one's files are removed. If DCP has planned
        without collectives, each rank calls it, and gets the coordinator's error.
        """
        reports = [result.storage_data for rank in results for result in rank]
        if self._ranks is None:
            self._commit(reports, [metadata.planner_data])
            return
        gathered = self._ranks.gather_object((reports, metadata.planner_data))  # None except in the coordinator
        failure: Exception | None = None
        try:
            if gathered is not None:
                self._commit([report for of_rank, _ in gathered for report in of_rank], [data for _, data in gathered])
        except Exception as error:
            failure = error
        if (failure := self._ranks.broadcast_object(failure)) is not None:
            raise failure

    def _commit(self, reports: list[RankReport], planner_datas: list[Any]) -> None:
        """Join the reports of all ranks, and commit the catalogue; `planner_datas` has one of all ranks or one each."""
        folder = self._folder()
        planner_data, planner_bytes = planner_datas[0], None
        if all(isinstance(data, dict) for data in planner_datas):
            planner_data = dict(ChainMap(*planner_datas))
        if planner_data is not None and paths_of(planner_data) is None:
            planner_bytes = _pickle(import_torch(), planner_data).data
        archives = {report.shard.name: report.scratch for report in reports if report.shard is not None}
        try:
            options: dict[str, Any] = {"alignment": self._alignment, "digest": self._digest, "save_id": self.save_id}
            tree = join_reports(reports, planner_data, planner_bytes, **options)
            folder.commit(tree, digest_kind(self._digest), archives, self._version)
        except BaseException as error:
            folder.take_back(archives)
            raise (error.located(path=folder.path) if isinstance(error, RecordError) else error) from error.__cause__

    def _folder(self) -> CheckpointFolder:
        """Return the folder of this save, one object until the next; UnsupportedError if no path was given."""
        if self._path is None:
            raise UnsupportedError("no folder to save to: ZcrStorageWriter(path), or dcp.save(checkpoint_id=)")
        if self._current_folder is None:
            self._current_folder = checkpoint_folder(self._path, durable=self._durable, options=self._options)
        return self._current_folder

    def _close(self) -> None:
        """Close the folder, which removes this rank's archive unless it was committed."""
        folder, self._current_folder = self._current_folder, None
        if folder is not None:
            folder.close()


def _value_of(torch: Any, planner: Any, item: Any) -> Any:
    """Return the value of a plan's item that is no tensor: as it is if it `is_plain`, else a PickledValue."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    is_default = isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), method) is getattr(DefaultSavePlanner, method)
        for method in ("resolve_data", "transform_object")
    )
    if is_default:  # it would pickle the value, which takes long for thousands
        value = planner.lookup_object(item.index)
        return value if is_plain(value) else _pickle(torch, value)
    data = planner.resolve_data(item).getvalue()
    try:
        value = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except Exception:  # torch's, of many kinds: the object stays pickled
        return PickledValue(data)
    return value if is_plain(value) else PickledValue(data)


def _pickle(torch: Any, value: Any) -> PickledValue:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return PickledValue(buffer.getvalue())
