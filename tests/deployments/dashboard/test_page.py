"""The operations page in a browser, over a fake fleet."""

from __future__ import annotations

import shutil
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright

from deployments.api.auth import digest_key
from tests.deployments.api.fake_fleet import FakeFleet
from tests.deployments.dashboard.replicas import adapter, replica

pytestmark = pytest.mark.cluster

KEY = "secret"
MARKUP = (
    "<img src=x onerror=document.title='broken'>"  # no name of an adapter, but the page must not rely on it
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    fleet = FakeFleet()
    rows = {f"tenant-{i:03d}": adapter(hits={"hbm": 9, "host": 0, "disk": 0}, misses=1) for i in range(120)}
    rows[MARKUP] = adapter(running=1, tier="loading")
    fleet.service.replicas = [replica("r1", **rows), replica("r2", **{"tenant-000": adapter(tier="host")})]
    app = fleet.app(api_key_digests=(digest_key(KEY),))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}/dashboard"
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def browser_page(url: str) -> Iterator[Page]:
    """Past the question for a key."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: install the package chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type == "error" else None
        )
        page.goto(url)
        page.locator("#key-form").wait_for()
        page.fill("#key", KEY)
        page.press("#key", "Enter")
        page.locator("#adapters tbody tr").first.wait_for()
        yield page
        browser.close()
    assert [text for text in complaints if "401" not in text] == []


def test_it_shows_the_fleet(browser_page: Page) -> None:
    page = browser_page
    assert page.locator("#key-form").is_hidden()
    assert "6 of 16 seats" in " ".join(page.inner_text("#tiles").split())
    assert page.locator("#replicas tbody tr").count() == 2
    assert page.locator("#adapters tbody tr").count() == 50
    page.locator("canvas").first.wait_for()  # the second answer


def test_names_are_text(browser_page: Page) -> None:
    page = browser_page
    assert page.locator("#adapters tbody th").first.inner_text() == MARKUP
    assert page.locator("img").count() == 0
    assert page.title() == "lorafleet"


def test_adapters_are_searched_and_paged(browser_page: Page) -> None:
    page = browser_page
    page.click("#next")
    expect(page.locator("#page")).to_have_text("2 of 3")
    page.fill("#search", "NANT-000")
    expect(page.locator("#adapters tbody tr")).to_have_count(1)
    cells = page.locator("#adapters .cell")
    titles = [cells.nth(i).get_attribute("title") for i in range(cells.count())]
    assert titles == ["replica 1: in device memory", "replica 2: in host memory"]
    page.fill("#search", "")
    expect(page.locator("#adapters tbody tr")).to_have_count(50)


@pytest.mark.parametrize("width", [390, 1400])
def test_everybody_can_use_it_in_both_themes(browser_page: Page, width: int) -> None:
    page = browser_page
    page.set_viewport_size({"width": width, "height": 900})
    for _ in range(2):
        violations = Axe().run(page).response["violations"]
        assert [(found["id"], found["impact"]) for found in violations] == []
        page.click("#theme")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
