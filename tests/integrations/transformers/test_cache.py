"""FlexdilatedCache: attention over all tokens, bounded memory; layers that share keys or hold states."""

from inspect import signature
from itertools import cycle
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, EncoderDecoderCache

from bench.cases.transformers import tiny_model
from flexdilated import attend, masks
from flexdilated.decoding import _held_keys, _reader
from flexdilated.integrations.transformers import FlexdilatedCache, _cache, set_pattern
from flexdilated.integrations.transformers._attention import Visibility, attention
from flexdilated.integrations.transformers._mask_functions import RulePatterns

from .models import model_of, tokens

PATTERNS = {"longnet": masks.longnet((4, 32), (1, 4)), "window": masks.local_window(left=7, right=0)}


def model_with(pattern: str) -> Any:
    return set_pattern(model_of("llama"), PATTERNS[pattern])


@torch.no_grad()
@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_steps_equal_one_pass(name: str) -> None:
    model, rows, cache = model_with("longnet"), tokens(), FlexdilatedCache()
    if name == "cache" and name not in signature(model.forward).parameters:
        pytest.skip("transformers calls it `cache` from 5.24 on")
    want = model(rows, use_cache=False).logits
    found = [model(part, **{name: cache}).logits for part in rows.split([20, 1, 1, 9, 1, 18], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-5)
    written = model.generate(rows[:, :20], max_new_tokens=5, do_sample=False, **{name: FlexdilatedCache()})
    assert torch.equal(written, model.generate(rows[:, :20], max_new_tokens=5, do_sample=False))
    assert cache.layers[1].values.shape == (2, 2, 50, 16)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_layers_break_their_graph_at_it() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, cache: FlexdilatedCache, mask: Visibility) -> torch.Tensor:
            keys, values = cache.update(2 * x, x, 0)
            return attention(self, x, keys, values, mask)[0] + x.transpose(1, 2)

    torch.compiler.reset()
    rule, x, cache = PATTERNS["longnet"] & masks.causal(), torch.randn(1, 4, 22, 16), FlexdilatedCache()
    compiled = torch.compile(Layer(), backend="eager")
    parts = (slice(0, 20), slice(20, 21), slice(21, 22))
    found = [compiled(x[:, :, part], cache, mask_of(rule, part)) for part in parts]
    torch.testing.assert_close(torch.cat(found, 1).transpose(1, 2), attend(x, 2 * x, x, rule) + x)


@torch.no_grad()
@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_models_break_their_graph_at_it() -> None:
    model, rows, cache = model_of("llama", num_hidden_layers=1), tokens()[:, :22], FlexdilatedCache()
    set_pattern(model, PATTERNS["longnet"])
    want, compiled = model(rows, use_cache=False).logits, torch.compile(model, backend="eager")
    model(rows[:, :20], past_key_values=cache)
    found = [compiled(part, past_key_values=cache).logits for part in rows[:, 20:].split(1, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want[:, 20:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_entries_and_tokens_of_a_cache() -> None:
    model, rows, cache = model_with("longnet"), tokens(), FlexdilatedCache()
    model(rows[:, :30], past_key_values=cache)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([3, 0]))
    model(rows[:, 40:], past_key_values=cache)
    cache.crop(-10)
    turned = rows.flip(0)
    got = model(turned[:, 30:], past_key_values=cache).logits
    torch.testing.assert_close(got, model(turned, use_cache=False).logits[:, 30:], rtol=0, atol=1e-5)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        model(rows, past_key_values=cache).logits, model(rows, use_cache=False).logits, rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_states_follow_their_keys() -> None:
    """Entries are repeated with both; a crop that is refused removes neither."""
    model, rows = family_of("falcon_h1"), tokens()
    set_pattern(model, {})
    cache = FlexdilatedCache(model.config)
    cache.activate_past_recording()
    model(rows[:, :30], past_key_values=cache)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, and at least -30; got -31"):
        cache.crop(-31)
    cache.batch_repeat_interleave(2)
    rows = rows.repeat_interleave(2, dim=0)
    got, want = model(rows[:, 30:], past_key_values=cache).logits, model(rows, use_cache=False).logits[:, 30:]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_new_rule_reads_what_is_held() -> None:
    """A pattern that is changed between steps sees all keys while they are held, and is refused once they are not."""
    model, own, ours = model_with("longnet"), DynamicCache(), FlexdilatedCache(undo=0)
    for pattern in (masks.local_window(left=7, right=0), masks.longnet((4, 32), (1, 4)), masks.causal()):
        set_pattern(model, pattern)
        want, got = (model(tokens(), past_key_values=cache).logits for cache in (own, ours))
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    set_pattern(model, masks.local_window(left=7, right=0))
    for _ in range(10):
        model(tokens(), past_key_values=ours)
    set_pattern(model, masks.causal())
    with pytest.raises(ValueError, match=r"keys were evicted by the rules that read them so far, and causal\(\) sees"):
        model(tokens(), past_key_values=ours)


@torch.no_grad()
def test_a_prefill_holds_what_its_layer_needs() -> None:
    """Each layer lets go of the keys of a long prefill before the next one begins."""
    model, cache, held = model_with("window"), FlexdilatedCache(undo=0), []
    last = model.model.layers[1]
    last.register_forward_pre_hook(lambda *_: held.append(cache.layers[0].held.nbytes))
    model(tokens(1, 250).repeat(1, 20), past_key_values=cache)
    one = 2 * 2 * 16 * 4  # bytes of a token's keys and values
    assert held == [256 * one]
    assert cache.layers[1].held.nbytes == 256 * one


@given(random=st.randoms(use_true_random=True))
@settings(max_examples=16)
@torch.no_grad()
def test_rules_that_change_while_tokens_are_taken_back(random: Random) -> None:
    """Each output is attention over all tokens, or the cache says that it evicted keys and holds what it held."""
    rules = [masks.local_window(left=random.randint(*ends), right=0) for ends in ((0, 3), (4, 12))]
    undo, page, rows = random.randint(0, 8), random.randint(1, 4), random.choice([1, 16])
    q, k, v = torch.randn(3, 1, 4, 160, 16, generator=torch.Generator().manual_seed(0))
    whole = [attend(q, k, v, rule) for rule in rules]
    cache, used, stop, number = FlexdilatedCache(undo=undo), set(), 0, 0
    small = mock.patch.multiple(_held_keys, _PAGE=page, _LEAST_SLOTS=page)
    with small, mock.patch.object(_reader, "MOST_ROWS", rows), mock.patch.object(_cache, "MOST_ROWS", rows):
        for _ in range(25):
            number ^= random.random() < 0.25
            size = random.randint(1, 4)
            new = slice(stop, stop + size)
            keys, values = cache.update(k[:, :, new], v[:, :, new], 0)
            try:
                got, _ = attention(torch.nn.Identity(), q[:, :, new], keys, values, mask_of(rules[number], new))
            except ValueError as error:
                assert "begin with a new FlexdilatedCache" in str(error)  # noqa: PT017
                assert used - {number}
                cache, used, stop = FlexdilatedCache(undo=undo), set(), 0
                continue
            torch.testing.assert_close(got.transpose(1, 2), whole[number][:, :, new], rtol=0, atol=1e-5)
            del keys, values  # after which the cache lets go of what a chunk took
            used.add(number)
            stop = new.stop
            back = min(stop, random.randint(1, 12)) if random.random() < 0.3 else 0
            try:
                cache.crop(-back)
                stop -= back
            except ValueError:
                assert back > undo or (back > size and len(used) > 1)
            assert cache.get_seq_length() == stop


def mask_of(rule: masks.Pattern | masks.Mixture, queries: slice) -> Visibility:
    """What a model with this rule hands to its layers."""
    made = Visibility(None, None, None, {}, queries.start, 0, (1, 1, queries.stop - queries.start, queries.stop))
    made._rule_patterns = RulePatterns(rule, None, None, {})
    return made


@torch.no_grad()
def test_chunks_whose_tokens_see_later_ones_come_whole() -> None:
    model, cache = model_of("llama"), FlexdilatedCache()
    set_pattern(model, masks.chunked(10), compose="replace")
    parts = [model(part, past_key_values=cache).logits for part in tokens().split(20, 1)[:2]]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens()[:, :40]).logits)


@torch.no_grad()
@pytest.mark.parametrize("queries", [slice(3, 6), slice(0, 6)])
def test_queries_of_other_tokens_are_refused(queries: slice) -> None:
    """Such as those of a second model that drafts over these keys; and keys of an update before the last one."""
    cache, x = FlexdilatedCache(), torch.randn(1, 4, 10, 16)
    mask = mask_of(masks.causal(), queries)
    keys, values = cache.update(x[:, :, :6], x[:, :, :6], 0)
    attention(torch.nn.Identity(), x[:, :, :6], keys, values, mask_of(masks.causal(), slice(0, 6)))
    if queries.start == 0:
        cache.update(x[:, :, 6:], x[:, :, 6:], 0)
    with pytest.raises(ValueError, match=r"for queries of the tokens that came last; got Identity with queries"):
        attention(torch.nn.Identity(), x[:, :, queries], keys, values, mask)


pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Two layers read the keys of two others; one of each pair has a window.
    "gemma3n_text": (
        "Gemma3nForCausalLM",
        {
            **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
            **{"num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 1}),  # caps scores
    "diffllama": ("DiffLlamaForCausalLM", {"num_key_value_heads": 2}),  # attends twice, with the halves of its values
    "qwen3_next": ("Qwen3NextForCausalLM", {}),  # linear attention beside
    "lfm2": ("Lfm2ForCausalLM", {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "falcon_h1": ("FalconH1ForCausalLM", {"mamba_chunk_size": 8}),  # Mamba and attention in each layer
}
RULES = {"none": {}, "window": masks.local_window(left=5, right=0), "longnet": masks.longnet((4, 32), (1, 4))}


def family_of(name: str) -> Any:
    """With weights so large that the next token depends on all that is seen."""
    class_name, options = FAMILIES[name]
    made = tiny_model(name, class_name, "causal", **options).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.15)
    return made


def written(model: Any, cache: Any = None, **options: Any) -> torch.Tensor:
    return model.generate(tokens(), past_key_values=cache, max_new_tokens=5, do_sample=False, **options)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, "longnet") for name in FAMILIES), *zip(FAMILIES, cycle(["none", "window"]), strict=False)],
)
def test_tokens_are_those_of_the_model(name: str, pattern: str) -> None:
    """Without a pattern those that the model writes with its own attention; with one those of whole passes."""
    model = family_of(name)
    own = written(model)
    set_pattern(model, RULES[pattern])
    want = own if pattern == "none" else written(model, use_cache=False)
    assert torch.equal(written(model, FlexdilatedCache(model.config, undo=0)), want)
    if (name, pattern) in (("gemma3n_text", "longnet"), ("falcon_h1", "longnet")):
        assert torch.equal(written(model, FlexdilatedCache(model.config), num_beams=2), written(model, num_beams=2))


@torch.no_grad()
@pytest.mark.parametrize("wide", [1, 3])
def test_layers_that_share_keys_have_rules_of_their_own(wide: int) -> None:
    """The reader that sees more comes first, or last: keys are kept for both."""
    model, narrow = family_of("gemma3n_text"), masks.local_window(left=3, right=0)
    set_pattern(model, {wide: masks.local_window(left=300, right=0), 4 - wide: narrow, 0: narrow, 2: narrow})
    rows = tokens(1, 50).repeat(1, 16)
    want, cache = model(rows, use_cache=False).logits, FlexdilatedCache(undo=0)
    found = [model(part, past_key_values=cache).logits for part in rows.split([264] * 3 + [1] * 8, dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), want, rtol=0, atol=1e-4)
    assert [layer.num_tokens for layer in cache.layers] == [800, 800]
    assert cache.layers[0].keys.shape[2] < 400


@pytest.mark.parametrize("length", [20, 1])
def test_an_encoder_decoder(length: int) -> None:
    """Its self-attention takes the cache; alone it is refused, whatever the number of encoder tokens."""
    model = tiny_model("bart", "BartForConditionalGeneration", "encoder-decoder").eval()
    set_pattern(model, {})
    row, options = tokens()[:, :length], {"max_new_tokens": 9, "do_sample": False}
    want = model.generate(row, **options)
    found = model.generate(row, past_key_values=EncoderDecoderCache(FlexdilatedCache(), DynamicCache()), **options)
    assert torch.equal(found, want)
    with pytest.raises(ValueError, match=r"give EncoderDecoderCache\(FlexdilatedCache\(\), DynamicCache\(\)\)"):
        model.generate(row, past_key_values=FlexdilatedCache(), **options)
