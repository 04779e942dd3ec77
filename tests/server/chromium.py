"""Headless Chromium over its DevTools protocol: a page that is loaded, asked, typed into."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers, where there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--mute-audio",
    "--remote-debugging-port=0",
)
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
POLL_SECONDS = 0.02
BLANK = "about:blank"

KEY_CODES = {
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Home": 36, "End": 35,
    "PageUp": 33, "PageDown": 34, "Enter": 13, "Escape": 27, "Tab": 9,
}  # fmt: skip


def find_chromium() -> str | None:
    """Path of a Chromium or Chrome, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab. What the page writes to its console, and all that fails in it, is in `problems`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.urls: list[str] = []
        """Everything asked for."""
        self._is_navigated = False
        self._is_loaded = asyncio.Event()
        self._waiting: set[str] = set()
        self._answered: list[tuple[str, str]] = []

    async def listen(self) -> None:
        """Reads what comes; runs as long as the tab is there."""
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                answer = self._answers.pop(event["id"])
                if not answer.done():
                    answer.set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
            self._waiting.add(params["requestId"])
        elif method == "Network.responseReceived":
            self._answered.append((params["response"]["url"], params["requestId"]))
        elif method in ("Network.loadingFinished", "Network.loadingFailed"):
            self._waiting.discard(params["requestId"])
        elif method == "Page.frameNavigated":
            self._is_navigated = params["frame"]["url"] != BLANK
        elif method == "Page.loadEventFired" and self._is_navigated:
            self._is_loaded.set()
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(f"console: {params['args']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {params['exceptionDetails']}")
        elif method == "Log.entryAdded":
            self.problems.append(f"log: {params['entry']}")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; fails if the browser refuses it."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(self._answers[number], ANSWER_SECONDS)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def open(self, url: str) -> None:
        """Go to a page; returns when it is loaded, with its scripts run."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        # As if its window was in front: else nothing in it ever has the focus.
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._is_loaded.wait(), ANSWER_SECONDS)

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def wait_for(self, expression: str, seconds: float = 60.0) -> None:
        """Until the expression is true, or an element that is there."""
        deadline = asyncio.get_running_loop().time() + seconds
        while not await self.evaluate(f"Boolean({expression})"):
            if asyncio.get_running_loop().time() > deadline:
                text = await self.evaluate("document.body.innerText")
                raise AssertionError(f"not {expression}; {self.problems=}; page:\n{text}")
            await asyncio.sleep(POLL_SECONDS)

    async def settle(self) -> None:
        """Until nothing that the page asked for is under way."""
        deadline = asyncio.get_running_loop().time() + ANSWER_SECONDS
        while self._waiting:
            assert asyncio.get_running_loop().time() < deadline, self._waiting
            await asyncio.sleep(POLL_SECONDS)

    async def last_json(self, part_of_url: str) -> Any:
        """What came last from such an address."""
        number = [number for url, number in self._answered if part_of_url in url][-1]
        answer = await self.call("Network.getResponseBody", requestId=number)
        return json.loads(answer["body"])

    async def press(self, key: str, *, ctrl: bool = False) -> None:
        """A key, down and up."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": KEY_CODES[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        modifiers = 2 if ctrl else 0
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **common, **text
            )

    async def screenshot(self, path: Path, width: int, height: int) -> None:
        await self.resize(width, height)
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))

    async def resize(self, width: int, height: int) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def prefer(self, **features: str) -> None:
        """Media features such as prefers_color_scheme="light"."""
        wanted = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=wanted)


@contextmanager
def browser(binary: str) -> Iterator[int]:
    """A browser with a profile of its own, gone afterwards; yields the port it listens on."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [binary, *FLAGS, f"--user-data-dir={profile}", BLANK],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield _port(Path(profile), process)
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def tab(port: int, url: str) -> AsyncIterator[Page]:
    """A new tab of the browser, with the page that is there."""
    root = f"http://127.0.0.1:{port}/json"
    async with aiohttp.ClientSession() as session:
        async with session.put(f"{root}/new?{BLANK}") as answer:
            target = await answer.json()
        socket_url = target["webSocketDebuggerUrl"]
        async with session.ws_connect(socket_url, max_msg_size=2**27) as socket:
            page = Page(socket)
            listening = asyncio.create_task(page.listen())
            try:
                await page.open(url)
                yield page
            finally:
                async with session.get(f"{root}/close/{target['id']}") as answer:
                    await answer.read()
                listening.cancel()


def _port(profile: Path, process: subprocess.Popen[bytes]) -> int:
    """Where the browser listens, which it writes into its profile once it does."""
    deadline = time.monotonic() + START_SECONDS
    written = profile / "DevToolsActivePort"
    while not (written.exists() and written.read_text().count("\n")):
        assert process.poll() is None, f"the browser ended with status {process.returncode}"
        assert time.monotonic() < deadline, "the browser does not start"
        time.sleep(POLL_SECONDS)
    return int(written.read_text().split()[0])
