"""Stand-ins for other libraries: the same names and signatures, over archives. One import line is the whole trial."""

__all__ = []
