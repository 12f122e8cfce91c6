"""Small image models of diffusers."""

from typing import Any

import torch

from ._inputs import (
    CHANNELS,
    HEADS,
    IMAGE,
    TEXT,
    TOKENS,
    WIDTH,
    Inputs,
    Model,
    call,
    fraction,
    ids,
    image,
    randn,
    sizes,
    text_mask,
    tokens,
)

_ROPE: Inputs = {"axes_dims_rope": (4, 4, 8)}
_FLUX = sizes(dim=16, in_channels=CHANNELS, num_layers=1, num_single_layers=1, joint_attention_dim=32, **_ROPE)


def _flux(**more: Any) -> Inputs:
    return tokens(text_width=32, **fraction() | ids() | more)


def _cogview() -> Inputs:
    return image(original_size=randn(2, 2), target_size=randn(2, 2), crop_coords=randn(2, 2))


_COGVIEW = sizes(
    dim=16, in_channels=CHANNELS, out_channels=CHANNELS, text_embed_dim=WIDTH, time_embed_dim=8, condition_dim=4
)

IMAGES = {
    "AuraFlow": Model(
        "AuraFlowTransformer2DModel",
        {"in_channels": CHANNELS, "sample_size": 16, "num_mmdit_layers": 1, "num_single_dit_layers": 1,
         "joint_attention_dim": WIDTH, "caption_projection_dim": 16, "pos_embed_max_size": 64,
         "num_attention_heads": HEADS, "attention_head_dim": 8, "out_channels": CHANNELS},
        lambda: image(**fraction()),
        text="first", replaced=1,
    ),
    "Bria": Model(
        "BriaTransformer2DModel", _FLUX | {"axes_dims_rope": [4, 4, 8]}, _flux, text="first",
    ),
    "Bria FIBO": Model(
        "BriaFiboTransformer2DModel",
        _FLUX | {"axes_dims_rope": [4, 4, 8], "text_encoder_dim": WIDTH},
        lambda: _flux(text_encoder_layers=[randn(2, TEXT, WIDTH) for _ in range(2)]),
        text="first", replaced=1,
    ),
    "Chroma": Model(
        "ChromaTransformer2DModel",
        _FLUX | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        _flux,
        text="first", replaced=1,
    ),
    "CogView3 Plus": Model(
        "CogView3PlusTransformer2DModel", _COGVIEW | {"pos_embed_max_size": 8, "sample_size": 8}, _cogview, text="first"
    ),
    "CogView4": Model(
        "CogView4Transformer2DModel", _COGVIEW | {"rope_axes_dim": (8, 8), "sample_size": 8}, _cogview, text="first"
    ),
    "Flux": Model(
        "FluxTransformer2DModel",
        _FLUX | {"pooled_projection_dim": 32},
        lambda: _flux(pooled_projections=randn(2, 32)),
        text="first",
    ),
    "Flux 2": Model(
        "Flux2Transformer2DModel",
        _FLUX | {"timestep_guidance_channels": 8, "axes_dims_rope": (4, 4, 4, 4)},
        lambda: _flux(**ids(4), guidance=torch.ones(2)),
        text="first", replaced=1,
    ),
    "GLM-Image": Model(
        "GlmImageTransformer2DModel",
        sizes(dim=16, in_channels=CHANNELS, out_channels=CHANNELS, text_embed_dim=WIDTH, time_embed_dim=8,
              condition_dim=4, prior_vq_quantizer_codebook_size=8),
        lambda: image(target_size=randn(2, 2), crop_coords=randn(2, 2), prior_token_drop=torch.tensor([False, True]),
                      prior_token_id=torch.arange(2 * TOKENS).view(2, TOKENS) % 8),
        text="first",
    ),
    "HunyuanDiT": Model(
        "HunyuanDiT2DModel",
        sizes(in_channels=CHANNELS, patch_size=2, sample_size=16, hidden_size=16, cross_attention_dim=WIDTH,
              cross_attention_dim_t5=8, pooled_projection_dim=8, text_len=TEXT, text_len_t5=5,
              use_style_cond_and_image_meta_size=False),
        lambda: image(
            timestep=torch.tensor([10.0, 5.0]), text_embedding_mask=text_mask(),
            encoder_hidden_states_t5=randn(2, 5, 8), text_embedding_mask_t5=torch.ones(2, 5, dtype=torch.long),
            image_rotary_emb=(randn(TOKENS, 8), randn(TOKENS, 8)),
        ),
    ),
    "HunyuanImage": Model(
        "HunyuanImageTransformer2DModel",
        sizes(in_channels=CHANNELS, out_channels=CHANNELS, num_layers=1, num_single_layers=1, num_refiner_layers=1,
              patch_size=(2, 2), text_embed_dim=WIDTH, rope_axes_dim=(4, 4)),
        lambda: image(**fraction(), encoder_attention_mask=text_mask()),
        text="last",
    ),
    "JoyImage Edit": Model(
        "JoyImageEditTransformer3DModel",
        {"in_channels": CHANNELS, "hidden_size": 24, "num_attention_heads": 2, "text_dim": WIDTH, "num_layers": 2,
         "rope_dim_list": [4, 4, 4]},
        lambda: call(randn(2, CHANNELS, 1, 12, 16)),
        text="last",
    ),
    "LongCat-Image": Model(
        "LongCatImageTransformer2DModel",
        _FLUX | {"axes_dims_rope": [4, 4, 8], "pooled_projection_dim": 32},
        _flux,
        text="first",
    ),
    "Lumina Next": Model(
        "LuminaNextDiT2DModel",
        {"sample_size": 16, "in_channels": CHANNELS, "hidden_size": 16, "num_layers": 2, "num_attention_heads": 2,
         "num_kv_heads": 1, "multiple_of": 8, "cross_attention_dim": WIDTH},
        lambda: image(cross_attention_kwargs={}, encoder_mask=text_mask(),
                      image_rotary_emb=torch.polar(torch.ones(8, 8, 4), randn(8, 8, 4))),
    ),
    "Ovis-Image": Model("OvisImageTransformer2DModel", _FLUX | {"out_channels": CHANNELS}, _flux, text="first"),
    "PixArt": Model(
        "PixArtTransformer2DModel",
        sizes(in_channels=CHANNELS, norm_num_groups=1, sample_size=16, cross_attention_dim=16, caption_channels=WIDTH),
        lambda: image(added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
    ),
    "Qwen-Image": Model(
        "QwenImageTransformer2DModel",
        sizes(dim=16, in_channels=CHANNELS, out_channels=1, joint_attention_dim=WIDTH, **_ROPE),
        lambda: tokens(**fraction(), encoder_hidden_states_mask=text_mask(), img_shapes=[[(1, *IMAGE)]] * 2),
        text="first",
    ),
    "Stable Diffusion 3": Model(
        "SD3Transformer2DModel",
        sizes(sample_size=16, patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS, joint_attention_dim=32,
              caption_projection_dim=16, pooled_projection_dim=64, dual_attention_layers=(0,), qk_norm="rms_norm"),
        lambda: image(text_width=32, pooled_projections=randn(2, 64)),
        text="last", replaced=3,
    ),
}  # fmt: skip
