"""Texts that a reader of patterns may be handed: valid ones, malformed ones, and scraps of both in any order."""

import json
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from bench._catalogue import ENTRIES
from flexdilated import masks
from flexdilated.masks.core._expression import CONSTRUCTORS, KINDS
from flexdilated.masks.patterns._custom import Custom

_WHOLE = (0, 1, -1, 2, 7, 128, 2**31 - 1, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40)
_VALUES = (*_WHOLE, True, False, None, 0.5, 1e300, "", "left", "interleaved", "\ud800", [], [1], [[0], [1, 0]], {})
_SCRAPS = (
    *"~&|+-()[],=. '\"_0123456789\n\t\\#@{}:;",
    *("1e9", "0x10", "×", "…", "\0", "\ud800", "\u202e", "None", "True", "'interleaved'", "masks.", "recipes."),
    *(".per_document(", ".__class__", "__import__('os')", "lambda: 0", "left=", "rate=", "(" * 40, "~" * 50, "9" * 60),
    *(f"{name}(" for name in sorted(CONSTRUCTORS)),
)
_JSON_SCRAPS = (
    *'{}[]",:0123456789-+.eE \n',
    *("null", "true", "NaN", "Infinity", "-Infinity", "1e999", '"kind"', '"parts"', '"part"', '"\\ud800"', "\0"),
    *("[" * 100, '{"kind":"not","part":' * 70, "9" * 5000, '"kind":"custom"', "\ufeff", "//", "'"),
    *(f'"kind":"{kind}"' for kind in KINDS),
)


def expression(generator: Random) -> str:
    """What might be given to `masks.parse`."""
    kind = generator.random()
    if kind < 0.15:
        return _soup(generator, _SCRAPS)
    if kind < 0.3:
        return _call(generator)
    return _damaged(generator, _composed(generator), _SCRAPS)


def json_text(generator: Random) -> str:
    """What might be given to `masks.from_json`."""
    kind = generator.random()
    if kind < 0.15:
        return _soup(generator, _JSON_SCRAPS)
    data = _grown(generator, depth=3)
    if kind < 0.6:
        data = _replaced(generator, data)
    text = json.dumps(data)
    return text if kind < 0.7 else _damaged(generator, text, _JSON_SCRAPS)


TEXTS: dict[str, Callable[[Random], str]] = {"expressions": expression, "JSON texts": json_text}


@cache
def _specimens() -> tuple[str, ...]:
    """The catalogue's patterns as text. Made when first drawn from: an import must not compute."""
    patterns = (entry.pictured() for entry in ENTRIES)
    texts = [repr(each) for each in patterns if not any(isinstance(leaf, Custom) for leaf in each.leaves())]
    return tuple(text for text in texts if len(text) < 1000)


@cache
def _data() -> tuple[Any, ...]:
    """The same as data of JSON."""
    return tuple(json.loads(masks.to_json(masks.parse(text))) for text in _specimens())


def _soup(generator: Random, scraps: tuple[str, ...]) -> str:
    return "".join(generator.choices(scraps, k=generator.randint(0, 30)))


def _composed(generator: Random) -> str:
    text = generator.choice(_specimens())
    while generator.random() < 0.4:
        text = f"{text} {generator.choice('&|+')} {'~' * generator.randint(0, 2)}({generator.choice(_specimens())})"
    return text


def _call(generator: Random) -> str:
    """A constructor with arguments of any kind."""
    name = generator.choice(tuple(CONSTRUCTORS))
    arguments = [repr(generator.choice(_VALUES)) for _ in range(generator.randint(0, 4))]
    names = generator.sample(("left", "right", "rate", "offset", "segment", "block", "seed", "count"), 2)
    arguments += [f"{name}={generator.choice(_VALUES)!r}" for name in names if generator.random() < 0.3]
    return f"{name}({', '.join(arguments)})"


def _damaged(generator: Random, text: str, scraps: tuple[str, ...]) -> str:
    """Characters lost, and others put in their place; in a third of the cases none."""
    for _ in range(generator.randint(-1, 3)):
        at = generator.randint(0, len(text))
        text = text[:at] + generator.choice(scraps) + text[at + generator.randint(0, 3) :]
    return text


def _grown(generator: Random, depth: int) -> Any:
    """Data of a pattern, with others for parts."""
    if not depth or generator.random() < 0.5:
        return generator.choice(_data())
    kind, inner = generator.choice(("and", "or", "not", "per_head", "head_groups", "mixture", "blockwise")), depth - 1
    if kind in ("not", "blockwise"):
        block = {} if kind == "not" else {"block": generator.choice(_WHOLE)}
        return {"kind": kind, "part": _grown(generator, inner), **block}
    return {"kind": kind, "parts": [_grown(generator, inner) for _ in range(generator.randint(0, 3))]}


def _replaced(generator: Random, data: Any) -> Any:
    """The same data with one value or name changed, at a place drawn on the way down."""
    if isinstance(data, dict) and data and generator.random() < 0.9:
        name = generator.choice(tuple(data))
        if generator.random() < 0.1:
            return {("kinds" if key == name else key): value for key, value in data.items()}
        return {**data, name: _replaced(generator, data[name])}
    if isinstance(data, list) and data and generator.random() < 0.8:
        at = generator.randrange(len(data))
        return [*data[:at], _replaced(generator, data[at]), *data[at + 1 :]]
    return generator.choice((*_VALUES, generator.choice(tuple(KINDS))))
