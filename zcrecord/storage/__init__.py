"""Files, memory and streams: mappings, reads, sinks, scratch files, uploads, compressed input, threads.

Errors of the system and of stores are raised as SourceError, unless a docstring says otherwise.
"""
