"""From values to the bytes of an archive: flattened trees, shared payloads, writers in one pass."""
