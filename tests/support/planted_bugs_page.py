"""Write the table of planted bugs into its page: `python -m tests.support.planted_bugs_page`."""

from pathlib import Path

from tests.support.planted_bugs import table
from tests.support.planted_bugs_in_engines import IN_ENGINES
from tests.support.planted_bugs_in_patterns import IN_PATTERNS
from tests.support.planted_bugs_of_others import OF_OTHERS

BUGS = (*OF_OTHERS, *IN_PATTERNS, *IN_ENGINES)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "contributing" / "tests.md"
_BEGIN, _END = "<!-- planted bugs begin -->\n", "<!-- planted bugs end -->"


def filled(text: str) -> str:
    """The page with the table as it should be."""
    before, _, rest = text.partition(_BEGIN)
    return f"{before}{_BEGIN}{table(BUGS)}\n{_END}{rest.partition(_END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
