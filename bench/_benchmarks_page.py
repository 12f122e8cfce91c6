"""The page of benchmarks: its list of questions, from the questions themselves."""

from pathlib import Path

from ._guard_cases import CASES
from ._markdown import markdown
from ._questions import QUESTIONS
from ._run import question_text

BENCHMARKS = Path("docs/benchmarks.md")


def benchmarks_parts() -> dict[str, str]:
    """What each name asks, and what each case of the guard runs."""
    asked = [(f"`{name}`", question_text(name)) for name in QUESTIONS]
    watched = [(f"`{name}`", (case.__doc__ or "").strip()) for name, case in CASES.items()]
    return {
        "questions": f"\n{markdown(asked, ('name', 'question'))}\n",
        "cases": f"\n{markdown(watched, ('case', 'what runs'))}\n",
    }
