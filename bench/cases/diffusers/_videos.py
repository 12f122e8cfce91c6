"""Small video models of diffusers."""

from typing import Any

import torch

from ._inputs import (
    CHANNELS,
    GRID,
    TEXT,
    WIDTH,
    Inputs,
    Model,
    call,
    fraction,
    randn,
    sizes,
    text_mask,
    tokens,
    video,
)

_IN_AND_OUT: Inputs = {"in_channels": CHANNELS, "out_channels": CHANNELS}
_GRID_SIZES: Inputs = dict(zip(("num_frames", "height", "width"), GRID, strict=True))


def _wan(**more: Any) -> Inputs:
    own: Inputs = {**_IN_AND_OUT, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 32}
    return sizes(dim=12, **own | more)


def _hunyuan(**more: Any) -> Inputs:
    own: Inputs = {**_IN_AND_OUT, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 2}
    own |= {"patch_size_t": 1, "text_embed_dim": WIDTH, "pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}
    return sizes(dim=10, **own | more)


def _hunyuan_inputs() -> Inputs:
    guidance = torch.tensor([6000, 6000])
    return video(encoder_attention_mask=text_mask(), pooled_projections=randn(2, 8), guidance=guidance)


def _cogvideo(**more: Any) -> Inputs:
    own: Inputs = {**_IN_AND_OUT, "time_embed_dim": 2, "text_embed_dim": WIDTH, "sample_width": 8, "sample_height": 8}
    own |= {"sample_frames": 9, "patch_size": 2, "temporal_compression_ratio": 4, "max_text_seq_length": TEXT}
    return sizes(**own | more)


def _steps() -> Inputs:
    """For each frame the time steps to go from and to."""
    return {"timestep": torch.full((2, 3), 10), "r_timestep": torch.full((2, 3), 4)}


_FRAMES_FIRST = "B F C H W"


def _frames_first() -> Inputs:
    return call(randn(2, 3, CHANNELS, 8, 8))


VIDEOS = {
    "Allegro": Model(
        "AllegroTransformer3DModel",
        sizes(dim=12, cross_attention_dim=24, sample_height=8, sample_width=8, sample_frames=3, caption_channels=WIDTH),
        lambda: video(encoder_attention_mask=text_mask()),
    ),
    "AnyFlow": Model(
        "AnyFlowTransformer3DModel", _wan(), lambda: call(randn(2, 3, CHANNELS, 8, 8), **_steps()),
        layout=_FRAMES_FIRST
    ),
    "ChronoEdit": Model("ChronoEditTransformer3DModel", _wan(), video),
    "CogVideoX": Model("CogVideoXTransformer3DModel", _cogvideo(), _frames_first, text="first", layout=_FRAMES_FIRST),
    "ConsisID": Model("ConsisIDTransformer3DModel", _cogvideo(), _frames_first, text="first", layout=_FRAMES_FIRST),
    "Cosmos": Model(
        "CosmosTransformer3DModel",
        sizes(dim=12, **_IN_AND_OUT, text_embed_dim=WIDTH, adaln_lora_dim=4, max_size=(4, 8, 8),
              concat_padding_mask=False),
        video,
    ),
    "EasyAnimate": Model(
        "EasyAnimateTransformer3DModel",
        sizes(dim=16, **_IN_AND_OUT, patch_size=2, sample_width=8, sample_height=8, mmdit_layers=1, time_embed_dim=2,
              text_embed_dim=WIDTH),
        video,
        text="first",
    ),
    "HunyuanVideo": Model("HunyuanVideoTransformer3DModel", _hunyuan(), _hunyuan_inputs, text="last"),
    "HunyuanVideo 1.5": Model(
        "HunyuanVideo15Transformer3DModel",
        sizes(dim=10, **_IN_AND_OUT, num_refiner_layers=1, patch_size=2, text_embed_dim=WIDTH, text_embed_2_dim=WIDTH,
              image_embed_dim=8, rope_axes_dim=(2, 4, 4)),
        lambda: video(
            **fraction(), encoder_attention_mask=text_mask(), encoder_hidden_states_2=randn(2, 3, WIDTH),
            encoder_attention_mask_2=torch.ones(2, 3), image_embeds=randn(2, 2, 8),
        ),
        text="last",
    ),
    "Kandinsky 5": Model(
        "Kandinsky5Transformer3DModel",
        {
            **{"in_text_dim": WIDTH, "in_text_dim2": 8, "time_dim": 8, "model_dim": 24, "ff_dim": 32},
            **{"num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4)},
        },
        lambda: call(
            randn(2, 3, 8, 8, CHANNELS), pooled_projections=randn(2, 8), text_rope_pos=torch.arange(TEXT),
            visual_rope_pos=[torch.arange(side) for side in GRID],
        ),
        layout="B F H W C",
    ),
    "LTX": Model(
        "LTXVideoTransformer3DModel",
        sizes(**_IN_AND_OUT, cross_attention_dim=16, caption_channels=32),
        lambda: tokens(text_width=32, encoder_attention_mask=text_mask(), **_GRID_SIZES),
    ),
    "LTX 2": Model(
        "LTX2VideoTransformer3DModel",
        {
            **sizes(dim=12, **_IN_AND_OUT, cross_attention_dim=24, caption_channels=WIDTH),
            **{"audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2},
            **{"audio_attention_head_dim": 8, "audio_cross_attention_dim": 16},
        },
        lambda: tokens(
            audio_hidden_states=randn(2, 5, 4), audio_encoder_hidden_states=randn(2, TEXT, WIDTH),
            encoder_attention_mask=text_mask(), audio_encoder_attention_mask=text_mask(),
            audio_num_frames=5, **_GRID_SIZES,
        ),
    ),
    "Mochi": Model(
        "MochiTransformer3DModel",
        sizes(patch_size=2, pooled_projection_dim=16, in_channels=CHANNELS, text_embed_dim=WIDTH, time_embed_dim=4,
              max_sequence_length=TEXT),
        lambda: video(encoder_attention_mask=text_mask()),
        text="last",
    ),
    "Motif": Model(
        "MotifVideoTransformer3DModel",
        sizes(dim=10, **_IN_AND_OUT, num_layers=1, num_single_layers=1, text_embed_dim=WIDTH, rope_axes_dim=(2, 4, 4)),
        lambda: video(encoder_attention_mask=text_mask()),
        text="last",
    ),
    "SkyReels": Model("SkyReelsV2Transformer3DModel", _wan(), video),
    "Wan": Model("WanTransformer3DModel", _wan(), video),
    "Wan Animate": Model(
        "WanAnimateTransformer3DModel",
        _wan(
            in_channels=12, latent_channels=4, image_dim=4, added_kv_proj_dim=24, motion_encoder_size=16,
            motion_encoder_channel_sizes={"4": 4, "8": 4, "16": 4}, motion_style_dim=8, motion_dim=4,
            motion_encoder_dim=8, face_encoder_hidden_dim=16, face_encoder_num_heads=2, inject_face_latents_blocks=2,
        ),
        lambda: video(
            12, pose_hidden_states=randn(2, 4, 2, 8, 8), face_pixel_values=randn(2, 3, 5, 16, 16),
            encoder_hidden_states_image=randn(2, 3, 4),
        ),
    ),
    "Wan VACE": Model(
        "WanVACETransformer3DModel",
        _wan(vace_layers=[0], vace_in_channels=4),
        lambda: video(control_hidden_states=randn(2, 4, 3, 8, 8), control_hidden_states_scale=torch.ones(1)),
        replaced=3,
    ),
}  # fmt: skip
