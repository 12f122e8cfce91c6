"""KVCache: attention of new tokens over cached keys, for causal patterns and for look-ahead within chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._attend import autocast
from .._validate import OTHER_KEYWORDS, Scale, check_score_mod, check_sinks, check_tensors, scaled
from ..engines import MOST_ROWS, ScoreMod, fixed_score_mod, sum_dtype, with_sinks
from ..masks import Mixture, Pattern
from ..masks.core import HEADS, advises, bytes_text, renamed, require_int, shortened
from ._cohort import Cohort, grouped
from ._held_keys import HeldKeys, refuse_gradients, stay_out_of_graphs
from ._reader import Reader

# B batch, H query heads, G key/value heads, N new tokens, M held tokens, C selected batch entries
# D head dim of queries and keys, E of values

_APPENDED_AT_ONCE = 4096  # tokens that `append` stores at a time; keys are evicted in between
_SHOWN = 400  # characters of a pattern in a repr


_HOW_TO_ADD = "write cache.attend(q, k, v) to append the new tokens and attend, cache.append(k, v) to append only"
_ADVICE = {
    **dict.fromkeys(("update", "forward", "step", "decode"), _HOW_TO_ADD),
    **dict.fromkeys(("get_seq_length", "seq_len", "length", "size"), "cache.num_tokens is the number of tokens seen"),
    **dict.fromkeys(
        ("is_compileable", "layers", "max_cache_len", "get_max_cache_shape", "is_initialized", "get_mask_sizes"),
        "for models of transformers write fd.integrations.transformers.FlexdilatedCache(model.config)",
    ),
    **dict.fromkeys(("clear", "empty"), "cache.reset() forgets all tokens"),
    **dict.fromkeys(("keys", "values", "k", "v", "key_cache"), "cache.held() is (positions, keys, values)"),
    **dict.fromkeys(("lengths", "seqlens", "position"), "cache.positions has the number of tokens of each batch entry"),
    **dict.fromkeys(("merge", "extend", "cat", "concat"), "cache.join(other) adds the batch entries of another cache"),
}
_HOW_TO_PAD = "pad on the right, and write lengths=, the number of new tokens of each batch entry"
_NEW_CACHE = "write fd.KVCache(pattern, num_heads=8), one for each layer"


class KVCache:
    """Keys and values that later queries of a pattern can see, for decoding; one cache per layer.

    `attend` takes the next tokens and returns their output as in a single pass over all tokens. With a causal pattern
    their number is arbitrary. A pattern may also let queries see later keys of their own chunk, such as a video frame;
    each call then takes whole chunks, see `chunk`. Keys that no later query can see are evicted: with bounded look-back
    the cache does not grow with the number of tokens seen. The first tokens set sizes, dtype and device.

    Batch entries (samples) may be at different positions: `lengths` is the number of new tokens of each, `crop` takes
    a number for each, and `join` adds entries of another cache. Entries at different positions are computed one after
    another.

    num_heads: query heads on this device.
    capacity: maximum number of keys of a batch entry, allocated with the first tokens; None to grow as needed.
    undo: number of tokens by which `crop` can go back from the furthest one seen. Keys that only the last `undo`
        tokens see are therefore not evicted yet.
    scale, engine, head_offset, num_heads_global: as in `attend`; calls with at most 16 tokens are computed without an
        engine.

    A cache is for inference only; it is not differentiable. Raises ValueError or TypeError for a pattern whose
    look-ahead is not limited to chunks, for a pattern with run-time tensors or padding="zeros", and for tensors that do
    not fit the previous tokens.

    >>> cache = fd.KVCache(masks.local_window(left=127, right=0), num_heads=4)
    >>> cache.attend(*torch.randn(3, 1, 4, 100, 64)).shape  # the first tokens, then the next ones
    torch.Size([1, 4, 100, 64])
    >>> batch = fd.KVCache(masks.local_window(left=127, right=0), num_heads=4)
    >>> out = batch.attend(*torch.randn(3, 2, 4, 100, 64), lengths=torch.tensor([100, 30]))  # padded on the right
    >>> batch.positions
    tensor([100,  30])
    >>> fd.KVCache(masks.blockwise(masks.local_window(left=4, right=0), 8), num_heads=4).chunk  # frames of 8 tokens
    8
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        stay_out_of_graphs(KVCache, "attend", "append")  # in __new__, as unpickling does not call __init__
        return super().__new__(cls)

    @advises(
        keywords=renamed(num_heads=HEADS, capacity="max_length max_len max_seq_len max_cache_len size"), how=_NEW_CACHE
    )
    def __init__(
        self,
        pattern: Pattern | Mixture,
        *,
        num_heads: int,
        capacity: int | None = None,
        undo: int = 0,
        scale: Scale = None,
        engine: str | None = None,
        head_offset: int = 0,
        num_heads_global: int | None = None,
    ) -> None:
        if capacity is not None:
            require_int("capacity", capacity, minimum=1)
        self.undo = require_int("undo", undo, minimum=0)
        self._reader = Reader(
            pattern,
            num_heads=num_heads,
            scale=1.0 if isinstance(scale, Tensor) else scale,
            engine=engine,
            head_offset=head_offset,
            num_heads_global=num_heads_global,
        )
        self.scale, self._sources = scale, self._reader.sources
        self.pattern, self.num_heads, self.engine, self.capacity = self._reader.pattern, num_heads, engine, capacity
        self.reset()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a KVCache has no {name}" + (f": {_ADVICE[name]}" if name in _ADVICE else ""))

    def __call__(self, *args: object, **named: object) -> NoReturn:
        raise TypeError(f"a KVCache cannot be called: {_HOW_TO_ADD}")

    def reset(self) -> None:
        """Forget all tokens, and the sizes, dtype and device that they set."""
        self._cohorts: list[Cohort] = []

    @property
    def num_tokens(self) -> int:
        """Number of tokens seen: the position of the next token.

        Raises ValueError if the batch entries are at different positions: see `positions`.
        """
        seen = {cohort.seen for cohort in self._cohorts}
        if len(seen) > 1:
            raise ValueError(
                "num_tokens must be one number for all batch entries, and these have seen different numbers of tokens: "
                f"write cache.positions; got {self._tokens_seen()}"
            )
        return max(seen, default=0)

    @property
    def positions(self) -> Int64[Tensor, " B"]:
        """Number of tokens seen by each batch entry, on the CPU: the position of its next token.

        It has shape (0,) before the first tokens, when the batch is unknown.
        """
        return torch.tensor(self._tokens_seen(), dtype=torch.int64)

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk; no query sees a key after its chunk. It is 1 for a causal pattern.

        It is the smallest chunk found in the first 2048 positions, or in about two periods of the pattern if these are
        longer, up to 32,768. Chunks begin at position 0, or after a shorter first piece. A call of `attend` may end at
        any position where none of its tokens sees a later key, such as the end of a chunk.
        """
        return self._reader.ends.chunk

    @property
    def num_kept(self) -> int:
        """Largest number of keys that the cache holds now for a batch entry; evicted keys are not counted."""
        return max((cohort.held.num_used for cohort in self._cohorts), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of keys and values, unused room included, and of the state of a subclass."""
        return sum(cohort.nbytes for cohort in self._cohorts)

    @advises(
        keywords={
            **OTHER_KEYWORDS,
            **dict.fromkeys(("key_padding_mask", "padding_mask"), _HOW_TO_PAD),
            **renamed(lengths="seqlens seq_lens cu_seqlens"),
        },
        how="write cache.attend(q, k, v) with those of the new tokens",
    )
    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N E"],
        *,
        lengths: Int64[Tensor, " B"] | None = None,
        score_mod: ScoreMod | None = None,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Append the next N tokens, and return their attention output over all keys that each of them sees.

        N may be 0. G must divide H.

        lengths: number of new tokens of each batch entry, from 0 to N, read on the host. The new tokens come first
            among its N tokens; the tokens after them are padding, which is neither read nor stored, and has output 0.
            None: all N tokens of each entry are new.
        score_mod: as in `flexdilated.attend`.
        sinks: a logit for each head, which adds a term exp(sink) to the softmax denominators; None adds no term.

        Raises ValueError if a new token sees a key after the last new token of its batch entry (see `chunk`), if the
        keys exceed `capacity`, or if an input requires a gradient while gradients are enabled. A call that raises
        changes nothing.
        """
        q, k, v = autocast(q, k, v)
        numbers = self._checked_lengths(q, k, v, lengths)
        check_sinks(sinks, q)
        check_score_mod(score_mod)
        if isinstance(self.scale, Tensor):
            q, _ = scaled(q, self.scale, q.shape[-1])
        refuse_gradients(q, k, v, sinks)
        if numbers == 0:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        score_mod = fixed_score_mod(score_mod, sum_dtype(q), q.device)
        parts, outs = self._split_cohorts(k, v, numbers), []
        for cohort, number in parts:
            new_q, new_k, new_v = (cohort.tokens_of(x, number) for x in (q, k, v))
            with _entries_in_errors(cohort.entries, len(q)):
                local = cohort.local_score_mod(score_mod, len(q))
                outs.append(self._advance(cohort, new_q, new_k, new_v, sinks, local))
        refuse_gradients(*outs)  # of tensors that score_mod captures
        self._cohorts = [cohort for cohort, _ in parts]
        whole = *q.shape[:3], v.shape[3]
        if outs[0].shape == whole:
            return outs[0]
        out = outs[0].new_zeros(whole)
        for (cohort, number), part in zip(parts, outs, strict=True):
            out[cohort.batch_index, :, :number] = part
        return out

    @advises(keywords=renamed(lengths="seqlens seq_lens"), how="write cache.append(k, v) with those of the new tokens")
    def append(
        self,
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N E"],
        *,
        lengths: Int64[Tensor, " B"] | None = None,
    ) -> None:
        """Append the next N tokens without computing their output; they may end inside a chunk.

        lengths: number of new tokens of each batch entry, as in `attend`.

        Raises ValueError, and changes nothing, if the keys exceed `capacity`, or if k or v requires a gradient while
        gradients are enabled.
        """
        _, k, v = autocast(k, k, v)
        numbers = self._checked_lengths(None, k, v, lengths)
        refuse_gradients(k, v)
        if numbers == 0:
            return
        parts = self._split_cohorts(k, v, numbers)
        for cohort, number in parts:
            if not number:
                continue
            new = (cohort.tokens_of(x, number).split(_APPENDED_AT_ONCE, 2) for x in (k, v))
            with _entries_in_errors(cohort.entries, len(k)):
                for some_k, some_v in zip(*new, strict=True):
                    cohort.held.append(some_k, some_v, cohort.seen)
                    cohort.seen += some_k.shape[2]
                    cohort.held.shrink(cohort.seen)
        self._cohorts = [cohort for cohort, _ in parts]

    def crop(self, num_tokens: int | Int64[Tensor, " B"]) -> None:
        """Remove all tokens except the first `num_tokens`, as if the removed tokens had not been appended.

        num_tokens: one number for all batch entries, or a tensor with a number for each.

        Raises ValueError, and changes nothing, for more tokens than were seen, if it removes tokens and a remaining
        one sees a key at position num_tokens or later, and if queries from position num_tokens may see evicted keys.
        Going back at most `undo` tokens from the furthest one seen works at the end of a chunk.
        """
        seen = self._tokens_seen()
        if isinstance(num_tokens, Tensor):
            numbers = _checked_integers("num_tokens", num_tokens, seen if self._cohorts else [0] * num_tokens.numel())
        else:
            most = min((cohort.seen for cohort in self._cohorts), default=0)
            numbers = require_int("num_tokens", num_tokens, minimum=0, maximum=most)
        parts = [part for cohort in self._cohorts for part in cohort.split(numbers)]
        for cohort, number in parts:
            with _entries_in_errors(cohort.entries, len(seen)):
                self._check_crop(cohort, number)
                cohort.crop(number)
        self._cohorts = [cohort for cohort, _ in parts]

    def select(self, entries: Int64[Tensor, " C"]) -> None:
        """Keep only these batch entries (indices), in this order; indices may repeat, as after a step of beam search.

        entries: at least one integer in [0, batch), shape (C,).

        Raises TypeError or ValueError for other values. Does nothing before the first token.
        """
        if not isinstance(entries, Tensor) or entries.dtype not in (torch.int32, torch.int64) or entries.dim() != 1:
            raise TypeError(f"entries must be a tensor of integers of shape (C,); got {entries!r:.80}")
        if not self._cohorts:
            return
        batch, chosen = len(self._tokens_seen()), entries.tolist()
        if not chosen or min(chosen) < 0 or max(chosen) >= batch:
            raise ValueError(
                f"entries must name at least one batch entry, each between 0 and {batch - 1}; got {chosen}"
            )
        self._cohorts = [part for cohort in self._cohorts for part in cohort.in_new_batch(chosen)]

    def join(self, other: KVCache) -> None:
        """Append the batch entries of another cache, such as new requests to those that are being decoded.

        They keep their positions, and come after the entries of this cache. Their keys are copied.

        other: a cache that was made with equal arguments, and whose tokens have the heads, head dims, dtype and device
            of those in this cache. It does not change.

        Raises TypeError or ValueError, and changes nothing, if `other` does not fit.

        >>> running, new = (fd.KVCache(masks.local_window(left=127, right=0), num_heads=4) for _ in range(2))
        >>> running.append(*torch.randn(2, 3, 4, 100, 64))
        >>> new.append(*torch.randn(2, 1, 4, 30, 64))
        >>> running.join(new)
        >>> running.positions
        tensor([100, 100, 100,  30])
        """
        if type(other) is not type(self):
            raise TypeError(f"join takes another {type(self).__name__}; got {type(other).__name__}")
        ours, theirs = self._constructor_arguments(), other._constructor_arguments()
        unequal = [name for name, value in ours.items() if not _equal(value, theirs[name])]
        if unequal:
            raise ValueError(f"join takes a cache that was made with equal arguments; got another {unequal[0]}")
        if self._cohorts and other._cohorts:
            held, new = (cache._cohorts[0].held.traits for cache in (self, other))
            if held != new:
                raise ValueError(f"join takes a cache whose tokens match those in this one, {held}; got {new}")
        batch = len(self._tokens_seen())
        cohorts = [*self._cohorts, *(cohort.moved(batch) for cohort in other._cohorts)]
        self._cohorts = [cohort for cohort in cohorts if cohort.entries]  # without that of an empty batch

    def held(
        self, entry: int | None = None
    ) -> tuple[Int64[Tensor, " M"], Float[Tensor, "B G M D"], Float[Tensor, "B G M E"]]:
        """Return (positions, keys, values) of the M tokens in the cache, in ascending order of position.

        positions are on the CPU; keys and values are views of the cache's buffers.

        entry: index of a batch entry, whose keys and values are returned with batch 1; None for the whole batch.

        Raises ValueError before the first token, when sizes are unknown, for an entry out of range, and for the whole
        batch once entries were given different lengths or crops, or were joined: they may then hold different tokens.
        """
        if not self._cohorts:
            raise ValueError("a cache that has seen no tokens holds no keys")
        if entry is None and len(self._cohorts) > 1:
            raise ValueError(
                "held() needs the index of a batch entry, cache.held(0), once entries were given different lengths or "
                f"crops, or have joined; got entries that have seen {self._tokens_seen()} tokens"
            )
        cohort, rows = self._cohorts[0], slice(None)
        if entry is not None:
            require_int("entry", entry, minimum=0, maximum=len(self._tokens_seen()) - 1)
            cohort = next(cohort for cohort in self._cohorts if entry in cohort.entries)
            rows = slice(place := cohort.entries.index(entry), place + 1)
        held = cohort.held
        positions = [torch.arange(run.first, run.stop) for run in held.runs]
        slots = slice(0, held.num_used)
        return torch.cat([torch.arange(0), *positions]), held.keys[rows, :, slots], held.values[rows, :, slots]

    def _tokens_seen(self) -> list[int]:
        """Return the number of tokens seen by each batch entry; [] before the first tokens."""
        seen = {entry: cohort.seen for cohort in self._cohorts for entry in cohort.entries}
        return [seen[entry] for entry in range(len(seen))]

    def _split_cohorts(self, k: Tensor, v: Tensor, numbers: int | Sequence[int]) -> list[tuple[Cohort, int]]:
        """Return [(cohort, number of new tokens of each of its entries)]: copies of the cohorts, split where necessary.

        numbers: as from `_checked_lengths`.

        A call changes these copies, and stores them at its end, so a call that raises changes nothing. They may share
        the buffers: appending writes only after the held keys, or to new buffers. Before the first tokens, the cohorts
        are new and empty, one for each distinct number.
        """
        if self._cohorts:
            return [part for cohort in self._cohorts for part in cohort.split(numbers)]
        options = {"capacity": self.capacity, "undo": self.undo}
        groups = {numbers: range(len(k))} if isinstance(numbers, int) else grouped(numbers)
        return [
            (Cohort(tuple(entries), HeldKeys(k[: len(entries)], v[: len(entries)], self._sources, **options)), number)
            for number, entries in groups.items()
        ]

    def _advance(
        self, cohort: Cohort, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, score_mod: ScoreMod | None
    ) -> Tensor:
        """Append the next tokens of a cohort, and return their output. score_mod: as from `Cohort.local_score_mod`."""
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        cohort.held.append(k, v, cohort.seen)
        out, lse = self._attend_held(q, cohort, score_mod)
        if sinks is not None:
            out, _ = with_sinks(out, lse, sinks)
        cohort.seen += q.shape[2]
        if q.shape[2] > MOST_ROWS:
            cohort.held.shrink(cohort.seen)
        return out.to(q.dtype)

    def _attend_held(self, q: Tensor, cohort: Cohort, score_mod: ScoreMod | None) -> tuple[Tensor, Tensor]:
        """Return (output, lse) of the next queries of a cohort.

        The keys of these tokens are already in `cohort.held`; `cohort.seen` does not count them yet.
        """
        held = cohort.held
        return self._reader.attend(q, held.keys, held.values, first=cohort.seen, held=held, score_mod=score_mod)

    def _check_crop(self, cohort: Cohort, num_tokens: int) -> None:
        """Raise ValueError if a crop removes tokens, and a remaining one sees position `num_tokens` or a later one."""
        if num_tokens < cohort.seen:
            self._reader.check_crop(num_tokens)

    def _constructor_arguments(self) -> dict[str, Any]:
        names, reader = ("pattern", "num_heads", "capacity", "undo", "scale", "engine"), self._reader
        where = {"head_offset": reader.head_offset, "num_heads_global": reader.num_heads_global}
        return {name: getattr(self, name) for name in names} | where

    def _checked_lengths(self, q: Tensor | None, k: Tensor, v: Tensor, lengths: Tensor | None) -> int | list[int]:
        """Return the number of new tokens of each batch entry, after checks of a call's arguments.

        The result is one number for all entries if `lengths` is None, and 0 if all lengths are 0.

        q: None for `append`.

        Raises TypeError or ValueError for tensors that do not fit the cache, and for tokens that the pattern rejects.
        """
        for name, x in (("k", k), ("v", v)):  # without q, errors must not mention it
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
        seen = self._tokens_seen()
        if self._cohorts:
            self._cohorts[0].held.check_continues(k, v, batch=len(seen))
        numbers = [k.shape[2]] * k.shape[0]
        if lengths is not None:
            numbers = _checked_integers("lengths", lengths, numbers)
        for (first, number), entries in grouped(zip(seen or [0] * len(numbers), numbers, strict=True)).items():
            with _entries_in_errors(entries, len(numbers)):
                self._reader.check_tokens(range(first, first + number))
                if q is not None and number:
                    self._reader.check_end(first, number)
        if lengths is None:
            return k.shape[2]
        return numbers if any(numbers) else 0

    def __repr__(self) -> str:
        own = f"{shortened(repr(self.pattern), _SHOWN)}, num_heads={self.num_heads}, engine={self.engine!r}"
        seen = sorted(set(self._tokens_seen())) or [0]
        tokens = f"{seen[0]:,} tokens" if len(seen) == 1 else f"{seen[0]:,} to {seen[-1]:,} tokens"
        held = f"{tokens} seen, {self.num_kept:,} keys kept in {bytes_text(self.nbytes)}"
        return f"{type(self).__name__}({own}: {held})"


def _checked_integers(name: str, value: object, most: Sequence[int]) -> list[int]:
    """Return `value`, a tensor with an integer for each batch entry, as a list.

    most: largest number for each batch entry; the smallest is 0.

    Raises TypeError or ValueError for another value.
    """
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be a tensor of int32 or int64, one for each batch entry; got {value!r:.80}")
    if value.shape != (len(most),):
        raise ValueError(
            f"{name} must have shape ({len(most)},), a number for each batch entry; got {tuple(value.shape)}"
        )
    return [
        require_int(f"{name}[{entry}]", number, minimum=0, maximum=limit)
        for entry, (number, limit) in enumerate(zip(value.tolist(), most, strict=True))
    ]


@contextmanager
def _entries_in_errors(entries: Sequence[int], batch: int) -> Iterator[None]:
    """Context in which the text of a ValueError names these batch entries, unless they are the whole batch.

    batch: number of all batch entries.
    """
    try:
        yield
    except ValueError as error:
        if len(entries) == batch:
            raise
        named = f"batch {'entry' if len(entries) == 1 else 'entries'} {', '.join(map(str, entries))}"
        raise ValueError(f"{named}: {error}") from error


def _equal(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool((one == other).all())
    return isinstance(one, Tensor) == isinstance(other, Tensor) and one == other
