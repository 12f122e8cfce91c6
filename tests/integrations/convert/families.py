"""Small models of each family, as users build them, with inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import x_transformers
from torch import Tensor, nn

from bench.cases._training import Step, gradients_of, loss
from tests.support.vision import vision

HEADS = 4
WIDTH = 32


@dataclass(frozen=True)
class Family:
    """make: the model, without dropout. inputs: of a call. tokens: that attend to each other.

    replaced: in how many modules. fused: these call `scaled_dot_product_attention` when they train.
    """

    make: Callable[..., nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    tokens: int
    replaced: int
    fused: bool = True
    call: Callable[..., Tensor] = lambda model, *inputs, **options: model(*inputs, **options)


def features(num_tokens: int = 21) -> tuple[Tensor, ...]:
    return (torch.randn(2, num_tokens, WIDTH, generator=torch.Generator().manual_seed(1)),)


def images() -> tuple[Tensor, ...]:
    return (torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1)),)


def words() -> tuple[Tensor, ...]:
    return (torch.randint(0, 50, (2, 24), generator=torch.Generator().manual_seed(1)),)


def encoder(batch_first: bool = True) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=batch_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)


def translator() -> nn.Module:
    return nn.Transformer(WIDTH, HEADS, 2, 2, 48, dropout=0.0, batch_first=True)


def translate(model: nn.Module, source: Tensor) -> Tensor:
    """With a causal target of the same length."""
    target = source.flip(1)
    mask = nn.Transformer.generate_square_subsequent_mask(source.shape[1])
    return model(source, target, tgt_mask=mask, tgt_is_causal=True)


def vit(name: str = "vit_tiny_patch16_224", **options: Any) -> Any:
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "num_heads": HEADS, "depth": 2, "num_classes": 5}
    return vision()[0].create_model(name, **sizes | options)


def gated_vit() -> nn.Module:
    """Its attention is of a subclass with the forward of timm's own class."""

    class Gated(vision()[0].layers.Attention):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, gated=True)

    return vit(attn_layer=Gated)


def gemma_vit() -> nn.Module:
    """It scales scores by 1, and shares keys among heads."""
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": WIDTH, "num_heads": HEADS, "head_dim": 8, "depth": 2}
    return vision()[0].create_model("gemma4_vit_167m", **sizes, num_kv_heads=2)


def beit() -> nn.Module:
    return vit("beit_base_patch16_224", use_rel_pos_bias=False, use_abs_pos_emb=True)


def torchvision_vit() -> nn.Module:
    vit = vision()[1].models.VisionTransformer
    return vit(16, 4, num_layers=2, num_heads=HEADS, hidden_dim=WIDTH, mlp_dim=48, num_classes=5)


def language_model(**options: Any) -> nn.Module:
    sizes = {"depth": 2, "attn_dim_head": 32, "rotary_pos_emb": True, "rotary_emb_dim": 32}
    layers = x_transformers.Decoder(dim=WIDTH, heads=HEADS, **{**sizes, **options})
    return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers)


def x_encoder() -> nn.Module:
    layers = x_transformers.Encoder(
        dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=8, attn_qk_norm=True, attn_flash=True
    )
    return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=64, attn_layers=layers)


FAMILIES = {
    "encoder": Family(encoder, features, 21, 2),
    "encoder, tokens first": Family(lambda: encoder(False), lambda: (features()[0].transpose(0, 1),), 21, 2),
    "nn.Transformer": Family(translator, features, 21, 4, call=translate),
    "torchvision": Family(torchvision_vit, images, 17, 2),
    "timm": Family(vit, images, 17, 2),
    "timm, qk_norm": Family(lambda: vit(qk_norm=True, reg_tokens=3, init_values=0.1), images, 20, 2),
    "timm, gated": Family(gated_vit, images, 17, 2),
    "timm, EVA": Family(lambda **options: vit("eva02_tiny_patch14_224", **options), images, 17, 2),
    "timm, rotary": Family(lambda: vit("vit_small_patch16_rope_224"), images, 17, 2),
    "timm, Gemma 4": Family(gemma_vit, images, 16, 2),
    "timm, BEiT without its table": Family(beit, images, 17, 2),
    "x-transformers": Family(language_model, words, 24, 2, fused=False),
    "x-transformers, flash": Family(lambda: language_model(attn_flash=True), words, 24, 2),
    "x-transformers, grouped": Family(lambda: language_model(attn_kv_heads=2, attn_flash=True), words, 24, 2),
    "x-transformers, sinks": Family(lambda: language_model(attn_head_learned_sink=True), words, 24, 2, fused=False),
    "x-transformers, encoder": Family(x_encoder, words, 24, 2),
}


def model_of(name: str, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FAMILIES[name].make(**options)
        for x in model.parameters():  # what begins at 0, or near it, would hide what attention does
            nn.init.normal_(x, *((0.5, 0.3) if x.dim() == 1 else (0.0, x[0].numel() ** -0.5)))
        return model


def outputs(model: nn.Module, name: str, **options: Any) -> Tensor:
    family = FAMILIES[name]
    return family.call(model, *family.inputs(), **options)


def step(model: nn.Module, name: str, **options: Any) -> Step:
    """One training step."""
    model.zero_grad()
    out = outputs(model, name, **options)
    loss(out).backward()
    return out.detach(), gradients_of(model)
