"""Are millions of drawn and spoilt texts read as a pattern or answered by a clear error, in bounded time and memory?"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from time import thread_time

from flexdilated import masks

from ._hostile_texts import TEXTS
from ._memory import peak_bytes
from ._result import Result, Row, at_most

_MB = 1 << 20
_LONGEST_ERROR = 1300  # characters: the place that an error shows, and what it quotes
_EXAMPLES = 5

Reader = Callable[[str], object]
READERS: dict[str, Reader] = {"expressions": masks.parse, "JSON texts": masks.from_json}


@dataclass(frozen=True)
class Config:
    """How many texts of each kind, and of how many their memory is watched."""

    texts: int
    watched: int
    seed: int


FULL = Config(texts=1_500_000, watched=100_000, seed=0)
SMALL = Config(texts=300, watched=100, seed=0)


@dataclass
class Answers:
    """How texts were answered. `slowest` is (seconds of this thread, text)."""

    verdicts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")

    def add(self, text: str, verdict: str, seconds: float) -> None:
        """One more. All verdicts but two are faults of the reader."""
        self.verdicts[verdict] += 1
        if verdict not in ("pattern", "ValueError") and len(self.wrong) < _EXAMPLES:
            self.wrong.append(f"{verdict}: {text[:200]!r}")
        self.slowest = max(self.slowest, (seconds, text[:200]))

    @property
    def num_wrong(self) -> int:
        return sum(times for verdict, times in self.verdicts.items() if verdict not in ("pattern", "ValueError"))


def run(config: Config) -> Result:
    """What reads must come back from its own text; an error must be a ValueError of bounded length."""
    return Result(tuple(row for kind in TEXTS for row in _rows(kind, config)))


def answer_all(kind: str, *, number: int, seed: int, read: Reader | None = None) -> Answers:
    """Draw this many texts of a kind, and have each read."""
    generator, found, read = Random(seed), Answers(), read or READERS[kind]
    for _ in range(number):
        text = TEXTS[kind](generator)
        start = thread_time()
        verdict = _verdict(read, text)
        found.add(text, verdict, thread_time() - start)
    return found


def _verdict(read: Reader, text: str) -> str:
    try:
        pattern = read(text)
    except ValueError as error:
        return "ValueError" if type(error) is ValueError and len(str(error)) <= _LONGEST_ERROR else "an unclear error"
    except Exception as error:  # that there is none of these is what is asked
        return type(error).__name__
    if not isinstance(pattern, masks.Pattern | masks.Mixture):
        return "no pattern"
    again = masks.from_json(masks.to_json(pattern))
    # Values of run-time tensors are no part of a text, and tell patterns apart.
    same = again.text == pattern.text and (again == pattern or pattern.varies)
    return "pattern" if same else "another pattern"


def _rows(kind: str, config: Config) -> list[Row]:
    found = answer_all(kind, number=config.texts, seed=config.seed)
    grown = peak_bytes(_watched, kind, config)
    detail = {"texts": config.texts, "verdicts": dict(found.verdicts), "wrong": found.wrong}
    seconds, slowest = found.slowest
    return [
        Row(
            f"{kind}: neither read nor answered by a clear error",
            at_most(0),
            found.num_wrong,
            (),
            detail,
        ),
        Row(f"{kind}: processor time of the slowest", at_most(1, "s"), seconds, (), {"text": slowest}),
        Row(
            f"{kind}: peak memory of reading {config.watched:,}",
            at_most(64, "MB"),
            grown / _MB,
            (),
            {"texts": config.watched},
        ),
    ]


def _watched(kind: str, config: Config) -> Callable[[], object]:
    answer_all(kind, number=1000, seed=config.seed + 1)
    return lambda: answer_all(kind, number=config.watched, seed=config.seed + 2)
