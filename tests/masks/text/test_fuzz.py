"""Drawn and malformed texts are read as a pattern or refused with a clear error, in bounded time and memory."""

import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from time import thread_time

import pytest

from flexdilated import masks
from tests.support.malformed_texts import TEXTS

LONGEST_ERROR = 1300  # characters: the place that an error shows, and what it quotes

Reader = Callable[[str], object]
READERS: dict[str, Reader] = {"expressions": masks.parse, "JSON texts": masks.from_json}


@dataclass
class Answers:
    """How texts were answered; `wrong` are those that were neither read nor refused with a clear error."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0  # of this thread


def answer_all(kind: str, *, number: int, seed: int) -> Answers:
    """Draw this many texts of a kind, and have each read. What reads must come back from its own text."""
    generator, found, read = Random(seed), Answers(), READERS[kind]
    for _ in range(number):
        text = TEXTS[kind](generator)
        start = thread_time()
        verdict = verdict_on(read, text)
        found.slowest_s = max(found.slowest_s, thread_time() - start)
        found.verdicts[verdict] += 1
        if verdict not in ("pattern", "ValueError"):
            found.wrong.append(f"{verdict}: {text[:200]!r}")
    return found


def verdict_on(read: Reader, text: str) -> str:
    try:
        pattern = read(text)
    except ValueError as error:
        return "ValueError" if type(error) is ValueError and len(str(error)) <= LONGEST_ERROR else "an unclear error"
    except Exception as error:  # that there is none of these is what is tested
        return type(error).__name__
    if not isinstance(pattern, masks.Pattern | masks.Mixture):
        return "no pattern"
    again = masks.from_json(masks.to_json(pattern))
    # Values of run-time tensors are no part of a text, and tell patterns apart.
    same = again.text == pattern.text and (again == pattern or pattern.varies)
    return "pattern" if same else "another pattern"


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_are_answered(kind):
    answer_all(kind, number=50, seed=21)
    tracemalloc.start()
    answer_all(kind, number=100, seed=22)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 64 << 20
    found = answer_all(kind, number=2000, seed=20)
    assert found.wrong == []
    assert found.slowest_s < 1
    # Both answers are drawn often.
    assert found.verdicts.keys() == {"pattern", "ValueError"}
    assert min(found.verdicts.values()) > 200
