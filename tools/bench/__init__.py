"""Benchmarks: our work and a peer's side by side in one run, interleaved, as medians; what was promised stands beside.

    python -m tools.bench                     everything, to tools/bench/results.json (needs 8 GB of disk)
    python -m tools.bench --only small sparse
    python -m tools.bench --quick             small sizes, few repetitions: shows that it runs, not how fast it is
    python -m tools.bench --readme            puts results.json into README.md and the README.md beside this file
    python -m tools.bench --check             tells whether it is there

A module to an area, each with `run(settings)`; `harness` times and describes the machine, `table` writes tables,
`reasons` README's.
Files are warm in the page cache unless a row says otherwise. Lower is better in every row.
"""
