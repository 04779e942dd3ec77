"""The live page in a headless Chromium: under load, without a mouse, without its server.

Skipped where there is no Chromium (Debian: apt-get install chromium).
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest

from rawpaged import AsyncEngine
from rawpaged.server.metrics import SECONDS, PrometheusStats
from tests.server.chromium import Page, browser, find_chromium, tab
from tests.server.client import complete, send
from tests.server.conftest import Server, serve
from tests.tiny import engine_of, tiny_config

CHROMIUM = find_chromium()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium or Chrome on this machine")

NUM_BLOCKS = 200
PREFIX = [7, 8, 9, 10] * 16
CELLS = """((KINDS) => [...document.querySelectorAll("#grid .cell")].map((cell) => ({
    label: cell.getAttribute("aria-label"),
    text: cell.textContent,
    classes: [...cell.classList].filter((name) => KINDS.includes(name)),
    fill: cell.style.getPropertyValue("--fill"),
})))(["used", "idle", "cached", "shared"])"""
FOCUSED = "Number(document.activeElement.dataset.index ?? -1)"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    assert CHROMIUM is not None
    with browser(CHROMIUM) as port:
        yield port


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[AsyncEngine, PrometheusStats]]:
    stats = PrometheusStats("tiny")
    config = tiny_config(num_gpu_blocks_override=NUM_BLOCKS, max_model_len=512)
    with AsyncEngine(config, stats_logger=stats) as engine:
        yield engine, stats


@contextmanager
def serving(engine: tuple[AsyncEngine, PrometheusStats], **options: Any) -> Iterator[Server]:
    with serve(
        cast(Any, engine[0]), stats=engine[1], served_model_names=["tiny"], **options
    ) as server:
        yield server


@contextmanager
def load(server: Server) -> Iterator[None]:
    """Three clients whose prompts begin alike, three samples each, again and again."""
    is_over = threading.Event()

    def ask(client: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            answer = complete(
                server.url,
                model="tiny",
                prompt=[*PREFIX, client, number % 3],
                n=3,
                max_tokens=300,
                ignore_eos=True,
                seed=number,
                request_id=f"client{client}",
            )
            assert answer.status == 200, answer.body

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 150))


def expected_cells(block_map: dict[str, Any]) -> list[dict[str, Any]]:
    """What the grid has to show of an answer of /kv, block by block."""
    cells = []
    for run in block_map["runs"]:
        names = [block_map["requests"][i]["request_id"] for i in block_map["owners"][run["owners"]]]
        # 0:cmpl-client1-0123456789ab-0, where 0 is the sample
        short = [f"{name.split('-')[1]}#{name.split(':')[0]}" for name in names]
        more = f" and {len(short) - 4} more" if len(short) > 4 else ""
        refs, tokens, size = run["ref_count"], run["num_tokens"], block_map["block_size"]
        assert refs == len(names)
        if refs:
            owners = f"{refs} owner{'s' * (refs > 1)} ({', '.join(short[:4])}{more})"
            words = [owners, f"{tokens} of {size} slots filled"]
            words += ["in the prefix cache"] * run["is_cached"]
        else:
            words = ["cached, held by nobody" if run["is_cached"] else "free"]
        classes = {
            "used": refs > 0,
            "idle": refs == 0 and run["is_cached"],
            "cached": run["is_cached"],
            "shared": refs > 1,
        }
        for block_id in range(run["first_block"], run["first_block"] + run["num_blocks"]):
            cells.append(
                {
                    "label": f"Block {block_id}: {'; '.join(words)}",
                    "text": str(refs) if refs > 1 else "",
                    "classes": sorted(name for name, has in classes.items() if has),
                    "fill": f"{100 * tokens / size:g}%" if refs else "",
                }
            )
    return cells


async def cells_of(page: Page) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = await page.evaluate(CELLS)
    return [{**cell, "classes": sorted(cell["classes"])} for cell in cells]


async def hold(page: Page) -> dict[str, Any]:
    """Hold the page; returns the map that it shows then."""
    await page.evaluate("document.getElementById('hold').focus()")
    await page.press("Enter")
    await page.wait_for("document.getElementById('state').dataset.state === 'held'")
    await page.settle()
    block_map: dict[str, Any] = await page.last_json("/kv?")
    return block_map


def test_the_grid_shows_the_pool(port: int, engine: tuple[AsyncEngine, PrometheusStats]) -> None:
    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.wait_for(f"document.querySelectorAll('#grid .cell').length === {NUM_BLOCKS}")
            for _ in range(3):
                await page.wait_for("document.querySelector('#grid .shared')")
                await page.wait_for("document.querySelector('#grid .used:not(.cached)')")
                shown = await hold(page)
                assert await cells_of(page) == expected_cells(shown)
                rows = await page.evaluate("document.querySelectorAll('#requests tbody tr').length")
                assert rows == len(shown["requests"])
                await page.press("Enter")  # goes on
            await page.wait_for("document.getElementById('state').dataset.state === 'run'")
            text = await page.evaluate("document.body.innerText")
            assert page.problems == []
            assert all(each.startswith((url, "data:")) for each in page.urls), page.urls
        for words in (
            "tiny",
            "cpu float32",
            "200 \N{MULTIPLICATION SIGN} 16 tokens",
            "tok/s",
            "First token",
        ):
            assert words in text
        assert "NaN" not in text
        assert "undefined" not in text

    def hit_share() -> float:
        hits, queries = (
            engine[1].registry.get_sample_value(
                f"rawpaged:prefix_cache_{name}_total", {"model_name": "tiny"}
            )
            for name in ("hits", "queries")
        )
        assert hits
        assert queries
        return hits / queries

    async def idle(url: str) -> None:
        """What is left is what the pool says, and numbers that have settled are right."""
        async with tab(port, url) as page:
            await page.wait_for("document.getElementById('state').dataset.state === 'idle'")
            await page.wait_for("document.querySelector('#grid .idle')")
            assert await cells_of(page) == expected_cells(send(url, "GET", "/kv").json)
            totals = await page.evaluate("document.getElementById('totals').innerText")
            ended = engine[1].registry.get_sample_value(
                "rawpaged:request_success_total",
                {"model_name": "tiny", "finished_reason": "length"},
            )
            assert f"{ended:.0f} length" in totals
            tiles = await page.evaluate("document.getElementById('tiles').innerText")
            assert f"{100 * hit_share():.0f} % since the start" in tiles
            assert page.problems == []

    with serving(engine, enable_admin_routes=True) as server:
        with load(server):
            run(scenario(server.url))
        run(idle(server.url))


def test_without_a_mouse(port: int, engine: tuple[AsyncEngine, PrometheusStats]) -> None:
    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.wait_for("document.querySelector('#grid .shared')")
            for _ in range(12):
                await page.press("Tab")
                if await page.evaluate(FOCUSED) >= 0:
                    break
            assert await page.evaluate(FOCUSED) == 0
            columns = await page.evaluate(
                "document.querySelector('#grid .row').querySelectorAll('.cell').length"
            )
            last = NUM_BLOCKS - 1
            bottom = last // columns * columns
            for key, ctrl, index in (
                ("ArrowRight", False, 1),
                ("ArrowDown", False, columns + 1),
                ("ArrowUp", False, 1),
                ("ArrowUp", False, 1),
                ("ArrowLeft", False, 0),
                ("ArrowLeft", False, 0),
                ("End", False, columns - 1),
                ("Home", False, 0),
                ("PageDown", False, min(8 * columns, bottom)),
                ("PageUp", False, 0),
                ("End", True, last),
                ("ArrowRight", False, last),
                ("Home", True, 0),
            ):
                await page.press(key, ctrl=ctrl)
                assert await page.evaluate(FOCUSED) == index, (key, ctrl)
                assert await page.evaluate(
                    "[...document.querySelectorAll('#grid [tabindex=\"0\"]')]"
                    ".map((cell) => Number(cell.dataset.index))"
                ) == [index]
                title = await page.evaluate("document.getElementById('inspector-title').innerText")
                assert title == f"Block {index}"
            await pick(page)
            assert page.problems == []

    async def pick(page: Page) -> None:
        """Enter brings out the blocks of a block's owners, Escape all of them again."""
        shown = await hold(page)
        runs = [run for run in shown["runs"] if run["ref_count"] == 1]
        owner = shown["owners"][runs[0]["owners"]][0]
        of_owner = [
            run["first_block"] + i
            for run in shown["runs"]
            if owner in shown["owners"][run["owners"]]
            for i in range(run["num_blocks"])
        ]
        await page.evaluate(
            f"document.querySelectorAll('#grid .cell')[{runs[0]['first_block']}].focus()"
        )
        bright = (
            "[...document.querySelectorAll('#grid .cell:not(.faint)')]"
            ".map((cell) => Number(cell.dataset.index))"
        )
        await page.press("Enter")
        assert await page.evaluate(bright) == of_owner
        assert (
            await page.evaluate("document.querySelectorAll('.pick[aria-pressed=true]').length") == 1
        )
        await page.press("Escape")
        assert await page.evaluate(bright) == list(range(NUM_BLOCKS))

    with serving(engine, enable_admin_routes=True) as server, load(server):
        run(scenario(server.url))


def test_without_the_admin_flag(port: int, engine: tuple[AsyncEngine, PrometheusStats]) -> None:
    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.wait_for("!document.getElementById('off').hidden")
            await page.wait_for("document.getElementById('state').dataset.state === 'idle'")
            text = await page.evaluate("document.body.innerText")
            assert "--enable-admin-routes" in text
            assert "200 \N{MULTIPLICATION SIGN} 16 tokens" in text
            assert await page.evaluate("document.getElementById('map').hidden")
            assert page.problems == []
            assert not any("/kv" in each for each in page.urls)

    with serving(engine) as server:
        run(scenario(server.url))


def test_with_an_api_key(port: int, engine: tuple[AsyncEngine, PrometheusStats]) -> None:
    async def enter(page: Page, key: str) -> None:
        await page.wait_for("!document.getElementById('key-form').hidden")
        await page.evaluate("document.getElementById('key').focus()")
        await page.call("Input.insertText", text=key)
        await page.press("Enter")

    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.wait_for("!document.getElementById('key-form').hidden")
            assert page.problems == []
            assert not any("/kv" in each for each in page.urls)
            await enter(page, "wrong")
            await page.wait_for(
                "document.getElementById('key-text').innerText.includes('does not take')"
            )
            await enter(page, "secret")
            await page.wait_for(f"document.querySelectorAll('#grid .cell').length === {NUM_BLOCKS}")
            assert await page.evaluate("document.getElementById('key-form').hidden")
            assert not any("secret" in each for each in page.urls)

    with serving(engine, enable_admin_routes=True, api_key="secret") as server:
        run(scenario(server.url))


def test_a_hidden_page_asks_nothing(port: int, engine: tuple[AsyncEngine, PrometheusStats]) -> None:
    hide = (
        "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )

    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.wait_for("document.querySelector('#grid .cell')")
            await page.evaluate(hide % "true")
            await page.settle()
            asked = len(page.urls)
            await page.evaluate("new Promise((done) => setTimeout(done, 2500))")
            assert len(page.urls) == asked
            await page.evaluate(hide % "false")
            await page.settle()
            assert len(page.urls) > asked

    with serving(engine, enable_admin_routes=True) as server:
        run(scenario(server.url))


def test_a_restarted_server(port: int) -> None:
    """Told of while it is away and when it is back, with whatever flags it has then."""

    async def scenario() -> None:
        with serve() as first:
            number = int(first.url.rpartition(":")[2])
            page_tab = tab(port, first.url)
            page = await page_tab.__aenter__()
            await page.wait_for("document.getElementById('state').dataset.state === 'idle'")
            assert page.problems == []
            text = await page.evaluate("document.body.innerText")
            assert "NaN" not in text  # this engine counts nothing
        message = "document.getElementById('message').innerText"
        await page.wait_for(f"{message}.includes('No answer from the server')")
        assert await page.evaluate("document.getElementById('state').dataset.state") == "lost"
        with serve(port=number, enable_admin_routes=True, api_key="key"):
            await page.wait_for(f"{message}.includes('restarted')")
            assert await page.evaluate("document.getElementById('state').dataset.state") == "idle"
            await page.wait_for("!document.getElementById('key-form').hidden")
            assert await page.evaluate("document.getElementById('off').hidden")
            assert not any("exception" in problem for problem in page.problems)
        await page_tab.__aexit__(None, None, None)

    run(scenario())


def prometheus_quantile(bounds: list[float], counts: list[int], share: float) -> float | None:
    """histogram_quantile of PromQL, over cumulative counts."""
    if counts[-1] == 0:
        return None
    rank = share * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= rank)
    if math.isinf(bounds[index]):
        return bounds[index - 1]
    low, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0)
    if counts[index] == below:
        return bounds[index]
    return low + (bounds[index] - low) * (rank - below) / (counts[index] - below)


def test_quantiles_are_those_of_prometheus(port: int) -> None:
    """Of scraped text, and of the difference of two scrapes."""
    rng = random.Random(2)
    stats, later = PrometheusStats("m"), []
    for _ in range(40):
        stats.record_first_token(rng.expovariate(3.0))
    before = stats.render().decode()
    for _ in range(60):
        later.append(rng.expovariate(0.5))
        stats.record_first_token(later[-1])
    after = stats.render().decode()
    bounds = [*SECONDS, math.inf]
    counts = [sum(seconds <= bound for seconds in later) for bound in bounds]

    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            for share in (0.5, 0.95, 1.0):
                got = await page.evaluate(f"""(async () => {{
                    const p = await import("/page/prometheus.js");
                    const read = (text) =>
                        p.bucketsOf(p.parse(text), "time_to_first_token_seconds");
                    const [before, after] = {json.dumps([before, after])}.map(read);
                    return p.quantile(p.bucketsBetween(before, after), {share});
                }})()""")
                expected = prometheus_quantile(bounds, counts, share)
                assert got == pytest.approx(expected, rel=1e-12)
            nothing = "import('/page/prometheus.js').then((p) => p.quantile([], 0.5))"
            assert await page.evaluate(nothing) is None

    with serve() as server:
        run(scenario(server.url))


TEXTS = (
    "#state-text",
    ".note",
    ".tile h2",
    ".value",
    ".limits dt",
    ".address",
    ".keys",
    "th",
    "td",
)
CONTRAST = """(selector) => {
    const element = document.querySelector(selector);
    const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
    const light = (text) => {
        const [r, g, b] = rgb(text).map((v) => v / 255)
            .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const pair = [light(getComputedStyle(element).color),
                  light(getComputedStyle(document.body).backgroundColor)].sort((a, b) => b - a);
    return (pair[0] + 0.05) / (pair[1] + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_contrast_and_motion(
    port: int, engine: tuple[AsyncEngine, PrometheusStats], scheme: str
) -> None:
    """WCAG 2.2: 4.5 for text, 3 for the colours of owners; no motion where none is wanted."""

    async def scenario(url: str) -> None:
        async with tab(port, url) as page:
            await page.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
            await page.wait_for("document.querySelector('#grid .cell')")
            for selector in TEXTS:
                assert await page.evaluate(f"({CONTRAST})('{selector}')") >= 4.5, selector
            for number in range(10):
                await page.evaluate(
                    f"document.getElementById('model').style.color = 'var(--o{number})'"
                )
                assert await page.evaluate(f"({CONTRAST})('#model')") >= 3, number
            await page.evaluate("document.querySelector('#grid .cell').classList.add('fresh')")
            motion = "getComputedStyle(document.querySelector('#grid .cell.fresh')).animationName"
            assert await page.evaluate(motion) == "none"
            await page.prefer(prefers_reduced_motion="no-preference")
            assert await page.evaluate(motion) == "arrive"

    with serving(engine, enable_admin_routes=True) as server:
        run(scenario(server.url))


def test_a_pool_larger_than_the_window(port: int) -> None:
    """2048 blocks at once; the rest is reached with the keyboard too."""

    async def scenario(server: Server, large: AsyncEngine) -> None:
        async with tab(port, server.url) as page:
            await page.wait_for("document.querySelectorAll('#grid .cell').length === 2048")
            await page.evaluate("document.getElementById('first').focus()")
            await page.press("ArrowRight")
            await page.wait_for("document.querySelectorAll('#grid .cell').length === 452")
            output = await page.evaluate("document.getElementById('range').innerText")
            assert output == "blocks 2,048 to 2,499 of 2,500"
            label = "document.querySelector('#grid .cell').getAttribute('aria-label')"
            assert await page.evaluate(label) == "Block 2048: free"
            assert await page.evaluate("document.getElementById('first').value") == "1"
            assert not await page.evaluate("document.getElementById('follow').checked")
            await page.press("ArrowLeft")
            await page.wait_for(f"{label} === 'Block 0: free'")
            await page.evaluate("document.getElementById('follow').click()")
            # The pool's last blocks are in use: the window goes there by itself.
            block_pool = engine_of(large).scheduler.kv_cache_manager.block_pool
            block_pool._free.sort()
            with load(server):
                await page.wait_for(f"{label}.startsWith('Block 2048:')")
                await page.wait_for("document.querySelector('#grid .used')")
            assert page.problems == []

    stats = PrometheusStats("tiny")
    config = tiny_config(num_gpu_blocks_override=2500, max_model_len=512)
    with (
        AsyncEngine(config, stats_logger=stats) as large,
        serving((large, stats), enable_admin_routes=True) as server,
    ):
        run(scenario(server, large))
