"""score_mod in a KVCache: heads of several devices, learned tensors, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.engines import ScoreMod
from tests.support.agreement import TIGHT

from .test_kv_cache import LONGNET, draw_tensors

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)


def decoded(cache: fd.KVCache, tensors: tuple[Tensor, ...], score_mod: ScoreMod) -> Tensor:
    """Long pieces, by an engine; a short one; and steps."""
    pieces = zip(*(x.split([130, 7, 1, 1, 1, 100], dim=2) for x in tensors), strict=True)
    return torch.cat([cache.attend(*new, score_mod=score_mod) for new in pieces], dim=2)


@pytest.mark.parametrize("pattern", [LONGNET, masks.local_window(left=30, right=0), masks.causal()], ids=str)
def test_heads_of_two_devices(pattern: masks.Pattern) -> None:
    """Each has its own heads of a bias; plans of long pieces are shared by positions that differ by a period."""
    tensors = draw_tensors(N=240, B=2)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score - SLOPES[h] * ((q_idx - k_idx) + 0.1 * (k_idx % 100))

    truth = fd.attend(*tensors, pattern, score_mod=score_mod, enable_gqa=True, engine="reference")
    q, k, v = tensors
    for own, of in ((slice(0, 2), slice(0, 1)), (slice(2, 4), slice(1, 2))):
        cache = fd.KVCache(pattern, num_heads=2, head_offset=own.start, num_heads_global=4)
        assert_close(decoded(cache, (q[:, own], k[:, of], v[:, of]), score_mod), truth[:, own], **TIGHT)


def test_entries_at_different_positions() -> None:
    """The function gets indices of entries in the batch, though the cache computes some entries apart."""
    tensors, biases = draw_tensors(N=60, B=3), torch.randn(3, 4, dtype=torch.float64)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, k_idx: Tensor) -> Tensor:
        return score + biases[b, h] * (q_idx - k_idx)

    truth = fd.attend(*tensors, masks.causal(), score_mod=score_mod, enable_gqa=True, engine="reference")
    cache, firsts = fd.KVCache(masks.causal(), num_heads=4), [30, 4, 30]
    cache.append(*(x[:, :, :30] for x in tensors[1:]), lengths=torch.tensor(firsts))
    for number in (20, 3):
        new = (torch.stack([row[:, at : at + number] for row, at in zip(x, firsts, strict=True)]) for x in tensors)
        out = cache.attend(*new, score_mod=score_mod)
        for row, exact, at in zip(out, truth, firsts, strict=True):
            assert_close(row, exact[:, at : at + number], **TIGHT)
        firsts = [at + number for at in firsts]


def test_functions_that_do_not_read_all() -> None:
    """Their results are laid out in memory in other ways than the scores."""
    tensors, pieces = draw_tensors(N=60, B=2), [20, 10, 10, 20]
    functions: list[ScoreMod] = [
        lambda score, b, h, q_idx, k_idx: (q_idx - k_idx) * score.new_tensor(-0.1),
        lambda score, b, h, q_idx, k_idx: SLOPES[h] * k_idx,
        lambda score, b, h, q_idx, k_idx: SLOPES[b],
        lambda score, b, h, q_idx, k_idx: score.new_zeros(()),
        lambda score, b, h, q_idx, k_idx: torch.where(k_idx % 3 == 0, score, -torch.inf),
    ]
    for pattern in (masks.chunked(10), LONGNET, masks.causal() + masks.causal()):
        for score_mod in functions:
            truth = fd.attend(*tensors, pattern, score_mod=score_mod, enable_gqa=True, engine="reference")
            cache = fd.KVCache(pattern, num_heads=4)
            new = zip(*(x.split(pieces, dim=2) for x in tensors), strict=True)
            found = torch.cat([cache.attend(*each, score_mod=score_mod) for each in new], dim=2)
            assert_close(found, truth, **TIGHT)


def test_learned_tensors_need_no_grad() -> None:
    """The call that is refused leaves the cache as it was."""
    tensors = draw_tensors(N=240, B=2)
    learned = SLOPES.clone().requires_grad_()
    cache = fd.KVCache(masks.causal(), num_heads=4)
    for number in (1, 100):
        with pytest.raises(ValueError, match=r"an input requires one: call it under torch\.no_grad"):
            cache.attend(*(x[:, :, :number] for x in tensors), score_mod=fd.biases.alibi(learned))
        assert (cache.num_tokens, cache.num_kept) == (0, 0)
    with torch.no_grad():
        found = decoded(cache, tensors, fd.biases.alibi(learned))
    exact = fd.attend(*tensors, masks.causal(), score_mod=fd.biases.alibi(SLOPES), enable_gqa=True, engine="reference")
    assert_close(found, exact, **TIGHT)


def test_selected_blocks_take_none() -> None:
    layer = fd.SelectedAttention(fd.BlockSelector(block=8, choose=fd.TopK(2)))
    cache = layer.cache(num_heads=4)
    tensors = draw_tensors(N=16, B=1)
    with pytest.raises(ValueError, match="a cache of selected blocks takes no score_mod"):
        cache.attend(*tensors, score_mod=fd.biases.alibi(SLOPES))
    assert cache.num_tokens == 0
