"""One page of HTML that shows an archive, to be opened without a server."""

from .pages import PageReport, describe_archive, report, report_page

__all__ = ["PageReport", "describe_archive", "report", "report_page"]
