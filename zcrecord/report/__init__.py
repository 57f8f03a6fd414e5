"""Writes an HTML page that shows an archive and opens without a server."""

from .pages import PageReport, describe_archive, report, report_page

__all__ = ["PageReport", "describe_archive", "report", "report_page"]
