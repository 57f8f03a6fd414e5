"""The archive format as bytes and columns: header, index, text pools and the rules of FORMAT.md; no I/O."""
