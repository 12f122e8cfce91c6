"""KVCache: attention of the next tokens over those already seen, for causal patterns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._attend import attend, autocast
from .._engines import check_engine
from .._validate import check_sinks, check_tensors, resolve_scale
from ..engines import (
    MOST_ROWS,
    Branch,
    GroupedBranch,
    branch_rules,
    group_heads,
    merge,
    refuse_transforms,
    row_forward,
    row_parts,
    sum_dtype,
    with_sinks,
)
from ..masks import Bound, Mixture, Pattern, causal
from ..masks.core import bytes_text, common_period, require_expression, require_int, shortened
from ..masks.needs import FOREVER, RowSource, causal_by_form, later_pair
from ..masks.patterns import names
from ._held_keys import HeldKeys

# B batch, H query heads, G key/value heads, N new tokens, M tokens held, D head dim, C batch entries chosen

_APPENDED_AT_ONCE = 4096  # tokens without queries are taken in portions, and evicted in between
_SHOWN = 400  # characters of a pattern in a repr


class KVCache:
    """The keys and values that later queries of a causal pattern can see; one cache a layer.

    `attend` takes the next tokens, any number of them, and returns what one pass over all tokens would. Keys
    that no later query can see are evicted: with bounded look-back the cache stays within about twice the keys
    that are visible, however many tokens pass. All entries of a batch stand at the same position. Sizes, dtype
    and device are those of the first tokens.

    num_heads: query heads on this device.
    capacity: most keys held at once, allocated with the first tokens; None means as many as it takes.
    undo: how many of the last tokens `crop` may take back: keys that only these see are kept for so long.
    scale, engine, head_offset, num_heads_global: as in `attend`; an engine computes chunks of more than 16
        tokens, and fewer need none.

    For inference: nothing here is differentiable. Raises ValueError or TypeError for a pattern in which a query
    sees a later key, for one with run-time tensors, and for tensors that do not continue those before.

    >>> cache = fd.KVCache(masks.local_window(left=127, right=0), num_heads=4)
    >>> cache.attend(*torch.randn(3, 1, 4, 100, 64)).shape  # the first tokens, then the next ones
    torch.Size([1, 4, 100, 64])
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        _stay_out_of_graphs()  # here, and not in __init__, which unpickling does not call
        return super().__new__(cls)

    def __init__(
        self,
        pattern: Pattern | Mixture,
        *,
        num_heads: int,
        capacity: int | None = None,
        undo: int = 0,
        scale: float | None = None,
        engine: str | None = None,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> None:
        _check_pattern(pattern)
        check_engine(engine)
        if capacity is not None:
            require_int("capacity", capacity, minimum=1)
        self.undo = require_int("undo", undo, minimum=0)
        require_int("num_heads", num_heads, minimum=1)
        require_int("head_offset", head_offset, minimum=0)
        total = head_offset + num_heads if num_heads_global is None else num_heads_global
        # Bound by hand: a cache has no number of tokens yet for `bind` to check.
        Bound(pattern, 1, 1, num_heads, head_offset, total, 0, 0, 1)
        self.num_heads, self.capacity, self.engine = num_heads, capacity, engine
        self._head_offset, self._num_heads_global = head_offset, total
        self._scale = None if scale is None else resolve_scale(scale, head_dim=1)
        where = {"num_heads": num_heads, "head_offset": head_offset, "num_heads_global": total}
        _check_causal(pattern, _sources(branch_rules(pattern, **where)))
        # A search that found no later key is no proof; the intersection changes nothing, or makes it true.
        proven = all(map(causal_by_form, pattern.branches()))
        self.pattern: Pattern | Mixture = pattern if proven else pattern & causal()
        self._branches = branch_rules(self.pattern, **where)
        self._keeping = _sources(self._branches)
        self._period = common_period(self.pattern.branches())
        self._limited = [leaf for leaf in pattern.leaves() if type(leaf).check_tokens is not Pattern.check_tokens]
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and with them the sizes."""
        self._held: HeldKeys | None = None
        self._groups: tuple[GroupedBranch, ...] = ()
        self._seen = 0

    @property
    def num_tokens(self) -> int:
        """Tokens seen, which is the position of the next one."""
        return self._seen

    @property
    def num_kept(self) -> int:
        """Keys held at the moment, evicted ones not counted."""
        return 0 if self._held is None else self._held.num_used

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of keys and values, with their room for more."""
        return 0 if self._held is None else self._held.nbytes

    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N D"],
        *,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H N D"]:
        """Append the next N tokens, and attend from each of them over all it sees. G may be a divisor of H."""
        q, k, v = autocast(q, k, v)
        self._check(q, k, v)
        check_sinks(sinks, q)
        _check_no_gradient(q, k, v, sinks)
        if not q.shape[2]:
            return torch.zeros_like(q)
        with self._as_before_on_error():
            held = self._take(k, v)
            out, lse = self._compute(q, held)
            if sinks is not None:
                out, _ = with_sinks(out, lse, sinks)
            self._seen += q.shape[2]
        if q.shape[2] > MOST_ROWS:
            held.shrink(self._seen)
        return out.to(q.dtype)

    def append(self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N D"]) -> None:
        """Append the next N tokens, whose own outputs are not wanted."""
        _, k, v = autocast(k, k, v)
        self._check(None, k, v)
        _check_no_gradient(k, v)
        if not k.shape[2]:
            return
        with self._as_before_on_error():
            for portion in zip(k.split(_APPENDED_AT_ONCE, 2), v.split(_APPENDED_AT_ONCE, 2), strict=True):
                held = self._take(*portion)
                self._seen += portion[0].shape[2]
                held.shrink(self._seen)

    def crop(self, num_tokens: int) -> None:
        """Take back all tokens but the first `num_tokens`: what follows attends as if the others had not been there.

        Raises ValueError, and changes nothing, for more tokens than were seen, and where keys are evicted that queries
        from there on may see: no more than `undo` tokens can be taken back for certain.
        """
        require_int("num_tokens", num_tokens, minimum=0, maximum=self._seen)
        if self._held is None:
            return
        if self._held.lacks(num_tokens):
            raise ValueError(
                f"the cache holds no longer what queries from position {num_tokens} on may see; it can take back "
                f"undo={self.undo} tokens for certain, and {self._seen} were seen. Make it with a larger undo"
            )
        self._held.drop_from(num_tokens)
        self._seen = num_tokens

    def select(self, entries: Int64[Tensor, " C"]) -> None:
        """Go on with these entries of the batch, in this order, each as often as it is named: after a step of beams.

        entries: integers of shape (C,) in [0, batch). Raises TypeError or ValueError for anything else.
        """
        if not isinstance(entries, Tensor) or entries.dtype not in (torch.int32, torch.int64) or entries.dim() != 1:
            raise TypeError(f"entries must be a tensor of integers of shape (C,); got {entries!r:.80}")
        if self._held is None:
            return
        batch = self._held.keys.shape[0]
        if not len(entries) or int(entries.min()) < 0 or int(entries.max()) >= batch:
            raise ValueError(f"entries must lie between 0 and {batch - 1}, and be at least one; got {entries.tolist()}")
        self._held.select(entries.long())

    def held(self) -> tuple[Int64[Tensor, " M"], Float[Tensor, "B G M D"], Float[Tensor, "B G M D"]]:
        """(positions, keys, values) of the tokens whose keys are held, ascending; keys and values are views.

        Raises ValueError where no token was seen: nothing is known of sizes then.
        """
        if self._held is None:
            raise ValueError("a cache that has seen no tokens holds no keys")
        held = self._held
        positions = [torch.arange(run.first, run.stop) for run in held.runs]
        slots = slice(0, held.num_used)
        return torch.cat([torch.arange(0), *positions]), held.keys[:, :, slots], held.values[:, :, slots]

    @contextmanager
    def _as_before_on_error(self) -> Iterator[None]:
        """A call that raises leaves the cache as it was: what it wrote lies behind what was held, or in new buffers."""
        before = None if self._held is None else self._held.snapshot(), self._groups, self._seen
        try:
            yield
        except BaseException:
            self._held, self._groups, self._seen = before
            raise

    def _take(self, k: Tensor, v: Tensor) -> HeldKeys:
        """Hold the next tokens' keys. The tokens count as seen once the call is done."""
        if self._held is None:
            self._held = HeldKeys(k, self._keeping, capacity=self.capacity, undo=self.undo)
            self._groups = group_heads(
                self._branches, num_heads=self.num_heads, num_kv_heads=k.shape[1], device=k.device
            )
        self._held.append(k, v, self._seen)
        return self._held

    def _compute(self, q: Tensor, held: HeldKeys) -> tuple[Tensor, Tensor]:
        return (self._rows if q.shape[2] <= MOST_ROWS else self._chunk)(q, held)

    def _rows(self, q: Tensor, held: HeldKeys) -> tuple[Tensor, Tensor]:
        """Queries over the keys that they see, a few at a time."""
        found, first = [], self._seen
        for few in q.split(MOST_ROWS, dim=2):
            queries = range(first, first + few.shape[2])
            parts = row_parts(self._groups, queries, range(queries.stop), held)
            found.append(row_forward(parts, few, held.keys, held.values, resolve_scale(self._scale, q.shape[-1])))
            first = queries.stop
        outs, lses = zip(*found, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)

    def _chunk(self, q: Tensor, held: HeldKeys) -> tuple[Tensor, Tensor]:
        """Many queries, over each run of keys that some of them see, by an engine."""
        queries = range(self._seen, self._seen + q.shape[2])
        runs = held.visible(queries.start, len(queries))
        if not all(_accepts(self.pattern, queries, run) for run in runs):
            return self._rows(q, held)  # some patterns insist on all keys that they name
        if not runs:
            wide = sum_dtype(q)
            return torch.zeros_like(q), q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        out, lse = self._attend_run(q, runs[0], held)
        for run in runs[1:]:
            out, lse = merge(out.to(lse.dtype), lse, *self._attend_run(q, run, held))
        return out, lse

    def _attend_run(self, q: Tensor, run: range, held: HeldKeys) -> tuple[Tensor, Tensor]:
        (slots,) = held.slices(run)
        # Shifted together by a multiple of the period, equal calls share one plan.
        earliest = min(run.start, self._seen)
        shift = earliest - earliest % self._period if self._period else 0
        return attend(
            q,
            held.keys[:, :, slots],
            held.values[:, :, slots],
            self.pattern,
            scale=self._scale,
            enable_gqa=True,
            q_offset=self._seen - shift,
            k_offset=run.start - shift,
            engine=self.engine,
            head_offset=self._head_offset,
            num_heads_global=self._num_heads_global,
            return_lse=True,
        )

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
        for name, x in (("k", k), ("v", v)):  # without q, errors must not speak of it
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a tensor; got {type(x).__name__}")
        check_tensors(k if q is None else q, k, v, enable_gqa=True)
        if q is not None and q.shape[1:3] != (self.num_heads, k.shape[2]):
            raise ValueError(
                f"q must hold num_heads={self.num_heads} heads and the new tokens of k; "
                f"got q {tuple(q.shape)} and k {tuple(k.shape)}"
            )
        if self.num_heads % k.shape[1]:
            raise ValueError(f"num_heads={self.num_heads} must be a multiple of the key/value heads; got {k.shape[1]}")
        if self._held is not None:
            _check_continues(self._held.keys, k)
        queries = range(self._seen, self._seen + k.shape[2])
        for leaf in self._limited:
            # A rule may name keys that are yet to come; what no keys make right is an error.
            if not _accepts(leaf, queries, range(FOREVER)):
                leaf.check_tokens(queries, range(queries.stop))

    def __repr__(self) -> str:
        own = f"{shortened(repr(self.pattern), _SHOWN)}, num_heads={self.num_heads}, engine={self.engine!r}"
        held = f"{self._seen:,} tokens seen, {self.num_kept:,} keys kept in {bytes_text(self.nbytes)}"
        return f"{type(self).__name__}({own}: {held})"


@cache
def _stay_out_of_graphs() -> None:
    """Let torch.compile break its graph at a cache, from the first one on: asking for it imports the whole compiler."""
    for name in ("attend", "append"):
        method = getattr(KVCache, name)
        setattr(KVCache, name, torch.compiler.disable(method, reason="a cache changes with every call"))


def _check_pattern(pattern: Pattern | Mixture) -> None:
    require_expression(pattern)
    if names(pattern):
        raise ValueError(
            "a cache needs a pattern without run-time tensors, which are of one call and its tokens; "
            f"got one with {', '.join(map(repr, names(pattern)))}"
        )


def _sources(branches: tuple[Branch, ...]) -> list[RowSource]:
    return [rule.source for branch in branches for rule in branch.rules]


def _check_causal(pattern: Pattern | Mixture, sources: list[RowSource]) -> None:
    for source in sources:
        pair = later_pair(source)
        if pair is not None:
            raise ValueError(
                "a cache needs a causal pattern, in which no query sees a later key; here query "
                f"{pair[0]} sees key {pair[1]}: take pattern & masks.causal(). Got {pattern!r}"
            )


def _accepts(pattern: Pattern | Mixture, queries: range, keys: range) -> bool:
    """Whether the pattern can be bound to queries and keys at these positions."""
    try:
        pattern.check_tokens(queries, keys)
    except ValueError:
        return False
    return True


def _check_no_gradient(*tensors: Tensor | None) -> None:
    refuse_transforms("KVCache", tensors)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        raise ValueError("a cache passes no gradient on, and an input requires one: call it under torch.no_grad()")


def _check_continues(held: Tensor, k: Tensor) -> None:
    """The next tokens must have the sizes, dtype and device of those before."""

    def traits(x: Tensor) -> str:
        batch, heads, _, head_dim = x.shape
        return f"batch {batch}, {heads} key/value heads, head dim {head_dim}, {x.dtype} on {x.device}"

    if traits(held) != traits(k):
        raise ValueError(f"the next tokens must continue those before, {traits(held)}; got {traits(k)}")
