"""`RecordWriter`: an archive written while its tensors become known, one at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from . import tree
from .entries import Form, ModuleKind
from .errors import ProducerError, RecordError, TensorNotFoundError, UnsupportedError
from .layout import ALIGNMENT, NONE, check_alignment
from .lazy import LazyTensor, Pieces
from .paths import Outline, path_of_name
from .save import metadata_entries
from .sharing import analyse
from .sink import open_sink
from .writer import SaveReport, StreamWriter, digest_kind

__all__ = ["OpenTensor", "RecordWriter"]

_KINDS = {
    "mapping": ModuleKind.MAPPING,
    "list": ModuleKind.LIST,
    "tuple": ModuleKind.TUPLE,
    "object": ModuleKind.OBJECT,
}


class RecordWriter:
    """A record written forward, one tensor at a time; what was written is not held, and no file is left by a failure.

    For producers that know their tensors one after the other; the index goes behind the payloads. Only inside a `with`
    block, whose end makes the archive appear, whole; an exception in the block leaves the old file as it was. Names
    are split at their dots, as those of a `state_dict()` are; a tuple of keys is taken as it is.

    Args:
        dest, alignment, digest, durable, metadata: as of `save_record`. `metadata` may be changed until the end.

    Example:
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
    ) -> None:
        digest_kind(digest)
        check_alignment(alignment)
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.report: SaveReport | None = None
        self._dest, self._durable, self._alignment, self._digest = dest, durable, alignment, digest
        self._outline = Outline()
        self._numbers: dict[tuple[str, ...], tuple[Form, int]] = {}
        self._stack = contextlib.ExitStack()
        self._stream: StreamWriter | None = None
        self._unfinished: str | None = None

    def __enter__(self) -> RecordWriter:
        if self._stream is not None or self.report is not None:
            raise UnsupportedError("this RecordWriter was used before; make a new one for each archive")
        metadata_entries(self.metadata)
        sink = self._stack.enter_context(open_sink(self._dest, durable=self._durable))
        self._stream = StreamWriter(sink, alignment=self._alignment, digest=self._digest)
        return self

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
            entries = self._outline.entries()
            entries.metadata = metadata_entries(self.metadata)
            self.report = self._open().finish(entries)
            self._stream = None

    def _open(self) -> StreamWriter:
        if self._stream is None:
            raise UnsupportedError("a RecordWriter writes only inside its with block")
        if self._unfinished is not None:
            raise UnsupportedError(f"tensor '{self._unfinished}' is not finished; one is written at a time")
        return self._stream

    def add(self, name: str | Sequence[str], value: Any) -> None:
        """Write one tensor: an array of numpy, torch or jax, a PackedTensor, StringTensor or LazyTensor.

        Copies nothing of an array in C order. Equal bytes are stored once, but the tensors stay distinct.

        Raises:
            NameCollisionError: the name is taken. UnsupportedError: no tensor. ProducerError: a LazyTensor gave other
            bytes than it declared. SourceError: the file system refused.
        """
        out, path = self._open(), path_of_name(name)
        self._outline.check(path)
        full = ".".join(path)
        if tree.is_attribute(value, full):
            raise UnsupportedError(f"a {type(value).__name__} is no tensor; see .attribute(name, value)", tensor=full)
        placement = analyse([tree.as_tensor(value, full)])
        (form,) = placement.forms
        self._unfinished = full
        try:
            payload = out.store(placement.sources[0]) if placement.sources else NONE
        except RecordError as error:
            raise error.located(tensor=full) from error.__cause__
        self._tell(path, form, payload)

    @contextlib.contextmanager
    def tensor(self, name: str | Sequence[str], dtype: Any, shape: Sequence[int]) -> Iterator[OpenTensor]:
        """Open one tensor of a dtype and shape, whose values the block writes in pieces, in C order.

        Raises:
            ProducerError: the block ends with too few bytes written; its writes, with too many or of another type.
        """
        out, path = self._open(), path_of_name(name)
        self._outline.check(path)
        full = ".".join(path)
        declared = LazyTensor(dtype, shape, ())
        pieces = Pieces(declared.kind, declared.shape)
        self._unfinished = full
        out.begin(declared.nbytes)
        try:
            yield OpenTensor(out, pieces)
            pieces.finish()
        except RecordError as error:
            raise error.located(tensor=full) from error.__cause__
        self._tell(path, Form(declared.kind.code, declared.kind.bits, declared.shape), out.end())

    def _tell(self, path: tuple[str, ...], form: Form, payload: int) -> None:
        self._outline.tensor(path, form, payload)
        self._numbers[path] = form, payload
        self._unfinished = None

    def tie(self, name: str | Sequence[str], to: str | Sequence[str]) -> None:
        """Add a tensor that is, and stays, the same memory as one written before.

        Raises:
            TensorNotFoundError: `to` was not written. NameCollisionError: `name` is taken.
        """
        self._open()
        known = self._numbers.get(path_of_name(to))
        if known is None:
            raise TensorNotFoundError(".".join(path_of_name(to)), lambda: map(".".join, self._numbers))
        path = path_of_name(name)
        self._outline.tensor(path, *known)
        self._numbers[path] = known

    def attribute(self, name: str | Sequence[str], value: Any) -> None:
        """Add an attribute: None, bool, int, float, str, bytes, or a list or tuple of one of these."""
        self._open()
        self._outline.attribute(path_of_name(name), value)

    def module(self, name: str | Sequence[str], kind: str = "mapping", type_name: str = "") -> None:
        """Add a module, empty so far, or say that one is a 'list', a 'tuple' or an 'object' (a class's instance).

        The empty name is the record itself. Modules appear by themselves, as mappings, where a name goes through them.

        Raises:
            UnsupportedError: another kind. NameCollisionError: a tensor has its name.
        """
        self._open()
        if kind not in _KINDS:
            raise UnsupportedError(f"kind {kind!r} is not known; {', '.join(_KINDS)}")
        self._outline.module(path_of_name(name) if name else (), _KINDS[kind], type_name)


class OpenTensor:
    """A tensor that is being written, piece by piece."""

    __slots__ = ("_out", "_pieces")

    def __init__(self, out: StreamWriter, pieces: Pieces) -> None:
        self._out, self._pieces = out, pieces

    def write(self, piece: Any) -> None:
        """Append bytes, or an array of the tensor's dtype; copies nothing that lies in C order."""
        self._out.write(self._pieces.take(piece))
