"""Models equal SDPA without a pattern, its dense mask with one; a family is served, or refused at once."""

import re
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils as rules

import flexdilated as fd
from bench._dense import counts
from bench.cases._training import Step, gradients_of
from bench.cases.transformers import families, tiny_model
from bench.cases.transformers.sweep import PAGE, examine, page, results
from flexdilated import masks
from flexdilated.integrations.transformers import _unsupported_models, attention_layers, set_pattern
from flexdilated.integrations.transformers._attention import attention
from flexdilated.integrations.transformers._mask_functions import pattern_from_mask_function
from flexdilated.masks.patterns import names
from tests.integrations.passes import assert_same_step

from .models import DECODERS, FAMILIES, NUM_HEADS, batch_of, model_of, real_logits, tokens

# N tokens of a row, H heads

LONGNET = masks.longnet((4, 16), (1, 2))
PATTERNS = {
    "longnet": LONGNET,
    "strided": masks.strided(3) | masks.local_window(left=2, right=0),
    "per head": masks.per_head([masks.local_window(left=5, right=5), masks.chunked(8)] * (NUM_HEADS // 2)),
    "first tokens": masks.first_tokens(2) | masks.local_window(left=3, right=1),
}


def step(model, name: str, padding: str | None, implementation: str) -> Step:
    """Logits of real tokens."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = real_logits(model, batch_of(name, padding))
    logits.pow(2).sum().backward()
    return logits.detach(), gradients_of(model)


@pytest.mark.parametrize(
    ("name", "padding"),
    [(name, padding) for name in FAMILIES for padding in (None, "left", "right")
     if (FAMILIES[name].inputs != "tokens") == (padding is None) or (name, padding) == ("llama", None)],
)  # fmt: skip
def test_equals_sdpa(name: str, padding: str | None) -> None:
    model = model_of(name).train()
    # gpt-oss has sinks, which sdpa does not take.
    want = step(model, name, padding, "eager" if name == "gpt-oss" else "sdpa")
    assert_same_step(step(model, name, padding, "flexdilated"), want)


@pytest.mark.parametrize("entries", [1, 2])
@pytest.mark.parametrize("added", [True, False])
def test_a_ready_made_mask_that_hides_keys(entries: int, added: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 16)
    visible = torch.rand(entries, 1, 1, 9) < 0.6
    visible[..., 4] = True
    given = torch.zeros(visible.shape).masked_fill(~visible, -1e4) if added else visible
    got, _ = attention(torch.nn.Identity(), q, k, v, given)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    rows = visible[:, 0, 0].expand(2, -1)
    torch.testing.assert_close(got[rows], want.transpose(1, 2)[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(("compose", "padding"), [("and", None), ("replace", "inside")])
def test_a_pattern_equals_its_dense_mask(pattern: str, compose: str, padding: str | None) -> None:
    """A pair in two branches of a mixture counts twice."""
    model, batch = model_of("llama"), batch_of("llama", padding)
    rule = PATTERNS[pattern]
    times = counts(rule & masks.causal() if compose == "and" else rule, tokens().shape[1], num_heads=NUM_HEADS)
    visible = batch["attention_mask"].bool()
    model.set_attn_implementation("sdpa")
    ready_made = times[None] * visible[:, None, None, :]
    want = model(tokens(), attention_mask=ready_made.log()).logits
    set_pattern(model, rule, compose=compose)
    rows = ready_made.any(-1).all(1) & visible  # SDPA has no use for a row without keys
    torch.testing.assert_close(model(**batch).logits[rows], want[rows], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pattern"),
    [*((name, "longnet") for name in (*DECODERS, "bert", "modernbert")),
     ("llama", "strided"), ("gpt-oss", "per head"), ("modernbert", "first tokens")],
)  # fmt: skip
@torch.no_grad()
def test_a_padded_row_is_the_row_alone(name: str, pattern: str) -> None:
    model = model_of(name)
    set_pattern(model, PATTERNS[pattern])
    left, right = batch_of(name, "left"), batch_of(name, "right")
    if name not in ("bert", "gpt2"):  # whose learned positions begin with the padding
        torch.testing.assert_close(model(**left).logits[1:, 17:], model(tokens()[1:, 17:]).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(**right).logits[1:, :33], model(tokens()[1:, :33]).logits, rtol=0, atol=1e-5)


def test_all_layers_are_found() -> None:
    counts = {name: len(attention_layers(model_of(name))) for name in FAMILIES}
    assert counts == {name: {"llama4": 4, "whisper": 6}.get(name, 2) for name in FAMILIES}


pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
_BY_CLASS = {class_name: (model_type, kind) for model_type, kind, class_name in families()}


@pytest.mark.parametrize(
    "class_name",
    [
        "Qwen2MoeForCausalLM",  # a window of 0 that no layer uses
        "DeepseekV3ForCausalLM",  # values narrower than keys
        "DeepseekV32ForCausalLM",  # keys that an indexer chooses
        "MiniMaxM3VLForCausalLM",  # blocks that an indexer chooses
        "Gemma2ForCausalLM",  # capped scores
        "T5ForConditionalGeneration",  # a learned bias for each head and distance
        pytest.param("InklingForCausalLM", marks=pytest.mark.thorough),  # a bias for each query
        "BertLMHeadModel",  # a mask made once more of one that is there
        "LayoutLMForMaskedLM",  # a padding mask of its own
        "Gemma4ForCausalLM",  # rows taken from its mask
        "BartForConditionalGeneration",
    ],
)
def test_served(class_name: str) -> None:
    model_type, kind = _BY_CLASS[class_name]
    found = examine(model_type, class_name, kind, ["default", "cache", "checkpointed", "segments"])
    assert found["outcome"] == "serves", found
    ways = ["plain", "padded", "pattern", "training", *(["dynamic", "static"] if kind == "causal" else [])]
    assert {way: found[way] for way in ways} == dict.fromkeys(ways, "yes")
    assert found["changes"] == "yes"


@pytest.mark.thorough  # BERT and llama with documents are compiled in test_documents.py
@pytest.mark.parametrize("class_name", ["BertLMHeadModel", "Gemma4ForCausalLM"])
def test_documents_stay_apart_in_a_graph(class_name: str) -> None:
    model_type, kind = _BY_CLASS[class_name]
    assert examine(model_type, class_name, kind, ["compiled"])["compiled"] == "yes"


def test_what_a_layer_hands_over_must_be_known() -> None:
    """Else it would be ignored in silence, as the choice of an indexer would. The model is as it was."""
    model = tiny_model("deepseek_v32", "DeepseekV32ForCausalLM", "causal").eval()
    _unsupported_models._why_unserved.cache_clear()
    said = "DeepseekV32Attention, hands indices to attention functions, which flexdilated does not know"
    with patch.object(_unsupported_models, "_KNOWN", _unsupported_models._KNOWN - {"indices"}):
        with pytest.raises(ValueError, match=said):
            set_pattern(model, {})
        assert model.config._attn_implementation == "sdpa"
        _unsupported_models._why_unserved.cache_clear()


def test_an_indexer_chooses_within_documents() -> None:
    """As transformers' own mask has them, and with set_pattern also where that does not tell."""
    model = tiny_model("deepseek_v32", "DeepseekV32ForCausalLM", "causal").eval()
    ids, positions = torch.randint(3, 20, (1, 80)), torch.cat([torch.arange(35), torch.arange(45)])[None]
    wanted = model(ids, position_ids=positions, use_cache=False).logits
    set_pattern(model, {})
    found = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(found, wanted)


def test_no_family_raises_later() -> None:
    late = {name: row["why"] for name, row in results().items() if row["outcome"] == "raises later"}
    assert late == {}


def test_the_page_shows_the_results() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (version,) = re.findall(r"of transformers ([\d.]+\d)", text)
    assert text == page(results(), version)


# B batch entries, N tokens

_LENGTH = 24


def evaluated(function) -> Tensor:
    """(B, N, N) of a function of index tensors."""
    entry, token = torch.arange(2), torch.arange(_LENGTH)
    found = function(entry[:, None, None], torch.tensor(0), token[None, :, None], token[None, None, :])
    return found.expand(2, _LENGTH, _LENGTH)


def as_read(function) -> Tensor:
    """(B, N, N) of the pattern that it is read as: whose value each query gets a share of."""
    reading = pattern_from_mask_function(function, None)
    pattern = reading.whole()
    q, v = torch.zeros(2, 1, _LENGTH, 8), torch.eye(_LENGTH).expand(2, 1, -1, -1)
    return fd.attend(q, q, v, pattern, bindings={name: reading.tensors[name] for name in names(pattern)})[:, 0] > 0


sizes = st.integers(1, _LENGTH + 3)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def ids_of(parts: list[int]) -> Tensor:
    """Sequences of these lengths, and one more to the end, (2, N); the second entry is one sequence."""
    ids = torch.arange(len(parts)).repeat_interleave(torch.tensor(parts))[:_LENGTH]
    first = torch.cat([ids, torch.full((_LENGTH - len(ids),), len(parts))])
    return torch.stack([first, torch.zeros_like(first)])


def positions_in(ids: Tensor) -> Tensor:
    """How many tokens of its own sequence come before each."""
    same = ids[:, :, None] == ids[:, None, :]
    return same.long().tril(-1).sum(-1)


plain = st.one_of(
    st.just(rules.causal_mask_function),
    st.just(rules.bidirectional_mask_function),
    st.builds(rules.sliding_window_causal_mask_function, sizes),
    st.builds(rules.sliding_window_overlay, sizes),  # no limit to later keys
    st.builds(lambda size: lambda b, h, q, k: k <= q + size, sizes),  # none to earlier ones
    st.builds(rules.sliding_window_bidirectional_mask_function, sizes),
    st.builds(lambda size: rules.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.long)), sizes),
)


@given(plain, plain)
def test_rules_of_positions(one, other) -> None:
    assert torch.equal(as_read(one), evaluated(one))
    chunks = [each.__closure__ for each in (one, other) if each.__name__ == "and_mask"]
    if len(chunks) < 2:  # two chunk sizes at once are refused
        both = rules.and_masks(one, other)
        assert torch.equal(as_read(both), evaluated(both))
    either = rules.or_masks(one, other)
    assert torch.equal(as_read(either), evaluated(either))


@given(plain, lengths)
def test_packed_sequences(rule, parts: list[int]) -> None:
    ids = ids_of(parts)
    if hasattr(rules, "packed_sequence_compatibility_function"):
        packed = rules.packed_sequence_compatibility_function(rule, positions_in(ids), ids)
    else:  # since transformers 5.24
        remapped = rules.remap_positions_for_packed_sequence(rule, positions_in(ids))
        packed = rules.and_masks(remapped, rules.packed_sequence_mask_function(ids))
    assert torch.equal(as_read(packed), evaluated(packed))


@given(plain, lengths, st.lists(st.booleans(), min_size=2 * _LENGTH, max_size=2 * _LENGTH))
def test_groups_that_see_each_other_and_keys_that_are_hidden(rule, parts: list[int], visible: list[bool]) -> None:
    """Groups as of the tokens of an image: those with negative ids are in none."""
    seen, ids = torch.tensor(visible).view(2, -1), ids_of(parts)
    either = rules.or_masks(rule, rules.blockwise_overlay(torch.where(ids % 3 == 1, -1, ids)))
    for function in (either, rules.and_masks(rule, rules.padding_mask_function(seen))):
        assert torch.equal(as_read(function), evaluated(function))


GROUPS = ids_of([3, 5, 2])
distances = st.integers(-_LENGTH - 2, _LENGTH + 2)


@given(distances, distances)
def test_limits_of_the_distance(one: int, other: int) -> None:
    """On either side of the diagonal, also where no pair is left."""
    for rule in (
        lambda b, h, q, k: (k + one <= q) & (q < k + other),
        lambda b, h, q, k: (q - k >= one) & (q - k < other),
        lambda b, h, q, k: ((q - k > one) & (k - q <= 0)) | ((q - k < 0) & (-(q - k) < other)),
    ):
        assert torch.equal(as_read(rule), evaluated(rule))


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda b, h, q, k: q * 2 >= k, "unsupported operand"),
        (lambda b, h, q, k: abs(q - k) >= 3, "least distance in both directions"),
        (lambda b, h, q, k: q >= 3, "a number other than 0"),
        (lambda b, h, q, k: torch.ones(()), "it returns Tensor"),
        (lambda b, h, q, k: torch.ones(2, 4, dtype=torch.bool)[b, q], "hides queries by a table"),
        (lambda b, h, q, k: k // 4 == q // 3, "different sizes"),
        (lambda b, h, q, k: (k // 4 == q // 4) & (k // 3 == q // 3), "two chunk sizes"),
        (lambda b, h, q, k: q.new_zeros((), dtype=torch.bool), "allows no pair"),
        (lambda b, h, q, k: GROUPS[b, q] == GROUPS.flip(1)[b, k], "entries of two tables"),
        (lambda b, h, q, k: GROUPS[b, q] + 1 == GROUPS[b, k], "groups other than those of a query and a key"),
        (
            lambda b, h, q, k: (GROUPS[b, k] <= q) & (GROUPS[b, q] == GROUPS[b, k]),
            "an entry of a table with a position",
        ),
        (lambda b, h, q, k: GROUPS[b, q] // 2 == k // 2, "an entry of a table with a position"),
    ],
)
def test_what_cannot_be_read(function, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pattern_from_mask_function(function, None)
