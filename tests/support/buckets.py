"""An S3 server in this process, whose requests are noted, and answered by an error or not at all where a test says so.

The server is moto's; nothing leaves this machine. With ZCRECORD_TEST_S3=http://KEY:SECRET@HOST:PORT requests are handed
on to a real server there, which has to take parts of 64 KiB; see tools/swift.py.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tools.moto_server import moto_app, serving

ERROR = b"<Error><Code>%s</Code><Message>refused by the test</Message></Error>"
ELSEWHERE = os.environ.get("ZCRECORD_TEST_S3", "")
PATIENCE = {"connect_timeout": 5, "read_timeout": 20, "retries": {"max_attempts": 1}}


class S3:
    """A server of S3.

    Attributes:
        options: to reach it, as `storage_options`.
        requests: so far, as "PUT /bucket/m.zcr?partNumber=1", without the ids of uploads.
        answers: maps a request to what becomes of it: None lets it through, "lost" carries it out and closes the
            connection, "closed" closes it at once; anything else is the status and code of an error.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        self.options: dict[str, Any] = {}
        self.requests: list[str] = []
        self.answers: Callable[[str], str | None] = lambda _: None

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        query = "&".join(sorted(p for p in environ["QUERY_STRING"].split("&") if not p.startswith("uploadId")))
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}{'?' if query else ''}{query}"
        self.requests.append(request)
        code = self.answers(request)
        if code is None:
            return self._app(environ, start)  # type: ignore[no-any-return]
        if code == "lost":
            b"".join(self._app(environ, lambda *_: None))
        if code in ("lost", "closed"):
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionAbortedError  # which the server passes over
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(code, [("Content-Type", "application/xml")])
        return [ERROR % code.partition(" ")[2].encode()]

    def file_system(self) -> Any:
        """Return fsspec's file system of the server, which has listed nothing yet."""
        import s3fs

        fs = s3fs.S3FileSystem(**self.options)
        fs.invalidate_cache()
        return fs

    def empty(self) -> None:
        """Remove all objects and unfinished uploads, and forget all requests."""
        fs = self.file_system()
        fs.clear_multipart_uploads("bucket")
        for key in fs.find("bucket"):
            fs.rm_file(key)
        self.requests.clear()

    def unfinished(self, bucket: str) -> list[str]:
        """Return the keys of multipart uploads that were neither completed nor aborted: the store keeps their parts."""
        return [upload["Key"] for upload in self.file_system().list_multipart_uploads(bucket)]


def forward(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
    """Hand a request on to the server elsewhere, as it is, and its answer back."""
    names = {name: name[5:].replace("_", "-").title() for name in environ if name.startswith("HTTP_")}
    headers = {header: environ[name] for name, header in names.items() if header != "Transfer-Encoding"}
    headers |= {"Content-Type": environ["CONTENT_TYPE"]} if environ.get("CONTENT_TYPE") else {}
    body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    headers["Content-Length"] = str(len(body))
    connection = http.client.HTTPConnection(ELSEWHERE.rpartition("@")[2])
    connection.request(environ["REQUEST_METHOD"], environ["RAW_URI"], body, headers)
    answer = connection.getresponse()
    start(f"{answer.status} {answer.reason}", [h for h in answer.getheaders() if h[0] != "Connection"])
    data = answer.read()
    connection.close()
    return [data]


@contextlib.contextmanager
def serving_s3() -> Iterator[S3]:
    """Serve S3, with an empty bucket named "bucket"."""
    s3 = S3(forward if ELSEWHERE else moto_app())
    with serving(s3) as url:
        key, secret = (ELSEWHERE or "http://key:secret@").removeprefix("http://").rpartition("@")[0].rsplit(":", 1)
        s3.options = {"key": key, "secret": secret, "endpoint_url": url, "config_kwargs": PATIENCE}
        with contextlib.suppress(FileExistsError):
            s3.file_system().mkdir("bucket")
        yield s3
