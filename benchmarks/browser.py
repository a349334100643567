"""Open pages in headless Chromium with Selenium, for tests and timings."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["MISSING", "Browser"]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMEDRIVER = shutil.which("chromedriver")
_FOUND = {
    "chromium": CHROMIUM is not None,
    "chromedriver": CHROMEDRIVER is not None,
    "selenium": importlib.util.find_spec("selenium") is not None,
}
MISSING = ", ".join(name for name, found in _FOUND.items() if not found)
"""What has to be installed before a :class:`Browser` can start; empty if nothing."""

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
)
# Two frames after loading, everything near the window is drawn.
_NEXT_FRAMES = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


class Browser:
    """Drive one window of headless Chromium."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        # With an explicit path Selenium never downloads a driver.
        service = webdriver.ChromeService(executable_path=CHROMEDRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.get("about:blank")  # leaves the start page, which requests files of its own

    def close(self) -> None:
        """Quit the browser and its driver."""
        self.driver.quit()

    def clear_logs(self) -> None:
        """Drop what :meth:`errors` and :meth:`requests` would return."""
        self.errors()
        self.requests()

    def errors(self) -> list[str]:
        """Return and drop the console's errors and warnings, exceptions and failed requests."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """Return and drop the addresses that the page requested."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]

    def resize(
        self, *, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False, media: str = ""
    ) -> None:
        """Set the size of the window, its colour scheme and its medium (``print``)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def open(self, page: Path) -> float:
        """Open a file; return the milliseconds until it is loaded and drawn."""
        self.driver.get(page.resolve().as_uri())
        return float(self.run(f"{_NEXT_FRAMES}.then(() => performance.now())"))

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        return self.driver.execute_script(f"return {script}")

    def draw(self) -> None:
        """Wait until the next frames are drawn."""
        self.run(f"{_NEXT_FRAMES}.then(() => 0)")

    def click(self, selector: str) -> None:
        """Click on the middle of an element."""
        self._actions(selector).click().perform()
        self.draw()

    def hover(self, selector: str) -> None:
        """Move the mouse to the middle of an element."""
        self._actions(selector).perform()
        self.draw()

    def press(self, key: str) -> None:
        """Press a key, such as ``ENTER`` or ``ARROW_RIGHT``, on the element that has the focus."""
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.driver).send_keys(getattr(Keys, key)).perform()
        self.draw()

    def _actions(self, selector: str) -> Any:
        """Scroll an element into view, and return actions that begin with moving the mouse to its middle."""
        from selenium.webdriver import ActionChains

        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        self.draw()
        return ActionChains(self.driver, duration=0).move_to_element(self.driver.find_element("css selector", selector))
