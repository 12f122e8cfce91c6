"""Documents in one row: where position_ids fall, another begins, and no token sees another document, in any call."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as ALL_MASK_FUNCTIONS
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import flexdilated as fd
from bench.cases.transformers import tiny_model
from flexdilated import masks
from flexdilated.integrations.transformers import set_pattern

from .models import model_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

# B batch entries, N tokens of a row

N = 50
LONGNET = masks.longnet((4, 16), (1, 2))
MAKE: dict[str, Callable[..., Any]] = {
    **{name: partial(model_of, name) for name in ("llama", "mistral", "gpt2", "bert")},
    "modernbert": partial(model_of, "modernbert", local_attention=500),
    "llama 4": partial(model_of, "llama4", attention_chunk_size=500),
    "clip": lambda: tiny_model("clip_text_model", "CLIPTextModel", eos_token_id=96).eval(),
    "qwen2.5-vl": lambda: tiny_model("qwen2_5_vl_text", "Qwen2_5_VLTextModel").eval(),
}
ENCODERS, WITH_AXES = ("bert", "modernbert"), ("qwen2.5-vl",)
ALL_PAIRS = [name for name in MAKE if name != "mistral"]  # which has a window
CALLS = ("default", "no cache", "cache", "static", "ones", "padded left", "padded right", "padded inside", "axes")


@st.composite
def positions_of_rows(draw: st.DrawFn) -> Tensor:
    """Positions (2, N) that mostly rise by 1, with repeats, gaps and falls."""
    rows = []
    for _ in range(2):
        steps = draw(st.lists(st.sampled_from([1] * 12 + [0, 2, 7, -99]), min_size=N, max_size=N))
        rows.append(list(accumulate(steps, lambda at, step: max(at + step, 0), initial=0))[1:])
    return torch.tensor(rows).clamp(max=240)


def documents_of(positions: Tensor, visible: Tensor) -> Tensor:
    """The document of each token, (2, N), token by token."""
    found = torch.zeros_like(positions)
    for row, seen, ids in zip(positions.tolist(), visible.tolist(), found, strict=True):
        last, number = -1, 0
        for token, (place, real) in enumerate(zip(row, seen, strict=True)):
            if real:
                number, last = number + (place < last), place
            ids[token] = number
    return found


def same(ids: Tensor) -> Tensor:
    return ids[:, :, None] == ids[:, None, :]


def first_output(model: Any, **batch: Any) -> Tensor:
    return model(**batch)[0]


def pair(name: str) -> tuple[Any, Any]:
    """A model with this library's attention, and the same with SDPA."""
    ours, sdpa = MAKE[name](), MAKE[name]()
    sdpa.set_attn_implementation("sdpa")
    return set_pattern(ours, {}), sdpa


kept_pair = cache(pair)  # for tests that change neither


@pytest.mark.parametrize("name", ALL_PAIRS)
@given(data=st.data())
@settings(max_examples=12)
@torch.no_grad()
def test_a_call_is_attention_within_documents(name: str, data: st.DataObject) -> None:
    """Documents as counted token by token; SDPA gets them as a mask of queries and keys."""
    ours, sdpa = kept_pair(name)
    positions = data.draw(positions_of_rows())
    if name == "clip":
        positions.clamp_(max=76)
    call = data.draw(st.sampled_from(["axes"] * 9 + list(CALLS) if name in WITH_AXES else CALLS))
    visible = torch.ones(2, N, dtype=torch.bool)
    options: dict[str, Any] = {}
    if call.startswith("padded") or call == "ones":
        side = {"left": slice(0, 17), "right": slice(33, None), "inside": slice(20, 24), "ones": slice(0)}
        visible[1, side[call.rsplit(" ", 1)[-1]]] = False
        options["attention_mask"] = visible.long()
        positions = torch.where(visible, positions, data.draw(st.sampled_from([0, 1])))
    elif call in ("cache", "no cache"):
        options["use_cache"] = call == "cache"
    elif call == "static" and name not in (*ENCODERS, "clip"):
        options["past_key_values"] = StaticCache(config=ours.config, max_cache_len=64)
    given_positions = positions
    if call == "axes" and name in WITH_AXES:
        given_positions = torch.stack([positions, *[positions.flip(1)] * data.draw(st.integers(2, 3))])
    ids = documents_of(positions, visible)
    allowed = same(ids) & visible[:, None, :]
    if name not in ENCODERS:
        allowed &= torch.ones(N, N, dtype=torch.bool).tril()
    if call == "no cache" and name in ("llama", "gpt2", "llama 4"):
        # transformers divides the row itself, wherever the difference is not 1
        allowed &= same((positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1))
    want = first_output(sdpa, input_ids=tokens(), position_ids=given_positions, attention_mask=allowed[:, None])
    got = first_output(ours, input_ids=tokens(), position_ids=given_positions, **options)
    torch.testing.assert_close(got[visible], want[visible], rtol=0, atol=2e-5)


def sequences(*sizes: int) -> Tensor:
    """Positions (1, N) of whole sequences of these sizes in a row."""
    return torch.cat([torch.arange(size) for size in sizes])[None]


def apart(model: Any, *sizes: int, rows: Tensor | None = None) -> Tensor:
    """Logits of sequences in calls of their own."""
    parts = (tokens() if rows is None else rows).split(sizes, dim=1)
    return torch.cat([model(part).logits for part in parts], dim=1)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt2", "llama4", "bert", "modernbert"])
@torch.no_grad()
def test_packed_is_separate(name: str) -> None:
    """With a pattern, and with the model's windows and chunks, which begin in each document; with chosen blocks too."""
    model, positions = model_of(name), sequences(13, 2, 35)
    chosen = fd.SelectedAttention(fd.BlockSelector(block=8, choose=fd.TopK(9), always=masks.chunked(8)))
    for pattern in (LONGNET, chosen) if name == "llama" else (LONGNET,):
        set_pattern(model, pattern)
        want = apart(model, 13, 2, 35)
        calls: list[dict[str, Any]] = [{}] if name in ENCODERS else [{}, {"use_cache": False}]
        if name not in ENCODERS and pattern is not chosen:
            calls += [{"past_key_values": StaticCache(config=model.config, max_cache_len=64)}]
        for options in calls:
            got = model(tokens(), position_ids=positions, **options).logits
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@torch.no_grad()
def test_models_that_are_only_registered() -> None:
    """Their layers read the positions that they get."""
    model = model_of("llama")
    model.set_attn_implementation("flexdilated")
    mask = torch.ones(2, N, dtype=torch.long)
    for options in ({}, {"use_cache": False}, {"attention_mask": mask}):
        got = model(tokens(), position_ids=sequences(20, 30), **options).logits
        torch.testing.assert_close(got, apart(model, 20, 30), rtol=0, atol=1e-5)
    cache = DynamicCache()
    model(tokens(), past_key_values=cache)
    with pytest.raises(ValueError, match="cached keys do not record their document"):
        model(tokens()[:, :5], position_ids=sequences(5), past_key_values=cache)


def test_a_layer_that_reads_no_positions_leaves_them_to_the_next() -> None:
    """Both get the mask that the model made once, in a model that is only registered."""
    fd.integrations.transformers.register()
    attention, mask_of = (functions["flexdilated"] for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_FUNCTIONS))
    layers = [torch.nn.Module(), torch.nn.Module()]
    layers[0].is_causal = False
    x, mask, positions = torch.randn(1, 2, N, 8), mask_of(batch_size=1, q_length=N, kv_length=N), sequences(20, 30)
    _, (got, _) = (attention(layer, x, x, x, mask, position_ids=positions) for layer in layers)
    seen = same(torch.arange(N)[None] // 20 > 0) & torch.ones(N, N, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen[:, None])
    torch.testing.assert_close(got.transpose(1, 2), want)


def new_cache(data: st.DataObject, config: Any) -> Callable[[], Any]:
    static = partial(StaticCache, config, max_cache_len=N + 9)
    return data.draw(st.sampled_from([partial(DynamicCache, config=config), static]))


def chunks(data: st.DataObject) -> list[tuple[int, int]]:
    """The calls that a row is divided into, one or more."""
    cuts = data.draw(st.sets(st.integers(1, N - 1), max_size=5))
    return list(pairwise([0, *sorted(cuts), N]))


@given(data=st.data())
@settings(max_examples=16)
@torch.no_grad()
def test_positions_that_go_on_over_a_cache(data: st.DataObject) -> None:
    """With gaps and repeats, padding, and rows that change their places: each call equals SDPA's."""
    models = kept_pair(data.draw(st.sampled_from(["llama", "mistral"])))
    make, ids = new_cache(data, models[0].config), tokens()
    caches = [make(), make()]
    steps = torch.tensor(data.draw(st.lists(st.sampled_from([1, 1, 1, 0, 3]), min_size=N, max_size=N)))
    positions = steps.cumsum(0).expand(2, -1).clone()
    visible, turned = torch.ones(2, N, dtype=torch.long), False
    if data.draw(st.booleans()):
        visible[1, : data.draw(st.integers(1, 20))] = 0
        positions = (visible.cumsum(1) - 1).clamp(min=0)
        turned = data.draw(st.booleans())
    masked = bool((visible == 0).any()) or data.draw(st.booleans())
    for number, (start, stop) in enumerate(chunks(data)):
        if turned and number == 1:
            for each in caches:
                each.reorder_cache(torch.tensor([1, 0]))
            ids, positions, visible = (x.flip(0) for x in (ids, positions, visible))
        options: dict[str, Any] = {"position_ids": positions[:, start:stop]}
        if masked:
            options["attention_mask"] = visible[:, :stop]
        got, want = (
            model(ids[:, start:stop], past_key_values=past, **options).logits
            for model, past in zip(models, caches, strict=True)
        )
        real = visible[:, start:stop].bool()
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=2e-5)


@given(data=st.data())
@settings(max_examples=12)
@torch.no_grad()
def test_a_fall_over_a_cache_is_refused(data: st.DataObject) -> None:
    """Served in the first call, over a cache that was reset too; refused afterwards, and so is what follows it."""
    model, _ = kept_pair("llama")
    fall, masked = data.draw(st.integers(2, N - 1)), data.draw(st.booleans())
    positions, past = sequences(fall, N - fall), new_cache(data, model.config)()
    for start, stop in chunks(data):
        options: dict[str, Any] = {"past_key_values": past, "position_ids": positions[:, start:stop]}
        if masked:
            options["attention_mask"] = torch.ones(2, stop, dtype=torch.long)
        if start == 0:
            got = model(tokens()[:, :stop], **options).logits
            sizes = [size for size in (min(fall, stop), stop - min(fall, stop)) if size]
            want = apart(model, *sizes, rows=tokens()[:, :stop])
            torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
        elif fall < stop:
            if fall < start and data.draw(st.booleans()):
                del options["position_ids"]
            with pytest.raises(ValueError, match=r"cached keys do not record .* on whole rows with use_cache=False"):
                model(tokens()[:, start:stop], **options)
            break
        else:
            model(tokens()[:, start:stop], **options)
    past.reset()
    got = model(tokens(), past_key_values=past, position_ids=positions).logits
    torch.testing.assert_close(got, apart(model, fall, N - fall), rtol=0, atol=2e-5)
    whole = model(tokens(), use_cache=False, position_ids=positions).logits
    torch.testing.assert_close(whole, got, rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "bert", "qwen2.5-vl"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_keep_their_documents(name: str, reentrant: bool) -> None:
    """Two passes with other documents before one backward: gradients are those of SDPA with masks."""
    ours, sdpa = (each.train() for each in pair(name))
    ours.activation_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        ours.enable_input_require_grads()
    losses = [torch.zeros(()), torch.zeros(())]
    for fall in (20, 33):
        positions = sequences(fall, N - fall).expand(2, -1)
        allowed = same(documents_of(positions, torch.ones(2, N)))
        if name != "bert":
            allowed = allowed & torch.ones(N, N, dtype=torch.bool).tril()
        for number, (model, mask) in enumerate([(ours, None), (sdpa, allowed[:, None])]):
            out = first_output(model, input_ids=tokens(), position_ids=positions, attention_mask=mask)
            losses[number] = losses[number] + out.square().mean() * fall
    for parameters in (ours, sdpa):
        parameters.zero_grad()
    for got in losses:
        got.backward()
    for (path, x), y in zip(ours.named_parameters(), sdpa.parameters(), strict=True):
        if y.grad is not None:
            assert x.grad is not None, path
            torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-4 * float(y.grad.abs().max()) + 1e-7)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(tiny_model, "bart", "BartForCausalLM", "causal"), "BartDecoder does not use position_ids"),
        (partial(tiny_model, "qwen3_next", "Qwen3NextForCausalLM"), "Qwen3NextModel mixes tokens outside of its atten"),
        (partial(tiny_model, "mobilebert", "MobileBertForMaskedLM"), "MobileBertModel mixes tokens outside of its att"),
    ],
)
@torch.no_grad()
def test_models_that_cannot_keep_documents_apart(make: Callable[[], Any], said: str) -> None:
    """They take rows of one document, also with gaps."""
    model = set_pattern(make().eval(), {})
    ids, positions = tokens()[:, :20], torch.arange(20)[None]
    for fall in (positions % 8, positions % 19):
        with pytest.raises(ValueError, match=rf"{said}.*: give each document a row of its own, padded, with an att"):
            model(ids, position_ids=fall)
    model(ids, position_ids=positions + 9 * (positions > 7))


@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
@torch.no_grad()
def test_an_attention_mask_of_segment_numbers_is_refused(name: str) -> None:
    t5 = name == "t5"
    model = tiny_model("t5", "T5ForConditionalGeneration", "encoder-decoder").eval() if t5 else model_of(name)
    set_pattern(model, {})
    segments = torch.ones(2, N, dtype=torch.long)
    segments[0, 20:40], segments[0, 40:] = 2, 0
    more = {"decoder_input_ids": tokens()[:, :5]} if t5 else {}
    for mask in (segments, segments.double()):
        with pytest.raises(ValueError, match=r"attention_mask must hold 0 and 1, .* write position_ids that begin at"):
            model(tokens(), attention_mask=mask, **more)
    ones = segments.clamp(max=1)
    want = model(tokens(), attention_mask=ones, **more)[0]
    for mask in (ones.bool(), ones.int(), ones.double()):
        assert torch.equal(model(tokens(), attention_mask=mask, **more)[0], want)


def test_cross_attention_sees_every_key_of_any_document() -> None:
    """Also where keys are as many as tokens: those of the encoder are no tokens of the decoder's row."""
    model = tiny_model("t5gemma", "T5GemmaForConditionalGeneration").eval()
    set_pattern(model, {})
    positions = sequences(8, 12)

    def second(read: Tensor, written: Tensor) -> Tensor:
        given = {"decoder_input_ids": written, "decoder_position_ids": positions}
        with torch.no_grad():
            return model(encoder_outputs=BaseModelOutput(read), **given, use_cache=False).logits[:, 8:]

    read, written = torch.randn(1, 20, 32), torch.randint(3, 90, (1, 20))
    found = second(read, written)
    assert (found - second(torch.cat([-read[:, :1], read[:, 1:]], 1), written)).abs().max() > 1e-3
    assert torch.equal(found, second(read, torch.cat([93 - written[:, :8], written[:, 8:]], 1)))


@pytest.mark.parametrize("name", ["bert", pytest.param("qwen2.5-vl", marks=pytest.mark.thorough)])
@torch.no_grad()
def test_one_graph_for_all_documents(name: str) -> None:
    """Values of positions are not read while a model is traced; padding is a tensor too."""
    torch.compiler.reset()
    model = set_pattern(MAKE[name](**({"num_hidden_layers": 1} if name == "bert" else {})), LONGNET)
    counter, number = CompileCounter(), 0
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    mask = torch.ones(2, N, dtype=torch.long)
    mask[1, :9] = 0
    options = {"attention_mask": mask} if name == "bert" else {}
    real = mask.bool() if options else mask >= 0
    for positions in (sequences(20, 30), sequences(13, 2, 35), torch.arange(N)[None] // 2):
        batch = {"input_ids": tokens(), "position_ids": positions, **options}
        got, want = first_output(compiled, **batch), first_output(model, **batch)
        torch.testing.assert_close(got[real], want[real], rtol=0, atol=1e-5)
        number = number or counter.frame_count
        assert counter.frame_count == number


@torch.no_grad()
def test_a_graph_over_a_cache_asserts_that_positions_go_on() -> None:
    """Steps over a static cache are one graph, in which one number comes to the host, however many layers there are."""
    torch.compiler.reset()
    model, positions = set_pattern(model_of("llama"), LONGNET), torch.arange(N)[None] // 2
    graphs = EagerAndRecordGraphs()
    step = torch.compile(model, fullgraph=True, backend=graphs)
    past = StaticCache(config=model.config, max_cache_len=64)
    want = model(tokens(), position_ids=positions, use_cache=True).logits
    model(tokens()[:, :30], position_ids=positions[:, :30], past_key_values=past)
    for place in range(30, 36):
        got = step(tokens()[:, place, None], position_ids=positions[:, place, None], past_key_values=past).logits
        torch.testing.assert_close(got[:, 0], want[:, place], rtol=0, atol=1e-5)
    (graph,) = graphs.graphs
    targets = [str(node.target) for node in graph.graph.nodes]
    assert (targets.count("item"), targets.count("flexdilated.aten.default")) == (1, 2)
    with pytest.raises(RuntimeError, match=r"cached keys do not record their document: .* with use_cache=False"):
        step(tokens()[:, 0, None], position_ids=positions[:, 6, None], past_key_values=past)


@torch.no_grad()
def test_threads_and_errors_leave_no_trace() -> None:
    models = [model_of("llama"), model_of("gpt2")]
    for model in models:
        set_pattern(model, {})
    with pytest.raises(IndexError):
        models[0](tokens() + 97, position_ids=sequences(20, 30))
    with pytest.raises(ValueError, match="forms no attention weights"):
        models[0](tokens(), position_ids=sequences(20, 30), output_attentions=True)

    @torch.no_grad()
    def run(fall: int) -> Tensor:
        return first_output(models[fall % 2], input_ids=tokens(), position_ids=sequences(fall, N - fall))

    falls = [5, 11, 20, 33, 42]
    want = [run(fall) for fall in falls]
    with ThreadPoolExecutor(5) as pool:
        for number, got in enumerate(pool.map(run, falls * 4)):
            assert torch.equal(got, want[number % 5])


@torch.no_grad()
def test_positions_that_the_model_makes_are_one_document() -> None:
    """A model around another may hand positions that fall, as those of sound between frames do."""
    model = tiny_model("qwen2_5_vl_text", "Qwen2_5_VLTextModel").eval()

    class Around(transformers.PreTrainedModel):
        config_class = type(model.config)
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inner = model

        def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Any:
            own = (torch.arange(N) % 20).expand(3, 1, -1) if position_ids is None else position_ids
            self.inner(input_ids=input_ids)  # a pass within this one, such as an image tower's
            return self.inner(input_ids=input_ids, position_ids=own)

    around = Around(model.config).eval()
    sdpa = copy.deepcopy(around)
    sdpa.set_attn_implementation("sdpa")
    set_pattern(around, {})
    torch.testing.assert_close(around(tokens())[0], sdpa(tokens())[0], rtol=0, atol=1e-5)
    packed = around(tokens(), position_ids=sequences(20, 30).expand(3, 1, -1))[0]
    torch.testing.assert_close(packed[:, 20:], around.inner(tokens()[:, 20:])[0], rtol=0, atol=1e-5)
