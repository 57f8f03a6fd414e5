"""Answers of zcrecord and its peers to each attack, as Markdown tables: `python -m tools.attacks [MODULE...]`.

The tricks are those of `tests/attacks/peers.py`: archives for zcrecord, files made alike for safetensors and numpy; the
models of `onnx_files.py` and `external.py`, the same file for zcrecord, `onnx.load` and the checker; the files of
`foreign.py`, the same for zcrecord and for the package whose format it is; and the servers of `servers.py` that end by
themselves, for zcrecord and fsspec's `cat_file`. A cell has the answer, and what it took where that is much: processor
time, and the peak of memory; where a peer is asked in two ways, the worse one. A trick that each refuses at little cost
is counted. It needs fork and Linux's /proc, as `attacks.running` does.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.measure import MIB

SECONDS, NBYTES = 0.1, 16 * MIB  # less is not told
REFUSED = r"(?!accepted|hung|killed)\w+"
TESTS = Path(__file__).resolve().parents[1] / "tests"
# Module of attacks -> column -> its package, and the doors that it stands for.
COLUMNS: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "attacks.peers": {
        "zcrecord": ("zcrecord", ("load_record",)),
        "safetensors": ("safetensors", ("load", "safe_open")),
        "numpy": ("numpy", ("np.load",)),
    },
    **{
        module: {
            "zcrecord": ("zcrecord", ("convert",)),
            "onnx.load": ("onnx", ("onnx.load",)),
            "onnx.checker": ("onnx", ("onnx.checker",)),
        }
        for module in ("attacks.onnx_files", "attacks.external")
    },
    "attacks.foreign": {
        "zcrecord": ("zcrecord", ("convert",)),
        "safe_open": ("safetensors", ("safe_open",)),
        "numpy.load": ("numpy", ("numpy.load",)),
        "torch.load": ("torch", ("torch.load",)),
    },
    "attacks.servers": {"zcrecord": ("zcrecord", ("load_record",)), "fsspec": ("fsspec", ("cat_file",))},
}


def main(modules: Sequence[str]) -> None:
    for module in COLUMNS:
        if not modules or module.partition(".")[2] in modules:
            print(table(module), end="\n\n", flush=True)


def table(module: str) -> str:
    """Return the table of a module's attacks."""
    sys.path += [path for path in (str(TESTS), str(TESTS / "support")) if path not in sys.path]  # not installed
    from attacks.running import answers

    with tempfile.TemporaryDirectory() as folder:
        ours = answers(module, Path(folder), "ours", how="timed")
        found = [*ours, *answers(module, Path(folder), "peers", how="timed")]
    columns = COLUMNS[module]
    lines = [
        f"| trick | {' | '.join(f'{name} {version(package)}' for name, (package, _) in columns.items())} |",
        f"|---|{'---|' * len(columns)}",
    ]
    alike = 0
    for trick in dict.fromkeys(answer.attack for answer in ours):
        cells = [worst(a for a in found if a.attack == trick and a.door in doors) for _, doors in columns.values()]
        if set(cells[1:]) == {"-"}:
            continue  # nobody else was asked
        if all(cell == "-" or re.fullmatch(REFUSED, cell) for cell in cells):
            alike += 1
        else:
            lines.append(f"| {trick} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Refused by each, in less time and memory than is told here: {alike} more."])


def worst(told: Iterable[Any]) -> str:
    """Return the cell of the answer that took longest; of doors that answer differently, the one that accepts."""
    sorted_ones = sorted(told, key=lambda a: (not a.kind, a.seconds))
    if not sorted_ones:
        return "-"
    answer = sorted_ones[-1]
    lost = answer.kind == "hung" or answer.kind.startswith("killed")
    took = [f"{1000 * answer.seconds:.0f} ms"] if answer.seconds >= SECONDS and not lost else []
    took += [f"{answer.resident / MIB:.0f} MiB"] if answer.resident >= NBYTES and not lost else []
    return ", ".join([answer.kind or "accepted", *took])


if __name__ == "__main__":
    main(sys.argv[1:])
