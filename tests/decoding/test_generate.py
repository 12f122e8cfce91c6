"""Generation: greedy equals recomputing everything at each step; draws follow the probabilities; bad input."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import flexdilated as fd
from flexdilated.nn._longnet import Sampling
from tests.support.longnet_oracle import TINY

V = TINY.vocab_size
CONFIGS = {
    "plain": TINY,
    "grouped heads": replace(TINY, num_kv_heads=2, heads="grouped"),
    "odd segments": replace(TINY, offsets="contiguous", segment_lengths=(5, 40, 80), depth=1),
}
MODELS = CONFIGS | {
    "embedded": replace(TINY, vocab_size=None),
    "learned": replace(TINY, position="learned", max_positions=60),
    "xpos": replace(TINY, position="xpos", xpos_scale=5),
    "no positions": replace(TINY, position=None, num_heads=8),
    "subln": replace(TINY, subln=True, num_kv_heads=2),
    "deepnorm": replace(TINY, deepnorm=True, bias=True),
}


def model_of(config, dtype=torch.float64):
    torch.manual_seed(0)
    return fd.LongNet(config, dtype=dtype)


def prompt_of(B=2, N=23):
    return torch.randint(V, (B, N), generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def most_likely_next(model, tokens):
    """What one pass over all tokens holds most likely after each of them."""
    return model(tokens).argmax(-1)


@pytest.mark.parametrize(
    ("config", "layout", "prefill_chunk"),
    [*zip(CONFIGS.values(), ("natural", "residue", "auto"), (7, 1, 8192), strict=True)],
    ids=CONFIGS,
)
def test_greedy_equals_recomputing(config, layout, prefill_chunk) -> None:
    """Across the ends of every segment, whatever the layout of a full pass: each token is the one that it predicts."""
    model = model_of(replace(config, layout=layout))
    out = model.generate(prompt_of(), max_new_tokens=70, temperature=0, prefill_chunk=prefill_chunk)
    assert out.shape == (2, 93)
    assert torch.equal(out[:, :23], prompt_of())
    assert torch.equal(out[:, 23:], most_likely_next(model, out)[:, 22:-1])
    assert len(out[:, 23:].unique()) > 4


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
@torch.no_grad()
def test_caches_go_on_from_different_positions(config) -> None:
    """Cropped to a number for each sequence, and joined: in pieces, logits or features are those of one pass."""
    model, tokens = model_of(config), prompt_of(B=3, N=60)
    if not config.vocab_size:
        tokens = torch.randn(3, 60, config.embed_dim, dtype=torch.float64)
    expected, caches, other = model(tokens), model.new_caches(), model.new_caches()
    model(tokens[:2, :40], caches=caches)
    model(tokens[2:, :5], caches=other)
    for cache, more in zip(caches, other, strict=True):
        cache.join(more)
        cache.crop(torch.tensor([40, 38, 5]))
    new = torch.stack([tokens[0, 40:60], tokens[1, 38:58], tokens[2, 5:25]])
    parts = [model(part, caches=caches) for part in new.split([1, 18, 1], dim=1)]
    for row, sequence, first in zip(torch.cat(parts, 1), expected, (40, 38, 5), strict=True):
        assert_close(row, sequence[first : first + 20], rtol=1e-8, atol=1e-9)
    with pytest.raises(ValueError, match="the input must have the batch of the caches, 3; got batch 1"):
        model(tokens[:1], caches=caches)


@torch.no_grad()
def test_a_longnet_of_segments_takes_whole_segments() -> None:
    """Calls with whole segments of a model that is not causal equal one pass; single tokens raise an error."""
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "vocab_size": 50}
    config = fd.LongNetConfig(**sizes, segment_lengths=(4, 8), dilation_rates=(1, 2), causal=False)
    torch.manual_seed(0)
    model, tokens = fd.LongNet(config).eval(), torch.randint(50, (2, 32))
    caches = model.new_caches()
    parts = [model(part, caches=caches) for part in tokens.split(8, 1)]
    assert_close(torch.cat(parts, 1), model(tokens))
    with pytest.raises(ValueError, match=r"chunk of 8 tokens; here query 32 sees key .*: bring 8 or 16 tokens"):
        model(tokens[:, :1], caches=caches)
    assert [cache.num_tokens for cache in caches] == [32, 32]


def test_equal_generators_equal_tokens_and_nothing_else_changes() -> None:
    """Neither the model's mode, nor torch's random state when a generator is given; no gradients."""
    model, state = model_of(TINY), torch.get_rng_state()
    drawn = [
        model.generate(prompt_of(), max_new_tokens=20, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    ]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[0][:, :23], prompt_of())
    assert drawn[0].shape == (2, 43)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(model.generate(prompt_of(), max_new_tokens=0), prompt_of())


def test_stop() -> None:
    """A sequence ends with its first stop token, and the result where all have."""
    model = model_of(TINY)
    out = model.generate(prompt_of(B=3), max_new_tokens=30, temperature=0)
    stop = int(out[0, 30])
    generated = model.generate(prompt_of(B=3), max_new_tokens=30, temperature=0, stop=stop)
    for row, free in zip(generated[:, 23:], out[:, 23:], strict=True):
        at = int((free == stop).int().argmax()) if (free == stop).any() else 30
        assert torch.equal(row[: at + 1], free[: min(at + 1, len(row))])
        assert (row[at + 1 :] == stop).all()
    alone = model.generate(prompt_of(B=3)[:1], max_new_tokens=30, temperature=0, stop=stop)
    assert alone.shape[1] <= 31
    assert alone[0, -1] == stop


LOGITS = torch.tensor([0.5, 0.125, 0.25, 0.125]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.125, 0.25, 0.125]),
        ({"temperature": 0.5}, [0.25 / 0.34375, 1 / 64 / 0.34375, 0.0625 / 0.34375, 1 / 64 / 0.34375]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_k": 100}, [0.5, 0.125, 0.25, 0.125]),
        ({"top_p": 0.49}, [1, 0, 0, 0]),
        ({"top_p": 0.51}, [2 / 3, 0, 1 / 3, 0]),
        ({"top_p": 1.0}, [0.5, 0.125, 0.25, 0.125]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_probabilities(options, expected) -> None:
    """20,000 draws: within five standard deviations of each probability, and none where it is 0."""
    generator = torch.Generator().manual_seed(0)
    tokens = Sampling(**options, generator=generator).draw(LOGITS.expand(20000, 4))
    shares = torch.bincount(tokens, minlength=4) / 20000
    wanted = torch.tensor(expected)
    assert ((shares - wanted).abs() <= 5 * (wanted * (1 - wanted) / 20000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("options", [{"temperature": 1e-40}, {"temperature": 1e-300}, {"top_p": 1e-300}, {"top_k": 1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_most_likely_token_always_stays(options, dtype) -> None:
    logits = 50 * torch.randn(4, V, dtype=dtype, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(**options).draw(logits), logits.argmax(-1))


def test_caches_that_do_not_fit() -> None:
    model = model_of(TINY)
    with pytest.raises(ValueError, match=r"call it under torch.no_grad\(\)"):
        model(prompt_of(), caches=model.new_caches())
    with torch.no_grad():
        model(prompt_of(), caches=(caches := model.new_caches()))
        caches[1].crop(torch.tensor([23, 5]))
        with pytest.raises(ValueError, match=r"got 2 with \[23, \[23, 5\]\] tokens"):
            model(prompt_of(), caches=caches)


@pytest.mark.parametrize(
    "config", [{"position": "learned", "max_positions": 126}, {"position": "xpos", "xpos_scale": 1}]
)
@pytest.mark.parametrize("prompt", [100, 126, 127])
def test_positions_are_counted_before_the_first_pass(config, prompt) -> None:
    """As many tokens as fit are drawn, the last of which is not read; one more raises, and nothing has run."""
    model, passes = model_of(replace(TINY, **config), torch.float32), []
    model.blocks[0].register_forward_hook(lambda *_: passes.append(1))
    fit = 127 - prompt
    assert model.generate(prompt_of(1, prompt), max_new_tokens=fit).shape == (1, 127)
    passes.clear()
    with pytest.raises(ValueError, match=rf"got 127 tokens: {prompt} of the prompt, .* max_new_tokens={fit + 1}"):
        model.generate(prompt_of(1, prompt), max_new_tokens=fit + 1, stop=3)
    assert not passes
