"""Encoders of torchscale and Prov-GigaPath, for their checkpoints and for new weights; on torch alone."""

from ._config import LongNetEncoderConfig
from ._encoder import DilatedSelfAttention, EncoderLayer, LongNetEncoder
from ._slide import SlideEncoder, SlideEncoderConfig, slide_segments

__all__ = [
    "DilatedSelfAttention",
    "EncoderLayer",
    "LongNetEncoder",
    "LongNetEncoderConfig",
    "SlideEncoder",
    "SlideEncoderConfig",
    "slide_segments",
]
