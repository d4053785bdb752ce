"""Take the screenshots of docs/guides/web-page.md: the page of a demo server, in chromium without a screen.

    python -m tools.page_screenshots

Needs selenium, chromium and its driver, as the tests of the page do. Writes docs/guides/images/page-*.webp.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from tests.browser.browser import Browser, open_browser
from tests.browser.conftest import ServerProcess
from tests.browser.test_views import Load

FOLDER = Path("docs/guides/images")
QUALITY = 55
PROMPT = "Tell me about a lion and a mouse."


def save(browser: Browser, name: str) -> None:
    """Write what the window shows as a WebP file."""
    options = {"format": "webp", "quality": QUALITY}
    path = FOLDER / f"page-{name}.webp"
    path.write_bytes(base64.b64decode(browser.command("Page.captureScreenshot", options)["data"]))
    print(f"{path}: {path.stat().st_size} bytes")


def show_chat(browser: Browser, url: str) -> None:
    """Show an answer with the probabilities of its tokens."""
    browser.open(url, width=1180, height=760)
    browser.until(lambda: browser.one("#model").text, "the model")
    browser.click(lambda: browser.labelled("Token prob"))
    browser.labelled("Max tokens").send_keys("70")
    browser.labelled("Seed").send_keys("3")
    browser.run("scrollTo(0, 0); document.querySelector('#view-chat .side details').scrollTop = 0")
    browser.labelled("Message").send_keys(PROMPT + "\n")
    browser.until(lambda: "70 tokens" in browser.run("return document.querySelector('.log').textContent"), "the answer")
    browser.run("scrollTo(0, 0)")
    save(browser, "chat")


def show_engine(browser: Browser, url: str) -> None:
    """Show the engine while it computes two requests of one prefix."""
    browser.open(f"{url}/#engine", width=1180, height=940)
    with Load(url):
        browser.until(lambda: browser.run("return document.querySelector('canvas.kv').clientHeight > 40"), "blocks")
        threading.Event().wait(8)  # until the charts have something to show
        save(browser, "engine")


def main() -> int:
    """Take all screenshots; return the exit status."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        print("chromium and chromedriver are not installed", file=sys.stderr)
        return 1
    server = ServerProcess("--max-num-seqs", "8")
    try:
        server.wait_until_ready()
        with tempfile.TemporaryDirectory() as folder:
            browser = open_browser(Path(folder))
            try:
                show_chat(browser, server.url)
                show_engine(browser, server.url)
            finally:
                browser.close()
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
