"""A real headless Chromium, that of the system's package."""

import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
MISSING = "no Chromium is installed: apt install chromium (Debian), apk add chromium (Alpine)"
WIDE, NARROW = (1440, 900), (360, 740)

WATCH = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const one of list.getEntries()) if (!one.hadRecentInput) window.shifted += one.value;
}).observe({ type: "layout-shift", buffered: true });
"""
"""Adds up the layout shifts that no input of the user caused."""

Scheme = Literal["light", "dark"]


@dataclass(frozen=True)
class Window:
    """A page of Chromium, with what went wrong on it."""

    page: Page
    faults: list[str] = field(default_factory=list[str])

    @property
    def shifted(self) -> float:
        """How far things have moved by themselves."""
        return float(self.page.evaluate("window.shifted"))

    def sign_in(self, url: str, key: str) -> None:
        """Sign in by hand."""
        self.page.goto(f"{url}/ui/sign-in")
        self.page.get_by_label("API key").fill(key)
        self.page.get_by_role("button", name="Sign in").click()
        self.page.wait_for_url(f"{url}/ui/")


class Chromium:
    """The browser."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @contextmanager
    def window(self, size: tuple[int, int] = WIDE, scheme: Scheme = "light") -> Generator[Window]:
        """Open a window with its own cookies."""
        context = self._browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        context.add_init_script(WATCH)
        page = context.new_page()
        made = Window(page)
        page.on("pageerror", lambda error: made.faults.append(str(error)))
        page.on("console", lambda said: made.faults.append(said.text) if said.type in ("error", "warning") else None)
        try:
            yield made
        finally:
            context.close()


@pytest.fixture(scope="module")
def chromium() -> Generator[Chromium]:
    """Chromium, if the machine has it; `make test-browser` fails without it.

    Its driver keeps an event loop in this thread until the end, so it must not last into modules with loops of theirs.
    """
    found = next((path for name in NAMES if (path := shutil.which(name)) is not None), None)
    if found is None:
        (pytest.fail if os.environ.get("SLUICE_TESTS_NEED_BROWSER") else pytest.skip)(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield Chromium(browser)
        browser.close()
