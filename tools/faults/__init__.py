"""Faults on purpose: saves interrupted at every system call, killed at any moment, and read while they replace files.

`python -m tools.faults` states the figures; the tests run the same with fewer repetitions.
"""
