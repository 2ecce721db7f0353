"""The live page in a real browser: on a real cluster, and on a router that asks for a key."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from playwright.async_api import Browser, Page, async_playwright, expect

from deploy.ports import free_port
from router.listening import HttpServer
from tests.fakes_dispatch import FakeDispatcher, FakeOperations, http_app, one_key
from tests.integration.four_pairs.conftest import FourPairs
from tests.integration.reference import COUNTING
from tests.smollm2_text import smollm2_text

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium"),
]
PATIENCE_MS = 60_000
FEED: dict[str, Any] = {
    "model": "smol",
    "ready": True,
    "draining": False,
    "registry_stale": False,
    "in_flight": 3,
    "queued": 2,
    "pairs": [],
    "nodes": [],
    "flows": [],
    "series": [],
    "requests": [],
}


@asynccontextmanager
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"], timeout=2 * PATIENCE_MS
        )
        try:
            yield opened
        finally:
            await opened.close()


@asynccontextmanager
async def page_at(url: str, opened: Browser, **options: Any) -> AsyncIterator[Page]:
    """The page, which must not have complained of anything in the end."""
    context = await opened.new_context(**options)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    await page.goto(f"{url}/dashboard")
    try:
        yield page
    finally:
        await context.close()
    assert [text for text in complaints if "401" not in text] == []


async def colour(page: Page, name: str) -> str:
    value: str = await page.evaluate(f"getComputedStyle(document.body).{name}")
    return value


@pytest.mark.model
async def test_the_page_shows_a_real_cluster_and_marks_accepted_drafts(four_pairs: FourPairs) -> None:
    url = str(four_pairs.router.http.base_url)
    for _ in range(4):
        await four_pairs.router.complete(prompt=COUNTING, max_tokens=16, temperature=0)
    phone = {"viewport": {"width": 390, "height": 800}, "color_scheme": "dark"}
    async with browser() as opened:
        async with page_at(url, opened) as page:
            await page.wait_for_selector("#requests tr .lane i.s-decode")
            assert await page.inner_text("#state") == "ready"
            assert await page.locator(".pool.prefill .node").count() == 1
            assert await page.locator(".pool.decode .node").count() == 4
            assert await page.inner_text("#pairs") == "4 of 4 pairs ready"
            assert await page.locator("#wires path").count() == 4
            for stage in ("queue", "prefill", "transfer", "decode"):
                assert await page.locator(f".lane i.s-{stage}").count() >= 1, stage
            assert await page.locator(".chart svg .dot-a, .chart svg .a").count() >= 2
            await page.fill("#prompt", "Repeat: one two three, one two three, one two three, one two three")
            await page.fill("#max-tokens", "24")
            for _ in range(4):  # two of the four decode nodes draft
                await page.click("#send")
                await expect(page.locator("#send")).to_be_enabled(timeout=PATIENCE_MS)
                assert "tokens" in await page.inner_text("#summary")
                if await page.locator("#answer mark").count():
                    break
            else:
                pytest.fail("no accepted draft was marked")
        async with page_at(url, opened, **phone) as page:
            await page.wait_for_selector("#requests tr")
            assert await page.evaluate("document.documentElement.scrollWidth") == 390
            assert await colour(page, "backgroundColor") == "rgb(14, 17, 22)"
        async with page_at(url, opened, color_scheme="light") as page:
            assert await colour(page, "backgroundColor") == "rgb(246, 247, 249)"


async def test_with_keys_the_page_asks_for_one_and_keeps_it_for_feed_and_playground() -> None:
    dispatcher = FakeDispatcher(
        script=smollm2_text().tokenizer.encode("<b>bold</b>", add_special_tokens=False), rounds=(1, 2)
    )
    async with (
        serving(dispatcher) as url,
        browser() as opened,
        page_at(url, opened) as page,
    ):
        await page.wait_for_selector("#key-dialog[open]")
        assert await page.inner_text("#state") == "key needed"
        await page.fill("#key-input", "secret")
        await page.click("#key-dialog .primary")
        await expect(page.locator("#state")).to_have_text("ready", timeout=PATIENCE_MS)
        assert await page.inner_text("#tiles .tile:first-child .value") == "3+2 waiting"
        assert await page.evaluate("sessionStorage.getItem('paceline.key')") == "secret"
        await page.fill("#prompt", "hi")
        await page.click("#send")
        await expect(page.locator("#summary")).to_contain_text("tokens", timeout=PATIENCE_MS)
        assert await page.inner_text("#answer") == "<b>bold</b>"  # text, whatever it looks like
        assert await page.locator("#answer b").count() == 0
        assert await page.locator("#answer mark").count() >= 1


@asynccontextmanager
async def serving(dispatcher: FakeDispatcher) -> AsyncIterator[str]:
    app = http_app(dispatcher, smollm2_text(), keys=one_key("secret"), operations=FakeOperations(says=FEED))
    port = free_port()
    server = HttpServer(uvicorn.Config(app, port=port, lifespan="off", log_config=None))
    task = asyncio.ensure_future(server.serve())
    try:
        while not server.started:  # noqa: ASYNC110  it has no event for that
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task
