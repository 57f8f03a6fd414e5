"""Replacements for other libraries: the same names and signatures, over archives; change one import line to try."""

__all__ = []
