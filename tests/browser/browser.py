"""Browser: chromium without a screen, as the tests use it."""

from __future__ import annotations

import base64
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TIMEOUT_S = 60.0  # far beyond what anything takes; no test waits for it unless it fails
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => {
  window.violations.push(`${event.violatedDirective} ${event.blockedURI}`);
});
"""


class Browser:
    """One window, which tests share. allowed_errors: texts of console messages that the test provokes."""

    def __init__(self, driver: Any, folder: Path) -> None:
        self.driver = driver
        self.folder = folder
        self.allowed_errors: list[str] = []
        self._origins: set[str] = set()

    def begin(self, folder: Path) -> None:
        """Begin a test as if the browser was new: in a new tab, with nothing stored or said. Pictures go to the folder."""
        self.folder, self.allowed_errors = folder, []
        for origin in self._origins:
            self.command("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        self._origins.clear()
        old = self.driver.window_handles
        self.driver.switch_to.new_window("tab")
        new = self.driver.current_window_handle
        for handle in old:
            self.driver.switch_to.window(handle)
            self.driver.close()
        self.driver.switch_to.window(new)
        self.command("Network.clearBrowserCache", {})
        self.command("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
        self.driver.get_log("browser")

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, calm: bool = False) -> None:
        """Show a page in a window of this size, with these wishes of the user."""
        mobile = width < 600
        self._origins.add("/".join(url.split("/")[:3]))
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.command("Emulation.setDeviceMetricsOverride", metrics)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else "no-preference"},
        ]
        self.command("Emulation.setEmulatedMedia", {"features": features})
        self.driver.get("about:blank")  # a fragment alone would not load the page again
        self.driver.get(url)

    def command(self, name: str, parameters: dict[str, Any]) -> Any:
        """Send a command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(name, parameters)

    def run(self, script: str, *arguments: object) -> Any:
        """Run a function's body in the page."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait until a condition is true and return it; an element that the page replaced meanwhile is looked for again."""
        from selenium.common.exceptions import StaleElementReferenceException

        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            with contextlib.suppress(StaleElementReferenceException):
                found = condition()
                if found:
                    return found
            time.sleep(0.03)
        self.shot("timeout")
        raise AssertionError(f"never came: {what}; the page says {self.run('return document.body.innerText')[:2000]!r}")

    def all(self, selector: str) -> list[Any]:
        """Return the visible elements of a CSS selector, as they are at one moment."""
        script = (
            "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility({ visibilityProperty: true }))"
        )
        return self.run(script, selector)

    def one(self, selector: str) -> Any:
        """Return the first visible element of a selector, waiting for it."""
        return self.until(lambda: next(iter(self.all(selector)), None), selector)

    def button(self, name: str) -> Any:
        """Return the first visible button with this text."""
        script = """
        return [...document.querySelectorAll("button")].find(
          (button) => button.textContent.trim() === arguments[0] && button.checkVisibility({ visibilityProperty: true }))"""
        return self.until(lambda: self.run(script, name), f"button {name}")

    def labelled(self, label: str) -> Any:
        """Return the control of a visible label that begins with this text."""
        script = """
        return [...document.querySelectorAll("label")].find(
          (label) => label.textContent.startsWith(arguments[0]) && label.control?.checkVisibility())?.control"""
        return self.until(lambda: self.run(script, label), f"label {label}")

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def click(self, find: Callable[[], Any]) -> None:
        """Click what is found, again while the page still moves it or puts another in its place."""
        from selenium.common.exceptions import ElementClickInterceptedException

        def is_clicked() -> bool:
            try:
                element = find()
                self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
                element.click()
            except ElementClickInterceptedException:
                return False
            return True

        self.until(is_clicked, "a click")

    def hover(self, element: Any) -> None:
        """Point at an element."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).move_to_element(element).perform()

    def tab_to(self, name: str) -> None:
        """Press Tab until what has this text, label or id has the focus."""
        from selenium.webdriver.common.keys import Keys

        script = """
        const e = document.activeElement;
        const label = e.labels?.[0]?.textContent ?? e.getAttribute("aria-label") ?? e.textContent;
        return label.trim().startsWith(arguments[0]) || e.id === arguments[0]"""
        for _ in range(80):
            self.press(Keys.TAB)
            if self.run(script, name):
                return
        raise AssertionError(f"Tab never reaches {name!r}")

    def until_in(self, label: str) -> None:
        """Wait until the control of this label has the focus."""
        script = "return document.activeElement.labels?.[0]?.textContent"
        self.until(lambda: self.run(script) == label, f"the focus in {label}")

    def focused(self) -> str:
        """Return the text or the value of what has the focus."""
        return self.run("const e = document.activeElement; return (e.textContent || e.value || e.tagName).trim()")

    def shot(self, name: str) -> None:
        """Keep a picture of the whole page in the test's folder."""
        size = self.command("Page.getLayoutMetrics", {})["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 4000), "scale": 1}
        found = self.command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": True, "clip": clip})
        (self.folder / f"{name}.png").write_bytes(base64.b64decode(found["data"]))

    def check_silence(self) -> None:
        """Fail where the console has errors, or the content policy was violated."""
        assert self.run("return window.violations ?? []") == []
        messages = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
        unexpected = [text for text in messages if not any(allowed in text for allowed in self.allowed_errors)]
        assert not unexpected, "\n".join(unexpected)

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()


def open_browser(folder: Path) -> Browser:
    """Start a browser with a profile of its own."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (*ARGUMENTS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver")))
    return Browser(driver, folder)
