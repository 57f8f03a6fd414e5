"""All errors that zcrecord raises for bad input, a missing tensor or a failing disk, as one tree.

::

    Exception
    └── RecordError                      names the place (path, tensor, offset), the fault, and what to do
        ├── FormatError(ValueError)      the bytes are not a valid archive
        │   ├── VersionError             a later version, or a feature this reader does not know
        │   └── IntegrityError           a checksum or digest does not match: the bytes changed
        ├── LimitError(ValueError)       a documented limit is exceeded, on either side
        ├── UnsupportedError(TypeError)  a legal value that the format or this build cannot hold
        ├── MismatchError(TypeError)     the record does not match the class or pytree it is loaded into
        ├── ProducerError(ValueError)    a lazily produced tensor differs from its declaration
        ├── FillError(ValueError)        a hollow record is filled twice, sealed too early, or was aborted
        ├── NameCollisionError(ValueError)  two tensors, modules or attributes would have the same name
        ├── LoadCancelledError           the caller cancelled a load
        ├── OnnxError(ValueError)        the input is not a valid ONNX model
        │   └── ExternalDataError        an external-data path breaks a rule
        ├── TensorNotFoundError(KeyError)
        ├── DependencyError(ImportError) an optional package is missing; says how to install it
        └── SourceError(OSError)         the operating system or a server reports an error
            ├── SourceNotFoundError(FileNotFoundError)
            ├── DestinationExistsError(FileExistsError)
            └── PipeClosedError(BrokenPipeError)

This module has the text and attributes of errors. Other modules decide when to raise them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

__all__ = [
    "Advice",
    "DependencyError",
    "DestinationExistsError",
    "ExternalDataError",
    "FillError",
    "FormatError",
    "IntegrityError",
    "LimitError",
    "LoadCancelledError",
    "MismatchError",
    "NameCollisionError",
    "OnnxError",
    "PipeClosedError",
    "ProducerError",
    "RecordError",
    "SourceError",
    "SourceNotFoundError",
    "TensorNotFoundError",
    "UnsupportedError",
    "VersionError",
    "missing_package",
    "printable",
]


def printable(text: str, limit: int = 200) -> str:
    """Return `text` with unprintable characters escaped, and its middle cut out beyond `limit` characters."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}…{text[-limit // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Advice(NamedTuple):
    """Advice to give an argument; `text` has `{}` in the place of its name and value.

    `str` writes them as Python does. A front end may write them in its own way, as the command line writes options.

    Example:
        >>> str(Advice("{} replaces it", "force", True)), str(Advice("name one by {}", "module"))
        ('force=True replaces it', 'name one by module=')
    """

    text: str
    argument: str = ""
    value: Any = None  # the one to give; None if the caller has to choose it

    def __str__(self) -> str:
        return self.text.format(f"{self.argument}={'' if self.value is None else repr(self.value)}")


class RecordError(Exception):
    """Base class of all errors of zcrecord. The text names the place, the fault, and what to do. Can be pickled.

    Attributes:
        message: the fault.
        advice: what to do about it, if that is to give an argument; else None, and `message` has it.
        path: the file; None if it is not known.
        tensor: the full name of the tensor or module; None if the error is not about one.
        offset: byte offset of the fault in the file; None if it is not known.
        damage: after a full verification every damaged range, as `Damage`; the message names the first.
    """

    advice: Advice | None = None
    damage: tuple[Any, ...] = ()
    _stored: ClassVar[tuple[str, ...]] = ("message", "path", "tensor", "offset", "args")  # maybe outside __dict__

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        advice: Advice | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.advice = message, advice
        self.path, self.tensor, self.offset = path, tensor, offset

    def __str__(self) -> str:
        return self.describe()

    def describe(self, advise: Callable[[Advice], str] = str) -> str:
        """Return the text of the error, as `str` does, with the advice in the words of a front end."""
        where = [printable(self.path)] if self.path else []
        if self.tensor is not None:
            where.append(f"tensor '{printable(self.tensor)}'")
        text = self.text(advise)
        return ": ".join([*where, printable(text, len(text))])

    def text(self, advise: Callable[[Advice], str] = str) -> str:
        """Return message and advice without the place, unescaped; `advise` may return "" for no advice."""
        advice = "" if self.advice is None else advise(self.advice)
        return f"{self.message}; {advice}" if advice else self.message

    def located(self, *, path: str | None = None, tensor: str | None = None, offset: int | None = None) -> RecordError:
        """Fill in the places that are still unknown, and return this same error."""
        self.path = self.path if self.path is not None else path
        self.tensor = self.tensor if self.tensor is not None else tensor
        self.offset = self.offset if self.offset is not None else offset
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        stored = {name: getattr(self, name) for name in self._stored}
        return _rebuild, (type(self), {**self.__dict__, **stored})


@contextlib.contextmanager
def located(*, path: str | None = None, tensor: str | None = None) -> Iterator[None]:
    """Fill in the places of a RecordError that the block raises, where they are still unknown."""
    try:
        yield
    except RecordError as error:
        error.located(path=path, tensor=tensor)
        raise


def _rebuild(kind: type[RecordError], state: dict[str, Any]) -> RecordError:
    """Return an unpickled error; its constructor is not called, since subclasses take other arguments."""
    error = kind.__new__(kind)
    for key, value in state.items():
        setattr(error, key, value)
    return error


class FormatError(RecordError, ValueError):
    """The bytes are not a valid archive."""


class VersionError(FormatError):
    """The archive is of another version of the format, or needs a feature that this release does not know."""


class IntegrityError(FormatError):
    """A checksum or digest does not match: the bytes are not those that were written."""


class LimitError(RecordError, ValueError):
    """A documented limit is exceeded; writer and reader enforce the same ones."""


class UnsupportedError(RecordError, TypeError):
    """A legal value that the format, or this operation, cannot hold."""


class MismatchError(RecordError, TypeError):
    """The record does not match the class or pytree it is loaded into; `tensor` is the path of the first difference."""


class ProducerError(RecordError, ValueError):
    """A lazily produced tensor differs from its declaration: too few or too many bytes, another type, or used up."""


class FillError(RecordError, ValueError):
    """A hollow record is filled twice, sealed while a tensor is missing, or used after it was sealed or aborted."""


class NameCollisionError(RecordError, ValueError):
    """Two tensors, modules or attributes of one record would have the same name."""


class LoadCancelledError(RecordError):
    """The caller cancelled a load by `cancel`; the loader has released all its memory."""


class OnnxError(RecordError, ValueError):
    """The input is not a valid ONNX model."""


class ExternalDataError(OnnxError):
    """An external-data reference breaks one of the rules that keep it inside the model's folder."""


class DependencyError(RecordError, ImportError):
    """An optional package is missing; the message gives the command that installs it."""


def missing_package(package: str, *others: str, extra: str | None = None, why: str = "") -> DependencyError:
    """Return the error of a missing package, with the command that installs it.

    No message has `zcrecord[extra]`: on a package index that name may belong to somebody else.

    Args:
        package: its name for pip; `others` are installed with it.
        extra: the extra of zcrecord that has all of them.
        why: the start of the message, instead of "PACKAGE is not installed".
    """
    checkout = f", or in a checkout of zcrecord pip install '.[{extra}]'" if extra else ""
    install = f"pip install {' '.join((package, *others))}{checkout}"
    return DependencyError(f"{why or f'{package} is not installed'}; {install}")


class TensorNotFoundError(RecordError, KeyError):
    """No tensor, or no module, has that name.

    The message lists close names. They are looked for when the message is first read. With `why` that is the message.
    """

    def __init__(
        self,
        name: str = "",
        names: Callable[[], Iterable[str]] = tuple,
        *,
        path: str | None = None,
        why: str | None = None,
    ) -> None:
        super().__init__("", path=path, tensor=name)
        self._names: Callable[[], Iterable[str]] | None = names if why is None else None
        self.args = (name,)
        self._text = why or ""

    @property
    def message(self) -> str:
        """The error's text with close names; reading it never raises another error."""
        if self._names is not None:
            try:
                self._text = _close_names(self.tensor or "", self._names())
            except RecordError:  # the names are damaged, or the record is closed by now
                self._text = "not in this record"
            self._names = None
        return self._text

    @message.setter
    def message(self, text: str) -> None:
        self._text = text


def _close_names(name: str, names: Iterable[str]) -> str:
    """Return the message for a name that is not in a record: up to three close names, else the first three."""
    import difflib  # here, because it is needed only once something went wrong

    all_names, last_part = list(names), name.rpartition(".")[2]
    likely = [n for n in all_names if n.rpartition(".")[2] == last_part or name in n]
    candidates = (likely or all_names)[:2000]  # for which difflib takes up to 0.4 s
    close = difflib.get_close_matches(name, candidates, n=3, cutoff=0.5) or [n for n in candidates if name in n][:3]
    if close:
        return "not in this record; close names: " + ", ".join(f"'{printable(n)}'" for n in close)
    examples = ", such as " + ", ".join(f"'{printable(n)}'" for n in all_names[:3]) if all_names else ""
    return f"not in this record of {len(all_names)} names{examples}"


class SourceError(RecordError, OSError):
    """The operating system or a server reports an error; `errno` is its number, if it has one."""

    _stored: ClassVar[tuple[str, ...]] = (*RecordError._stored, "errno", "strerror", "filename")

    def __init__(
        self,
        message: str = "",
        *,
        path: str | None = None,
        tensor: str | None = None,
        offset: int | None = None,
        advice: Advice | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, tensor=tensor, offset=offset, advice=advice)
        self.errno, self.strerror, self.filename = errno, message, path


class SourceNotFoundError(SourceError, FileNotFoundError):
    """There is no such file."""


class DestinationExistsError(SourceError, FileExistsError):
    """The output exists already, and replacing it was not allowed."""


class PipeClosedError(SourceError, BrokenPipeError):
    """The reader of a pipe closed it; the output is incomplete."""
