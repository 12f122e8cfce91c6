"""Draw viewer.png and viewer_pairs.png beside this file: the viewer's page as chromium shows it.

Run from a checkout with the extra `plot` and chromium installed: python docs/images/make_viewer_pictures.py
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the browser is driven as in the tests

from flexdilated import masks  # noqa: E402
from flexdilated.viewer import page  # noqa: E402
from tests.support.browser import Browser, find_browser  # noqa: E402

WINDOW = {"width": 1280, "height": 900}
EVERYTHING = "q=0&k=0&span=1048576&head=0&order=natural&block=128"
PAIRS = "q=32756&k=32744&span=34&head=1&order=natural&block=128"


def main() -> None:
    """All of a million tokens, and pairs at the border of two segments."""
    found = find_browser()
    assert found, "the pictures are drawn with chromium: make browser"
    wide = masks.longnet([2048, 32768, 262144, 1048576], [1, 16, 128, 512]) & masks.causal()
    close = masks.longnet([2048, 8192, 32768], [1, 4, 16]) & masks.causal()
    with TemporaryDirectory() as folder, Browser(found) as browser:
        file = Path(folder) / "page.html"
        sizes = {"num_tokens": 1 << 20, "num_heads": 8, "title": "LongNet at a million tokens"}
        file.write_text(page(wide, **sizes), "utf-8")
        draw(browser, f"{file.as_uri()}#{EVERYTHING}", "viewer", dark=False)
        file.write_text(page(close, **sizes), "utf-8")
        draw(browser, f"{file.as_uri()}#{PAIRS}", "viewer_pairs", dark=True, held=(32785, 32773))


def draw(browser: Browser, address: str, name: str, *, dark: bool, held: tuple[int, int] | None = None) -> None:
    tab = browser.open(address, dark=dark, **WINDOW)
    tab.settle()
    if held is not None:
        tab.evaluate(f"viewer.hold({held[0]}, {held[1]})")
        tab.settle()
    picture = Path(__file__).with_name(f"{name}.png")
    tab.screenshot(picture)
    tab.close()
    with Image.open(picture) as image:
        image.convert("RGB").save(picture, optimize=True)


if __name__ == "__main__":
    main()
