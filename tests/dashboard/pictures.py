"""Makes the pictures of the documentation: `python -m tests.dashboard.pictures`, which takes some 4 minutes.

Look at each of them before a commit. They are small because they have few colours.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import struct
import tempfile
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dashboard.conftest import CHROMIUM, OPTIONS, WITHIN_MS
from tests.dashboard.scene import Scene, scene

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PICTURES = Path(__file__).parents[2] / "docs/pictures"
INDEXED = """async (url) => {
    const image = new Image();
    image.src = url;
    await image.decode();
    const pen = new OffscreenCanvas(image.width, image.height).getContext("2d");
    pen.drawImage(image, 0, 0);
    const { data } = pen.getImageData(0, 0, image.width, image.height);
    const pixels = new Uint32Array(data.buffer);
    const counts = new Map();
    for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
    const parts = (pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
    const far = (one, other) => Math.max(...one.map((value, at) => Math.abs(value - other[at])));
    const colours = [...counts].sort((one, other) => other[1] - one[1]).map(([pixel]) => pixel);
    let palette = [];
    for (let apart = 1; palette.length === 0 || palette.length > 256; apart += 2) {
        palette = [];
        for (const pixel of colours) {
            if (palette.length > 256) break;
            const colour = parts(pixel);
            if (palette.every((one) => far(one, colour) >= apart)) palette.push(colour);
        }
    }
    const nearest = (colour) => palette.reduce(
        (best, one, at) => (far(one, colour) < far(palette[best], colour) ? at : best), 0);
    const places = new Map(colours.map((pixel) => [pixel, nearest(parts(pixel))]));
    const bytes = Uint8Array.from(pixels, (pixel) => places.get(pixel));
    const text = new Blob([bytes]);
    const read = new FileReader();
    return new Promise((done) => {
        read.onload = () => done({ palette, pixels: read.result.split(",")[1], width: image.width });
        read.readAsDataURL(text);
    });
}"""
"""A picture in at most 256 colours: the most frequent ones, and for each other one the nearest of them."""
LIVE_S = 70
"""How long the daemon runs first: it says after a minute for how long a GPU is idle."""
SETTLES_MS = 2500
"""The stream of events never ends, so there is no sign that everything has arrived."""
LAPTOP, PHONE, WALL = (1440, 900), (390, 844), (1920, 1080)


def places(found: Scene) -> dict[str, tuple[str, str, tuple[int, int]]]:
    """The view, the scheme and the size of each picture."""
    gpu = found.hardware.uuid(3)
    training = time.strftime("%H:%M", time.localtime(time.time() - 85 * 60))  # about when it began
    return {
        "now": ("now", "light", LAPTOP),
        "now-dark": ("now", "dark", LAPTOP),
        "timeline": ("timeline?range=7d", "light", (1440, 560)),
        "queue": ("queue", "light", (1440, 380)),
        "jobs": ("jobs", "light", (1440, 420)),
        "job": (f"jobs/{found.ids['job']}", "dark", (1440, 1000)),
        "gpu": (f"gpus/{gpu}?range=24h", "light", LAPTOP),
        "lease": (f"leases/{found.ids['mistral-ft']}", "light", (1440, 710)),
        "usage": ("usage", "light", (1440, 710)),
        "events": (f"events?at={training}", "dark", LAPTOP),
        "wall": ("wall", "dark", WALL),
        "phone": ("now", "light", PHONE),
        "phone-dark": ("now", "dark", PHONE),
    }


def take(browser: Browser, found: Scene, to: Path) -> None:
    """Take all pictures."""
    for name, (view, scheme, (width, height)) in places(found).items():
        found.show()
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{found.running.url}/#/{view}")
        page.wait_for_selector("body[data-drawn]", timeout=WITHIN_MS)
        page.wait_for_function("() => !document.body.innerText.includes('Loading...')", timeout=WITHIN_MS)
        page.wait_for_timeout(SETTLES_MS)
        picture = base64.b64encode(page.screenshot()).decode()
        page.goto("about:blank")
        content = small_png(page.evaluate(INDEXED, f"data:image/png;base64,{picture}"))
        context.close()
        (to / f"{name}.png").write_bytes(content)
        print(f"{name}.png: {len(content) // 1000} kB", flush=True)


def small_png(indexed: dict[str, Any]) -> bytes:
    """A PNG with a palette."""
    width, pixels = indexed["width"], base64.b64decode(indexed["pixels"])
    rows = b"".join(b"\0" + pixels[at : at + width] for at in range(0, len(pixels), width))
    head = struct.pack(">IIBBBBB", width, len(pixels) // width, 8, 3, 0, 0, 0)
    palette = bytes(value for colour in indexed["palette"] for value in colour)
    parts = ((b"IHDR", head), (b"PLTE", palette), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=PICTURES, help="where they are written")
    parser.add_argument("--live-s", type=float, default=LIVE_S, help="how long the daemon runs first")
    options = parser.parse_args()
    if shutil.which("chromium") is None:
        parser.exit(1, "This needs Chromium: bash tests/packages.sh\n")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - most tests of this folder need no browser

    options.to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, scene(Path(directory)) as found:
        end_s = time.monotonic() + options.live_s
        while time.monotonic() < end_s:
            found.show()
            time.sleep(1)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(OPTIONS), headless=True)
            take(browser, found, options.to)
            browser.close()


if __name__ == "__main__":
    main()
