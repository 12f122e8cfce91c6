"""Bytes as people read them."""


def bytes_text(number: float) -> str:
    """Three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:,.0f} TiB" if number >= 100 else f"{number:.3g} TiB"
