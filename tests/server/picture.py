"""A picture of a server's live page, as docs/images/live-page.png is one.

    python -m tests.server.picture http://127.0.0.1:8000 docs/images/live-page.png

The page is open for --seconds before, so that its curves have something to show.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from tests.server.chromium import browser, find_chromium, tab


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.server.picture", description=__doc__)
    parser.add_argument("url", help="of a server that runs")
    parser.add_argument("file", type=Path, help="PNG")
    parser.add_argument("--seconds", type=float, default=150.0, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=960)
    options = parser.parse_args(arguments)
    binary = find_chromium()
    if binary is None:
        parser.error("there is no Chromium or Chrome on this machine")
    with browser(binary) as port:
        asyncio.run(_take(port, options))


async def _take(port: int, options: argparse.Namespace) -> None:
    async with tab(port, options.url) as page:
        await page.resize(options.width, options.height)
        await asyncio.sleep(options.seconds)
        await page.screenshot(options.file, options.width, options.height)


if __name__ == "__main__":
    main()
