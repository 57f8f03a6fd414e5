"""Choice of tensors and modules by name: exact names, patterns as a shell has them, new names for old ones.

`*` and `?` match dots too, and case counts. A name matches itself, whatever characters it has.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from zcrecord.errors import TensorNotFoundError, UnsupportedError, printable

Patterns = str | Iterable[str]


def is_pattern(name: str) -> bool:
    """Return True if a name has a wildcard: `*`, `?` or `[`."""
    return any(wildcard in name for wildcard in "*?[")


def matcher(patterns: Iterable[str], *, below: bool = False) -> Callable[[str], bool]:
    """Return a test whether a name matches any pattern; with `below` also whether a module around it does."""
    exact = set(patterns)
    wild = [pattern for pattern in exact if is_pattern(pattern)]
    expressions = [fnmatch.translate(pattern) for pattern in wild]
    if below:
        expressions += [fnmatch.translate(f"{pattern}.*") for pattern in exact]
        expressions += [re.escape(f"{pattern}.") for pattern in wild]  # a name matches itself, too
    match = re.compile("|".join(expressions) or r"(?!)").match
    return lambda name: name in exact or match(name) is not None


class NameFilter:
    """Tests whether a name is selected: it, or a module around it, matches `select` (None: any) and not `exclude`."""

    def __init__(self, select: Patterns | None, exclude: Patterns | None) -> None:
        selected, excluded = ("*",) if select is None else _checked_patterns(select), _checked_patterns(exclude or ())
        self.text = " ".join(selected) + (f" without {' '.join(excluded)}" if excluded else "")
        self._is_selected, self._is_excluded = matcher(selected, below=True), matcher(excluded, below=True)

    def __call__(self, name: str) -> bool:
        """Return True if the name is selected and not excluded."""
        return self._is_selected(name) and not self._is_excluded(name)


def _checked_patterns(patterns: Any, options: str = "select= and exclude= take") -> tuple[str, ...]:
    """Return one pattern or several as a tuple; UnsupportedError, which starts with `options`, if one is no str."""
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise UnsupportedError(f"{options} patterns, and one is a {type(pattern).__name__}")
    return listed


def name_test(
    names: Any, tensors: Callable[[], list[str]], modules: list[str], path: str | None, *, each: bool = False
) -> Callable[[str], bool]:
    """Return a test whether a name matches `names`, names and patterns of tensors or modules in the archive at `path`.

    TensorNotFoundError for a name that is not there; with `each`, also for a pattern that matches nothing.
    """
    if not isinstance(names, Iterable):
        raise UnsupportedError(f"names= takes a pattern, several, or a function, not a {type(names).__name__}")
    patterns = _checked_patterns(names, "names= takes")
    known = {*tensors(), *modules} if patterns else set()
    missing = [name for name in patterns if name not in known]
    missing = [name for name in missing if not is_pattern(name) or (each and not any(map(matcher([name]), known)))]
    if missing:
        why = prefix_advice(missing[0], tensors())
        raise TensorNotFoundError(missing[0], lambda: _to_suggest(missing[0], tensors(), modules), path=path, why=why)
    return matcher(patterns)


def prefix_advice(name: str, tensors: list[str]) -> str | None:
    """Return advice for a name that tensors' names start with, as in a flat state dict; None for other names."""
    if not any(tensor.startswith(f"{name}.") for tensor in tensors):
        return None
    return f"is no module, only how names of tensors start; '{printable(name)}.*' matches those"


def _to_suggest(name: str, tensors: list[str], modules: list[str]) -> list[str]:
    """Return candidates for an error's suggestions: modules with a name like `name`, then all tensors."""
    import difflib  # here, because it is needed only once something went wrong

    close = [*difflib.get_close_matches(name, modules, cutoff=0.5), *(module for module in modules if name in module)]
    return list(dict.fromkeys([*close, *sorted(tensors)]))


def renamer(rename: Any) -> Callable[[str], str]:
    """Return a function from names to new names: `rename` itself, or by a mapping of prefixes and patterns.

    The longest prefix of a name is replaced, then each pattern in turn. UnsupportedError for anything else.
    """
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise UnsupportedError(f"rename= takes a mapping or a function, not a {type(rename).__name__}")
        function: Callable[[str], str] = rename
        return function
    for key, value in rename.items():
        is_text_pattern = isinstance(key, re.Pattern) and isinstance(key.pattern, str)
        is_name = is_text_pattern or isinstance(key, str)
        if not (is_name and isinstance(value, str)) and not (is_text_pattern and callable(value)):
            fault = f"rename= maps names, or compiled patterns of text, to names, and not {key!r} to {value!r}"
            raise UnsupportedError(fault)
    prefixes = {key: value for key, value in rename.items() if isinstance(key, str)}
    patterns = [(key, value) for key, value in rename.items() if not isinstance(key, str)]

    def new_name(name: str) -> str:
        prefix, suffix = name, ""
        while prefix and prefix not in prefixes:
            prefix, _, last = prefix.rpartition(".")
            suffix = f".{last}{suffix}"
        if prefix in prefixes:
            suffix = f".{name}" if name and not prefix else suffix
            name = f"{prefixes[prefix]}{suffix}".removeprefix(".")
        for pattern, replacement in patterns if name else ():
            name = pattern.sub(replacement, name)
        return name

    return new_name


def star_match(old: str) -> Callable[[str], re.Match[str] | None]:
    """Return the fullmatch function of a pattern whose only wildcard is `*`, any text; each `*` is a group."""
    return re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL).fullmatch


def star_renamer(old: str, new: str) -> Callable[[str], str]:
    """Return a function that renames what matches `old`: the n-th `*` of `new` is the text that the n-th stands for."""
    parts = new.split("*")
    if old.count("*") != len(parts) - 1:
        fault = f"'{printable(old)}' has {old.count('*')} *, the new name '{printable(new)}' {len(parts) - 1}"
        raise UnsupportedError(f"{fault}; give both the same number of *")
    match = star_match(old)

    def rename(name: str) -> str:
        if (matched := match(name)) is None:
            return name
        return "".join(part + text for part, text in zip(parts, [*matched.groups(), ""], strict=True))

    return rename
