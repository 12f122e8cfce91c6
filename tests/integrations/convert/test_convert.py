"""What stays when a model is converted and what comes back; what convert leaves or refuses, and why."""

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import x_transformers
from torch import nn
from torch.nn import functional as F

import flexdilated as fd
from bench._dense import counts
from bench.cases._training import loss
from flexdilated import masks
from flexdilated.integrations.convert._rule import pattern_of_call
from tests.integrations.passes import assert_dropout_trains
from tests.support.ranks import one_rank
from tests.support.vision import vision

from .families import (
    FAMILIES,
    HEADS,
    WIDTH,
    encoder,
    features,
    language_model,
    model_of,
    outputs,
    step,
    translator,
    vit,
)

WINDOW = masks.local_window(left=3, right=2)
KINDS = ["nn.Transformer", "timm", "timm, EVA", "x-transformers"]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # the first layer's input has no gradient
def test_parameters_names_classes_and_hooks_stay(name: str) -> None:
    model, called = model_of(name), []
    weights, state = dict(model.named_parameters()), list(model.state_dict())
    kinds = {each: type(module) for each, module in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    replaced = [each.name for each in fd.convert(copy.deepcopy(model), WINDOW).replaced]
    for each in replaced:
        module = model.get_submodule(each)
        module.register_forward_pre_hook(lambda *_, of=each: called.append((of, "before")))
        module.register_forward_hook(lambda *_, of=each: called.append((of, "after")))
        module.register_full_backward_hook(lambda *_, of=each: called.append((of, "backward")))
    fd.convert(model, WINDOW)
    assert list(model.state_dict()) == state
    assert all(x is weights[each] for each, x in model.named_parameters())
    assert all(isinstance(module, kinds[each]) for each, module in model.named_modules())
    before, (out, _) = {each: x.detach().clone() for each, x in weights.items()}, step(model.train(), name)
    assert sorted(called) == sorted((each, when) for each in replaced for when in ("before", "after", "backward"))
    optimizer.step()
    changed = [each for each, x in weights.items() if not torch.equal(x, before[each])]
    assert any("attn" in each or "attention" in each for each in changed)
    assert loss(outputs(model, name)) < loss(out)


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_pickles_are_converted(name: str) -> None:
    """And weights go to models that are not, or have been before; a second pattern takes the place of the first."""
    model, loaded = model_of(name).eval(), FAMILIES[name].make().eval()
    fd.convert(loaded, WINDOW)
    loaded.load_state_dict(model.state_dict())
    fd.convert(model, masks.every())
    fd.convert(model, WINDOW)
    assert "local_window(left=3, right=2)" in repr(model)
    want = outputs(model, name)
    assert torch.equal(outputs(loaded, name), want)
    copied = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    fd.convert(model, None)  # which concerns neither
    for other in (copied, read):
        assert torch.equal(outputs(other, name), want)
        fd.convert(other, None)
        assert torch.equal(outputs(other, name), outputs(model, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"), [("timm, EVA", "blocks.0.attn"), ("x-transformers", "attn_layers.layers.0.1")]
)
def test_compiled(name: str, path: str) -> None:
    """In one graph; torch's own attention, which is in the other models, in the tests below."""
    attention, (x,) = model_of(name, depth=1).train().get_submodule(path), features()
    fd.convert(attention, WINDOW)
    compiled: Any = torch.compile(attention, fullgraph=True, backend="eager")
    outs = [out[0] if isinstance(out, tuple) else out for out in (compiled(x), attention(x))]
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_model_that_is_compiled_takes_notice() -> None:
    """Of being converted, and of being given back."""
    model, (x,) = model_of("encoder").get_submodule("layers.0").train(), features()
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    before = model(x)
    torch.testing.assert_close(compiled(x), before, rtol=0, atol=1e-5)
    fd.convert(model, WINDOW)
    assert not torch.allclose(model(x), before, atol=1e-3)
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=1e-5)
    fd.convert(compiled, None)
    torch.testing.assert_close(compiled(x), before, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_padding_and_causal_order_compiled() -> None:
    """With values of masks that the graph does not know, and all gradients, by AOT."""
    torch.manual_seed(0)
    model, (x,) = encoder().get_submodule("layers.0").train(), features()
    fd.convert(model, WINDOW | masks.first_tokens(1))
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    mask = nn.Transformer.generate_square_subsequent_mask(21)
    for hidden in (slice(15, 21), slice(9, 12)):
        padding = torch.zeros(2, 21)
        padding[1, hidden] = -torch.inf
        options: dict[str, Any] = {"src_mask": mask, "is_causal": True, "src_key_padding_mask": padding}
        outs = compiled(x, **options), model(x, **options)
        torch.testing.assert_close(*outs, rtol=0, atol=1e-5)
        grads = (torch.autograd.grad(loss(out), list(model.parameters())) for out in outs)
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_padding_of_keys_and_of_rows() -> None:
    """Expanded to all heads and rows too; rows of padding are zeros before the projection if the mask hides them."""
    attention, x = vit().get_submodule("blocks.0.attn"), torch.randn(2, 17, WIDTH)
    real = torch.ones(2, 17, dtype=torch.bool)
    real[1, 12:] = False
    of_keys = real[:, None, None]
    want = attention(x, attn_mask=of_keys & counts(WINDOW, 17)[0].bool())
    fd.convert(attention, WINDOW)
    compiled: Any = torch.compile(attention, fullgraph=True, backend="eager")
    of_rows = of_keys & real[:, None, :, None]
    for call, mask in ((attention, of_keys), (attention, of_keys.expand(-1, HEADS, 17, -1)), (compiled, of_rows)):
        torch.testing.assert_close(call(x, attn_mask=mask)[real], want[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(attention(x, attn_mask=of_rows), compiled(x, attn_mask=of_rows))
    assert torch.equal(attention(x, attn_mask=of_rows)[~real], attention.proj.bias.expand(5, -1))
    real[:, 3:6] = False  # as between a text and an image
    of_rows = real[:, None, None] & real[:, None, :, None]
    found = attention(x, attn_mask=of_rows)
    torch.testing.assert_close(found[real], attention(x, attn_mask=real[:, None, None])[real], rtol=0, atol=1e-5)
    assert torch.equal(found[~real], attention.proj.bias.expand(11, -1))


def test_a_function_of_the_name_chooses() -> None:
    model = translator()
    seen = {}

    def chosen(name: str, module: nn.Module) -> masks.Pattern | None:
        seen[name] = module
        return None if "layers.0" in name else WINDOW

    report = fd.convert(model, chosen)
    assert seen == {each: model.get_submodule(each) for each in seen}
    assert [each.name for each in report.replaced] == [each for each in seen if "layers.1" in each]
    assert "decoder.layers.1.multihead_attn" in [each.name for each in report.replaced]
    assert [(each.name, each.reason) for each in report.left] == [
        (each, "the function chose None") for each in seen if "layers.0" in each
    ]
    fd.convert(model, lambda name, _: WINDOW if name == "encoder.layers.0.self_attn" else None)
    again = fd.convert(model, lambda *_: None)
    assert (again.replaced, len(again.left)) == ((), 6)


@torch.no_grad()
def test_attention_of_timm_that_is_not_fused() -> None:
    """As `TIMM_FUSED_ATTN=0` makes it; what the module says of itself comes back with its class."""
    fused, plain = model_of("timm"), model_of("timm")
    for block in plain.blocks:
        block.attn.fused_attn = False
    before = outputs(plain, "timm")
    fd.convert(fused, WINDOW)
    fd.convert(plain, WINDOW)
    assert torch.equal(outputs(plain, "timm"), outputs(fused, "timm"))
    fd.convert(plain, None)
    assert not plain.blocks[0].attn.fused_attn
    assert torch.equal(outputs(plain, "timm"), before)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's own attention returns a view, too
def test_fully_shard_stacks() -> None:
    """FSDP exchanges classes too."""
    from torch.distributed.fsdp import fully_shard

    with one_rank() as mesh:
        model, (x,) = model_of("encoder"), features()
        fd.convert(model, WINDOW)
        want = model(x)
        for layer in model.layers:
            fully_shard(layer.self_attn, mesh=mesh)
        torch.testing.assert_close(model(x), want, rtol=0, atol=1e-6)


def test_checkpointing_changes_nothing() -> None:
    model = model_of("timm").train()
    fd.convert(model, WINDOW)
    want, grads = step(model, "timm")
    model.set_grad_checkpointing()
    out, ours = step(model, "timm")
    assert torch.equal(out, want)
    assert all(torch.equal(ours[each], grads[each]) for each in grads)


def test_a_mask_of_keys_is_padding_for_one_query_too() -> None:
    """It might be read as a row of pairs."""
    q, (k, v) = torch.randn(3, 2, 1, 8), torch.randn(2, 3, 2, 5, 8)
    mask = (torch.arange(5) < torch.tensor([5, 3, 1])[:, None])[:, None, None]
    rule = pattern_of_call(masks.every(), mask, (3, 1, 5), is_causal=False)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(fd.attend(q, k, v, rule), wanted, rtol=1e-4, atol=1e-5)


def test_masks_of_no_tokens_hide_none() -> None:
    rule = pattern_of_call(masks.every(), torch.ones(2, 1, 0, 0, dtype=torch.bool), (2, 0, 0), is_causal=False)
    assert fd.attend(*torch.randn(3, 2, 2, 0, 8), rule).shape == (2, 2, 0, 8)


DROPPING = {
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.1), 1),
    "timm": lambda: vit(attn_drop_rate=0.1),
    "x-transformers": lambda: language_model(attn_dropout=0.1),
    "x-transformers, flash": lambda: language_model(attn_dropout=0.1, attn_flash=True),
}


@pytest.mark.parametrize("name", DROPPING)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_attention_dropout_trains(name: str) -> None:
    model, family = DROPPING[name](), FAMILIES[name]
    for each in model.modules():  # but for the attention's own
        if isinstance(each, nn.Dropout) and name == "encoder":
            each.p = 0.0
    fd.convert(model, WINDOW)
    assert_dropout_trains(model, partial(family.call, model, *family.inputs()))


def test_cross_attention_is_left_unless_it_is_chosen() -> None:
    model = translator()
    left = fd.convert(model, WINDOW).left
    assert [each.name for each in left] == [f"decoder.layers.{i}.multihead_attn" for i in range(2)]
    assert left[0].reason == "cross-attention of a decoder layer; a function of its name may choose a pattern"
    source, target = torch.randn(2, 9, WIDTH), torch.randn(2, 13, WIDTH)
    assert model(source, target).shape == target.shape
    cross = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, kdim=7, vdim=5)
    with pytest.raises(ValueError, match="its keys or values have another width: cross-attention"):
        fd.convert(cross, WINDOW)
    key, value = torch.randn(2, 9, 7), torch.randn(2, 9, 5)
    want = cross(target, key, value, attn_mask=torch.arange(9) > torch.arange(13)[:, None] + 2)[0]
    fd.convert(cross, lambda *_: masks.local_window(left=12, right=2))
    torch.testing.assert_close(cross(target, key, value)[0], want, rtol=0, atol=1e-5)
    layers = x_transformers.Decoder(dim=WIDTH, depth=1, heads=HEADS, cross_attend=True)
    report = fd.convert(layers, WINDOW)
    assert [each.name for each in report.replaced] == ["layers.0.1"]
    assert [(each.name, each.reason.partition(";")[0]) for each in report.left] == [
        ("layers.1.1", "cross-attention of its layers")
    ]


def test_unbatched_and_alone() -> None:
    """The model may be the attention module itself."""
    attention, x = nn.MultiheadAttention(WIDTH, HEADS), torch.randn(9, WIDTH)
    want = attention(x, x, x, key_padding_mask=torch.arange(9) > 6)[0]
    (replaced,) = fd.convert(attention, masks.every()).replaced
    assert (replaced.name, replaced.kind, replaced.num_heads) == ("", "torch.MultiheadAttention", HEADS)
    got, weights = attention(x, x, x, key_padding_mask=torch.arange(9) > 6)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert weights is None


def test_key_masks_of_timm() -> None:
    """NaFlexVit pads images of different sizes, and may say so by a mask of keys alone."""
    model = vision()[0].create_model(
        "naflexvit_base_patch16_gap", embed_dim=WIDTH, num_heads=HEADS, depth=2, patch_size=4, num_classes=5
    )
    torch.manual_seed(0)
    tokens, valid = torch.randn(2, 16, 48), torch.ones(2, 16, dtype=torch.bool)
    valid[1, 12:] = False
    place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1).view(1, 16, 2)
    batch = {"patches": tokens, "patch_coord": place.expand(2, -1, -1), "patch_valid": valid}
    want = model(batch)
    fd.convert(model, masks.every())
    with pytest.raises(ValueError, match="attn_mask must be None, or exactly torch's causal mask"):
        model(batch)
    model.use_key_only_attn_mask = True
    torch.testing.assert_close(model(batch), want, rtol=0, atol=1e-5)


def test_a_module_that_is_refused_beside_one_that_is_served() -> None:
    """The report names it with the reason that the error gives alone, and it is as it was."""
    model = language_model(attn_softclamp_logits=True)
    kinds = [type(module) for module in model.modules()]
    report = fd.convert(nn.ModuleDict({"refused": model, "served": nn.MultiheadAttention(8, 2)}), WINDOW)
    assert [each.name for each in report.replaced] == ["served"]
    assert report.left
    assert all("softclamp_logits caps scores" in each.reason for each in report.left)
    assert [type(module) for module in model.modules()] == kinds
