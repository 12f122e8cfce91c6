"""Ladders of segments and rates that are in use, and the same with shorter segments."""

# LongNet's own ladder (arXiv 2307.02486), where rates do not divide segments, and Prov-GigaPath's, whose last
# segments exceed any slide.
PAPER_5 = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))
GIGAPATH_5 = ((1024, 5792, 32768, 185363, 1048576), (1, 2, 4, 8, 16))
LONGNET_4 = ((2048, 4096, 8192, 16384), (1, 2, 4, 8))
LONGNET_5 = ((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 8, 16))
LADDERS = {"longnet-4": LONGNET_4, "longnet-5": LONGNET_5, "paper-5": PAPER_5, "gigapath-5": GIGAPATH_5}


def scaled(ladder: tuple[tuple[int, ...], tuple[int, ...]], divisor: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A ladder with shorter segments and the same rates."""
    return tuple(-(-w // divisor) for w in ladder[0]), ladder[1]
