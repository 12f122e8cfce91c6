"""Configuration of a LongNet encoder, and its translation from torchscale's EncoderConfig."""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from ..._engine_choice import check_engine
from ...masks import Mixture, Pattern, longnet
from ...masks.core import require_choice, require_finite, require_int, require_probability

MERGE_GRADS = ("exact", "detached")


@dataclass(frozen=True)
class LongNetEncoderConfig:
    """Configuration of a `LongNetEncoder`: plain data, validated on construction.

    embed_dim, depth, num_heads, ffn_dim: sizes; num_heads divides embed_dim; ffn_dim None is 4 * embed_dim.
    segment_lengths, dilation_rates: the branches; lengths are in tokens. Every head has all branches, with the offsets
        that `masks.longnet` calls "contiguous".
    padding: None for LongNet's attention as defined. "zeros" reproduces torchscale, for its checkpoints: zero keys take
        part in the softmax, and if a branch's rate does not divide its segment length, outputs after the first segment
        are shifted to later tokens.
    merge_grad: "exact", or "detached": the weights that merge the branches have no gradient, as in torchscale.
    norm_eps: epsilon of all layer norms.
    final_norm: True for a layer norm after the last layer.
    dropout: probability, in training, of zeroing an element of the input, and of the output of each attention and
        feed-forward.
    attention_dropout: probability, in training, of dropping an attention weight.
    activation_dropout: probability, in training, of zeroing an element inside the feed-forward, after its activation.
    drop_path: probability, in training, that a batch entry skips the attention, or the feed-forward, of the last layer;
        it grows linearly from 0 at the first layer, so it has no effect with depth 1.
    engine: as in `attend`.

    Raises ValueError or TypeError for values that are out of range or do not fit together.

    >>> from flexdilated.integrations.torchscale import LongNetEncoderConfig
    >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4}
    >>> LongNetEncoderConfig(**sizes, segment_lengths=(64, 256), dilation_rates=(1, 4)).ffn_dim
    256
    """

    embed_dim: int
    depth: int
    num_heads: int
    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    ffn_dim: int | None = None
    padding: str | None = None
    merge_grad: str = "exact"
    norm_eps: float = 1e-5
    final_norm: bool = True
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    drop_path: float = 0.0
    engine: str | None = None

    def __post_init__(self) -> None:
        for name in ("embed_dim", "depth", "num_heads"):
            require_int(name, getattr(self, name), minimum=1)
        if self.embed_dim % self.num_heads:
            raise ValueError(f"num_heads must divide embed_dim; got {self.num_heads} heads and {self.embed_dim}")
        hidden = 4 * self.embed_dim if self.ffn_dim is None else self.ffn_dim
        object.__setattr__(self, "ffn_dim", require_int("ffn_dim", hidden, minimum=1))
        for name in ("segment_lengths", "dilation_rates"):
            value = getattr(self, name)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        _ = self.pattern  # which checks the branches
        require_choice("merge_grad", self.merge_grad, MERGE_GRADS)
        if require_finite("norm_eps", self.norm_eps) <= 0:
            raise ValueError(f"norm_eps must be above 0; got {self.norm_eps}")
        for name in ("dropout", "attention_dropout", "activation_dropout", "drop_path"):
            require_probability(name, getattr(self, name))
        check_engine(self.engine)

    @property
    def pattern(self) -> Pattern | Mixture:
        """Pattern of every layer: `masks.longnet` with these branches and this padding."""
        return longnet(self.segment_lengths, self.dilation_rates, offsets="contiguous", padding=self.padding)

    @classmethod
    def from_torchscale(cls, config: Mapping[str, Any], **changes: Any) -> Self:
        """Make a configuration from options of torchscale's EncoderConfig; missing options have that class's defaults.

        config: options by name, from its JSON or `vars(args)`; segment_length and dilated_ratio, which are required,
            may be strings, such as "[1024, 2048]".
        changes: fields of this class that override the translation; padding is otherwise "zeros" and merge_grad
            "exact".

        Raises ValueError that names every option that is required and missing, unknown, or not supported; also
        ValueError or TypeError for values that the class refuses.
        """
        given = dict(config)
        refused = [
            f"{name}={given[name]!r} (available: {only!r})"
            for name, only in _ONLY_SUPPORTED.items()
            if given.get(name, only) != only
        ]
        if (given.get("vocab_size") or 0) > 0 and not given.get("no_output_layer", False):
            refused.append("vocab_size above 0 without no_output_layer=True: an output projection is not available")
        if (given.get("rel_pos_buckets") or 0) > 0 and (given.get("max_rel_pos") or 0) > 0:
            refused.append("rel_pos_buckets and max_rel_pos above 0: relative positions are not available")
        refused += [f"{name}, which EncoderConfig does not have" for name in given if name not in _KNOWN]
        refused += [f"{name}, which a LongNet needs" for name in _BRANCHES if not given.get(name)]
        if refused:
            raise ValueError(f"a LongNetEncoder cannot be made from this config: {'; '.join(refused)}")
        fields = {own: given.get(name, default) for own, (name, default) in _OPTIONS.items()}
        branches = {own: _integers_from(name, given[name]) for name, own in _BRANCHES.items()}
        return cls(**{**fields, **branches, "padding": "zeros", **changes})


# field of our configuration -> (torchscale's option, its default)
_OPTIONS: dict[str, tuple[str, Any]] = {
    "embed_dim": ("encoder_embed_dim", 768),
    "num_heads": ("encoder_attention_heads", 12),
    "ffn_dim": ("encoder_ffn_embed_dim", 3072),
    "depth": ("encoder_layers", 12),
    "final_norm": ("normalize_output", True),
    "norm_eps": ("layernorm_eps", 1e-5),
    "dropout": ("dropout", 0.0),
    "attention_dropout": ("attention_dropout", 0.0),
    "activation_dropout": ("activation_dropout", 0.0),
    "drop_path": ("drop_path_rate", 0.0),
}
_BRANCHES = {"segment_length": "segment_lengths", "dilated_ratio": "dilation_rates"}
# torchscale's option -> the only supported value, which is also the default
_ONLY_SUPPORTED: dict[str, Any] = {
    "activation_fn": "gelu",
    "deepnorm": False,
    "layernorm_embedding": False,
    "moe_freq": 0,
    "multiway": False,
    "no_scale_embedding": True,
    "seq_parallel": False,
    "subln": True,
    "xpos_rel_pos": False,
}
# These affect only execution or initialization, belong to options above, or are overridden by them, as
# encoder_normalize_before by subln. block_shift is in Prov-GigaPath's configs but unused there.
_WITHOUT_EFFECT = (
    *("encoder_normalize_before", "vocab_size", "no_output_layer", "rel_pos_buckets", "max_rel_pos", "flash_attention"),
    *("moe_top1_expert", "moe_expert_count", "moe_gating_use_fp32", "moe_eval_capacity_token_fraction", "use_xmoe"),
    *("moe_second_expert_policy", "moe_normalize_gate_prob_before_dropping", "bert_init", "block_shift"),
    *("share_encoder_input_output_embed", "max_source_positions", "img_size", "patch_size", "in_chans"),
    *("checkpoint_activations", "fsdp", "ddp_rank", "xpos_scale_base"),
)
_KNOWN = {*_ONLY_SUPPORTED, *_WITHOUT_EFFECT, *_BRANCHES, *(name for name, _ in _OPTIONS.values())}


def _integers_from(name: str, value: Any) -> tuple[int, ...]:
    """Convert a list of integers, or its text such as "[1024, 2048]", to a tuple.

    Raises ValueError for values that cannot be converted. name: name of the option in this error.
    """
    try:
        read = literal_eval(value) if isinstance(value, str) else value
        numbers = tuple(map(int, read))
        if any(number != float(one) for number, one in zip(numbers, read, strict=True)):
            raise ValueError(f"{read!r} has fractions")
        return numbers
    except (SyntaxError, TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name} must be a list of integers, or a text such as '[1024, 2048]'; got {value!r:.200}"
        ) from None


_MAX_NAMED_KEYS = 12


def load(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load a state_dict into a module.

    Raises ValueError, before any change, if a key is missing or unknown, or a tensor has another shape.
    """
    own = module.state_dict()
    sizes = {name: (tuple(state_dict[name].shape), tuple(own[name].shape)) for name in own if name in state_dict}
    faults = {
        "missing": [name for name in own if name not in state_dict],
        "foreign": [name for name in state_dict if name not in own],
        "misshapen": [f"{name} {got} for {needed}" for name, (got, needed) in sizes.items() if got != needed],
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {kind}: {_names_text(names)}" for kind, names in faults.items() if names)
        raise ValueError(f"the state_dict must have exactly the parameters of {type(module).__name__}; {listed}")
    module.load_state_dict(dict(state_dict))


def _names_text(names: list[str]) -> str:
    more = len(names) - _MAX_NAMED_KEYS
    return ", ".join(names[:_MAX_NAMED_KEYS]) + (f" and {more} more" if more > 0 else "")
