"""KVCache with batch entries at different positions: lengths, crops, selections and joins."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.decoding import _reader
from flexdilated.engines import ScoreMod
from tests.support import strategies
from tests.support.agreement import TIGHT
from tests.support.strategies import Case

from .test_generate import CONFIGS, model_of, prompt_of
from .test_kv_cache import LONGNET, WINDOW, draw_tensors, tiny_sizes
from .test_kv_cache_chunks import chunked, crosses

NAN = float("nan")


def padded(tensors: tuple[Tensor, ...], samples: list[tuple[int, int]], lengths: list[int], width: int):
    """q, k and v of a call: of each (sequence, position) its next tokens, then padding, which is NaN."""
    rows = list(zip(samples, lengths, strict=True))
    found = []
    for x in tensors:
        new = torch.full((len(rows), x.shape[1], width, x.shape[3]), NAN, dtype=x.dtype)
        for row, ((sequence, first), length) in zip(new, rows, strict=True):
            row[:, :length] = x[sequence, :, first : first + length]
        found.append(new)
    return tuple(found)


class Requests:
    """A cache, and of each entry of its batch the sequence that it continues, with its position.

    Each call is checked: positions, keys that are held, and outputs, which are those of one pass over each sequence
    alone. counts: (H, N, N), from the dense rule, to find positions where no query sees a later key. biases: (sequence,
    H, distances), which a score_mod adds to scores; None for none.
    """

    def __init__(
        self,
        cache: fd.KVCache,
        tensors: tuple[Tensor, ...],
        counts: Tensor,
        sinks: Tensor | None,
        biases: Tensor | None = None,
    ) -> None:
        self.cache, self.tensors, self.counts, self.sinks, self.biases = cache, tensors, counts, sinks, biases
        options = {"enable_gqa": True, "engine": "reference", "sinks": sinks}
        each = ((tuple(x[b : b + 1] for x in tensors), self.score_mod([b])) for b in range(len(tensors[0])))
        self.expected = torch.cat([fd.attend(*qkv, cache.pattern, score_mod=rule, **options) for qkv, rule in each])
        self.samples: list[tuple[int, int]] = []

    def score_mod(self, sequences: list[int]) -> ScoreMod | None:
        """A function of all its arguments, for a batch of these sequences; it fails for pairs that are not allowed."""
        if self.biases is None:
            return None
        biases, numbers, shown = self.biases, torch.tensor(sequences), self.counts > 0

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
            bias = biases[numbers[b], h, (q_idx - k_idx) % biases.shape[2]]
            return torch.where(shown[h, q_idx, k_idx], score * 0.5 + bias - 0.01 * k_idx, NAN)

        return score_mod

    def ends(self, first: int) -> list[int]:
        """Numbers of tokens that a call from position `first` on may have."""
        N = self.counts.shape[1]
        return [stop - first for stop in range(first, N + 1) if not crosses(self.counts, first, stop)]

    def check(self) -> None:
        assert self.cache.positions.tolist() == [position for _, position in self.samples]
        _, k, v = self.tensors
        for entry, (sequence, position) in enumerate(self.samples):
            held, keys, values = self.cache.held(entry)
            assert (held < position).all()
            assert torch.equal(keys, k[sequence : sequence + 1, :, held])
            assert torch.equal(values, v[sequence : sequence + 1, :, held])

    def advance(self, lengths: list[int], width: int, *, attends: bool) -> None:
        q, k, v = padded(self.tensors, self.samples, lengths, width)
        given = None if lengths == [width] * len(lengths) else torch.tensor(lengths)
        if attends:
            rule = self.score_mod([sequence for sequence, _ in self.samples])
            out = self.cache.attend(q, k, v, lengths=given, sinks=self.sinks, score_mod=rule)
            for row, (sequence, first), length in zip(out, self.samples, lengths, strict=True):
                assert_close(row[:, :length], self.expected[sequence, :, first : first + length], **TIGHT)
                assert not row[:, length:].any()
        else:
            self.cache.append(k, v, lengths=given)
        self.samples = [(sequence, at + n) for (sequence, at), n in zip(self.samples, lengths, strict=True)]

    def draft(self, lengths: list[int], kept: list[int]) -> None:
        """Append wrong tokens, and take them back, with the last tokens beyond the positions `kept`."""
        _, k, v = padded(self.tensors, self.samples, lengths, width := max(lengths))
        fill = torch.arange(width) < torch.tensor(lengths)[:, None]
        k, v = (torch.where(fill[:, None, :, None], x + 1, NAN) for x in (k, v))
        self.cache.append(k, v, lengths=torch.tensor(lengths))
        self.cache.crop(torch.tensor(kept, dtype=torch.int32))
        self.samples = [(sequence, at) for (sequence, _), at in zip(self.samples, kept, strict=True)]


@st.composite
def chunked_cases(draw: st.DrawFn) -> Case:
    H = draw(st.integers(1, 3))
    twin, first, chunk = draw(chunked(H))
    return Case.whole(twin, H, first + chunk * draw(st.integers(1, 40 // chunk)))


@pytest.mark.parametrize("cases", [strategies.whole_cases(strategies.causal_twins), chunked_cases()], ids=str)
@settings(max_examples=40)
@given(data=st.data())
def test_any_schedule_equals_passes_over_each_sample(cases: st.SearchStrategy[Case], data: st.DataObject) -> None:
    """Batches that grow by joins and shrink by selections, whose entries get lengths and crops of their own."""
    case = data.draw(cases)
    tensors = tuple(x.detach() for x in data.draw(strategies.tensors(case, batch=3)))
    sinks = data.draw(st.one_of(st.none(), strategies.sinks(case.num_heads)))
    sinks = None if sinks is None else sinks.detach()
    biases = torch.randn(3, case.num_heads, 7, dtype=tensors[0].dtype) if data.draw(st.booleans()) else None
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    undo = data.draw(st.integers(0, 12))

    def begun(count: int) -> Requests:
        cache = fd.KVCache(case.twin.pattern, num_heads=case.num_heads, undo=undo)
        requests = Requests(cache, tensors, case.counts(), sinks, biases)
        requests.samples = [(data.draw(st.integers(0, 2)), 0) for _ in range(count)]
        lengths = [data.draw(st.sampled_from(requests.ends(0))) for _ in range(count)]
        requests.advance(lengths, max(lengths) + data.draw(st.integers(0, 2)), attends=data.draw(st.booleans()))
        if not any(lengths):
            requests.samples = []  # the cache does not know its batch
        return requests

    with tiny_sizes(**sizes):
        requests = begun(data.draw(st.integers(1, 4)))
        for _ in range(data.draw(st.integers(1, 8))):
            requests.check()
            samples = requests.samples
            action = data.draw(st.sampled_from(["attend", "attend", "step", "append", "draft", "select", "join"]))
            if action == "join" or not samples:
                other = begun(data.draw(st.integers(1, 2)))
                requests.cache.join(other.cache)
                requests.samples = samples + other.samples
                other.check()
            elif action == "select":
                chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=4))
                requests.cache.select(torch.tensor(chosen))
                requests.samples = [samples[entry] for entry in chosen]
            elif action == "draft":
                lengths = [
                    data.draw(st.sampled_from([n for n in requests.ends(at) if n <= undo] or [0])) for _, at in samples
                ]
                least = [max(0, at + n - undo) for (_, at), n in zip(samples, lengths, strict=True)]
                kept = [
                    data.draw(st.sampled_from([p for p in range(low, at) if not crosses(requests.counts, 0, p)] + [at]))
                    for (_, at), low in zip(samples, least, strict=True)
                ]
                requests.draft(lengths, kept)
            elif action == "step":
                common = set.intersection(*(set(requests.ends(at)) for _, at in samples))
                number = data.draw(st.sampled_from(sorted(common | {0})))
                requests.advance([number] * len(samples), number, attends=True)
            else:
                lengths = [data.draw(st.sampled_from(requests.ends(at))) for _, at in samples]
                width = max(lengths) + data.draw(st.integers(0, 2))
                requests.advance(lengths, width, attends=action == "attend")
        requests.check()


def alone(tensors: tuple[Tensor, ...], pattern: masks.Pattern | masks.Mixture) -> Tensor:
    return fd.attend(*tensors, pattern, enable_gqa=True)


def ragged(
    pattern: masks.Pattern | masks.Mixture = LONGNET, seed: int = 0, **options
) -> tuple[fd.KVCache, tuple[Tensor, ...]]:
    """A cache of three entries that have seen 250, 7 and 130 tokens, and their sequences of 300 tokens."""
    q, k, v = draw_tensors(N=300, B=3, seed=seed)
    cache = fd.KVCache(pattern, num_heads=4, **options)
    cache.append(k[:, :, :250], v[:, :, :250], lengths=torch.tensor([250, 7, 130]))
    return cache, (q, k, v)


def next_tokens(cache: fd.KVCache, tensors: tuple[Tensor, ...], number: int) -> list[Tensor]:
    samples = list(enumerate(cache.positions.tolist()))
    return list(padded(tensors, samples, [number] * len(samples), number))


def assert_goes_on(cache: fd.KVCache, tensors: tuple[Tensor, ...], number: int = 20) -> None:
    """The next tokens of each entry, in one call and in steps, have the output of one pass over its sequence."""
    starts, expected = cache.positions.tolist(), alone(tensors, cache.pattern)
    new = next_tokens(cache, tensors, number)
    outs = [cache.attend(*(x[:, :, : number - 2] for x in new))]
    outs += [cache.attend(*(x[:, :, t : t + 1] for x in new)) for t in (number - 2, number - 1)]
    for row, sequence, first in zip(torch.cat(outs, 2), expected, starts, strict=True):
        assert_close(row, sequence[:, first : first + number], **TIGHT)
    assert cache.positions.tolist() == [first + number for first in starts]


def test_entries_with_equal_lengths_are_computed_together() -> None:
    """Entries stay in one call of the engine until their lengths differ, whatever their order."""
    q, k, v = draw_tensors(N=100, B=5)
    cache = fd.KVCache(LONGNET, num_heads=4)
    with mock.patch.object(_reader.Reader, "attend", autospec=True, side_effect=_reader.Reader.attend) as computed:
        cache.attend(q, k, v)
        cache.attend(q, k, v, lengths=torch.full((5,), 60))
        assert [call.args[1].shape[0] for call in computed.call_args_list] == [5, 5]
        computed.reset_mock()
        out = cache.attend(q, k, v, lengths=torch.tensor([30, 0, 30, 50, 30]))
        assert [call.args[1].shape[:3] for call in computed.call_args_list] == [(3, 4, 30), (1, 4, 50)]
    whole = [torch.cat([x, x[:, :, :60], x], 2) for x in (q, k, v)]
    for row, sequence, length in zip(out, alone(tuple(whole), LONGNET), (30, 0, 30, 50, 30), strict=True):
        assert_close(row[:, :length], sequence[:, 160 : 160 + length], **TIGHT)


def test_positions() -> None:
    cache = fd.KVCache(WINDOW, num_heads=4)
    assert (cache.positions.shape, cache.num_tokens) == ((0,), 0)
    q, k, v = draw_tensors(N=300, B=3)
    assert not cache.attend(q, k, v, lengths=torch.zeros(3, dtype=torch.int64)).any()
    assert cache.positions.shape == (0,)
    cache.attend(q, k, v, lengths=torch.tensor([300, 7, 0]))
    assert torch.equal(cache.positions, torch.tensor([300, 7, 0]))
    with pytest.raises(ValueError, match=r"write cache\.positions; got \[300, 7, 0\]"):
        _ = cache.num_tokens
    assert "0 to 300 tokens seen" in repr(cache)
    assert cache.num_kept == 108  # of the first entry: its next query sees keys from 200 on, in a page from 192 on
    cache.crop(torch.tensor([0, 0, 0]))
    assert cache.num_tokens == 0
    cache.reset()
    assert cache.positions.shape == (0,)


@pytest.mark.parametrize("pattern", [LONGNET, WINDOW], ids=["longnet", "window"])
def test_speculative_decoding(pattern) -> None:
    """Drafts of 12 tokens, of which each entry accepts another number, over several segments."""
    cache, tensors = ragged(pattern, undo=12)
    expected, generator = alone(tensors, pattern), torch.Generator().manual_seed(0)
    while int(cache.positions.max()) <= 276:
        starts = cache.positions
        accepted = torch.randint(0, 13, (3,), generator=generator)
        drafts = next_tokens(cache, tensors, 12)
        wrong = torch.arange(12) >= accepted[:, None]
        out = cache.attend(*(torch.where(wrong[:, None, :, None], -x, x) for x in drafts))
        for row, sequence, first, number in zip(out, expected, starts, accepted, strict=True):
            assert_close(row[:, :number], sequence[:, first : first + number], **TIGHT)
        cache.crop(starts + accepted)
    assert_goes_on(cache, tensors, 12)


def test_joins_and_selections() -> None:
    """Both caches of a join go on by themselves; finished entries leave, and new ones come to an empty cache, too."""
    cache, tensors = ragged()
    other, more = ragged(seed=1)
    cache.crop(torch.tensor([0, 7, 100]))
    cache.join(other)
    assert cache.positions.tolist() == [0, 7, 100, 250, 7, 130]
    assert_goes_on(cache, tuple(torch.cat([x, y]) for x, y in zip(tensors, more, strict=True)), 40)
    other.append(*torch.zeros(2, 3, 2, 20, 8, dtype=torch.float64))
    cache.select(torch.tensor([5, 1, 1]))
    cache.join(fd.KVCache(LONGNET, num_heads=4))
    assert_goes_on(cache, tuple(torch.cat([y[2:], x[[1, 1]]]) for x, y in zip(tensors, more, strict=True)))
    empty, (other, more) = fd.KVCache(LONGNET, num_heads=4), ragged(seed=1)
    empty.join(other)
    other.join(other)
    assert_goes_on(empty, more)
    assert_goes_on(other, tuple(x.repeat(2, 1, 1, 1) for x in more))


def test_a_batch_of_none_joins() -> None:
    """A cache of an empty batch has no entries to bring, and takes those of others."""
    cache, tensors = ragged()
    none = fd.KVCache(LONGNET, num_heads=4)
    none.append(*(x[:0, :, :5] for x in tensors[1:]))
    assert (none.num_tokens, none.positions.shape) == (5, (0,))
    cache.join(none)
    none.join(cache)
    assert_goes_on(cache, tensors)
    assert_goes_on(none, tensors)


def test_selections_copy_only_what_changes() -> None:
    """An entry that is alone at its position keeps its buffer when others leave."""
    cache, tensors = ragged()
    buffers = [cache.held(entry)[1].data_ptr() for entry in range(3)]
    cache.select(torch.tensor([2, 0]))
    assert [cache.held(entry)[1].data_ptr() for entry in range(2)] == [buffers[2], buffers[0]]
    assert_goes_on(cache, tuple(x[[2, 0]] for x in tensors))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies(copied) -> None:
    cache, tensors = ragged()
    other = copied(cache)
    assert_goes_on(cache, tensors)
    cache.reset()
    assert_goes_on(other, tensors)


def test_inference_mode_and_back() -> None:
    """Buffers that are split or selected in inference mode can be written to outside of it."""
    cache = fd.KVCache(LONGNET, num_heads=4)
    q, k, v = draw_tensors(N=300, B=3)
    with torch.inference_mode():
        cache.append(k[:, :, :9], v[:, :, :9])
        cache.attend(q[:, :, 9:49], k[:, :, 9:49], v[:, :, 9:49], lengths=torch.tensor([40, 2, 40]))
        cache.select(torch.tensor([2, 1]))
    assert_goes_on(cache, tuple(x[[2, 1]] for x in (q, k, v)))


def test_autocast() -> None:
    q, k, v = draw_tensors(dtype=torch.float32, N=40)
    cache, lengths = fd.KVCache(LONGNET, num_heads=4), torch.tensor([40, 3])
    with torch.autocast("cpu", torch.bfloat16):
        out = cache.attend(q, k, v, lengths=lengths)
    assert out.dtype == torch.bfloat16
    expected = alone((q, k, v), LONGNET)
    expected[1, :, 3:] = 0
    assert_close(out.float(), expected, rtol=0.05, atol=0.05)


# --- models ---


PLACED = {"learned": {"position": "learned", "max_positions": 60}, "xpos": {"position": "xpos"}}
MODELS = CONFIGS | {name: replace(CONFIGS["plain"], **options) for name, options in PLACED.items()}


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_a_longnet_goes_on_from_different_positions(config) -> None:
    """Its caches may be cropped to a number for each sequence, and joined: positions are those of each sequence."""
    model, tokens = model_of(config), prompt_of(B=3, N=60)
    expected, caches, other = model(tokens), model.new_caches(), model.new_caches()
    model(tokens[:2, :40], caches=caches)
    model(tokens[2:, :5], caches=other)
    for cache, more in zip(caches, other, strict=True):
        cache.join(more)
        cache.crop(torch.tensor([40, 38, 5]))
    new = torch.stack([tokens[0, 40:60], tokens[1, 38:58], tokens[2, 5:25]])
    parts = [model(part, caches=caches) for part in new.split([1, 19], dim=1)]
    for row, sequence, first in zip(torch.cat(parts, 1), expected, (40, 38, 5), strict=True):
        assert_close(row, sequence[first : first + 20], rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="the input must have the batch of the caches, 3; got batch 1"):
        model(tokens[:1], caches=caches)
