"""Expression: the base class of patterns and mixtures, and the registry of their kinds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.serialization import add_safe_globals

from ._advice import OF_PATTERNS, advises, no_operand, no_such_attribute
from ._bound import Bound, Extent
from ._check import LARGEST, Phrase, call, require_int, shortened
from ._torch_modes import outside_torch_modes

if TYPE_CHECKING:
    from ._pattern import Mixture, Pattern

_Class = TypeVar("_Class", bound=type)
_Function = TypeVar("_Function", bound=Callable[..., Any])

# Registry for JSON, parsing and the operators: classes by kind, constructors by name.
KINDS: dict[str, type[Any]] = {}
CONSTRUCTORS: dict[str, Callable[..., Any]] = {}

DEEPEST = 32  # levels: recursion through a pattern, also in pickle and copy, fits Python's stack
_FLATTER = "a chain of one operator, such as a | b | c, is one level"


def at_least(minimum: int, *, maximum: int = LARGEST, name: str | None = None, default: Any = MISSING) -> Any:
    """Return a dataclass field of a pattern for an integer in [minimum, maximum], checked on construction.

    maximum: 2**31 - 1 by default, so that numbers of pairs stay within int64.
    name: name of the parameter in JSON and errors, if it differs from the field's.
    default: default of the field; with None, the field also accepts None.

    Constructing the pattern raises TypeError for a value that is not an integer, ValueError for one outside the range.

    >>> @masks.extend.pattern_kind("sketch_of_a_field")
    ... class Sketch(masks.Pattern):
    ...     reach: int = masks.extend.at_least(1)
    >>> Sketch(0)
    Traceback (most recent call last):
    ValueError: reach must be at least 1; got reach=0
    """
    metadata = {"range": (minimum, maximum)} | ({} if name is None else {"name": name})
    return field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, field_specifiers=(field, at_least))
def pattern_kind(kind: str, *, positional: int | None = None) -> Callable[[_Class], _Class]:
    """Return a class decorator that makes a frozen dataclass and registers it under `kind`, its name in JSON.

    JSON stores the fields: integers, booleans, strings, None, patterns, or tuples of these. A tuple of patterns must be
    the field `parts`; `from_json` passes other tuples as lists, which `check` must convert. A field with
    metadata={"name": ...} is stored under that name; {"stored": False} omits a field, {"optional": True} omits it at
    its default value. Equal fields mean equal patterns, so the rule must depend on its fields only.

    kind: an identifier, also the name of the call that a pattern prints as.
    positional: number of fields printed without names; by default 1 if exactly one field has no default, else 0.

    Raises ValueError for a kind that is not an identifier, or that belongs to another class.

    >>> @masks.extend.pattern_kind("sketch_of_a_kind")
    ... class Sketch(masks.Pattern):
    ...     reach: int = masks.extend.at_least(1)
    >>> Sketch(64), masks.to_json(Sketch(64))
    (sketch_of_a_kind(64), '{"kind":"sketch_of_a_kind","reach":64}')
    """
    if not isinstance(kind, str) or not kind.isidentifier():
        raise ValueError(f"the kind of a pattern must be an identifier, such as 'log_sparse'; got {kind!r:.80}")

    def register(cls: _Class) -> _Class:
        _require_free(kind, KINDS.get(kind), cls)
        made = dataclass(frozen=True)(cls)
        stored = [each for each in fields(made) if each.metadata.get("stored", True)]
        made.kind, KINDS[kind] = kind, made
        named = {each.metadata.get("name", each.name): each for each in stored}
        made.stored = {name: each.name for name, each in named.items()}
        made.ranges = {name: each.metadata["range"] for name, each in named.items() if "range" in each.metadata}
        made.defaults = {each.name: each.default for each in stored}
        made.optional = frozenset(name for name, each in named.items() if each.metadata.get("optional"))
        needed = sum(each.default is MISSING for each in stored)
        made.positional = (1 if needed == 1 else 0) if positional is None else positional
        return made

    return register


def constructor(function: _Function) -> _Function:
    """Decorate a function that returns a pattern, so that expressions for `parse` can call it by its name.

    For `parse` to read the repr of a pattern, the function must be named like the pattern's kind, and its parameters
    like the pattern's fields, in the same order. The decorated function raises TypeError with advice for missing,
    excess and unknown arguments.

    Raises ValueError for the name of another registered function.

    >>> @masks.extend.constructor
    ... def recent(number):
    ...     return masks.local_window(left=number - 1, right=0)
    >>> masks.parse("recent(8) | first_tokens(4)")
    local_window(left=7, right=0) | first_tokens(4)
    """
    _require_free(function.__name__, CONSTRUCTORS.get(function.__name__), function)
    made = advises(keywords=OF_PATTERNS)(function)  # no effect if `function` already has `advises`
    CONSTRUCTORS[function.__name__] = made
    return made


def _require_free(name: str, known: Any, new: Any) -> None:
    """Raise ValueError if `name` is registered for an object `known` that is not an earlier definition of `new`.

    known: the registered class or function; None if the name is free.

    Two objects with equal module and qualified name are definitions of one object, as after running a notebook cell
    twice.
    """
    if known is not None and (known.__module__, known.__qualname__) != (new.__module__, new.__qualname__):
        raise ValueError(f"{name!r} is taken by {known.__module__}.{known.__qualname__}: choose another name")


class Expression:
    """Base of patterns and mixtures: immutable values with a stable text, sums by `+`, and binding to sizes.

    `text` is canonical JSON, computed once on construction; equal texts mean equal patterns, except for the values of
    run-time tensors. The repr is the expression that builds the value, cut after 4096 characters; `parse` reads an
    uncut one, except for custom functions, results of `resolve`, and kinds without a `constructor`. It names run-time
    tensors, without their values. `depth` is the number of nested levels; above 32 construction raises ValueError.
    `pads` is True if queries also see the zero keys that pad segments, which are no pairs: see `zero_keys`.

    `pattern_kind` sets the class attributes from the dataclass fields.

    kind: name in JSON.
    stored: {name in JSON: name of the field}.
    ranges: {name in JSON: (minimum, maximum)}.
    defaults: {name of the field: its default, dataclasses.MISSING if it has none}.
    optional: names in JSON of fields that are omitted at their defaults.
    positional: number of fields printed without names.
    """

    text: str
    depth: int = 0
    pads: bool = False
    kind: ClassVar[str]
    stored: ClassVar[dict[str, str]] = {}
    ranges: ClassVar[dict[str, tuple[int, int]]] = {}
    defaults: ClassVar[dict[str, Any]] = {}
    optional: ClassVar[frozenset[str]] = frozenset()
    positional: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        # A dataclass generates a repr unless the class defines one.
        if "__repr__" not in vars(cls):
            cls.__repr__ = Expression.__repr__
        add_safe_globals([cls])

    def __reduce__(self) -> tuple[Any, ...]:
        # By fields, as torch.load(weights_only=True) could not read what a value has cached, and checks nothing.
        own = fields(self)  # type: ignore[arg-type]  # subclasses are dataclasses
        named = [each.name for each in own if each.init and each.metadata.get("pickled", True)]
        return _rebuilt, (type(self), {name: getattr(self, name) for name in named})

    def __repr__(self) -> str:
        return shortened(self.phrase().text)

    def __post_init__(self) -> None:
        for name, (least, most) in self.ranges.items():
            value, default = getattr(self, self.stored[name]), self.defaults[self.stored[name]]
            if value is not None or default is not None:
                require_int(name, value, minimum=least, maximum=most)
        self.check()
        if inner := self.direct_parts():
            object.__setattr__(self, "depth", 1 + max([part.depth for part in inner]))
        if self.depth > DEEPEST:
            raise ValueError(f"a pattern must nest at most {DEEPEST} levels: {_FLATTER}; got one more, {self!r:.80}")
        if any(part.pads for part in inner):
            self.take_padding()
        object.__setattr__(self, "text", self.write())

    def __bool__(self) -> NoReturn:
        """Raise TypeError; without this method, `p and q` would be `q`, and `not p` would be False."""
        raise TypeError(
            f"a pattern is neither true nor false: combine patterns by `&`, `|` and `~`, not by `and`, `or` and `not`, "
            f"and test for one by `is None`; got {self!r:.200}"
        )

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise TypeError, as a pattern is not a function."""
        raise TypeError(
            "a pattern cannot be called: write fd.attend(q, k, v, pattern) for attention, or "
            "masks.block_mask(pattern, num_tokens, num_heads=8) for a BlockMask"
        )

    # Signature of a mask_mod: create_block_mask then calls it and shows this error.
    __call__.__signature__ = signature(lambda self, b, h, q, k: None)  # type: ignore[attr-defined]

    if not TYPE_CHECKING:  # so that type checkers report unknown names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(no_such_attribute(type(self).__name__, name))

    def __rand__(self, other: object) -> NoReturn:
        raise TypeError(no_operand("&", other))

    def __ror__(self, other: object) -> NoReturn:
        raise TypeError(no_operand("|", other))

    def __radd__(self, other: object) -> NoReturn:
        raise TypeError(no_operand("+", other))

    def __sub__(self, other: object) -> NoReturn:
        raise TypeError("patterns have no operator -: write pattern & ~other")

    def check(self) -> None:
        """Check the parameters: a kind of pattern overrides this method, which accepts all by default.

        It raises TypeError or ValueError for invalid parameters, and brings fields into their stored form by
        object.__setattr__: it must turn the lists that `from_json` passes into tuples. Construction calls it before the
        text is written.
        """

    def direct_parts(self) -> tuple[Pattern, ...]:
        """Return the patterns that this expression combines directly; () if it is not composed of patterns."""
        return ()

    def take_padding(self) -> None:
        """Raise ValueError, as zero keys of padding have no meaning in most compositions.

        Construction calls this method if a part has `pads`. A mixture allows such parts: it overrides the method, and
        sets its own `pads`.
        """
        raise ValueError(
            "a pattern with padding='zeros' can only be added by `+`, or intersected with causal() by `&`: elsewhere "
            f"leave out padding='zeros'; got it in {self.kind!r}"
        )

    @property
    def unpadded(self) -> Any:
        """This expression without the zero keys (score 0, value 0) that pad segments; allowed pairs are unchanged."""
        return self

    def zero_keys(self, head: Tensor, query: Tensor, *, num_heads: int, num_tokens: int) -> Tensor:
        """Return how many zero keys of padding, of score 0 and value 0, each query of each head sees, as int64.

        head, query: global heads, below num_heads, and positions, below num_tokens; they broadcast against each other
            to the shape of the result.
        num_tokens: length of the whole sequence, which determines the padding.
        """
        return torch.zeros_like(head + query)

    def write(self) -> str:
        """Return canonical JSON of the kind and `parameters`: no spaces, sorted keys, parts by their own texts."""
        return _canonical_json({"kind": self.kind, **self.parameters()})

    def to_data(self) -> dict[str, Any]:
        """Return plain data for JSON: a dict of `kind` and the parameters, with dicts for parts."""
        return json.loads(self.text)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Any:
        """Return the expression with the parameters in `data`, by their names in `to_data`; parts must be patterns.

        A parameter that is not in `data` has its default.
        """
        return cls(**{field: data[name] for name, field in cls.stored.items() if name in data})

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of the rule by their names in JSON, without optional ones at their defaults."""
        found = {name: getattr(self, field) for name, field in self.stored.items()}
        for name in self.optional:
            if found[name] == self.defaults[self.stored[name]]:
                del found[name]
        return found

    def phrase(self) -> Phrase:
        """Return the text of the expression; by default a call of its kind, without named arguments at defaults."""
        names = list(self.stored)
        values = [getattr(self, self.stored[name]) for name in names[: self.positional]]
        named = {
            name: value
            for name in names[self.positional :]
            if (value := getattr(self, self.stored[name])) != self.defaults[self.stored[name]]
        }
        return call(self.kind, *values, **named)

    def branches(self) -> tuple[Pattern, ...]:
        """Return the set patterns whose multiset sum is this expression: (self,) for a pattern, the parts of a mixture.

        A branch that counts m times occurs m times.
        """
        raise NotImplementedError  # defined by Pattern and Mixture

    @property
    def union(self) -> Pattern:
        """Pairs of nonzero attention weight, as one pattern: for a mixture, the union of its branches."""
        raise NotImplementedError

    def map_parts(self, change: Callable[[Pattern], Pattern]) -> Any:
        """Return the expression with `change` applied to each direct part; self if it has none."""
        return self

    def leaves(self) -> tuple[Pattern, ...]:
        """Return the innermost patterns of the tree of parts, from left to right, with repeats; (self,) for a leaf.

        A pattern over blocks of tokens is a leaf here, as its part counts blocks.
        """
        return tuple(leaf for part in self.direct_parts() for leaf in part.leaves()) or (self,)  # type: ignore[return-value]

    def map_leaves(self, change: Callable[[Any], Pattern]) -> Any:
        return self.map_parts(lambda part: part.map_leaves(change)) if self.direct_parts() else change(self)

    def below(self, positions: int) -> Any:
        """Return the expression with random leaves, such as random blocks, drawn only for positions < `positions`."""
        return self.map_parts(lambda part: part.below(positions)) if self.draws else self

    @cached_property
    def draws(self) -> bool:
        """True if a leaf is drawn at random, as random blocks are."""
        return any(type(leaf).below is not Expression.below for leaf in self.leaves())

    @cached_property
    def varies(self) -> bool:
        """True if a leaf depends on a run-time tensor, such as document ids, given by name or with its values."""
        return any(leaf.is_run_time for leaf in self.leaves())

    def given_tensors(self) -> dict[str, Tensor]:
        """Return the run-time tensors that the expression carries, by name.

        Raises ValueError if two different tensors share a name.
        """
        found: dict[str, Tensor] = {}
        for name, tensor in (pair for leaf in self.leaves() for pair in leaf.carried().items()):
            if found.setdefault(name, tensor) is not tensor:
                raise ValueError(
                    f"run-time tensors of a pattern must have different names; got two named {name!r}: give one of "
                    f"them another name, such as name='{name}_2'"
                )
        return found

    @outside_torch_modes
    def resolve(self, tensors: Mapping[str, Tensor], extent: Extent) -> Any:
        """Return the expression with each run-time tensor replaced by its values; self if it has none.

        tensors: values by name, those of `given_tensors` included.
        extent: one past the last position of the queries and of the keys.

        Raises ValueError for a tensor that is missing or does not fit, TypeError for a wrong dtype.
        """
        if not self.varies:
            return self
        of_run_time = dict.fromkeys(leaf for leaf in self.leaves() if leaf.is_run_time)
        resolved = {leaf: leaf.resolved(tensors, extent) for leaf in of_run_time}  # one for all its uses
        return self.map_leaves(lambda leaf: resolved[leaf] if leaf.is_run_time else leaf)

    def entry(self, batch: int) -> Any:
        """Return the rule of the batch entry with index `batch`; run-time tensors must have values: see `resolve`."""
        return self.map_leaves(lambda leaf: leaf.of_entry(batch)) if self.varies else self

    def num_entries(self) -> int:
        """Return the largest batch size of the run-time tensors; 1 without run-time tensors.

        The tensors must have their values: see `resolve`.
        """
        return max([leaf.entries for leaf in self.leaves()]) if self.varies else 1

    def require_entries(self, batch: int) -> None:
        """Raise ValueError unless each run-time tensor has batch size 1 or `batch`.

        The tensors must have their values: see `resolve`.
        """
        for leaf in self.leaves() if self.varies else ():
            if leaf.entries not in (1, batch):
                raise ValueError(
                    f"run-time tensors must have one row, or one for each of {batch} batch entries; "
                    f"got {leaf.entries} rows"
                )

    def check_heads(self, num_heads: int) -> None:
        """Raise ValueError if the expression cannot be bound to this number of heads, counted over all devices."""
        for part in self.direct_parts():
            part.check_heads(num_heads)

    def check_tokens(self, queries: range, keys: range) -> None:
        """Raise ValueError if the expression cannot be bound to queries and keys at these positions."""
        for part in self.direct_parts():
            part.check_tokens(queries, keys)

    def bind(
        self,
        *,
        num_heads: int,
        num_queries: int,
        num_keys: int,
        head_offset: int = 0,
        num_heads_global: int | None = None,
        q_offset: int = 0,
        k_offset: int = 0,
        batch: int = 1,
    ) -> Bound:
        """Return the expression with these sizes, as a `Bound`.

        Heads are numbered over all devices: this device has heads head_offset to head_offset + num_heads - 1 of
        num_heads_global, by default head_offset + num_heads. Query i has position q_offset + i; key j has position
        k_offset + j.

        batch: number of batch entries; with the default 1 it is the largest batch size of the pattern's run-time
            tensors, if it has any.

        Run-time tensors that the pattern carries are read when `bind` is called. Zero keys of padding are no pairs and
        are dropped.

        Raises ValueError for sizes below 1, offsets below 0, heads or positions that do not fit the pattern, and
        tensors that are missing or do not fit; TypeError for sizes and offsets that are not integers, and for tensors
        of a wrong dtype.
        """
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        rule = self.unpadded
        if self.varies:
            rule = rule.resolve(self.given_tensors(), Extent(q_offset + num_queries, k_offset + num_keys))
            batch = rule.num_entries() if batch == 1 else batch
        bound = Bound(rule, num_queries, num_keys, num_heads, head_offset, total, q_offset, k_offset, batch)
        rule.check_tokens(*(range(at, at + size) for at, size in ((q_offset, num_queries), (k_offset, num_keys))))
        return replace(bound, pattern=bound.pattern.below(bound.num_positions)) if rule.draws else bound

    def per_document(self, documents: Any) -> Any:
        """Return the rule with positions counted from the start of each document, and no pair across documents.

        documents: document ids, as `masks.documents` takes them, or a pattern from `masks.documents` or
            `masks.lengths`.

        Packed sequences then attend as separate ones do. For a mixture this holds for each branch.

        Raises ValueError for a pattern with run-time tensors: intersect such a pattern with the result instead.
        Raises TypeError for other patterns as `documents`.
        """
        return KINDS["per_document"].of(self, documents)

    def after(self, start: int) -> Any:
        """Return the rule with positions counted from `start` on; earlier tokens see no key, and no query sees them.

        Use it if tokens that another pattern covers, such as a class token and registers, precede the sequence. For a
        mixture this holds for each branch.

        Raises TypeError for a start that is not an integer. Raises ValueError for a start below 0, and, for a start
        above 0, if the pattern has run-time tensors: intersect such a pattern with the result instead.

        >>> vit = masks.neighborhood((14, 14), 2).after(1) | masks.global_tokens(1)
        """
        return KINDS["after"].of(self, start)

    def before(self, stop: int) -> Any:
        """Return the rule for positions below `stop`; later tokens see no key, and no query sees them.

        Use it if tokens that another pattern covers, such as a text behind the video it describes, follow the sequence.
        For a mixture this holds for each branch.

        Raises TypeError for a stop that is not an integer. Raises ValueError for a stop below 1, and for a pattern with
        run-time tensors: intersect such a pattern with the result instead.

        >>> grid = masks.neighborhood((4, 8, 8), 1).before(256)
        >>> text_behind = grid | ~masks.every().before(256)  # its tokens see all tokens and are seen by all
        """
        return KINDS["before"].of(self, stop)

    def queries_from(self, starts: Any, *, name: str = "starts") -> Any:
        """Return the pattern in which query i of batch entry b is at position starts[b] + i; keys keep their positions.

        starts: integers of shape (batch,) or (), at least 0; or a string, the name under which `attend(bindings=)`
            passes the tensor. New values do not recompile.
        name: name of the tensor in texts and errors, unless `starts` is a string.

        `attend(q_offset=starts)` with starts of shape (batch,) is equivalent. A mixture is changed branch by branch.

        Raises ValueError for a pattern with run-time tensors, except for an intersection with `visible_keys`. Other
        run-time patterns may be intersected with the result; they count query i as position i. When the tensor is used,
        raises ValueError for a start below 0.

        >>> last = masks.local_window(left=7, right=0).queries_from(torch.tensor([90, 12]))  # samples of 91 and 13 keys
        """
        return KINDS["queries_from"].of(self, starts, name)

    def __add__(self, other: object) -> Mixture:
        if not isinstance(other, Expression):
            raise TypeError(no_operand("+", other))
        return KINDS["mixture"](self.branches() + other.branches())


def _rebuilt(cls: type[Expression], values: dict[str, Any]) -> Expression:
    """Return the expression of class `cls` with these values of its fields.

    Raises TypeError if `cls` is no subclass of Expression.
    """
    if not issubclass(cls, Expression):  # a file may name any class that torch considers safe
        raise TypeError(f"a pickled pattern must have the class of a pattern; got {cls.__name__}")
    return cls(**values)


add_safe_globals([_rebuilt])  # torch.load reads patterns with weights_only=True, its default


def _canonical_json(value: Any) -> str:
    """Return a value as JSON without spaces and with sorted keys, in which an expression is its `text`.

    Raises ValueError for a string that is not printable, TypeError for values that a field of a pattern cannot have.
    """
    # Without the json module, as a compiled graph may build patterns.
    if isinstance(value, Expression):
        return value.text
    if isinstance(value, dict):
        return "{" + ",".join([f'"{key}":{_canonical_json(value[key])}' for key in sorted(value)]) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join([_canonical_json(each) for each in value]) + "]"
    if isinstance(value, str):
        if not value.isprintable():
            raise ValueError(f"a string in a pattern must be printable; got {value!r:.80}")
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    try:
        return str(index(value))  # specializes a dynamic size of a graph
    except TypeError:
        raise TypeError(
            "a field of a pattern must be an integer, a boolean, a string, None, a pattern, or a tuple of these: write "
            f"a fraction as two integers; got {value!r:.80} of type {type(value).__name__}"
        ) from None
