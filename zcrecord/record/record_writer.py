"""`RecordWriter`: an archive written while its tensors become known, one at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from zcrecord.codec.entries import KIND_NAMES, TensorLayout, digest_kind, is_attribute
from zcrecord.codec.layout import ALIGNMENT, NONE, check_alignment
from zcrecord.errors import ProducerError, RecordError, TensorNotFoundError, UnsupportedError
from zcrecord.storage.files import open_sink
from zcrecord.tensors.lazy import LazyTensor, Pieces
from zcrecord.writing import flatten
from zcrecord.writing.module_tree import ModuleTreeBuilder, path_of_name
from zcrecord.writing.sharing import PayloadPlan, plan_sharing
from zcrecord.writing.writers import SaveReport, StreamWriter

from .save import metadata_entries

if TYPE_CHECKING:
    from .save import Writer

__all__ = ["OpenTensor", "RecordWriter"]

_KINDS = {name: kind for kind, name in KIND_NAMES.items()}


class RecordWriter:
    """Writes a record forward, one tensor at a time; holds none that was written, leaves no file after a failure.

    For producers that know their tensors one after the other; the index goes behind the payloads. Only inside a `with`
    block, whose end makes the archive appear, whole; an exception in the block leaves the old file as it was. Names
    are split at their dots, as those of a `state_dict()` are; a tuple of keys is taken as it is.

    Args:
        dest, alignment, digest, durable, metadata, max_shard_size, base, storage_options: as of `save_record`.
            `metadata` may be changed until the end.

    Example:
        >>> import numpy as np, zcrecord
        >>> with RecordWriter("model.zcr") as out:
        ...     out.add("encoder.weight", np.ones((2, 3), np.float32))
        ...     out.attribute("encoder.heads", 8)
        >>> out.report.tensors, zcrecord.load_record("model.zcr").tree()["encoder"]["heads"]
        (1, 8)
    """

    def __init__(
        self,
        dest: Any,
        *,
        alignment: int = ALIGNMENT,
        digest: str | None = "xxh3",
        durable: bool = True,
        metadata: Mapping[str, Any] | None = None,
        max_shard_size: int | None = None,
        base: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        digest_kind(digest)
        check_alignment(alignment)
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.report: SaveReport | None = None
        self.modules = 0  # in the record, known at its end as the report is
        self._dest, self._durable, self._alignment, self._digest = dest, durable, alignment, digest
        if base is not None and max_shard_size is not None:
            raise UnsupportedError("base= and max_shard_size= do not go together")
        self._max_shard_size, self._base, self._storage_options = max_shard_size, base, storage_options
        self._tree = ModuleTreeBuilder()
        self._numbers: dict[str, tuple[TensorLayout, int]] = {}
        self._stack = contextlib.ExitStack()
        self._stream: Writer | None = None
        self._unfinished: str | None = None
        self._used = False

    def __enter__(self) -> RecordWriter:
        if self._used:
            raise UnsupportedError("this RecordWriter was used before; make a new one for each archive")
        self._used = True
        metadata_entries(self.metadata)
        with contextlib.ExitStack() as stack:  # which closes the sink if the first bytes cannot be written
            self._stream = self._new_stream(stack)
            self._stack = stack.pop_all()
        return self

    def _new_stream(self, stack: contextlib.ExitStack) -> Writer:
        options: dict[str, Any] = {"alignment": self._alignment, "digest": self._digest}
        if self._base is not None:
            from .references import referencing  # here, because few records refer to another

            return stack.enter_context(referencing(self._dest, self._base, durable=self._durable, **options))
        if self._max_shard_size is None:
            sink = stack.enter_context(open_sink(self._dest, durable=self._durable, options=self._storage_options))
            return StreamWriter(sink, **options)
        from .sharded_writer import ShardedWriter  # here, because few records have shards

        options |= {"durable": self._durable}
        return stack.enter_context(ShardedWriter(self._dest, self._max_shard_size, **options))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stream = None
            self._stack.__exit__(kind, error, trace)
            return
        with self._stack:
            if self._unfinished is not None:
                what = "was left unfinished by an error; nothing is written"
                raise ProducerError(what, tensor=self._unfinished)
            entries = self._tree.entries()
            entries.metadata = metadata_entries(self.metadata)
            self.report, self.modules = self._open().finish(entries), len(entries.modules)
            self._stream = None

    def _open(self) -> Writer:
        if self._stream is None:
            raise UnsupportedError("a RecordWriter writes only inside its with block")
        if self._unfinished is not None:
            raise UnsupportedError(f"tensor '{self._unfinished}' is not finished; one is written at a time")
        return self._stream

    def add(self, name: str | Sequence[str], value: Any) -> None:
        """Write one tensor: an array of numpy, torch or jax, a Packed-, String- or LazyTensor, or one of `parts`.

        Copies nothing of an array in C order. Equal bytes are stored once, but the tensors stay distinct.

        Raises:
            NameCollisionError: the name is taken. UnsupportedError: no tensor. ProducerError: a LazyTensor gave other
            bytes than it declared. SourceError: the file system reports an error.
        """
        out, path = self._open(), path_of_name(name)
        self._tree.check_name(path)
        full = ".".join(path)
        if is_attribute(value, full):
            raise UnsupportedError(f"a {type(value).__name__} is no tensor; see .attribute(name, value)", tensor=full)
        if not isinstance(value, _PlannedTensor):
            value = _PlannedTensor(self, plan_sharing([flatten.as_tensor(value, full)]), 0, {})
        elif value.writer is not self:
            raise UnsupportedError("one of the .parts(...) of another RecordWriter; call this one's", tensor=full)
        self._unfinished = full
        try:
            layout, payload = value.store(out)
        except RecordError as error:
            raise error.located(tensor=full) from error.__cause__
        self._tell(path, layout, payload)

    def parts(self, values: Iterable[Any]) -> list[Any]:
        """Return tensors that may share memory, to be added one by one: those that do will share a payload.

        Nothing is written yet. As with `save_record`, a tensor that is another one stays tied to it, and overlapping
        views of one base share what they reach of it.

        Example:
            >>> import numpy as np, zcrecord
            >>> w = np.arange(6)
            >>> with RecordWriter("model.zcr") as out:
            ...     for name, part in zip(["a", "b"], out.parts([w, w[::2]]), strict=True):
            ...         out.add(name, part)
            >>> out.report.payload_bytes, zcrecord.load_record("model.zcr")["b"].tolist()
            (48, [0, 2, 4])

        Raises:
            UnsupportedError: no tensor.
        """
        plan = plan_sharing([flatten.as_tensor(value, f"values[{i}]") for i, value in enumerate(values)])
        payloads: dict[int, int] = {}
        return [_PlannedTensor(self, plan, i, payloads) for i in range(len(plan.layout_ids))]

    @contextlib.contextmanager
    def tensor(
        self, name: str | Sequence[str], dtype: Any, shape: Sequence[int], *, order: Literal["C", "F"] = "C"
    ) -> Iterator[OpenTensor]:
        """Open one tensor of a dtype and shape; the block writes its values in pieces, in C order.

        With order "F" they come, and stay, with the first axis fastest; only of types that fill whole bytes.

        Raises:
            ProducerError: the block ends with too few bytes written; its writes, with too many or of another type.
        """
        out, path = self._open(), path_of_name(name)
        self._tree.check_name(path)
        full = ".".join(path)
        declared = LazyTensor(dtype, shape, ())
        if order == "F" and declared.kind.packed:
            raise UnsupportedError(f"{declared.kind.name} does not fill whole bytes, so has no strides", tensor=full)
        pieces = Pieces(declared.kind, declared.shape)
        self._unfinished = full
        out.begin(declared.nbytes)
        opened = OpenTensor(out, pieces)
        try:
            yield opened
            opened.finish()
        except RecordError as error:
            raise error.located(tensor=full) from error.__cause__
        layout = TensorLayout(declared.kind.code, declared.kind.bits, declared.shape)
        if order == "F" and 0 not in layout.shape and sum(d > 1 for d in layout.shape) > 1:
            steps = (prod(layout.shape[:axis]) if d > 1 else 0 for axis, d in enumerate(layout.shape))
            layout = layout._replace(strides=tuple(steps))
        self._tell(path, layout, out.end())

    def _tell(self, path: tuple[str, ...], layout: TensorLayout, payload: int) -> None:
        self._tree.tensor(path, layout, payload)
        self._numbers[".".join(path)] = layout, payload
        self._unfinished = None

    def tie(self, name: str | Sequence[str], to: str | Sequence[str]) -> None:
        """Add a tensor that is, and stays, the same memory as one written before.

        Raises:
            TensorNotFoundError: `to` was not written. NameCollisionError: `name` is taken.
        """
        self._open()
        path, other = path_of_name(name), ".".join(path_of_name(to))
        known = self._numbers.get(other)
        if known is None:
            raise TensorNotFoundError(other, lambda: self._numbers)
        self._tree.tensor(path, *known)
        self._numbers[".".join(path)] = known

    def attribute(self, name: str | Sequence[str], value: Any) -> None:
        """Add an attribute: None, bool, int, float, str, bytes, or a list or tuple of one of these."""
        self._open()
        self._tree.attribute(path_of_name(name), value)

    def module(self, name: str | Sequence[str], kind: str = "mapping", type_name: str = "") -> None:
        """Add a module, empty so far, or say that one is a 'list', a 'tuple' or an 'object' (a class's instance).

        In one that is 'numbered', keys that read as integers are integers when it is loaded. The empty name is the
        record itself. Modules appear by themselves, as mappings, where a name goes through them.

        Raises:
            UnsupportedError: another kind. NameCollisionError: a tensor has its name.
        """
        self._open()
        if kind not in list(_KINDS):
            raise UnsupportedError(f"kind {kind!r} is not known; {', '.join(_KINDS)}")
        if not isinstance(type_name, str):
            raise UnsupportedError(f"a type name is a str, not a {type(type_name).__name__}")
        self._tree.module(path_of_name(name) if name != "" else (), _KINDS[kind], type_name)


class _PlannedTensor:
    """One of several tensors that were planned together; `payloads` is theirs in common."""

    __slots__ = ("_number", "_payloads", "_plan", "writer")

    def __init__(self, writer: RecordWriter, plan: PayloadPlan, number: int, payloads: dict[int, int]) -> None:
        self.writer = writer
        self._plan, self._number, self._payloads = plan, number, payloads

    def store(self, out: Writer) -> tuple[TensorLayout, int]:
        """Write the source that holds the tensor, unless it was written for another; return layout and payload."""
        p, i = self._plan, self._number
        source = p.source_ids[i]
        if source >= 0 and source not in self._payloads:
            self._payloads[source] = out.store(p.sources[source])
            p.sources[source] = None  # written: a packed copy is let go
        return p.layouts[p.layout_ids[i]], self._payloads.get(source, NONE)


class OpenTensor:
    """A tensor that is being written, piece by piece."""

    __slots__ = ("_broken", "_out", "_pieces")

    def __init__(self, out: Writer, pieces: Pieces) -> None:
        self._out, self._pieces = out, pieces
        self._broken = False

    def write(self, piece: Any) -> None:
        """Append bytes, or an array of the tensor's dtype; copies nothing that lies in C order."""
        self._check()
        data = self._pieces.take(piece)
        self._broken = True
        self._out.write(data)
        self._broken = False

    def finish(self) -> None:
        """Raise ProducerError if bytes of the tensor are missing."""
        self._check()
        self._pieces.finish()

    def _check(self) -> None:
        if self._broken:
            raise ProducerError("one of its writes failed; how much of it was written is not known")
