"""Tables in Markdown, as pages have them."""

from collections.abc import Iterable, Sequence

from tabulate import tabulate


def markdown(lines: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """Texts as they are given: none is taken for a number."""
    return tabulate(lines, headers, tablefmt="github", disable_numparse=True)
