"""Error texts that say what to write instead of a rejected call, an unknown name, or a value that is not a pattern."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import wraps
from inspect import CO_VARARGS, CO_VARKEYWORDS, unwrap
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch.compiler import is_compiling

_Advised = TypeVar("_Advised", bound=Callable[..., Any])

_NEAR = 0.75  # difflib cutoff: num_heads and heads, which differ in meaning, score 0.71
# Prefixes that users write before the names of a module; the first module name that matches applies.
_ROOMS = {
    "flexdilated.masks.recipes": "masks.recipes.",
    "flexdilated.masks": "masks.",
    **{f"flexdilated.{room}": f"fd.{room}." for room in ("distributed", "testing", "selection.recipes", "schedules")},
    "flexdilated.integrations.transformers": "fd.integrations.transformers.",
    "flexdilated": "fd.",
}


# Attributes that users try on a pattern, with the advice for each.
_ADVICE = {
    **{name: f"write masks.{name}(pattern, num_tokens)" for name in ("describe", "layout", "plot", "show")},
    **dict.fromkeys(("draw", "visualize", "print"), "write masks.show(pattern, num_tokens)"),
    **dict.fromkeys(("density", "sparsity", "num_pairs", "cost"), "write masks.describe(pattern, num_tokens)"),
    **dict.fromkeys(
        ("block_mask", "to_block_mask", "BLOCK_SIZE"), "write masks.block_mask(pattern, num_tokens, num_heads=8)"
    ),
    **dict.fromkeys(("to_json", "json", "dumps", "serialize", "to_dict"), "write masks.to_json(pattern)"),
    **dict.fromkeys(("attend", "forward", "apply"), "write fd.attend(q, k, v, pattern)"),
    **dict.fromkeys(("to", "cuda", "cpu", "device", "dtype"), "a pattern has no device or dtype and fits any q"),
    **dict.fromkeys(
        ("to_dense", "dense", "mask", "to_mask", "matrix", "to_tensor", "numpy", "materialize", "mask_fn"),
        "write pattern.bind(num_heads=1, num_queries=n, num_keys=n).mask_mod()(0, 0, places[:, None], places), where "
        "places = torch.arange(n)",
    ),
    "causal": "write pattern & masks.causal()",
    "explain": "write masks.explain(pattern, query=, key=)",
    "plan": "write fd.plan(pattern, num_tokens)",
    "snapped": "write masks.snapped(pattern)",
}


class _Parameters(NamedTuple):
    """Names and kinds of a function's parameters, from which error texts are made.

    called: qualified name of the function; for `__init__`, that of its class.
    path: the name that users write, such as `fd.attend`.
    num_self: 1 for a method, else 0; the fields below omit `self`.
    positional: parameters that may be positional; the others are `keyword_only`.
    required, required_keywords: the required ones of `positional` and of `keyword_only`.
    flags: `co_flags` of the code object.
    """

    called: str
    path: str
    num_self: int
    positional: tuple[str, ...]
    keyword_only: tuple[str, ...]
    required: tuple[str, ...]
    required_keywords: tuple[str, ...]
    flags: int

    @classmethod
    def of(cls, function: Any) -> _Parameters:
        plain = unwrap(function)
        code, called = plain.__code__, plain.__qualname__.removesuffix(".__init__")
        num_self = int(code.co_varnames[:1] == ("self",))
        positional = code.co_varnames[num_self : code.co_argcount]
        keyword_only = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        required = positional[: len(positional) - len(plain.__defaults__ or ())]
        required_keywords = tuple(name for name in keyword_only if name not in (plain.__kwdefaults__ or ()))
        room = next((room for room in _ROOMS if plain.__module__.startswith(room)), "")
        path = _ROOMS.get(room, "") + called
        return cls(called, path, num_self, positional, keyword_only, required, required_keywords, code.co_flags)

    @property
    def most(self) -> int:
        """Maximum number of positional arguments, including self; 2**31 for a function with *args."""
        return 1 << 31 if self.flags & CO_VARARGS else self.num_self + len(self.positional)

    @property
    def call_advice(self) -> str:
        return f"write {self.path}({', '.join((*self.required, *(f'{name}=' for name in self.required_keywords)))})"

    def unknown_text(self, name: str, known: Mapping[str, str]) -> str:
        names = self.positional + self.keyword_only
        # torch.compile, which traces this, cannot trace the search.
        near = [] if name in known or is_compiling() else get_close_matches(name, names, 1, _NEAR)
        meant = f"write {near[0]}=" if near else f"it takes {', '.join(names) or 'nothing'}"
        return f"{self.called} has no argument {name}: {known.get(name, meant)}"

    def excess_text(self, args: tuple[object, ...], how: str) -> str:
        takes = (
            f"takes {', '.join(self.positional)} by position" if self.positional else "takes no positional arguments"
        )
        if self.positional and self.keyword_only:
            takes += f", and by name {', '.join(self.keyword_only)}"
        came = f"{'the extra arguments ' if self.positional else ''}{args[len(self.positional) :]!r:.80}"
        return f"{self.called} {takes}: {how or self.call_advice}; got {came}"

    def missing_text(self, given: int, named: Mapping[str, object], how: str) -> str:
        *others, last = [name for name in self.required[given:] + self.required_keywords if name not in named]
        lacks = f"{', '.join(others)} and {last}" if others else last
        return f"{self.called} needs {lacks}: {how or self.call_advice}"


def advises(*, keywords: Mapping[str, str] | None = None, how: str = "") -> Callable[[_Advised], _Advised]:
    """Return a decorator by which a function or class rejects missing, excess and unknown arguments, with advice.

    To reject, it raises TypeError. A function with **kwargs takes unknown keywords, except those in `keywords`.

    keywords: {unknown keyword: advice}. For another unknown keyword the error names a parameter of a similar name; if
        there is none, or a graph is compiled, it lists all parameters. Entries for existing parameters are ignored.
    how: advice for missing or excess arguments; "" gives the call with all required arguments.

    A function that is already decorated is returned unchanged.
    """

    def advising(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = advising(function.__init__)
            return function
        if hasattr(function, "is_advised"):
            return function
        its = _Parameters.of(function)
        num_self, most, required, required_keywords = its.num_self, its.most, its.required, its.required_keywords
        names, takes_any = frozenset(its.positional + its.keyword_only), bool(its.flags & CO_VARKEYWORDS)
        known = {name: text for name, text in (keywords or {}).items() if name not in names}

        @wraps(function)
        def advised(*args: Any, **named: Any) -> Any:
            for name in named:
                if name in known or not (takes_any or name in names):
                    raise TypeError(its.unknown_text(name, known))
            if len(args) > most:
                raise TypeError(its.excess_text(args[num_self:], how))
            if required_keywords or len(args) < num_self + len(required):
                for name in required[len(args) - num_self :] + required_keywords:
                    if name not in named:
                        raise TypeError(its.missing_text(len(args) - num_self, named, how))
            return function(*args, **named)

        advised.is_advised = True  # type: ignore[attr-defined]
        return advised

    return advising


# Other libraries' names of a length, heads and a width.
LENGTH = "seq_len seqlen seq_length sequence_length max_seq_len length n N tokens num_tokens q_len Q_LEN"
HEADS = "heads n_heads n_head nhead num_attention_heads H"
WIDTH = "dim d_model hidden_size n_embd model_dim embed_size embedding_dim"


# Keywords that users try on constructors of patterns; `advises` skips those that a constructor has.
OF_PATTERNS = {
    **dict.fromkeys(("causal", "is_causal"), "write pattern & masks.causal()"),
    **dict.fromkeys(("num_heads", *HEADS.split()), "leave it out, as a pattern takes the number of heads from q"),
    **dict.fromkeys(LENGTH.split(), "leave it out, as a pattern takes the numbers of tokens from q and k"),
    **dict.fromkeys(("device", "dtype"), "a pattern has no device or dtype and fits any q"),
}


def renamed(**names: str) -> dict[str, str]:
    """Return advice on keywords of other libraries, in the form that `advises` takes as `keywords`.

    names: for each of our parameters, the other libraries' names separated by spaces: renamed(radius="window size")
        returns {"window": "write radius=", "size": "write radius="}.
    """
    return {other: f"write {name}=" for name, others in names.items() for other in others.split()}


def no_such_name(module: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str], prefix: str) -> str:
    """Return the text of an AttributeError for a module without `name`, with up to two names to write instead.

    known: the module's names, which are searched for similar ones.
    elsewhere: other libraries' names with the expressions to write instead.
    prefix: text before each suggestion, such as "masks.".
    """
    near = [elsewhere[name]] if name in elsewhere else get_close_matches(name, known, 2, 0.7)
    meant = f": write {' or '.join(f'{prefix}{each}' for each in near)}" if near else ""
    return f"module {module!r} has no attribute {name!r}{meant}"


def no_such_attribute(kind: str, name: str) -> str:
    """Return the text of an AttributeError for a pattern or mixture of class `kind` that has no attribute `name`.

    For names that users often try, the text ends with advice.
    """
    return f"{kind!r} object has no attribute {name!r}" + (f": {_ADVICE[name]}" if name in _ADVICE else "")


def no_operand(operator: str, value: object) -> str:
    """Return the text of a TypeError for an operator, such as "&", with an operand `value` that is not a pattern."""
    is_start_of_sum = operator == "+" and isinstance(value, int | float) and value == 0
    sums = ": to add up a list write sum(patterns[1:], patterns[0])" if is_start_of_sum else ""
    return f"{operator} takes patterns; got {type(value).__name__}{sums or instead_of_pattern(value)}"


def instead_of_pattern(value: object) -> str:
    """Return advice on what to write in place of a value that is not a pattern, as the end of an error text.

    Returns "" for values without advice, such as an int, a dict or a class.
    """
    if hasattr(getattr(value, "pattern", None), "branches"):
        return ": pass its attribute .pattern"
    if type(value).__name__ == "Layout":
        return ": pass a pattern here, and the layout as layout="
    if value is None:
        return ": for dense attention write masks.every()"
    if isinstance(value, bool):
        return ": write masks.every() to allow all pairs, ~masks.every() to allow none"
    if isinstance(value, str):
        return ": to read a pattern from text write masks.parse('causal()')"
    if isinstance(value, list | tuple):
        return ": combine patterns by `|`, `&` or `+`, or write masks.per_head(patterns) for one pattern for each head"
    if type(value).__name__ == "BlockMask":
        return ": write masks.custom(block_mask)"
    if isinstance(value, Tensor) or type(value).__name__ == "ndarray":
        shape = tuple(value.shape)  # type: ignore[union-attr]
        if len(shape) == 1 or (len(shape) == 2 and shape[0] != shape[1]):
            return ": for a mask of keys, (batch, keys), write masks.visible_keys(mask), True where a key may be seen"
        return ": for a mask of pairs write masks.mask(allowed), True for each pair that takes part"
    if not callable(value) or isinstance(value, type):
        return ""
    if getattr(value, "__module__", "").startswith("flexdilated.masks"):
        return f": call it, masks.{getattr(value, '__name__', '')}(...)"
    return ": write masks.custom(fn)"
