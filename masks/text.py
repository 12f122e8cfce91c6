"""Patterns as text: JSON for checkpoints and custom ops, and expressions in Python's syntax."""

from __future__ import annotations

import ast
import inspect
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from functools import reduce
from typing import Any, NoReturn

from .core import (
    CONSTRUCTORS,
    CUT,
    DEEPEST,
    KINDS,
    LONGEST,
    QUOTED,
    Expression,
    Mixture,
    Pattern,
    advises,
    failed_imports,
    registered,
    require_expression,
    shortened,
)


@advises()
def to_json(pattern: Expression) -> str:
    """Return canonical JSON of a pattern or mixture, which `from_json` reads.

    It holds the names of run-time tensors, not the tensors.
    Raises TypeError for other values, and for a pattern with a custom function, as code has no JSON.

    >>> masks.to_json(masks.causal())
    '{"kind":"causal"}'
    """
    text = require_expression(pattern).text
    if _NAMES_A_FUNCTION in text:
        rule = "a custom function cannot be written as JSON: save its parameters, and call masks.custom when loading"
        raise TypeError(f"{rule}; got {pattern!r}")
    return text


@advises()
def from_json(text: str) -> Pattern | Mixture:
    """Return the pattern or mixture that `to_json` wrote as `text`; spaces and the order of names do not matter.

    An unknown kind imports the modules of all entry points of the group `flexdilated.patterns`, once per process.
    Raises ValueError for text that is no such JSON, with the reason, and TypeError for a value that is not a string.

    >>> masks.from_json(masks.to_json(masks.causal()))
    causal()
    """
    pattern = read_text(text)
    if _NAMES_A_FUNCTION in pattern.text:
        raise ValueError(
            f"a custom function cannot be written as JSON: call masks.custom with the function instead; got {pattern!r}"
        )
    return pattern


def read_text(text: str) -> Pattern | Mixture:
    """Return the pattern or mixture whose attribute `text` is this JSON.

    Unlike `from_json`, it accepts custom functions, which the text names by their digests.
    Raises ValueError for a string that is no such JSON, and if a custom function no longer exists in this process.
    Raises TypeError for a value that is not a string.
    """
    if not isinstance(text, str):
        raise TypeError(f"a pattern's JSON must be a string; got {type(text).__name__}")
    try:
        data = read_json(text)
    except ValueError as error:
        raise ValueError(f"a pattern must be JSON as to_json writes it; got {text[:80]!r}: {error}") from error
    try:
        return _from_data(data, depth=0)
    except RecursionError:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels; got {text[:80]!r}") from None


def kept_functions(text: str) -> object:
    """Return an object that keeps the custom functions in a pattern's JSON text alive; None if the text has none.

    Hold the object while the text is in use. Raises ValueError if a function no longer exists.
    """
    return read_text(text) if _NAMES_A_FUNCTION in text else None


_NAMES_A_FUNCTION = '"kind":"custom"'


def _from_data(data: Any, *, depth: int) -> Pattern | Mixture:
    if depth > DEEPEST:
        raise ValueError(f"a pattern must nest at most {DEEPEST} levels")
    kind = data.get("kind") if isinstance(data, dict) else None
    made = registered(KINDS, kind) if isinstance(kind, str) else None
    if made is None:
        failed = failed_imports()
        says = f"a pattern must be an object whose kind is one of {', '.join(sorted(KINDS))}; got {data!r:.80}"
        raise ValueError(f"{says}. {failed}".rstrip() if failed else says)
    if kind == "custom":
        return made.from_data(data)
    if not {"kind", *made.stored} - made.optional <= set(data) <= {"kind", *made.stored}:
        raise ValueError(
            f"a pattern of kind {kind!r} must have the fields {list(made.stored)}; got {sorted(data)!r:.200}"
        )
    values = {name: _field_value(data[name], name, depth) for name in made.stored if name in data}
    try:
        return made.from_data(values)
    except (TypeError, ValueError) as error:
        says = shortened(str(error), QUOTED)
        raise ValueError(f"a pattern of kind {kind!r} has wrong values: {says}") from error


def _field_value(value: Any, field: str, depth: int) -> Any:
    if field == "parts":
        if not isinstance(value, list):
            raise ValueError(f"parts must be a list of patterns; got {value!r:.80}")
        return tuple(_from_data(part, depth=depth + 1) for part in value)
    if field in ("part", "spans") or (isinstance(value, dict) and "kind" in value):
        return _from_data(value, depth=depth + 1)
    return value


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text (bytes are UTF-8) with unique names in each object and finite numbers.

    Raises ValueError for any other text, and for nesting or integers beyond the limits of Python's parser. Lower limits
    on nesting are up to the caller.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text, object_pairs_hook=_require_unique_names, parse_float=_finite_number, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("it nests too deep") from None


def _require_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"duplicate key {twice!r:.80}")
    return found


def _finite_number(text: str) -> float:
    number = float(text)
    if number - number:  # nan if the number is infinite
        raise ValueError(f"a number must be finite; got {text:.80}")
    return number


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"a number must be finite; got {text}")


_METHODS = ("after", "before", "per_document", "queries_from")
_PREFIX = "masks."
_MOST_BRACKETS = 2 * DEEPEST + 4  # printing uses up to two brackets per level, four for a block list
_LARGEST = 2**63 - 1
_AROUND = 40  # characters that an error shows before and after its place
# Permitted text. Each character matches in one way only, so matching takes linear time.
_STRINGS = r"""'[^'\\\n\ud800-\udfff]*'|"[^"\\\n\ud800-\udfff]*\""""
_READABLE = re.compile(rf"(?:{_STRINGS}|[\w\s~&|+\-()\[\],=.])*", re.ASCII)
_WORDS = re.compile(rf"{_STRINGS}|[A-Za-z_]\w*|(\d[\w.]*)|([(\[])|([)\]])", re.ASCII)
_INTEGER = re.compile(r"\d+(_\d+)*", re.ASCII)


@advises()
def parse(text: str) -> Pattern | Mixture:
    """Return the pattern or mixture of an expression such as `longnet([2048, 4096], [1, 2]) & causal()`.

    An expression calls constructors, recipes, and the methods `after`, `before`, `per_document` and `queries_from` of
    patterns, with positional or keyword arguments, and combines patterns by `~`, `+`, `&` and `|` with Python's
    precedence. It is parsed, never run. An unknown name imports the modules of all entry points of the group
    `flexdilated.patterns`, once per process. An expression has at most 4096 characters, and its brackets nest at most
    68 deep. Raises ValueError for any other string, with a caret if the error has a place, and TypeError for other
    values.

    >>> masks.parse('local_window(left=127, right=0) | first_tokens(4)')
    local_window(left=127, right=0) | first_tokens(4)
    """
    if not isinstance(text, str):
        raise TypeError(f"an expression must be a string; got {type(text).__name__}")
    if len(text) > LONGEST:
        raise ValueError(f"an expression must have at most {LONGEST} characters; got {len(text)}")
    value = _Parser(text).value()
    if not isinstance(value, Pattern | Mixture):
        raise ValueError(
            f"an expression must give a pattern; {text[:80]!r} gives a value of type {type(value).__name__}"
        )
    return value


class _Parser:
    """Parser of the text of an expression: evaluates its syntax tree, and raises errors that point into the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._line = re.sub(r"\s", " ", text, flags=re.ASCII)
        self._margin = len(text) - len(self._line.lstrip(" "))

    def value(self) -> object:
        self._require_readable()
        try:
            return self._evaluate(ast.parse(self._line[self._margin :], mode="eval").body)
        except SyntaxError as error:
            if not error.offset:
                raise self._error(
                    len(self._text), "the text must not end here, where a pattern or a value is missing"
                ) from None
            raise self._error(min(self._margin + error.offset - 1, len(self._text)), error.msg) from None
        except (RecursionError, MemoryError):
            raise self._error(0, "an expression must nest less deep") from None

    def _require_readable(self) -> None:
        match = _READABLE.match(self._text)
        assert match is not None, "it matches nothing at least"
        if match.end() < len(self._text):
            raise self._error(match.end(), _why_unreadable(self._text[match.end()]))
        depth = 0
        for word in _WORDS.finditer(self._text):
            number, opening, closing = word.groups(default="")
            depth += bool(opening) - bool(closing)
            if depth > _MOST_BRACKETS:
                raise self._error(word.start(), f"brackets must nest at most {_MOST_BRACKETS} deep")
            if number and not _INTEGER.fullmatch(number):
                raise self._error(word.start(), f"a number must be an integer such as 2_048; got {number:.40}")
            if number and int(number) > _LARGEST:
                says = f"a number must be at most 2**63 - 1; got one of {len(number)} characters"
                raise self._error(word.start(), says)

    def _evaluate(self, node: ast.expr) -> object:
        match node:
            case ast.Constant(str() as value):
                if self._text[self._character_index(node.col_offset) + 1 : self._end_index(node) - 1] != value:
                    raise self._error_at(node, "a string needs two quotes on one line, without prefix")
                return value
            case ast.Constant(int() | None as value):
                return value
            case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)) if not isinstance(value, bool):
                return -value
            case ast.UnaryOp(ast.Invert()):
                at, times = 0, 0
                while isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
                    at = self._character_index(node.col_offset)
                    node, times = node.operand, times + 1
                # Not `part` for an even number: ~ of a mixture raises.
                return self._apply_operator(at, "~", lambda part: ~part if times % 2 else ~~part, [node])
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Add()):
                parts = [*_chain_operands(node)]
                mark, join = _OPERATORS[type(node.op)]
                at = self._text.index(mark, self._end_index(parts[0]))
                return self._apply_operator(at, mark, join, parts)
            case ast.List() | ast.Tuple():
                values = [self._evaluate(each) for each in node.elts]
                return tuple(values) if isinstance(node, ast.Tuple) else values
            case ast.Call():
                return self._call(node)
            case ast.Name() | ast.Attribute():
                name, function = self._function(node)
                raise self._error(self._end_index(node), f"{name} must be called: {name}{_parameters_text(function)}")
        raise self._error_at(node, "an expression has calls, numbers, strings, lists and the operators ~ + & |")

    def _apply_operator(self, at: int, mark: str, join: Callable[..., Any], nodes: Sequence[ast.expr]) -> Expression:
        parts = [self._evaluate(node) for node in nodes]
        for part in parts:
            if not isinstance(part, Expression):
                raise self._error(at, f"{mark} takes patterns; got {part!r:.80}")
        try:
            return join(*parts)
        except TypeError as error:
            raise self._error(at, str(error)) from error

    def _call(self, node: ast.Call) -> object:
        """Call the function that a call node names, and return its result.

        If it raises TypeError, ValueError, OverflowError or RuntimeError, a ValueError points at its name instead.
        """
        name, function = self._function(node.func)
        given = [*node.args, *(each.value for each in node.keywords)]
        names = [str(each.arg) for each in node.keywords]
        for index, each in enumerate(node.keywords):
            if names[index] in names[:index]:
                raise self._error(
                    self._character_index(each.col_offset), f"an argument is given once; got {each.arg!r} again"
                )
        values = [self._evaluate(each) for each in given]
        by_name = dict(zip(names, values[len(node.args) :], strict=True))
        try:
            inspect.signature(function).bind(*values[: len(node.args)], **by_name)
        except TypeError as error:
            raise self._error_at(node.func, f"{name}{_parameters_text(function)}: {error}") from error
        try:
            return function(*values[: len(node.args)], **by_name)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self._error_at(node.func, f"{name}: {error}") from error

    def _function(self, node: ast.expr) -> tuple[str, Callable[..., object]]:
        """Return (name, function) of a node: a constructor, with or without prefix `masks.`, or a pattern's method.

        Raises ValueError for any other node.
        """
        name = _dotted_name(node).removeprefix(_PREFIX)
        if name:
            function = registered(CONSTRUCTORS, name)
            if function is None:
                raise self._error_at(node, _unknown_name_text(name))
            return name, function
        if not isinstance(node, ast.Attribute):
            raise self._error_at(node, "only a constructor or a pattern's method can be called")
        value = self._evaluate(node.value)
        if not isinstance(value, Expression) or node.attr not in _METHODS:
            says = f"a dot must follow a pattern, and be followed by one of its methods {', '.join(_METHODS)}"
            raise self._error(self._end_index(node) - len(node.attr), says)
        return node.attr, getattr(value, node.attr)

    def _character_index(self, place: int) -> int:
        """Return the character index in the text for `place`, a UTF-8 byte offset in the text without leading blanks.

        Nodes of a syntax tree have such offsets.
        """
        return self._margin + len(self._text[self._margin :].encode()[:place].decode(errors="ignore"))

    def _end_index(self, node: ast.expr) -> int:
        return self._character_index(node.end_col_offset or 0)

    def _error_at(self, node: ast.expr, says: str) -> ValueError:
        return self._error(self._character_index(node.col_offset), says)

    def _error(self, at: int, says: str) -> ValueError:
        """Return a ValueError with `says`, which is cut if long, the text around character index `at`, and a caret."""
        begin, end = max(0, at - _AROUND), at + _AROUND
        shown = "".join(character if character.isprintable() else " " for character in self._text[begin:end])
        before, after = CUT if begin else "", CUT if end < len(self._text) else ""
        caret = " " * (len(before) + at - begin) + "^"
        return ValueError(f"{shortened(says, QUOTED)}; at column {at + 1}:\n  {before}{shown}{after}\n  {caret}")


def _chain_operands(node: ast.BinOp) -> Iterator[ast.expr]:
    """Yield the operands of a chain of one operator, from left to right."""
    right: list[ast.expr] = []
    left: ast.expr = node
    while isinstance(left, ast.BinOp) and type(left.op) is type(node.op):
        right.append(left.right)
        left = left.left
    yield from (left, *reversed(right))


def _dotted_name(node: ast.expr) -> str:
    """Return the text of a name, dotted or not, such as "masks.causal" or "causal"; "" for any other expression."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(words)]) if isinstance(node, ast.Name) else ""


def _intersect(*parts: Any) -> Expression:
    """Return the intersection of patterns and at most one mixture, with the mixture last in the chain of `&`."""
    # Each branch of the mixture is then intersected once, with the intersection of all patterns.
    return reduce(operator.and_, sorted(parts, key=lambda part: isinstance(part, Mixture)))


_OPERATORS: dict[type[ast.operator], tuple[str, Callable[..., Expression]]] = {
    ast.BitOr: ("|", lambda *parts: reduce(operator.or_, parts)),
    ast.BitAnd: ("&", _intersect),
    ast.Add: ("+", lambda *parts: reduce(operator.add, parts)),
}


def _why_unreadable(character: str) -> str:
    if character in "'\"":
        return "a string needs its closing quote on the same line, and no backslash or surrogate in it"
    if character == CUT:
        return f"the expression was cut at {CUT}: to_json gives a large pattern whole"
    return f"an expression must not contain {character!r}"


def _parameters_text(build: Callable[..., object]) -> str:
    signature = inspect.signature(build)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _unknown_name_text(name: str) -> str:
    known = [*CONSTRUCTORS]
    near = [full for full in known if full.endswith(f".{name}")] or get_close_matches(name[:64], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no pattern is called {name[:64]!r}: {failed_imports()}{hint}There are {', '.join(sorted(known))}"
