"""KVCache: any schedule of calls is one pass over each sequence; what it keeps; dtypes and modes."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines._rows import matrix_forward
from tests.support import oracle, strategies
from tests.support.agreement import TIGHT
from tests.support.strategies import Case

from .cases import (
    FRAMES,
    FUNCTIONS,
    LONGNET,
    WINDOW,
    Expression,
    Requests,
    Sample,
    alone,
    assert_goes_on,
    chunked_cases,
    crosses,
    decode,
    draw_tensors,
    ragged,
    tiny_sizes,
    tree,
)

STREAMING = (masks.first_tokens(4) | WINDOW) & masks.causal()
BOUNDED = {"streaming": STREAMING, "longnet": LONGNET, "frames": FRAMES}


@pytest.mark.parametrize("cases", [strategies.whole_cases(strategies.causal_twins), chunked_cases()], ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_any_schedule_is_one_pass_over_each_sequence(cases: st.SearchStrategy[Case], data: st.DataObject) -> None:
    """Batches that grow by joins and shrink by selections, whose entries get lengths and crops of their own.

    Some or all heads of a pattern, with sinks, a scale, functions of scores and any engine. Keys are evicted on the
    way. A call that would end inside a chunk, and a crop beyond what is kept, change nothing.
    """
    case = data.draw(cases)
    first = data.draw(st.integers(0, case.num_heads - 1))
    case = replace(case, num_heads=data.draw(st.integers(1, case.num_heads - first)), head_offset=first)
    tensors = tuple(x.detach() for x in data.draw(strategies.tensors(case, batch=3)))
    sinks = data.draw(st.one_of(st.none(), strategies.sinks(case.num_heads)))
    options = {
        "sinks": None if sinks is None else sinks.detach(),
        "function": data.draw(st.sampled_from([None, None, "all arguments", *FUNCTIONS])),
        "scale": data.draw(st.sampled_from([None, -0.7, torch.linspace(-1, 2, case.num_heads, dtype=torch.float64)])),
        "engine": data.draw(st.sampled_from([None, None, "reference"])),
        "undo": (undo := data.draw(st.integers(0, 12))),
    }
    sizes = {name: data.draw(st.sampled_from([1, 2, 5])) for name in ("page", "least_slots", "rows")}
    empty = Requests(case, tensors, **options)

    def begun(count: int) -> Requests:
        requests = empty.copied()
        requests.samples = [Sample(data.draw(st.integers(0, 2)), 0) for _ in range(count)]
        lengths = [data.draw(st.sampled_from(requests.ends(0))) for _ in range(count)]
        requests.advance(lengths, max(lengths) + data.draw(st.integers(0, 2)), attends=data.draw(st.booleans()))
        if not any(lengths):
            requests.samples = []  # the cache does not know its batch
        return requests

    def turn(action: str) -> None:
        samples = requests.samples
        if action == "join" or not samples:
            others.append(data.draw(st.sampled_from([requests, None])) or begun(data.draw(st.integers(1, 2))))
            more = others[-1].samples
            requests.cache.join(others[-1].cache)
            requests.samples = samples + more
        elif action == "select":
            chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=4))
            requests.cache.select(torch.tensor(chosen))
            requests.samples = [samples[entry] for entry in chosen]
        elif action == "copy":
            others.append(requests.copied())
        elif action == "draft":
            requests.draft(
                [
                    data.draw(st.sampled_from([n for n in requests.ends(each.at) if n <= undo] or [0]))
                    for each in samples
                ]
            )
            ends = zip(samples, requests.samples, strict=True)
            kept = [requests.crops(before, max(0, after.reached - undo)) for before, after in ends]
            requests.crop([data.draw(st.sampled_from(each)) for each in kept])
        elif action == "crop":
            requests.crop([data.draw(st.sampled_from(requests.crops(each))) for each in samples])
        elif action == "refused":
            entry = data.draw(st.integers(0, len(samples) - 1))
            at = samples[entry].at
            if bad := [end for end in range(at + 1, case.num_keys + 1) if crosses(requests.counts, at, end)]:
                requests.refuse(entry, data.draw(st.sampled_from(bad)))
        elif action == "step":
            common = set.intersection(*(set(requests.ends(sample.at)) for sample in samples))
            number = data.draw(st.sampled_from(sorted(common | {0})))
            requests.advance([number] * len(samples), number, attends=True)
        else:
            lengths = [data.draw(st.sampled_from(requests.ends(sample.at))) for sample in samples]
            width = max(lengths) + data.draw(st.integers(0, 2))
            requests.advance(lengths, width, attends=action == "attend")

    actions = ["attend", "attend", "step", "append", "draft", "crop", "refused", "select", "join", "copy"]
    with tiny_sizes(**sizes):
        requests, others = begun(data.draw(st.integers(1, 4))), []
        for _ in range(data.draw(st.integers(1, 8))):
            requests.check()
            turn(data.draw(st.sampled_from(actions)))
        for each in others:
            each.check()
        for each in others:
            if each is not requests and each.samples:  # they share no memory with it
                _, k, v = each.tensors
                each.cache.append(*(x[:1, :, :3].expand(len(each.samples), -1, -1, -1) for x in (k, v)))
        requests.check()


def passes() -> dict[str, tuple[Expression, int, list[tuple[int, ...]]]]:
    """Patterns for 4 heads, tokens, and sizes of chunks that come over and over."""
    mixed, named_later = (1, 40, 3, 150), [[0, 3], [0, 1], [2, 5], [1, 3], [0, 4, 5], [5]]
    later = masks.block_list(named_later, block=20)
    return {
        "window": (WINDOW, 400, [(1,), (16, 17)]),
        "longnet": (LONGNET, 400, [(300,), mixed]),
        "no closed form": (~masks.strided(3) & WINDOW, 400, [mixed]),
        # Causal order hides blocks that are not there yet, and a later chunk has them; a grid ends with its tokens.
        "later keys": ((later | masks.neighborhood((10, 12), 2)) & masks.causal(), 120, [(30,), (1, 19)]),
        "later keys of a chunk": (later & masks.blockwise(masks.causal(), 40), 120, [(40,), (80,), (120,)]),
        "frames behind a prompt": (FRAMES.after(4) | masks.first_tokens(4), 300, [(4, 8, 24, 200, 64)]),
        "drafts": (masks.custom(tree), 304, [(8,), (24,), (64,)]),
    }


@pytest.mark.parametrize(("pattern", "tokens", "sizes"), passes().values(), ids=passes())
def test_chunks_are_one_pass_at_the_caches_own_sizes(pattern, tokens, sizes) -> None:
    """Over many evictions; heads share keys; calls of few and of many tokens, which an engine computes."""
    tensors = draw_tensors(N=tokens)
    for chunks in sizes:
        cache = fd.KVCache(pattern, num_heads=4)
        assert_close(decode(cache, *tensors, chunks), alone(tensors, pattern), **TIGHT)


@pytest.mark.parametrize(("name", "step", "bound"), [("streaming", 1, 228), ("longnet", 1, 256), ("frames", 8, 104)])
def test_memory_stays_bounded(name, step, bound) -> None:
    """Far beyond the look-back: never more keys than twice those visible, which `bound` counts with whole pages."""
    N = 600
    q, k, v = draw_tensors(H=1, G=1, N=N, B=1, D=2, dtype=torch.float32)
    cache = fd.KVCache(BOUNDED[name], num_heads=1)
    most, most_bytes = 0, 0
    for token in range(0, N, step):
        cache.attend(*(x[:, :, token : token + step] for x in (q, k, v)))
        most, most_bytes = max(most, cache.num_kept), max(most_bytes, cache.nbytes)
    assert cache.num_tokens == N
    assert bound <= most <= max(256, 2 * (bound + 1))
    assert most_bytes <= max(256, 2 * (bound + 1)) * 2 * 2 * 4


def test_a_large_prompt_is_given_back() -> None:
    """After a chunk, and after tokens without queries, no more is held than steps would have left; all of causal()."""
    q, k, v = draw_tensors(H=1, G=1, N=5000, B=1)
    for fill in (lambda cache: cache.attend(q, k, v), lambda cache: cache.append(k, v)):
        cache = fd.KVCache(WINDOW, num_heads=1)
        fill(cache)
        assert cache.num_tokens == 5000
        assert cache.num_kept <= 2 * 164
        assert cache.nbytes <= 4 * 164 * k[0, 0, 0].nbytes * 2
    cache = fd.KVCache(masks.causal(), num_heads=1)
    cache.append(k, v)
    assert cache.num_kept == 5000


def test_capacity_is_all_that_is_allocated() -> None:
    """A window of 101 keys goes on for ever in 256 slots; also where chunks come of which little stays visible."""
    tensors = draw_tensors(N=1000)
    cache = fd.KVCache(WINDOW, num_heads=4, capacity=256)
    out = decode(cache, *tensors, (20, 1, 60))
    assert cache.nbytes == 2 * 2 * 2 * 256 * 8 * 8
    assert_close(out, alone(tensors, WINDOW), **TIGHT)
    kept = fd.KVCache(masks.local_window(left=3, right=0), num_heads=4, capacity=1000)
    for part in (slice(600), slice(600, 900)):
        kept.attend(*(x[:, :, part] for x in tensors))
        assert kept.nbytes == 2 * 2 * 2 * 1000 * 8 * 8


@pytest.mark.parametrize(
    ("pattern", "dtype"),
    [(LONGNET, torch.float32), (LONGNET, torch.bfloat16), (STREAMING, torch.float16)],
    ids=["longnet", "longnet in bfloat16", "streaming in float16"],
)
def test_narrow_dtypes(pattern, dtype) -> None:
    """As close to float64 as one pass is, within twice its error."""
    q, k, v = draw_tensors(dtype=dtype, N=300)
    truth = alone((q.double(), k.double(), v.double()), pattern)
    out = decode(fd.KVCache(pattern, num_heads=4), q, k, v, (1, 50))
    assert out.dtype == dtype
    assert (out.double() - truth).norm() <= 2 * (alone((q, k, v), pattern).double() - truth).norm()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_matrix_products_are_the_kernel(dtype) -> None:
    """What serves devices other than the CPU."""
    q, k, v = draw_tensors(H=2, G=2, N=33, dtype=dtype)
    out, lse = matrix_forward(q[:, :, :3], k, v, scale=0.3)
    truth = oracle.attention(q[:, :, :3], k, v, torch.ones(2, 3, 33), 0.3)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close((out.double(), lse.double()), truth, rtol=tolerance, atol=tolerance)


def test_autocast() -> None:
    q, k, v = draw_tensors(dtype=torch.float32, N=40)
    cache, apart = fd.KVCache(LONGNET, num_heads=4), fd.KVCache(LONGNET, num_heads=4)
    with torch.autocast("cpu", torch.bfloat16):
        out = decode(cache, q, k, v, (30, 1))
        cache.append(k, v)
        ragged_out = apart.attend(q, k, v, lengths=torch.tensor([40, 3]))
    expected = alone((q, k, v), LONGNET)
    assert out.dtype == ragged_out.dtype == torch.bfloat16
    assert_close(out.float(), expected, rtol=0.05, atol=0.05)
    expected[1, :, 3:] = 0
    assert_close(ragged_out.float(), expected, rtol=0.05, atol=0.05)


def test_inference_mode_and_back() -> None:
    """Tokens of either kind of call go into one cache; buffers split or selected in it can be written to outside."""
    cache, (q, k, v) = fd.KVCache(LONGNET, num_heads=4), draw_tensors(N=300, B=3)
    with torch.inference_mode():
        cache.append(k[:, :, :9], v[:, :, :9])
        cache.attend(q[:, :, 9:49], k[:, :, 9:49], v[:, :, 9:49], lengths=torch.tensor([40, 2, 40]))
        cache.select(torch.tensor([2, 1]))
    assert_goes_on(cache, tuple(x[[2, 1]] for x in (q, k, v)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_reset_forgets_sizes(copied) -> None:
    """A copy goes its own way."""
    tensors = draw_tensors(N=50)
    cache = fd.KVCache(LONGNET, num_heads=4)
    expected = decode(cache, *tensors, (20,))
    other = copied(cache)
    assert_close(other.held(1), cache.held(1), rtol=0, atol=0)
    cache.reset()
    assert (cache.num_tokens, cache.num_kept, cache.nbytes, cache.positions.shape) == (0, 0, 0, (0,))
    assert decode(cache, *draw_tensors(N=50, B=1, G=1, dtype=torch.float32), (20,)).shape == (1, 4, 50, 8)
    assert "50 tokens" in repr(other)
    other.reset()
    assert_close(decode(other, *tensors, (1,)), expected, **TIGHT)


@pytest.mark.parametrize("chunk", [1, 8])
def test_what_the_search_for_later_keys_does_not_reach_stays_hidden(chunk: int) -> None:
    """A rule that sees later keys from position 3,000 on passes for one without: these are cut where chunks end."""
    late = masks.local_window(left=3, right=3) & ~masks.global_tokens(3000)
    pattern = late | (masks.chunked(8) if chunk == 8 else WINDOW)
    q, k, v = draw_tensors(N=3040, B=1)
    expected = alone((q, k, v), pattern & masks.blockwise(masks.causal(), chunk))[:, :, 3000:]
    for size in (chunk, 40):
        cache = fd.KVCache(pattern, num_heads=4)
        assert cache.chunk == chunk
        cache.append(k[:, :, :3000], v[:, :, :3000])
        assert_close(decode(cache, *(x[:, :, 3000:] for x in (q, k, v)), (size,)), expected, **TIGHT)


# --- entries at different positions ---


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
