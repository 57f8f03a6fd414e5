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
    """Return True if a name has wildcards."""
    return any(c in name for c in "*?[")


def matcher(patterns: Iterable[str], *, below: bool = False) -> Callable[[str], bool]:
    """Return a test of names that is true of those that match any pattern; `below`: of all below a match, too."""
    exact = set(patterns)
    wild = [p for p in exact if is_pattern(p)]
    expressions = [fnmatch.translate(p) for p in wild]
    if below:
        expressions += [*(fnmatch.translate(f"{p}.*") for p in exact), *(re.escape(f"{p}.") for p in wild)]
    match = re.compile("|".join(expressions) or r"(?!)").match
    return lambda name: name in exact or match(name) is not None


class NameFilter:
    """Tests whether a name is selected: it, or a module around it, matches `select` (None: any) and not `exclude`."""

    def __init__(self, select: Patterns | None, exclude: Patterns | None) -> None:
        chosen, dropped = ("*",) if select is None else _checked_patterns(select), _checked_patterns(exclude or ())
        self.text = " ".join(chosen) + (f" without {' '.join(dropped)}" if dropped else "")
        self._chosen, self._dropped = matcher(chosen, below=True), matcher(dropped, below=True)

    def __call__(self, name: str) -> bool:
        """Return True if the name is selected and not excluded."""
        return self._chosen(name) and not self._dropped(name)


def _checked_patterns(patterns: Any, options: str = "select= and exclude= take") -> tuple[str, ...]:
    """Return patterns as a tuple; UnsupportedError, which names the options, if one is not text."""
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in listed:
        if not isinstance(pattern, str):
            raise UnsupportedError(f"{options} patterns, and one is a {type(pattern).__name__}")
    return listed


def name_test(
    names: Any, tensors: Callable[[], list[str]], modules: list[str], path: str | None, *, each: bool = False
) -> Callable[[str], bool]:
    """Return a test of names against `names`, some maybe patterns; TensorNotFoundError for unknown ones.

    With `each`, a pattern that matches nothing is unknown, too.
    """
    if not isinstance(names, Iterable):
        raise UnsupportedError(f"names= takes a pattern, several, or a function, not a {type(names).__name__}")
    patterns = _checked_patterns(names, "names= takes")
    known = {*tensors(), *modules} if patterns else set()
    missing = [n for n in patterns if n not in known]
    missing = [n for n in missing if not is_pattern(n) or (each and not any(map(matcher([n]), known)))]
    if missing:
        why = prefix_advice(missing[0], tensors())
        raise TensorNotFoundError(missing[0], lambda: _to_suggest(missing[0], tensors(), modules), path=path, why=why)
    return matcher(patterns)


def prefix_advice(name: str, tensors: list[str]) -> str | None:
    """Return advice for a name that others start with: a flat state dict has dots in its keys, and no modules."""
    if not any(tensor.startswith(f"{name}.") for tensor in tensors):
        return None
    return f"is no module, only how names of tensors start; '{printable(name)}.*' matches those"


def _to_suggest(name: str, tensors: list[str], modules: list[str]) -> list[str]:
    """Return the names to look for close ones in: the tensors', which are counted if none is, and close modules'."""
    import difflib  # here, because it is needed only once something went wrong

    close = [*difflib.get_close_matches(name, modules, cutoff=0.5), *(module for module in modules if name in module)]
    return list(dict.fromkeys([*close, *sorted(tensors)]))


def renamer(rename: Any) -> Callable[[str], str]:
    """Return a function from names to new ones; of several prefixes the longest counts, of patterns each in turn."""
    if not isinstance(rename, Mapping):
        if not callable(rename):
            raise UnsupportedError(f"rename= takes a mapping or a function, not a {type(rename).__name__}")
        function: Callable[[str], str] = rename
        return function
    for key, value in rename.items():
        pattern = isinstance(key, re.Pattern) and isinstance(key.pattern, str)
        if not (isinstance(value, str) and (pattern or isinstance(key, str))) and not (pattern and callable(value)):
            fault = f"rename= maps names, or compiled patterns of text, to names, and not {key!r} to {value!r}"
            raise UnsupportedError(fault)
    exact = {k: v for k, v in rename.items() if isinstance(k, str)}
    patterns = [(k, v) for k, v in rename.items() if not isinstance(k, str)]

    def new(name: str) -> str:
        prefix, rest = name, ""
        while prefix and prefix not in exact:
            prefix, _, last = prefix.rpartition(".")
            rest = f".{last}{rest}"
        if prefix in exact:
            out = exact[prefix] + (rest if prefix or not name else f".{name}")
            name = out.removeprefix(".")
        for pattern, replacement in patterns if name else ():
            name = pattern.sub(replacement, name)
        return name

    return new


def star_match(old: str) -> Callable[[str], re.Match[str] | None]:
    """Return a match of names against a pattern whose only wildcard is `*`, any text; each `*` is a group."""
    return re.compile("(.*)".join(map(re.escape, old.split("*"))), re.DOTALL).fullmatch


def star_renamer(old: str, new: str) -> Callable[[str], str]:
    """Return a function that renames what matches `old`: the n-th `*` of `new` is the text that the n-th stands for."""
    parts = new.split("*")
    if old.count("*") != len(parts) - 1:
        fault = f"'{printable(old)}' has {old.count('*')} *, the new name '{printable(new)}' {len(parts) - 1}"
        raise UnsupportedError(f"{fault}; give both the same number of *")
    match = star_match(old)

    def rename(name: str) -> str:
        texts = match(name)
        return name if texts is None else "".join(a + b for a, b in zip(parts, [*texts.groups(), ""], strict=True))

    return rename
