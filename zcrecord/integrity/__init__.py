"""Signatures of records, and comparisons of two."""
