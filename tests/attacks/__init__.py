"""The attack catalogue: hostile archives and files, each with the error it must give, and what runs them.

`catalogue` says what an attack is, `running` has each answered in a process of its own. The files are made when they
are needed; none is kept.
"""
