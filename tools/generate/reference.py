"""The API reference in Markdown: a page for each public module, from its signatures and docstrings.

The source is parsed and never imported: a page needs no optional package, and is the same from every Python.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = Path("zcrecord/reference")  # relative to the root, as all paths that `files` returns
FOLDERS: tuple[Path, ...] = (PAGES,)  # that hold nothing else
ERRORS = "zcrecord.errors"
MODULES = (  # in the order of the index
    "zcrecord",
    ERRORS,
    "zcrecord.onnx",
    "zcrecord.distributed",
    "zcrecord.fleet",
    "zcrecord.formats",
    "zcrecord.remote",
    "zcrecord.loaders",
    "zcrecord.hollow",
    "zcrecord.embed",
    "zcrecord.transport",
    "zcrecord.vllm",
    "zcrecord.integrity",
    "zcrecord.report",
    "zcrecord.transformers",
    "zcrecord.lightning",
    "zcrecord.orbax",
    "zcrecord.compat.safetensors",
    "zcrecord.compat.safetensors.numpy",
    "zcrecord.compat.safetensors.torch",
    "zcrecord.compat.safetensors.flax",
)
MADE = "<!-- Made by `python -m tools.generate` from signatures and docstrings; change those. -->"
WIDTH = 100  # characters, beyond which a signature takes a line for each parameter
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Source|Note):\n")
_ENTRY = re.compile(r"(?P<names>[\w*]+(?:, [\w*]+)*): (?P<text>.+)", re.DOTALL)
_SENTENCE_OF_ERROR = re.compile(r"(?<=[.;]) (?=[A-Z]\w*Error(?:, [A-Z]\w*Error)*: )")
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Source:
    """One parsed module of the package: its name, its text and its syntax tree."""

    module: str
    is_package: bool
    text: str
    tree: ast.Module

    def as_written(self, node: ast.AST) -> str:
        """Return a node's source text: `ast.get_source_segment`, which splits the whole text into lines each time."""
        first, last = node.lineno - 1, node.end_lineno  # type: ignore[attr-defined]
        lines = [line.encode() for line in _lines(self.text)[first:last]]
        lines[-1] = lines[-1][: node.end_col_offset]  # type: ignore[attr-defined]
        lines[0] = lines[0][node.col_offset :]  # type: ignore[attr-defined]
        return b"\n".join(lines).decode()

    def segment(self, node: ast.AST) -> str:
        """Return a node's source text on one line."""
        found = self.as_written(node)
        joined = re.sub(r"\s+", " ", re.sub(r"#[^\n\"']*\n", "\n", found))
        return re.sub(r",? ([)\]}])", r"\1", re.sub(r"([(\[{]) ", r"\1", joined))

    def comment(self, node: ast.stmt) -> str:
        """Return the comment that ends a statement's line, "" where there is none."""
        assert node.end_lineno is not None
        line = _lines(self.text)[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        told = line.strip().removeprefix("#").strip()
        return "" if told.startswith(("fmt:", "noqa", "type:")) else told


@functools.cache
def _lines(text: str) -> list[str]:
    return text.split("\n")


def files() -> dict[Path, str]:
    """Return every page of the reference: its path, relative to the repository, and its whole text."""
    made = {PAGES / _file_name(module): page_of(module) for module in MODULES}
    return {PAGES / "README.md": _index()} | made


def _file_name(module: str) -> str:
    return f"{module.removeprefix('zcrecord.')}.md"


def _index() -> str:
    lines = [MADE, "", "# API reference", ""]
    lines += ["Everything here is public: names and signatures that a test pins. What is not here may change.", ""]
    lines += ["| module | |", "|---|---|"]
    lines += [f"| [`{module}`]({_file_name(module)}) | {_cell(_head(source_of(module).tree))} |" for module in MODULES]
    return "\n".join(lines) + "\n"


def page_of(module: str) -> str:
    source = source_of(module)
    names = [name for name in _public_names(source) if module == ERRORS or not _is_error(module, name)]
    found = {name: find(module, name) for name in names}
    parts = [MADE, f"# {module}", *_docstring(source.tree, module)]
    parts.append(_contents(found))
    if module == "zcrecord":
        parts.append(f"Errors: [`{ERRORS}`]({_file_name(ERRORS)}); all of them are names of `zcrecord`, too.")
    for name, (where, node) in found.items():
        parts += [f"## {name}", *_described(where, node, module)]
    return "\n\n".join(parts) + "\n"


def _contents(found: dict[str, tuple[Source, ast.stmt]]) -> str:
    lines = ["| name | |", "|---|---|"]
    for name, (source, node) in found.items():
        told = _cell(_head(node) if isinstance(node, Definition) else source.comment(node))
        lines.append(f"| [`{name}`](#{name.lower()}) | {told} |")
    return "\n".join(lines)


def _head(node: Definition | ast.Module) -> str:
    """Return the first paragraph of a docstring on one line."""
    text = ast.get_docstring(node) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


# Finding definitions.


@functools.cache
def source_of(module: str) -> Source:
    path = ROOT.joinpath(*module.split("."))
    is_package = path.is_dir()
    text = (path / "__init__.py" if is_package else path.with_suffix(".py")).read_text(encoding="utf-8")
    return Source(module, is_package, text, ast.parse(text))


def _public_names(source: Source) -> list[str]:
    """Return a module's `__all__`, of the errors what are classes."""
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            names: list[str] = ast.literal_eval(node.value)
            return [name for name in names if source.module != ERRORS or name[0].isupper()]
    raise ValueError(f"{source.module} has no __all__")


def _is_error(module: str, name: str) -> bool:
    """Tell whether a name of `zcrecord` is one of the errors, which have a page of their own."""
    return module == "zcrecord" and name in _public_names(source_of(ERRORS))


def find(module: str, name: str) -> tuple[Source, ast.stmt]:
    """Return the source and the statement that define a name of a module, through whatever it is imported from.

    Raises:
        ValueError: nothing defines it.
    """
    source = source_of(module)
    for node in _statements(source.tree.body):
        if isinstance(node, Definition) and node.name == name and not _is_overload(node):
            return source, node
        if isinstance(node, ast.Assign | ast.AnnAssign) and name in _assigned(node):
            return source, node
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return find(_imported_module(source, node), alias.name)
    raise ValueError(f"{module} does not define {name}")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield a module's statements, those under `if TYPE_CHECKING:` included."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _statements(node.body)


def _assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _imported_module(source: Source, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = source.module.split(".")
    parts = parts[: len(parts) - node.level + source.is_package]
    return ".".join([*parts, *filter(None, [node.module])])


def _decorators(node: Definition) -> list[str]:
    return [ast.unparse(decorator) for decorator in node.decorator_list]


def _is_overload(node: Definition) -> bool:
    return "overload" in _decorators(node)


# Describing them.


def _described(source: Source, node: ast.stmt, page: str) -> Iterator[str]:
    if isinstance(node, ast.ClassDef):
        yield from _class(source, node, page)
    elif isinstance(node, Function):
        yield _code(f"def {_signature(source, node, node.name)}")
        yield from _docstring(node, page)
    else:
        yield _code(_constant(source, node))


def _constant(source: Source, node: ast.stmt) -> str:
    """Return a constant on one line if it fits there, otherwise as it is written."""
    line = source.segment(node)
    return line if len(line) <= WIDTH else source.as_written(node)


def _class(source: Source, node: ast.ClassDef, page: str) -> Iterator[str]:
    bases = ", ".join(source.segment(base) for base in node.bases)
    fields = _fields(source, node)
    init = next((f for f in node.body if isinstance(f, Function) and f.name == "__init__"), None)
    if init is not None and "own use" in (ast.get_docstring(init) or ""):
        init = None
    if init is not None:
        shown = f"class {_signature(source, init, node.name, method=True, returns=False)}"
    elif fields:
        shown = f"class {_call(node.name, fields)}"
    else:
        shown = f"class {node.name}" + (f"({bases})" if bases else "")
    yield _code(shown)
    if bases and not shown.endswith(f"({bases})"):
        yield f"Bases: {', '.join(f'`{source.segment(base)}`' for base in node.bases)}."
    yield from _docstring(node, page)
    if init is not None and (ast.get_docstring(init) or "").count("\n"):
        yield from _docstring(init, page)
    for member in _members(node):
        yield from _member(source, member, node.name, page)


def _fields(source: Source, node: ast.ClassDef) -> list[str]:
    """Return the parameters of a dataclass or a named tuple: its fields in their order, those of bases first."""
    is_tuple = any(source.segment(base) == "NamedTuple" for base in node.bases)
    if not is_tuple and not any("dataclass" in decorator for decorator in _decorators(node)):
        return []
    found = []
    for base in node.bases:
        if isinstance(base, ast.Name) and not is_tuple and base.id in _names_of_classes(source):
            found += _fields(*_class_named(source, base.id))
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id[0] != "_":
            annotation = source.segment(entry.annotation)
            if "ClassVar" not in annotation:
                found.append(f"{entry.target.id}: {annotation}" + _default(source, entry.value))
    keyword_only = any("kw_only=True" in decorator for decorator in _decorators(node))
    return ["*", *found] if keyword_only and found else found


def _default(source: Source, value: ast.expr | None) -> str:
    """Return a field's default as it stands in a signature."""
    if value is None:
        return ""
    if isinstance(value, ast.Call) and source.segment(value.func).endswith("field"):
        given = {keyword.arg: source.segment(keyword.value) for keyword in value.keywords}
        return next((f" = {text}" for key, text in given.items() if key in ("default", "default_factory")), "")
    return f" = {source.segment(value)}"


def _names_of_classes(source: Source) -> set[str]:
    names = {node.name for node in source.tree.body if isinstance(node, ast.ClassDef)}
    for node in source.tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("zcrecord")):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def _class_named(source: Source, name: str) -> tuple[Source, ast.ClassDef]:
    where, node = find(source.module, name)
    assert isinstance(node, ast.ClassDef)
    return where, node


def _members(node: ast.ClassDef) -> list[Function]:
    return [f for f in node.body if isinstance(f, Function) and _is_public(f) and not _is_repeated(f)]


def _is_public(node: Function) -> bool:
    return node.name[0] != "_" or (node.name == "__getitem__" and ast.get_docstring(node) is not None)


def _is_repeated(node: Function) -> bool:
    """Tell whether a definition is an overload or a setter, of what is defined beside it."""
    return _is_overload(node) or any(decorator.endswith(".setter") for decorator in _decorators(node))


def _member(source: Source, node: Function, owner: str, page: str) -> Iterator[str]:
    if any(
        decorator in ("property", "functools.cached_property", "cached_property") for decorator in _decorators(node)
    ):
        assert node.returns is not None
        shown = f"{node.name}: {source.segment(node.returns)}  # a property"
    else:
        kind = next((f"@{d}\n" for d in _decorators(node) if d in ("classmethod", "staticmethod")), "")
        shown = f"{kind}def {_signature(source, node, node.name, method='staticmethod' not in kind)}"
    yield f"### {owner}.{node.name}"
    yield _code(shown)
    yield from _docstring(node, page)


def _signature(source: Source, node: Function, name: str, *, method: bool = False, returns: bool = True) -> str:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    shown = [_parameter(source, a, d) for a, d in zip(positional, [*defaults, *arguments.defaults], strict=True)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        shown.append(f"*{_parameter(source, arguments.vararg, None)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_parameter(source, a, d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append(f"**{_parameter(source, arguments.kwarg, None)}")
    if method:
        del shown[0]  # self
    return _call(name, shown, source.segment(node.returns) if returns and node.returns else None)


def _parameter(source: Source, argument: ast.arg, default: ast.expr | None) -> str:
    told = argument.arg + (f": {source.segment(argument.annotation)}" if argument.annotation else "")
    return told + (f" = {_value(source, default)}" if default is not None else "")


def _value(source: Source, default: ast.expr) -> str:
    """Return a default as it is written; of a constant's name what that stands for."""
    if isinstance(default, ast.Name) and default.id.isupper():
        where, node = find(source.module, default.id)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            return where.segment(node.value)
    return source.segment(default)


def _call(name: str, parameters: list[str], returned: str | None = None) -> str:
    end = f" -> {returned}" if returned is not None else ""
    line = f"{name}({', '.join(parameters)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {parameter}," for parameter in parameters), f"){end}"])


def _code(text: str, kind: str = "python") -> str:
    return f"```{kind}\n{text}\n```"


# Docstrings.


def _docstring(node: Definition | ast.Module, page: str) -> Iterator[str]:
    """Yield a docstring's blocks as Markdown: paragraphs, lists of what its sections name, and code."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    for block in re.split(r"\n{2,}(?!\s)", text):
        section = _SECTION.match(block)
        if section is None:
            yield from _paragraphs(block, page)
            continue
        inside = textwrap.dedent(block[section.end() :])
        if section[1] == "Example":
            yield _code(inside.strip("\n"), "pycon" if ">>>" in inside else "python")
        else:
            yield f"**{section[1]}:**"
            yield "\n".join(_entries(section[1], inside, page))


def _paragraphs(block: str, page: str) -> Iterator[str]:
    """Yield paragraphs, and neighbouring indented ones together as code."""
    parts = re.split(r"\n{2,}", block)
    for is_code, group in itertools.groupby(parts, lambda part: part.startswith("    ")):
        if is_code:
            code = textwrap.dedent("\n\n".join(group))
            yield _code(code, "text" if re.search("[─│]", code) else "python")
        else:
            yield from (_prose(" ".join(part.split()), page) for part in group if part.strip() != "::")


def _entries(section: str, text: str, page: str) -> Iterator[str]:
    """Yield a list item for each entry; text that names nothing is one item."""
    lines = text.strip("\n").split("\n")
    entries: list[str] = []
    for line in lines:
        begins = not line.startswith(" ") and (not entries or _ENTRY.match(line) is not None)
        if begins:
            entries.append(line)
        else:
            entries[-1] += " " + line.strip()
    if section == "Raises":
        entries = [part for entry in entries for part in _SENTENCE_OF_ERROR.split(entry)]
    for entry in entries:
        match = _ENTRY.match(entry)
        if match is None:
            yield f"- {_prose(entry, page)}"
        else:
            names = ", ".join(f"`{name}`" for name in match["names"].split(", "))
            yield f"- {names}: {_prose(match['text'], page)}"


def _prose(text: str, page: str = "") -> str:
    """Return text with what Markdown would take for HTML escaped, and public modules linked, outside of code."""
    parts = re.split(r"(`[^`]*`)", re.sub(r":\w+:(?=`)", "", text))
    for number, part in enumerate(parts):
        if part[:1] != "`":
            parts[number] = re.sub(r"([<*_])", r"\\\1", part)
        elif part[1:-1] in MODULES and part[1:-1] != page and page:
            parts[number] = f"[{part}]({_file_name(part[1:-1])})"
    return "".join(parts)
