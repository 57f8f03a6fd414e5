"""README's figures, from the results file alone: reasons to take zcrecord, and where its neighbours win.

A reason is a text with places for figures. `{row|peer}` is a pair, ours or theirs first, whichever is ahead in that
column; a pair that the results turn around is an error, so that README never promises what was not measured.
`{row:peer}` is one figure, and `{row=peer}` ours, if the other is not ahead by more than a twentieth. A clause that
begins with a question mark is left out where the results do not bear it out.
"""

from __future__ import annotations

import re
from typing import Any

from tools.bench.harness import OURS, Row
from tools.bench.table import quantity, rows_of, wins

WORKS = {
    "open": "open and get one tensor of 10,000 x 1 KB, whole index verified",
    "save": "save 10,000 x 1 KB, digests on, no fsync",
    "all": "open and get all 10,000: dict(record)",
    "private": "load 1.6 GB in 24 tensors: private memory",
    "session": "ONNX Runtime, GPT, 1.6 GB: create the session",
    "four": "4 ONNX Runtime sessions, one weight in two branches, 537 MB: memory",
    "latency": "ONNX Runtime, GPT, 1.6 GB: steady latency, batch 1",
    "size": "ONNX Runtime, GPT, 1.6 GB: size of the file",
    "gcc": "gcc, 64 MiB of weights to an object file",
    "clang": "clang-19, 64 MiB of weights to an object file",
}
REASONS = (  # instead of, what is gained, when to stay
    (
        "safetensors",
        "one tensor of 10,000 opened in {open|safetensors}, 10,000 saved in {save|safetensors}; checksums, ties, "
        "nesting, any memory order; [one import](zcrecord/compat/README.md) to try",
        "you write for others; what they wrote opens "
        "[as it is](zcrecord/compat/README.md#use-a-folder-as-it-came-from-a-hub)",
    ),
    (
        "GGUF",
        "one of 10,000 opened in {open|gguf}, by its Python reader; 10,000 saved in {save|gguf}; ties, checksums",
        "llama.cpp runs the model: zcrecord only stores its quantized blocks",
    ),
    (
        "`.npz`",
        "10,000 arrays read in {all|npz}; private memory for 1.6 GB {private|npz}; bfloat16 and narrower",
        "arrays are few and small, or should be compressed",
    ),
    (
        "`torch.save`",
        "one of 10,000 opened in {open|torch.load(mmap)}, `mmap=True`; no pickle; read in C, Rust and browsers, too",
        "you save arbitrary Python objects",
    ),
    (
        "the `.onnx` itself",
        "session of 1.6 GB created in {session|.onnx}; four processes serve 537 MB in {four|.onnx}; "
        "?tuned, it answers as fast, in {latency=.onnx}",
        "tools edit the model; ?one process serves for long, {latency|.onnx} an answer; "
        "?the disk is short: {size|.onnx}",
    ),
    (
        "a hex array in C",
        "64 MiB compiled by gcc in {gcc|hex array}, extrapolated; typed symbols",
        "it is a few KiB; clang 19's `#embed` takes {clang:zcrecord, #embed}",
    ),
)
AHEAD = 0.95  # of the other's figure at most: `wins` counts so
# Rows of the list of what others win at: the line that a row stands in, and its name there.
LABELS = (
    (r"save 1\.6 GB .*", "1.6 GB in 24 tensors", "to save (ours with fsync)"),
    (r"load 1\.6 GB in 24 tensors: private memory", "1.6 GB in 24 tensors", "of private memory"),
    (r"torch\.distributed\.checkpoint, .*: load, (.+)", "checkpoints", r"to load, \1"),
    (r"torch state dict .*: private memory .*", "1.6 GB in 24 tensors", "of private memory for a state dict"),
    (r"torch state dict .*: ready", "1.6 GB in 24 tensors", "until a state dict is ready"),
    (r"drop-in, .*: open and get one", "drop-in", "to open one of 10,000"),
    (
        r"onnx2zc on ([\d,]+) small initializers.*, each in a module .*",
        "converting small initializers",
        r"for \1 in modules",
    ),
    (r"onnx2zc on ([\d,]+) small initializers .*", "converting small initializers", r"for \1"),
    (r"ONNX Runtime, (\w+).*: steady latency, batch (\d+)", "latency in ONNX Runtime", r"for \1, batch \2"),
    (r"ONNX Runtime, ([\w ]+), .*: tune, beside the session's creation", "its session beside tuning, once", r"for \1"),
    (r"ONNX Runtime, (\w+).*: size of the file", "size beside a tuned archive", r"for \1"),
    (r"open (\d+) files of .* as they are, and get one", "30 shards of 1,000", "to open as they are"),
    (r"save (\d+) files of 1,000 tensors .*", "30 shards of 1,000", "to save"),
    (r"a checkpoint by .*: one file of it, no fsync", "checkpoints", "to join"),
)


def figures(results: dict[str, Any]) -> str:
    """Return the text between README's markers.

    Raises:
        ValueError: a row that is wanted is not there, or the results contradict a reason.
    """
    lines = ["Why change? The first figure of a pair is the winner's, the figure in brackets the other's.", ""]
    lines += ["| instead of | zcrecord gains | keep it when |", "|---|---|---|"]
    lines += [f"| {' | '.join(cells)} |" for cells in table(results)]
    lines += ["", "Where others win, with our figures in brackets:", "", *_wins(rows_of(results)), ""]
    machine = results["machine"]
    where = f"{machine['cores']} cores of an {machine['cpu']}"
    lines += [f"Medians, {machine['date']}, {where}; [all measurements](tools/bench/README.md)."]
    return "\n".join(lines)


def table(results: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the rows of the table of reasons with their figures.

    Raises:
        ValueError: a row that is wanted is not there, or the results contradict a reason.
    """
    rows = {row.work: row for row in rows_of(results)}
    return [(peer, _filled(gained, rows, ours=True), _filled(stay, rows, ours=False)) for peer, gained, stay in REASONS]


def _filled(text: str, rows: dict[str, Row], *, ours: bool) -> str:
    """Return a text with its figures; in the pairs of one of `ours` that one is ahead, otherwise the peer's."""
    clauses = []
    for clause in text.split("; "):
        try:
            clauses.append(_with_figures(clause.removeprefix("?"), rows, ours, AHEAD if clause[0] == "?" else 1))
        except ValueError:
            if not clause.startswith("?"):
                raise
    return "; ".join(clauses)


def _with_figures(clause: str, rows: dict[str, Row], ours: bool, most: float) -> str:
    """Return a clause with its figures, where one is ahead with at most `most` of the other's."""

    def figure(match: re.Match[str]) -> str:
        work = WORKS[match["row"]]
        if work not in rows:
            raise ValueError(f"the results have no row {work!r}")
        row = rows[work]
        pair = [row.values[OURS], row.values[match["peer"]]]
        if match["kind"] == ":":
            return quantity(pair[1], row.unit)
        ahead, behind = pair if ours else pair[::-1]
        alike = match["kind"] == "="
        if behind < AHEAD * ahead if alike else ahead >= most * behind:
            raise ValueError(f"README says otherwise than the results: {work}, {match['peer']}; change REASONS")
        first = quantity(ahead, row.unit)
        return first if alike else f"{first} ({quantity(behind, row.unit)})"

    return re.sub(r"\{(?P<row>\w+)(?P<kind>[|:=])(?P<peer>[^}]+)\}", figure, clause)


def _wins(rows: list[Row]) -> list[str]:
    """Return a line for each kind of work that a peer is ahead at, with all the figures."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row, peer in wins(rows):
        line, name = _label(row.work)
        theirs, ours = (quantity(row.values[which], row.unit) for which in (peer, OURS))
        lines.setdefault((peer, line), []).append(f"{theirs} ({ours}) {name}".rstrip())
    return [f"- {peer}, {line}: {'; '.join(named)}" for (peer, line), named in lines.items()]


def _label(work: str) -> tuple[str, str]:
    for pattern, line, name in LABELS:
        if match := re.fullmatch(pattern, work):
            return line, match.expand(name)
    return work, ""
