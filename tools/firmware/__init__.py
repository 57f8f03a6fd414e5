"""The digits classifier as firmware of a Cortex-M3, its weights used where they are flashed.

    python -m tools.firmware

`archives` makes what is flashed, the Makefile makes images of it, `images` runs and examines them, `__main__` shows the
figures.
"""
