"""What tests of caches share: sequences with the output of one pass, and a cache whose every call is held to it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.decoding import _held_keys, _kv_cache, _reader
from flexdilated.engines import ScoreMod
from tests.support import oracle, strategies, twins
from tests.support.agreement import TIGHT
from tests.support.strategies import Case
from tests.support.twins import Twin

# H query heads, G key/value heads, N tokens

Expression = masks.Pattern | masks.Mixture
WINDOW = masks.local_window(left=100, right=0)
LONGNET = masks.longnet([64, 128, 256], [1, 2, 4]) & masks.causal()
FRAMES = masks.blockwise(masks.local_window(left=4, right=0), 8)
NAN = float("nan")
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)


def tree(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Mask function of consecutive trees of four draft tokens, in which the second token sees the last."""
    return (q // 4 > k // 4) | ((q // 4 == k // 4) & TREE[q % 4, k % 4])


@contextmanager
def tiny_sizes(*, page: int, least_slots: int, rows: int) -> Iterator[None]:
    """Keys are evicted after a few tokens, in pages of a few; short chunks take either way."""
    held = mock.patch.multiple(_held_keys, _PAGE=page, _LEAST_SLOTS=least_slots)
    portions = mock.patch.multiple(_kv_cache, MOST_ROWS=rows, _APPENDED_AT_ONCE=7)
    with held, portions, mock.patch.object(_reader, "MOST_ROWS", rows):
        yield


def draw_tensors(H=4, G=2, N=700, D=8, B=2, dtype=torch.float64, seed=0) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(B, heads, N, D, generator=generator, dtype=dtype) for heads in (H, G, G))


def decode(cache: fd.KVCache, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[int]) -> Tensor:
    """The outputs of chunks of these sizes, over and over, up to the end."""
    sizes, outs = cycle(chunks), []
    while q.shape[2]:
        size = next(sizes)
        outs.append(cache.attend(q[:, :, :size], k[:, :, :size], v[:, :, :size]))
        q, k, v = (x[:, :, size:] for x in (q, k, v))
    return torch.cat(outs, dim=2)


def alone(tensors: tuple[Tensor, ...], pattern: Expression) -> Tensor:
    return fd.attend(*tensors, pattern, enable_gqa=True)


# --- entries at different positions ---


class Sample(NamedTuple):
    """A sequence, the position that a batch entry has in it, and the furthest that it had."""

    sequence: int
    at: int
    reached: int = 0

    def moved(self, at: int) -> Sample:
        return Sample(self.sequence, at, max(at, self.reached))


def padded(tensors: tuple[Tensor, ...], samples: list[Sample], lengths: list[int], width: int) -> list[Tensor]:
    """q, k and v of a call: of each sample its next tokens, then padding, which is NaN."""
    found = []
    for x in tensors:
        new = torch.full((len(samples), x.shape[1], width, x.shape[3]), NAN, dtype=x.dtype)
        for row, sample, length in zip(new, samples, lengths, strict=True):
            row[:, :length] = x[sample.sequence, :, sample.at : sample.at + length]
        found.append(new)
    return found


def ragged(pattern: Expression = LONGNET, **options) -> tuple[fd.KVCache, tuple[Tensor, ...]]:
    """A cache of three entries that have seen 250, 7 and 130 tokens, and their sequences of 300 tokens."""
    q, k, v = draw_tensors(N=300, B=3)
    cache = fd.KVCache(pattern, num_heads=4, **options)
    cache.append(k[:, :, :250], v[:, :, :250], lengths=torch.tensor([250, 7, 130]))
    return cache, (q, k, v)


def next_tokens(cache: fd.KVCache, tensors: tuple[Tensor, ...], number: int) -> list[Tensor]:
    samples = [Sample(*each) for each in enumerate(cache.positions.tolist())]
    return padded(tensors, samples, [number] * len(samples), number)


def assert_goes_on(cache: fd.KVCache, tensors: tuple[Tensor, ...], number: int = 20) -> None:
    """The next tokens of each entry, in one call and in steps, have the output of one pass over its sequence."""
    starts, expected = cache.positions.tolist(), alone(tensors, cache.pattern)
    new = next_tokens(cache, tensors, number)
    outs = [cache.attend(*(x[:, :, : number - 2] for x in new))]
    outs += [cache.attend(*(x[:, :, t : t + 1] for x in new)) for t in (number - 2, number - 1)]
    for row, sequence, first in zip(torch.cat(outs, 2), expected, starts, strict=True):
        assert_close(row, sequence[:, first : first + number], **TIGHT)
    assert cache.positions.tolist() == [first + number for first in starts]


# --- any schedule of calls ---


def crosses(counts: Tensor, first: int, end: int) -> bool:
    """True if a query in [first, end) sees a key at or after `end`; counts: (H, N, N)."""
    return bool(counts[:, first:end, end:].any())


@st.composite
def chunked(draw: st.DrawFn, num_heads: int, longest: int = 9) -> tuple[Twin, int, int]:
    """Draw (expression without look-ahead beyond chunks, first end, chunk), with chunks of at most `longest` tokens."""
    chunk = draw(st.integers(1, longest))
    first = draw(st.integers(0, chunk - 1))
    rule = twins.blockwise(twins.causal(), chunk).after(first)
    rule = rule | twins.first_tokens(first) if first else rule
    return draw(strategies.expressions(num_heads)) & rule, first, chunk


@st.composite
def chunked_cases(draw: st.DrawFn) -> Case:
    H = draw(st.integers(1, 3))
    twin, first, chunk = draw(chunked(H))
    return Case.whole(twin, H, first + chunk * draw(st.integers(1, 40 // chunk)))


# Of (biases, sequences): a score_mod of a batch of these sequences.
FUNCTIONS: dict[str, Callable[[Tensor, Tensor], ScoreMod]] = {
    "all arguments": lambda biases, numbers: (
        lambda score, b, h, q_idx, k_idx: score * 0.5 + biases[numbers[b], h, (q_idx - k_idx) % 7] - 0.01 * k_idx
    ),
    # Results of these are laid out in memory in other ways than the scores.
    "distance": lambda biases, numbers: lambda score, b, h, q_idx, k_idx: (q_idx - k_idx) * score.new_tensor(-0.1),
    "head and key": lambda biases, numbers: lambda score, b, h, q_idx, k_idx: biases[0, h, 0] * k_idx,
    "entry": lambda biases, numbers: lambda score, b, h, q_idx, k_idx: biases[numbers[b], 0, 0],
    "constant": lambda biases, numbers: lambda score, b, h, q_idx, k_idx: score.new_zeros(()),
    "some keys": lambda biases, numbers: (
        lambda score, b, h, q_idx, k_idx: torch.where(k_idx % 3 == 0, score, -torch.inf)
    ),
}


class Requests:
    """A cache, and of each entry of its batch the sequence that it continues, with its position.

    Each call is checked: positions, keys that are held, and outputs, which are the oracle's for each sequence alone. A
    score_mod fails for pairs that are not allowed.
    """

    def __init__(
        self,
        case: Case,
        tensors: tuple[Tensor, ...],
        *,
        sinks: Tensor | None = None,
        function: str | None = None,
        scale: float | Tensor | None = None,
        **options: Any,
    ) -> None:
        where = {"head_offset": case.head_offset, "num_heads_global": case.num_heads_global, "scale": scale}
        self.cache = fd.KVCache(case.twin.pattern, num_heads=case.num_heads, **where, **options)
        self.tensors, self.sinks, self.function = tensors, sinks, function
        whole = Case.whole(case.twin, case.num_heads_global, case.num_keys)
        self.shown, self.counts = whole.counts() > 0, case.counts()
        generator = torch.Generator().manual_seed(0)
        self.biases = torch.randn(3, case.num_heads_global, 7, generator=generator, dtype=torch.float64)
        b, h, at = (
            torch.arange(3)[:, None, None, None],
            torch.tensor(case.heads)[:, None, None],
            torch.arange(case.num_keys),
        )
        rule = self.score_mod(range(3)) or (lambda score, *_: score)
        modify = {"modify": lambda scores: rule(scores, b, h, at[:, None], at).expand(scores.shape)}
        factor = scale.reshape(-1, 1, 1) if isinstance(scale, Tensor) else scale
        self.expected = oracle.attention(*tensors, self.counts, factor, sinks, **modify)[0]
        self.samples: list[Sample] = []

    def score_mod(self, sequences: Sequence[int]) -> ScoreMod | None:
        if self.function is None:
            return None
        function, shown = FUNCTIONS[self.function](self.biases, torch.tensor(sequences)), self.shown

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            return torch.where(shown[h, q_idx, k_idx], function(score, b, h, q_idx, k_idx), NAN)

        return score_mod if self.function == "all arguments" else function

    def ends(self, first: int) -> list[int]:
        """Numbers of tokens that a call from position `first` on may have."""
        N = self.counts.shape[1]
        return [stop - first for stop in range(first, N + 1) if not crosses(self.counts, first, stop)]

    def crops(self, sample: Sample, least: int = 0) -> list[int]:
        """Positions, from `least` on, that an entry may go back to."""
        return [end for end in range(least, sample.at) if not crosses(self.counts, 0, end)] + [sample.at]

    def check(self) -> None:
        """Tokens that are held are those of the sequence; no later query sees one that is not."""
        assert self.cache.positions.tolist() == [sample.at for sample in self.samples]
        _, k, v = self.tensors
        for entry, (sequence, position, _) in enumerate(self.samples):
            held, keys, values = self.cache.held(entry)
            assert (held < position).all()
            assert torch.equal(keys, k[sequence : sequence + 1, :, held])
            assert torch.equal(values, v[sequence : sequence + 1, :, held])
            evicted = sorted(set(range(position)) - set(held.tolist()))
            assert not self.counts[:, position:, evicted].any()

    def copied(self) -> Requests:
        """The same with a cache of its own."""
        other = copy.copy(self)
        other.cache = copy.deepcopy(self.cache)
        return other

    def advance(self, lengths: list[int], width: int, *, attends: bool) -> None:
        q, k, v = padded(self.tensors, self.samples, lengths, width)
        given = None if lengths == [width] * len(lengths) else torch.tensor(lengths)
        if attends:
            rule = self.score_mod([sample.sequence for sample in self.samples])
            out = self.cache.attend(q, k, v, lengths=given, sinks=self.sinks, score_mod=rule)
            for row, sample, length in zip(out, self.samples, lengths, strict=True):
                assert_close(row[:, :length], self.expected[sample.sequence, :, sample.at :][:, :length], **TIGHT)
                assert not row[:, length:].any()
        else:
            self.cache.append(k, v, lengths=given)
        self.samples = [sample.moved(sample.at + n) for sample, n in zip(self.samples, lengths, strict=True)]

    def refuse(self, entry: int, end: int) -> None:
        """A call in which this entry ends inside a chunk raises an error that lists sizes that fit."""
        first, N = self.samples[entry].at, self.counts.shape[1]
        lengths = [end - first if entry == place else 0 for place in range(len(self.samples))]
        new = padded(self.tensors, self.samples, lengths, end - first)
        with pytest.raises(ValueError, match="must end where none of them sees a later key") as refused:
            self.cache.attend(*new, lengths=torch.tensor(lengths))
        bring = re.search(r"bring (\d+) or (\d+) tokens", str(refused.value))
        assert bring is not None
        fits = [stop for stop in range(end, N + 1) if not crosses(self.counts, first, stop)]
        assert [first + int(number) for number in bring.groups()][: len(fits)] == fits[:2]

    def draft(self, lengths: list[int]) -> None:
        """Append wrong tokens, which a crop must take back."""
        new = padded(self.tensors, self.samples, lengths, width := max(lengths))[1:]
        fill = torch.arange(width) < torch.tensor(lengths)[:, None]
        wrong = (torch.where(fill[:, None, :, None], x + 1, NAN) for x in new)
        self.cache.append(*wrong, lengths=torch.tensor(lengths))
        self.samples = [sample.moved(sample.at + n) for sample, n in zip(self.samples, lengths, strict=True)]

    def crop(self, kept: list[int]) -> None:
        """Take tokens back; more than are promised may be refused, for all entries."""
        try:
            self.cache.crop(torch.tensor(kept, dtype=torch.int32))
        except ValueError as error:
            refused = str(error)
        else:
            self.samples = [sample.moved(at) for at, sample in zip(kept, self.samples, strict=True)]
            return
        assert "the cache no longer holds all keys" in refused
        assert any(at < sample.reached - self.cache.undo for at, sample in zip(kept, self.samples, strict=True))
