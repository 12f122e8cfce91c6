"""Exact sparse attention over long sequences in PyTorch: by torch's kernels on CPU, by FlexAttention on GPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import biases, masks, schedules
from ._attend import attend
from ._plan import plan
from .decoding import KVCache
from .masks.core import no_such_name
from .memory import max_batch
from .nn import (
    BlockSparseAttention,
    DilatedAttention,
    HeadParallelDilatedAttention,
    LongNet,
    LongNetBackbone,
    LongNetClassifier,
    LongNetConfig,
    LongNetEncoderDecoder,
    MultiheadDilatedAttention,
    RingDilatedAttention,
    SelectedLayers,
)
from .observe import attention_received, plot_attention_received, profile_process, stats
from .refinement import ImportanceTracker, block_mass, pooled_scores, refine
from .selection import BlockSelector, SelectedAttention, Selection, Threshold, TopK, TopP

if TYPE_CHECKING:
    from . import distributed, flex_attention, integrations, testing
    from .integrations.convert import convert

__all__ = [
    "BlockSelector",
    "BlockSparseAttention",
    "DilatedAttention",
    "HeadParallelDilatedAttention",
    "ImportanceTracker",
    "KVCache",
    "LongNet",
    "LongNetBackbone",
    "LongNetClassifier",
    "LongNetConfig",
    "LongNetEncoderDecoder",
    "MultiheadDilatedAttention",
    "RingDilatedAttention",
    "SelectedAttention",
    "SelectedLayers",
    "Selection",
    "Threshold",
    "TopK",
    "TopP",
    "attend",
    "attention_received",
    "biases",
    "block_mass",
    "convert",
    "distributed",
    "flex_attention",
    "integrations",
    "masks",
    "max_batch",
    "plan",
    "plot_attention_received",
    "pooled_scores",
    "refine",
    "schedules",
    "stats",
    "testing",
]
__version__ = "0.1.0"
_LAZY_MODULES = ("distributed", "flex_attention", "integrations", "testing", "viewer")

profile_process()


def __getattr__(name: str) -> Any:
    """Return `convert` or a module of `_LAZY_MODULES`, imported on first access.

    Any other name raises AttributeError; its text names what to write instead, if that is known.
    """
    if name == "convert":
        return import_module(".integrations.convert", __name__).convert
    if name in _LAZY_MODULES:
        return import_module(f".{name}", __name__)
    raise AttributeError(no_such_name(__name__, name, __all__, _suggestions(), "fd."))


def _suggestions() -> dict[str, str]:
    """Return {wrong name: what to write}, both without "fd.", for names that callers may expect in `fd`."""
    found = {name: f"masks.{name}" for name in masks.__all__}
    found |= {name: f"masks.recipes.{name}" for name in masks.recipes.__all__}
    found |= dict.fromkeys(("attention", "scaled_dot_product_attention", "sdpa"), "attend")
    found |= {"set_pattern": "integrations.transformers.set_pattern"}
    found |= dict.fromkeys(("LongNetForCausalLM", "LongNetLM", "LongNetModel"), "LongNet(config)")
    found |= {"SlideEncoder": "integrations.torchscale.SlideEncoder", "version": "__version__"}
    found |= {name: f"integrations.{name}" for name in ("torchscale", "transformers")}
    return found | {name: f"testing.{name}" for name in ("check_attention_module", "check_pattern")}
