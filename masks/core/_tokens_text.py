"""Numbers of tokens as people write them."""


def tokens_text(number: int) -> str:
    """16384 as 16K, 1048576 as 1M; other numbers in full."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if number and number % size == 0:
            return f"{number // size:,}{unit}"
    return f"{number:,}"
