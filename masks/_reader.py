"""The grammar of pattern expressions, read by recursive descent. No text is ever run as Python."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from ._algebra import And, Or
from ._lexer import Token, fault, tokens
from ._pattern import DEEPEST, Expression, Mixture, Pattern

_CONSTANTS = {"True": True, "False": False, "None": None}
_METHODS = ("per_document",)
_PREFIX = "masks"
_MAX_DEPTH = 2 * DEEPEST + 4  # each level of a pattern is printed with up to two brackets, a block list with four


class Reader:
    """Reads one text; a method for each rule of the grammar. Names are looked up in `constructors`."""

    def __init__(self, text: str, constructors: Mapping[str, Callable[..., object]]) -> None:
        self._text = text
        self._constructors = constructors
        self._tokens = tokens(text)
        self._place = 0
        self._depth = 0

    def whole(self) -> object:
        """The value of the whole text."""
        value = self._value()
        if self._here.kind != "end":
            raise self._fault(self._here, f"an operator or the end should stand here; got {self._here.text}")
        return value

    def _value(self) -> object:
        """Operands joined by operators; one alone may be any value."""
        operands, operators = [self._operand()], list[Token]()
        while self._here.text in _JOINS:
            operators.append(self._take())
            operands.append(self._operand())
        return self._joined(operands, operators, tuple(_JOINS))

    def _joined(self, operands: list[object], operators: list[Token], marks: Sequence[str]) -> object:
        """Cut at the loosest mark, then join all parts at once: two at a time, long chains would take long."""
        if not operators:
            return operands[0]
        mark, tighter = marks[0], marks[1:]
        cuts = [index for index, operator in enumerate(operators) if operator.text == mark]
        begins, ends = [0, *(cut + 1 for cut in cuts)], [*cuts, len(operators)]
        parts = [
            self._joined(operands[begin : end + 1], operators[begin:end], tighter)
            for begin, end in zip(begins, ends, strict=True)
        ]
        return self._apply(operators[cuts[0]], _JOINS[mark], parts) if cuts else parts[0]

    def _operand(self) -> object:
        """A primary after any number of `~`, of which two cancel."""
        tildes = []
        while self._here.text == "~":
            tildes.append(self._take())
        value = self._primary()
        for tilde in tildes[: 2 - len(tildes) % 2] if tildes else ():
            value = self._apply(tilde, _complement, [value])
        return value

    def _apply(self, operator: Token, join: Callable[[Sequence[Any]], Expression], parts: list[object]) -> Expression:
        for part in parts:
            if not isinstance(part, Expression):
                raise self._fault(operator, f"{operator.text} takes patterns; got {part!r:.80}")
        try:
            return join(parts)
        except TypeError as error:
            raise self._fault(operator, str(error)) from error

    def _primary(self) -> object:
        """A value and the methods called on it."""
        value = self._atom()
        while self._here.text == ".":
            self._take()
            method = self._take()
            if not isinstance(value, Expression) or method.text not in _METHODS:
                raise self._fault(method, f"after the dot stands one of {', '.join(_METHODS)}, of a pattern")
            value = self._called(method, method.text, getattr(value, method.text))
        return value

    def _atom(self) -> object:
        token = self._here
        if token.text == "(":
            values, commas = self._list(")")
            return tuple(values) if commas or not values else values[0]
        if token.text == "[":
            return self._list("]")[0]
        if token.kind == "name" and token.text not in _CONSTANTS:
            name = self._name()
            return self._called(token, name, self._constructors[name])
        self._take()
        match token.kind:
            case "name":
                return _CONSTANTS[token.text]
            case "number":
                return int(token.text)
            case "string":
                return token.text[1:-1]
        if token.text == "-" and self._here.kind == "number":
            return -int(self._take().text)
        raise self._fault(token, f"a pattern or a value should stand here; got {token.text or 'the end'}")

    def _name(self) -> str:
        """A constructor's name, which may be dotted and may begin with `masks`."""
        first = self._take()
        words = [first.text]
        while self._here.text == ".":
            self._take()
            if self._here.kind != "name":
                raise self._fault(self._here, f"a name should stand after the dot; got {self._here.text or 'the end'}")
            words.append(self._take().text)
        name = ".".join(words[1:] if words[0] == _PREFIX and len(words) > 1 else words)
        if name not in self._constructors:
            raise self._fault(first, _unknown(name, list(self._constructors)))
        return name

    def _called(self, place: Token, name: str, function: Callable[..., object]) -> object:
        """What the function makes of the arguments in brackets, which its signature must take."""
        if self._here.text != "(":
            raise self._fault(self._here, f"{name} must be called: {name}{_parameters(function)}")
        by_place, by_name = list[object](), dict[str, object]()
        self._bracketed(")", lambda: self._argument(by_place, by_name))
        try:
            inspect.signature(function).bind(*by_place, **by_name)
        except TypeError as error:
            raise self._fault(place, f"{name}{_parameters(function)}: {error}") from error
        try:
            return function(*by_place, **by_name)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise self._fault(place, f"{name}: {error}") from error

    def _argument(self, places: list[object], names: dict[str, object]) -> None:
        """One argument, added to those by place or to those by name."""
        first = self._here
        if first.kind == "name" and self._tokens[self._place + 1].text == "=":
            self._take()
            self._take()
            if first.text in names:
                raise self._fault(first, f"an argument is given once; got {first.text!r} again")
            names[first.text] = self._value()
        elif names:
            raise self._fault(first, "arguments by place come before those by name")
        else:
            places.append(self._value())

    def _list(self, closing: str) -> tuple[list[object], int]:
        """The values in brackets, and how many commas stand after one of them."""
        values = []
        return values, self._bracketed(closing, lambda: values.append(self._value()))

    def _bracketed(self, closing: str, read: Callable[[], None]) -> int:
        """An opening bracket, what `read` reads, again after each comma, and the closing bracket; the commas."""
        opening = self._take()
        commas, self._depth = 0, self._depth + 1
        if self._depth > _MAX_DEPTH:
            raise self._fault(opening, f"brackets must nest at most {_MAX_DEPTH} deep")
        while self._here.text != closing:
            read()
            if self._here.text != ",":
                break
            self._take()
            commas += 1
        if self._here.text != closing:
            raise self._fault(self._here, f"the {opening.text!r} of column {opening.at + 1} needs its {closing!r}")
        self._take()
        self._depth -= 1
        return commas

    @property
    def _here(self) -> Token:
        return self._tokens[self._place]

    def _take(self) -> Token:
        token = self._here
        self._place += token.kind != "end"
        return token

    def _fault(self, token: Token, says: str) -> ValueError:
        return fault(self._text, token.at, says)


def _unite(parts: Sequence[Any]) -> Expression:
    mixtures = [part for part in parts if isinstance(part, Mixture)]
    if mixtures:  # its own operator says why not
        return parts[0] | (parts[1] if parts[0] is mixtures[0] else mixtures[0])
    return Or.of(*parts)


def _intersect(parts: Sequence[Any]) -> Expression:
    mixtures = [part for part in parts if isinstance(part, Mixture)]
    if len(mixtures) > 1:
        return mixtures[0] & mixtures[1]
    sets = And.of(*(part for part in parts if isinstance(part, Pattern)))
    return mixtures[0] & sets if mixtures else sets


def _add(parts: Sequence[Any]) -> Expression:
    return Mixture(tuple(branch for part in parts for branch in part.branches()))


def _complement(parts: Sequence[Any]) -> Expression:
    return ~parts[0]


# From the loosest to the tightest, as in Python.
_JOINS: dict[str, Callable[[Sequence[Any]], Expression]] = {"|": _unite, "&": _intersect, "+": _add}


def _parameters(build: Callable[..., object]) -> str:
    """The parameters as one writes them, without types."""
    signature = inspect.signature(build)
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(bare))


def _unknown(name: str, known: list[str]) -> str:
    near = [full for full in known if full.endswith(f".{name}")] or get_close_matches(name[:64], known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"no pattern is called {name[:64]!r}: {hint}There are {', '.join(known)}"
