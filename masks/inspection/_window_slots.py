"""One side of the window that is asked about, as a range of slots."""

from __future__ import annotations


def window_slots(name: str, window: object, size: int) -> range:
    """The window itself, or for None all `size` slots. Raises ValueError for what is no run of them."""
    window = range(size) if window is None else window
    if not isinstance(window, range) or window.step != 1 or not 0 <= window.start < window.stop <= size:
        raise ValueError(f"{name} must be a range of step 1 within 0 to {size}, and not empty; got {name}={window!r}")
    return window
