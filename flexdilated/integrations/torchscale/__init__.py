"""LongNet encoders of torchscale and Prov-GigaPath, for their checkpoints or new weights; neither library is needed."""

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
