"""Chromium for tests of pages: headless, with WebGPU in software, and strict about what a page complains of.

A test marked `needs("chromium")` takes the fixture `pages` (see conftest.py), and opens what it wants to look at:
`pages(width=360, scheme="dark")` is a new page of a context of its own. Whatever a page writes to its console as an
error or a warning, every exception nobody caught, every refusal of its Content-Security-Policy and every request that
leaves this machine is a complaint, and a test with complaints fails; one that provokes some says which
(`expect_complaints`), or takes them from `pages.complaints` itself. The browser is one for each test file, not one for
the session: while it lives, Playwright has an event loop running in this thread, in which nobody else could call
asyncio.run.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

# SwiftShader is a GPU made of software: WebGPU runs wherever Chromium does.
ARGUMENTS = [
    "--no-sandbox",  # the tests may run as root, in a container
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--use-vulkan=swiftshader",
    "--ignore-gpu-blocklist",
    "--enable-features=Vulkan,WebMachineLearningNeuralNetwork",  # the second one is navigator.ml
]
NOISE = ("powerPreference option is currently ignored",)  # what Chromium itself has to say
PATIENCE = 20_000  # ms: a loaded machine is slow; nothing is to take as long
HERE = {"localhost", "127.0.0.1", "::1"}


@contextmanager
def chromium(*more: str) -> Iterator[Browser]:
    """Run Debian's Chromium, headless, with more arguments if there are any."""
    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*ARGUMENTS, *more])
        try:
            yield browser
        finally:
            browser.close()


class Pages:
    """Makes pages, and keeps what they complain of."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        self.complaints: list[str] = []

    def __call__(self, *, width: int = 1280, height: int = 800, scheme: str = "light", **context: Any) -> Page:
        """Return a new page of that size and colour scheme ("light" or "dark"), in a context of its own."""
        options = {"viewport": {"width": width, "height": height}, "color_scheme": scheme, **context}
        page = self.browser.new_context(**options).new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"uncaught: {error}"))
        page.on("request", lambda request: self._request(request.url))
        return page

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not any(noise in message.text for noise in NOISE):
            self.complaints.append(f"{message.type}: {message.text}")

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname not in HERE:
            self.complaints.append(f"left this machine: {url}")

    def expect_complaints(self, *about: str) -> None:
        """Check that every complaint so far is about one of these, and forget them."""
        assert [text for text in self.complaints if not any(one in text for one in about)] == []
        self.complaints.clear()

    def close(self) -> None:
        for context in list(self.browser.contexts):
            context.close()


def scrolls_sideways(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"))
