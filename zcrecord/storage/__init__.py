"""Files, memory and streams: mappings, reads, sinks, scratch files, compressed input, threads."""
