"""Draw the pictures of docs/howto/inspecting.md into the folder `gallery` beside this file, each by the code above it.

Run from a checkout with the extra `plot` installed: python docs/images/make_gallery.py
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexdilated import masks

HERE = Path(__file__).parent
PAGE = HERE.parent / "howto" / "inspecting.md"
# A block of code, and the picture right below it, if there is one.
_BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(?:\n!\[[^\]]+\]\(\.\./images/(?P<picture>gallery/[^)]+)\))?", re.M | re.S
)


def pictures() -> Iterator[tuple[str, Any]]:
    """The path of each picture below `images`, and its figure, in the order of the page."""
    for block in _BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
        if block["picture"]:
            names: dict[str, Any] = {"masks": masks}
            exec(block["code"], names)
            yield block["picture"], names["figure"]


if __name__ == "__main__":
    for name, figure in pictures():
        figure.savefig(HERE / name, metadata={"Software": None}, pil_kwargs={"optimize": True})
