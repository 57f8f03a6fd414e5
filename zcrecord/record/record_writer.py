"""`RecordWriter`: an archive written forward, one tensor at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zcrecord.codec.entries import KIND_NAMES, Order, TensorLayout, dense_layout, digest_kind, is_attribute
from zcrecord.codec.layout import ALIGNMENT, NONE, check_alignment
from zcrecord.errors import ProducerError, TensorNotFoundError, UnsupportedError, located
from zcrecord.tensors.lazy import LazyTensor, Pieces
from zcrecord.writing import flatten
from zcrecord.writing.module_tree import ModuleTreeBuilder, path_of_name
from zcrecord.writing.sharing import PayloadPlan, plan_sharing
from zcrecord.writing.writers import SaveReport

from .save import PayloadWriter, metadata_entries, open_writer

_KINDS = {name: kind for kind, name in KIND_NAMES.items()}


class RecordWriter:
    """Writes a record forward, one tensor at a time; holds no written tensor, leaves no file after a failure.

    Writes only inside its `with` block. The end of the block makes the archive appear, whole; an exception leaves the
    old file as it was. The index follows the payloads. Names are split at their dots, as those of a `state_dict()`;
    a tuple of keys is not split.

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
        self.modules = 0  # in the record; known at the end, as the report is
        options: dict[str, Any] = {"alignment": alignment, "digest": digest, "durable": durable}
        self._writer = open_writer(dest, max_shard_size, base, storage_options, **options)
        self._tree = ModuleTreeBuilder()
        self._written: dict[str, tuple[TensorLayout, int]] = {}
        self._stack = contextlib.ExitStack()
        self._out: PayloadWriter | None = None
        self._unfinished: str | None = None  # the name of a tensor that is being written, or whose writing failed
        self._used = False

    def __enter__(self) -> RecordWriter:
        if self._used:
            raise UnsupportedError("this RecordWriter was used before; make a new one for each archive")
        self._used = True
        metadata_entries(self.metadata)
        self._out = self._stack.enter_context(self._writer)
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:
            self._out = None
            self._stack.__exit__(kind, *error)
            return
        with self._stack:
            if self._unfinished is not None:
                raise ProducerError("was left unfinished by an error; nothing is written", tensor=self._unfinished)
            entries = self._tree.entries()
            entries.metadata = metadata_entries(self.metadata)
            self.report, self.modules = self._require_open().finish(entries), len(entries.modules)
            self._out = None

    def _require_open(self) -> PayloadWriter:
        if self._out is None:
            raise UnsupportedError("a RecordWriter writes only inside its with block")
        if self._unfinished is not None:
            raise UnsupportedError(f"tensor '{self._unfinished}' is not finished; one is written at a time")
        return self._out

    def add(self, name: str | Sequence[str], value: Any) -> None:
        """Write one tensor: an array of numpy, torch or jax, a Packed-, String- or LazyTensor, or one of `parts`.

        An array in C order is not copied. Equal bytes are stored once, but the tensors stay distinct.

        Raises:
            NameCollisionError: the name is taken. UnsupportedError: not a tensor. ProducerError: a LazyTensor gave
            other bytes than it declared. SourceError: the file system reports an error.
        """
        out, path = self._require_open(), path_of_name(name)
        self._tree.check_name(path)
        full = ".".join(path)
        if is_attribute(value, full):
            fault = f"a {type(value).__name__} is not a tensor; see .attribute(name, value)"
            raise UnsupportedError(fault, tensor=full)
        if not isinstance(value, _PlannedTensor):
            value = _PlannedTensor(self, plan_sharing([flatten.as_tensor(value, full)]), 0, {})
        elif value.writer is not self:
            raise UnsupportedError("one of the .parts(...) of another RecordWriter; call this one's", tensor=full)
        self._unfinished = full
        with located(tensor=full):
            layout, payload = value.store(out)
        self._finish_tensor(path, layout, payload)

    def parts(self, values: Iterable[Any]) -> list[Any]:
        """Plan tensors that share memory: when they are added, one by one, they share a payload. Writes nothing.

        As with `save_record`, identical tensors stay tied, and overlapping views share their bytes.

        Example:
            >>> import numpy as np, zcrecord
            >>> w = np.arange(6)
            >>> with RecordWriter("model.zcr") as out:
            ...     for name, part in zip(["a", "b"], out.parts([w, w[::2]]), strict=True):
            ...         out.add(name, part)
            >>> out.report.payload_bytes, zcrecord.load_record("model.zcr")["b"].tolist()
            (48, [0, 2, 4])

        Raises:
            UnsupportedError: not a tensor.
        """
        plan = plan_sharing([flatten.as_tensor(value, f"values[{i}]") for i, value in enumerate(values)])
        payloads: dict[int, int] = {}
        return [_PlannedTensor(self, plan, i, payloads) for i in range(len(plan.layout_ids))]

    @contextlib.contextmanager
    def tensor(
        self, name: str | Sequence[str], dtype: Any, shape: Sequence[int], *, order: Order = "C"
    ) -> Iterator[OpenTensor]:
        """Open one tensor of a dtype and shape; the block writes its values in pieces, in C order.

        With order "F" the pieces, and the archive, have the first axis fastest; only for types that fill whole bytes.

        Raises:
            ProducerError: too few or too many bytes are written, or values of another type.
        """
        out, path = self._require_open(), path_of_name(name)
        self._tree.check_name(path)
        full = ".".join(path)
        declared = LazyTensor(dtype, shape, ())
        if order == "F" and declared.kind.packed:
            raise UnsupportedError(f"{declared.kind.name} does not fill whole bytes, so has no strides", tensor=full)
        pieces = Pieces(declared.kind, declared.shape)
        self._unfinished = full
        out.begin(declared.nbytes)
        opened = OpenTensor(out, pieces)
        with located(tensor=full):
            yield opened
            opened.finish()
        self._finish_tensor(path, dense_layout(declared.kind, declared.shape, order), out.end())

    def _finish_tensor(self, path: tuple[str, ...], layout: TensorLayout, payload: int) -> None:
        self._tree.tensor(path, layout, payload)
        self._written[".".join(path)] = layout, payload
        self._unfinished = None

    def tie(self, name: str | Sequence[str], to: str | Sequence[str]) -> None:
        """Add a tensor that shares its memory with one written before.

        Raises:
            TensorNotFoundError: `to` was not written. NameCollisionError: `name` is taken.
        """
        self._require_open()
        path, other = path_of_name(name), ".".join(path_of_name(to))
        entry = self._written.get(other)
        if entry is None:
            raise TensorNotFoundError(other, lambda: self._written)
        self._tree.tensor(path, *entry)
        self._written[".".join(path)] = entry

    def attribute(self, name: str | Sequence[str], value: Any) -> None:
        """Add an attribute: None, bool, int, float, str, bytes, or a list or tuple of one of these."""
        self._require_open()
        self._tree.attribute(path_of_name(name), value)

    def module(self, name: str | Sequence[str], kind: str = "mapping", type_name: str = "") -> None:
        """Add an empty module, or set the kind of one: 'list', 'tuple', 'object' (of a class) or 'numbered'.

        A 'numbered' module is a mapping, in which keys that read as integers are loaded as integers. The empty name is
        the record itself. Modules on the way to a name are added as mappings.

        Raises:
            UnsupportedError: another kind. NameCollisionError: a tensor has its name.
        """
        self._require_open()
        if kind not in list(_KINDS):
            raise UnsupportedError(f"kind {kind!r} is not known; {', '.join(_KINDS)}")
        if not isinstance(type_name, str):
            raise UnsupportedError(f"a type name is a str, not a {type(type_name).__name__}")
        self._tree.module(path_of_name(name) if name != "" else (), _KINDS[kind], type_name)


@dataclass(slots=True)
class _PlannedTensor:
    """One of several tensors planned together; `payloads` has the payload of each source written so far."""

    writer: RecordWriter
    plan: PayloadPlan
    number: int
    payloads: dict[int, int]

    def store(self, out: PayloadWriter) -> tuple[TensorLayout, int]:
        """Write the tensor's source, unless that was done for another tensor; return layout and payload."""
        plan, source = self.plan, self.plan.source_ids[self.number]
        if source >= 0 and source not in self.payloads:
            self.payloads[source] = out.store(plan.sources[source])
            plan.sources[source] = None  # frees a packed copy
        return plan.layouts[plan.layout_ids[self.number]], self.payloads.get(source, NONE)


class OpenTensor:
    """A tensor that is being written, in pieces."""

    def __init__(self, out: PayloadWriter, pieces: Pieces) -> None:
        self._out, self._pieces = out, pieces
        self._broken = False

    def write(self, piece: Any) -> None:
        """Append bytes, or an array of the tensor's dtype; bytes in C order are not copied."""
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
            raise ProducerError("a write of it failed halfway; write the archive again")
