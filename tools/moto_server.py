"""moto's S3 server on this machine, for tests and benchmarks; nothing leaves it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock


def moto_app() -> Any:
    """Return moto's WSGI application, with stores that are empty."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

    return DomainDispatcherApplication(create_backend_app)


@contextlib.contextmanager
def serving(app: Any) -> Iterator[str]:
    """Serve a WSGI application by threads of this process; yields its URL."""
    from moto.moto_server.werkzeug_app import MotoRequestHandler
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with mock.patch.dict(os.environ, AWS_EC2_METADATA_DISABLED="true"):  # no one is asked for credentials
            yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def serving_moto(bucket: str) -> Iterator[dict[str, Any]]:
    """Yield the options of fsspec for a server with one empty bucket."""
    import s3fs

    with serving(moto_app()) as url:
        options = {"key": "key", "secret": "secret", "client_kwargs": {"endpoint_url": url}}
        s3fs.S3FileSystem(**options).mkdir(bucket)
        yield options
