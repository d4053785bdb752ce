"""Take the screenshots of docs/guides/web-page.md: the page of a demo server, in chromium without a screen.

    python -m tools.page_screenshots [NAME ...]      # all without names: chat engine compare batches router

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
from tests.browser.test_chat_settings import field
from tests.browser.test_router_page import routing
from tests.browser.test_views import Load, batch_file

FOLDER = Path("docs/guides/images")
QUALITY = 15
PROMPT = "Tell me about a lion and a mouse."


def save(browser: Browser, name: str) -> None:
    """Write what the window shows as a WebP file, at three quarters of its size."""
    x, y, width, height = browser.run("return [scrollX, scrollY, innerWidth, innerHeight]")
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 0.75}
    options = {"format": "webp", "quality": QUALITY, "clip": clip}
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


def show_compare(browser: Browser, url: str) -> None:
    """Show two answers that differ by their seed."""
    browser.open(f"{url}/#compare", width=1180, height=1240)
    browser.until(lambda: browser.one("#model").text, "the model")
    for side, seed in enumerate(("1", "2")):
        for label, text in (("Max tokens", "24"), ("Seed", seed), ("Temperature", "0.8")):
            field(browser, side, label).send_keys(text)
    browser.labelled("Prompt").send_keys(PROMPT)
    browser.click(lambda: browser.button("Compare"))
    note = "return document.querySelector('#view-compare .note').textContent"
    browser.until(lambda: browser.run(note).startswith("The answers"), "the difference")
    save(browser, "compare")


def show_batches(browser: Browser, url: str) -> None:
    """Show a batch that has ended and one that runs."""
    browser.open(f"{url}/#batches", width=1180, height=470)
    state = "return document.querySelector('#view-batches tbody tr')?.textContent ?? ''"
    for num_requests, max_tokens, wanted in ((3, 4, "completed"), (500, 900, "in progress")):
        browser.labelled("File").send_keys(batch_file(browser.folder, num_requests, max_tokens))
        browser.labelled("Route").send_keys("/v1/completions")
        browser.button("Start").click()
        browser.until(lambda wanted=wanted: wanted in browser.run(state), wanted)
    save(browser, "batches")
    browser.button("Cancel").click()


def show_router(browser: Browser, url: str) -> None:
    """Show a router of the server."""
    with routing(url) as router_url:
        browser.open(f"{router_url}/#router", width=1180, height=430)
        browser.labelled("Admin key").send_keys("admin\n")
        browser.until(
            lambda: "ready" in browser.run("return document.querySelector('#view-router').textContent"), "the backend"
        )
        save(browser, "router")


VIEWS = {
    "chat": show_chat,
    "engine": show_engine,
    "compare": show_compare,
    "batches": show_batches,
    "router": show_router,
}


def main(names: list[str]) -> int:
    """Take screenshots; return the exit status."""
    unknown = sorted(set(names) - set(VIEWS))
    if unknown:
        print(f"{unknown[0]!r} is no view; there are {', '.join(VIEWS)}", file=sys.stderr)
        return 2
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
                for name in names or VIEWS:
                    VIEWS[name](browser, server.url)
            finally:
                browser.close()
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
