"""KVCache: attention of new tokens over cached keys, for causal patterns and for look-ahead within chunks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Self

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .._attend import autocast
from .._validate import OTHER_KEYWORDS, check_sinks, check_tensors
from ..engines import MOST_ROWS, with_sinks
from ..masks import Mixture, Pattern
from ..masks.core import HEADS, advises, bytes_text, renamed, require_int, shortened
from ._held_keys import HeldKeys, refuse_gradients, stay_out_of_graphs
from ._reader import Reader

# B batch, H query heads, G key/value heads, N new tokens, M held tokens, C selected batch entries
# D head dim of queries and keys, E of values

_APPENDED_AT_ONCE = 4096  # tokens without queries are appended in chunks, with eviction after each
_SHOWN = 400  # characters of a pattern in a repr


_ADDS = "write cache.attend(q, k, v) to append the new tokens and attend, cache.append(k, v) to append only"
_ASKED = {
    **dict.fromkeys(("update", "forward", "step", "decode"), _ADDS),
    **dict.fromkeys(("get_seq_length", "seq_len", "length", "size"), "cache.num_tokens is the number of tokens seen"),
    **dict.fromkeys(
        ("is_compileable", "layers", "max_cache_len", "get_max_cache_shape", "is_initialized", "get_mask_sizes"),
        "for models of transformers write fd.integrations.transformers.FlexdilatedCache(model.config)",
    ),
    **dict.fromkeys(("clear", "empty"), "cache.reset() forgets all tokens"),
    **dict.fromkeys(("keys", "values", "k", "v", "key_cache"), "cache.held() is (positions, keys, values)"),
}
_A_CACHE = "write fd.KVCache(pattern, num_heads=8), one for each layer"


class KVCache:
    """Keys and values that later queries of a pattern can see, for decoding; one cache per layer.

    `attend` takes the next tokens and returns their output as in a single pass over all tokens. With a causal pattern
    their number is arbitrary. A pattern may also let queries see later keys of their own chunk, such as a video frame;
    each call then takes whole chunks, see `chunk`. Keys that no later query can see are evicted: with bounded look-back
    the cache has at most about twice the visible keys, for any number of tokens. All batch entries have equal
    positions. The first tokens set sizes, dtype and device.

    num_heads: query heads on this device.
    capacity: maximum number of keys in the cache, allocated with the first tokens; None to grow as needed.
    undo: number of latest tokens that `crop` can always remove; keys that only these tokens see are not evicted yet.
    scale, engine, head_offset, num_heads_global: as in `attend`; the engine computes calls with more than 16 tokens,
        smaller calls are computed without an engine.

    For inference only: not differentiable. Raises ValueError or TypeError for a pattern whose look-ahead is not limited
    to chunks, for a pattern with run-time tensors, and for tensors that do not fit the previous tokens.

    >>> cache = fd.KVCache(masks.local_window(left=127, right=0), num_heads=4)
    >>> cache.attend(*torch.randn(3, 1, 4, 100, 64)).shape  # the first tokens, then the next ones
    torch.Size([1, 4, 100, 64])
    >>> fd.KVCache(masks.blockwise(masks.local_window(left=4, right=0), 8), num_heads=4).chunk  # frames of 8 tokens
    8
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        stay_out_of_graphs(KVCache, "attend", "append")  # in __new__, as unpickling does not call __init__
        return super().__new__(cls)

    @advises(
        keywords=renamed(num_heads=HEADS, capacity="max_length max_len max_seq_len max_cache_len size"), how=_A_CACHE
    )
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
        if capacity is not None:
            require_int("capacity", capacity, minimum=1)
        self.undo = require_int("undo", undo, minimum=0)
        self._reader = Reader(
            pattern,
            num_heads=num_heads,
            scale=scale,
            engine=engine,
            head_offset=head_offset,
            num_heads_global=num_heads_global,
        )
        self._keeping = self._reader.sources
        self.pattern, self.num_heads, self.engine, self.capacity = self._reader.pattern, num_heads, engine, capacity
        self.reset()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a KVCache has no {name}" + (f": {_ASKED[name]}" if name in _ASKED else ""))

    def __call__(self, *args: object, **named: object) -> NoReturn:
        """Raise TypeError: a cache is not callable."""
        raise TypeError(f"a KVCache cannot be called: {_ADDS}")

    def reset(self) -> None:
        """Forget all tokens, and the sizes, dtype and device that they set."""
        self._held: HeldKeys | None = None
        self._seen = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens seen: the position of the next token."""
        return self._seen

    @property
    def chunk(self) -> int:
        """Number of tokens in a chunk; no query sees a key after its chunk. It is 1 for a causal pattern.

        It is the smallest chunk found in the first 2048 positions, or in two periods of the pattern if these are
        longer, up to 32,768. Chunks begin at position 0, or after a shorter first piece. A call of `attend` may end at
        any position where none of its tokens sees a later key, such as the end of a chunk.
        """
        return self._reader.ends.chunk

    @property
    def num_kept(self) -> int:
        """Number of keys that the cache holds now; evicted keys are not counted."""
        return 0 if self._held is None else self._held.num_used

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of keys and values, unused slots included."""
        return 0 if self._held is None else self._held.nbytes

    @advises(keywords=OTHER_KEYWORDS, how="write cache.attend(q, k, v) with those of the new tokens")
    def attend(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B G N D"],
        v: Float[Tensor, "B G N E"],
        *,
        sinks: Float[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Append the next N tokens, and return their attention output over all keys that each of them sees.

        N may be 0. G must divide H. sinks: a logit for each head, which adds a term exp(sink) to the softmax
        denominators; None adds no term. Raises ValueError if one of the N tokens sees a key after the last of them: see
        `chunk`.
        """
        q, k, v = autocast(q, k, v)
        self._check(q, k, v)
        check_sinks(sinks, q)
        refuse_gradients(q, k, v, sinks)
        if not q.shape[2]:
            return v.new_zeros(*q.shape[:3], v.shape[3])
        with self._as_before_on_error():
            held = self._take(k, v)
            out, lse = self._compute(q, held)
            if sinks is not None:
                out, _ = with_sinks(out, lse, sinks)
            self._seen += q.shape[2]
        if q.shape[2] > MOST_ROWS:
            held.shrink(self._seen)
        return out.to(q.dtype)

    @advises(how="write cache.append(k, v) with those of the new tokens")
    def append(self, k: Float[Tensor, "B G N D"], v: Float[Tensor, "B G N E"]) -> None:
        """Append the next N tokens without computing their output; they may end inside a chunk."""
        _, k, v = autocast(k, k, v)
        self._check(None, k, v)
        refuse_gradients(k, v)
        if not k.shape[2]:
            return
        with self._as_before_on_error():
            for portion in zip(k.split(_APPENDED_AT_ONCE, 2), v.split(_APPENDED_AT_ONCE, 2), strict=True):
                held = self._take(*portion)
                self._seen += portion[0].shape[2]
                held.shrink(self._seen)

    def crop(self, num_tokens: int) -> None:
        """Remove all tokens except the first `num_tokens`, as if the removed tokens had not been appended.

        Raises ValueError, and changes nothing, for more tokens than were seen, if a remaining token sees the key of a
        removed one, and if queries from position num_tokens may see evicted keys. Removing at most `undo` tokens always
        works at the end of a chunk.
        """
        require_int("num_tokens", num_tokens, minimum=0, maximum=self._seen)
        if self._held is None:
            return
        if num_tokens < self._seen:
            self._reader.check_crop(num_tokens)
        self._held.take_back(num_tokens, self._seen)
        self._seen = num_tokens

    def select(self, entries: Int64[Tensor, " C"]) -> None:
        """Keep only these batch entries (indices), in this order; indices may repeat, as after a step of beam search.

        entries: at least one integer in [0, batch), shape (C,). Raises TypeError or ValueError for other values. Does
        nothing before the first token.
        """
        if not isinstance(entries, Tensor) or entries.dtype not in (torch.int32, torch.int64) or entries.dim() != 1:
            raise TypeError(f"entries must be a tensor of integers of shape (C,); got {entries!r:.80}")
        if self._held is None:
            return
        batch = self._held.keys.shape[0]
        if not len(entries) or int(entries.min()) < 0 or int(entries.max()) >= batch:
            raise ValueError(
                f"entries must name at least one batch entry, each between 0 and {batch - 1}; got {entries.tolist()}"
            )
        self._held.select(entries.long())

    def held(self) -> tuple[Int64[Tensor, " M"], Float[Tensor, "B G M D"], Float[Tensor, "B G M E"]]:
        """(positions, keys, values) of the M tokens in the cache, in ascending order of position.

        positions are on the CPU; keys and values are views of the cache's buffers. Raises ValueError before the first
        token, when sizes are unknown.
        """
        if self._held is None:
            raise ValueError("a cache that has seen no tokens holds no keys")
        held = self._held
        positions = [torch.arange(run.first, run.stop) for run in held.runs]
        slots = slice(0, held.num_used)
        return torch.cat([torch.arange(0), *positions]), held.keys[:, :, slots], held.values[:, :, slots]

    @contextmanager
    def _as_before_on_error(self) -> Iterator[None]:
        """Context manager that restores the cache if its body raises.

        It copies no keys, because appending writes only to slots after the held keys, or to new buffers.
        """
        before = None if self._held is None else self._held.snapshot(), self._seen
        try:
            yield
        except BaseException:
            self._held, self._seen = before
            raise

    def _take(self, k: Tensor, v: Tensor) -> HeldKeys:
        """Append the next tokens' keys and values, and return the buffer; the caller must update `_seen`."""
        if self._held is None:
            self._held = HeldKeys(k, v, self._keeping, capacity=self.capacity, undo=self.undo)
        self._held.append(k, v, self._seen)
        return self._held

    def _compute(self, q: Tensor, held: HeldKeys) -> tuple[Tensor, Tensor]:
        return self._reader.attend(q, held.keys, held.values, first=self._seen, held=held)

    def _check(self, q: Tensor | None, k: Tensor, v: Tensor) -> None:
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
        if self._held is not None:
            self._held.check_continues(k, v)
        self._reader.check_tokens(range(self._seen, self._seen + k.shape[2]))

    def __repr__(self) -> str:
        own = f"{shortened(repr(self.pattern), _SHOWN)}, num_heads={self.num_heads}, engine={self.engine!r}"
        held = f"{self._seen:,} tokens seen, {self.num_kept:,} keys kept in {bytes_text(self.nbytes)}"
        return f"{type(self).__name__}({own}: {held})"
