"""Hollow records: every name, shape, dtype and module of a record, without the weights; filled later."""

from .hollow_record import HollowRecord, hollow_of

__all__ = ["HollowRecord", "hollow_of"]
