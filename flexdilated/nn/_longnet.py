"""LongNet models: with logits of the next token, with one output per sequence, and from one sequence to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ..masks.core import advises, renamed, require_choice, require_finite, require_int
from ._backbone import LongNetBackbone
from ._longnet_block import residual_scales
from ._longnet_config import OTHER_NAMES, LongNetConfig
from ._pretrained import Pretrained

# B batch, N tokens, M tokens of the source, E embed dim, V vocabulary, C outputs

_HOW = (
    "write fd.LongNet(fd.LongNetConfig(vocab_size=256, embed_dim=512, depth=12, num_heads=8, "
    "segment_lengths=(2048, 4096), dilation_rates=(1, 2)))"
)
POOLINGS = ("mean", "first", "last")


class LongNet(LongNetBackbone):
    """Language model: a `LongNetBackbone` and, unless config.vocab_size is None, a projection of features to logits.

    `forward` takes the arguments of `LongNetBackbone.forward`, and returns logits (B, N, V) of the next tokens, or
    features (B, N, E) if vocab_size is None.

    options: keyword arguments of `LongNetBackbone`.

    Source: LongNet, arXiv 2307.02486.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    >>> fd.LongNet(config)(torch.randint(256, (1, 300))).shape
    torch.Size([1, 300, 256])

    A bidirectional encoder of embedded inputs with a local window as its pattern:

    >>> sizes = {"vocab_size": None, "embed_dim": 64, "depth": 2, "num_heads": 4}
    >>> encoder = fd.LongNet(fd.LongNetConfig(**sizes, causal=False, pattern=masks.local_window(left=31, right=31)))
    >>> encoder(torch.randn(1, 300, 64)).shape
    torch.Size([1, 300, 64])
    """

    @advises(
        keywords=dict.fromkeys((*(each.name for each in fields(LongNetConfig)), *OTHER_NAMES), _HOW),
        how=_HOW,
    )
    def __init__(self, config: LongNetConfig, **options: Any) -> None:
        super().__init__(config, **options)
        self.head: nn.Linear | None = None
        if self.embedding is not None and not config.tie_embeddings:
            weight = self.embedding.weight
            self.head = nn.Linear(
                config.embed_dim, weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype
            )
            nn.init.normal_(self.head.weight, std=0.1 * config.embed_dim**-0.5)  # logits near 0

    @advises(
        keywords={
            **renamed(max_new_tokens="max_length max_tokens num_tokens length", stop="eos_token_id eos"),
            "do_sample": "temperature=0 takes the most likely token",
        },
        how="write model.generate(tokens, max_new_tokens=100)",
    )
    @torch.no_grad()
    def generate(
        self,
        tokens: Int64[Tensor, "B N"],
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        stop: int | None = None,
        prefill_chunk: int = 8192,
        memory: Float[Tensor, "B M E_memory"] | None = None,
        memory_padding_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Int64[Tensor, "B N_plus_new"]:
        """Return `tokens` followed by at most max_new_tokens new tokens, drawn one by one from the model's logits.

        temperature: divisor of the logits; 0 takes the most likely token.
        top_k: draw only from the k most likely tokens; None for all.
        top_p: draw only from the most likely tokens that together reach probability p; None for all. With both, top_p
            applies to the tokens that top_k keeps.
        generator: source of randomness, on the model's device; None is torch's default.
        stop: token id that ends a sequence: after its first new `stop` a sequence contains only `stop`, and once every
            sequence has drawn it, the result ends; None for no such token.
        prefill_chunk: tokens of the prompt per forward pass, which bounds memory.
        memory, memory_padding_mask: as in `forward`.

        Raises ValueError or TypeError, before any token is drawn, for a model that is not causal, has no vocabulary or
        has a mesh, for a pattern that `KVCache` does not take, for an empty prompt, for more tokens than the model has
        positions, and for invalid values.
        """
        if self.config.vocab_size is None or not self.config.causal:
            raise ValueError(
                "generate needs a causal model with a vocabulary; "
                f"got vocab_size={self.config.vocab_size}, causal={self.config.causal}"
            )
        self._check_one_rank("generate")
        self._check_input(tokens)
        if not tokens.shape[1]:
            raise ValueError(f"generate needs a token to begin with; got shape {tuple(tokens.shape)}")
        require_int("max_new_tokens", max_new_tokens, minimum=0)
        if max_new_tokens:
            of = f": {tokens.shape[1]} of the prompt, and all but the last of max_new_tokens={max_new_tokens}"
            self.config.check_num_tokens(tokens.shape[1] + max_new_tokens - 1, of)
        sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        caches, read = self.new_caches(), self.project_memory(memory, memory_padding_mask)

        def next_logits(following: Tensor) -> Tensor:
            return self._outputs(self.features(following, caches, memory=read)[:, -1])

        options = {"max_new_tokens": max_new_tokens, "prefill_chunk": prefill_chunk}
        return torch.cat([tokens, generate(next_logits, tokens, sampling, stop=stop, **options)], dim=1)

    def _outputs(self, x: Float[Tensor, "... E"]) -> Tensor:
        """Return logits (..., V) of the features x, or x in a model without a vocabulary."""
        if self.head is not None:
            return self.head(x)
        return x if self.embedding is None else F.linear(x, self.embedding.weight)


@advises(keywords=renamed(num_outputs="num_classes num_labels"))
class LongNetClassifier(Pretrained):
    """A `LongNetBackbone` with one output vector (num_outputs,) per sequence: logits of classes, or numbers to regress.

    num_outputs: number of classes, or of numbers.
    pooling: features from which the outputs are projected: "mean" is the mean over the tokens that are not padding;
        "first" and "last" take the first or last of these tokens.

    >>> config = fd.LongNetConfig(
    ...     vocab_size=None, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
    ... )
    >>> fd.LongNetClassifier(config, 3)(torch.randn(2, 300, 64)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        config: LongNetConfig,
        num_outputs: int,
        *,
        pooling: str = "mean",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_outputs = require_int("num_outputs", num_outputs, minimum=1)
        self.pooling = require_choice("pooling", pooling, POOLINGS)
        self.backbone = LongNetBackbone(config, device=device, dtype=dtype)
        self.head = nn.Linear(config.embed_dim, num_outputs, device=device, dtype=dtype)
        nn.init.normal_(self.head.weight, std=0.1 * config.embed_dim**-0.5)
        nn.init.zeros_(self.head.bias)

    def made_of(self) -> dict[str, Any]:
        return {"config": self.backbone.config, "num_outputs": self.num_outputs, "pooling": self.pooling}

    def forward(
        self,
        tokens: Int64[Tensor, "B N"] | Float[Tensor, "B N E"],
        *,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
        bindings: Mapping[str, Tensor] | None = None,
    ) -> Float[Tensor, "B C"]:
        """Return outputs (B, num_outputs) of sequences of token ids, or of embedded inputs.

        key_padding_mask: True for padding, which is neither attended to nor pooled; each sequence needs at least one
            other token, which is not checked.
        bindings: as in `LongNetBackbone.forward`.

        Raises ValueError or TypeError as `LongNetBackbone.forward`, and ValueError for sequences of 0 tokens.
        """
        x = self.backbone(tokens, key_padding_mask=key_padding_mask, bindings=bindings)
        if not x.shape[1]:
            raise ValueError(f"a sequence needs a token to be pooled; got shape {tuple(tokens.shape)}")
        return self.head(self._pool(x, key_padding_mask))

    def _pool(self, x: Float[Tensor, "B N E"], padding: Tensor | None) -> Float[Tensor, "B E"]:
        if padding is None:
            return x.mean(1) if self.pooling == "mean" else x[:, 0 if self.pooling == "first" else -1]
        real = ~padding if padding.dtype == torch.bool else padding == 0
        if self.pooling == "mean":
            # Padding is masked by selection: multiplied by 0, features that are NaN would stay NaN.
            total = torch.where(real[..., None], x, 0).sum(1)
            return total / real.sum(1, keepdim=True).clamp(min=1).to(x.dtype)
        place = torch.arange(x.shape[1], device=x.device)
        chosen = torch.where(real, place, -1).amax(1) if self.pooling == "last" else real.int().argmax(1)
        return x[torch.arange(len(x), device=x.device), chosen]


@advises()
class LongNetEncoderDecoder(Pretrained):
    """Sequence-to-sequence model: the decoder's blocks attend to the decoder's tokens and to the encoder's features.

    encoder, decoder: configurations; the encoder's has causal=False, the decoder's causal=True and a vocab_size. The
        self-attention of each uses the branches or the pattern of its own configuration, without run-time tensors; in
        cross-attention every token of the decoder attends to all tokens of the encoder that are not padding.

    Raises TypeError or ValueError for other configurations.
    Source: Attention Is All You Need, arXiv 1706.03762, section 3.2.3.

    >>> sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "segment_lengths": (64, 256), "dilation_rates": (1, 4)}
    >>> encoder = fd.LongNetConfig(vocab_size=256, causal=False, **sizes)
    >>> model = fd.LongNetEncoderDecoder(encoder, fd.LongNetConfig(vocab_size=100, **sizes))
    >>> model(torch.randint(256, (1, 300)), torch.randint(100, (1, 40))).shape
    torch.Size([1, 40, 100])
    """

    def __init__(
        self,
        encoder: LongNetConfig,
        decoder: LongNetConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, config, causal in (("encoder", encoder, False), ("decoder", decoder, True)):
            if not isinstance(config, LongNetConfig):
                raise TypeError(f"{name} must be a LongNetConfig; got {type(config).__name__}")
            if config.causal != causal:
                raise ValueError(f"the {name} must have causal={causal}; got causal={config.causal}")
            if config.attention_pattern.varies:
                raise ValueError(
                    f"the {name} must have a pattern without run-time tensors, as its calls pass none; got "
                    f"{config.attention_pattern!r}"
                )
        if decoder.vocab_size is None:
            raise ValueError("the decoder must have a vocabulary; got vocab_size=None")
        factory = {"device": device, "dtype": dtype}
        scales = residual_scales(encoder, decoder_depth=decoder.depth)
        self.encoder = LongNetBackbone(encoder, scales=scales, **factory)
        scales = residual_scales(decoder, encoder_depth=encoder.depth)
        self.decoder = LongNet(decoder, memory_dim=encoder.embed_dim, scales=scales, **factory)

    def made_of(self) -> dict[str, Any]:
        return {"encoder": self.encoder.config, "decoder": self.decoder.config}

    def forward(
        self,
        source: Int64[Tensor, "B M"] | Float[Tensor, "B M E"],
        tokens: Int64[Tensor, "B N"],
        *,
        source_padding_mask: Bool[Tensor, "B M"] | None = None,
        key_padding_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N V"]:
        """Return logits (B, N, V) of the token that follows each of `tokens`, the decoder's input.

        source: token ids or embedded inputs of the encoder.
        source_padding_mask, key_padding_mask: True for padding of `source` and of `tokens`, to which no token attends;
            None for no padding.
        """
        memory = self.encoder(source, key_padding_mask=source_padding_mask)
        given = {"memory": memory, "memory_padding_mask": source_padding_mask}
        return self.decoder(tokens, key_padding_mask=key_padding_mask, **given)

    @torch.no_grad()
    def generate(
        self,
        source: Int64[Tensor, "B M"] | Float[Tensor, "B M E"],
        tokens: Int64[Tensor, "B N"],
        *,
        source_padding_mask: Bool[Tensor, "B M"] | None = None,
        **options: Any,
    ) -> Int64[Tensor, "B N_plus_new"]:
        """Return `tokens` followed by new tokens, drawn from the decoder, which attends to the encoded source.

        source_padding_mask: True for padding of the source; None for no padding.
        options: keyword arguments of `LongNet.generate`, except memory and memory_padding_mask.
        """
        memory = self.encoder(source, key_padding_mask=source_padding_mask)
        given = {"memory": memory, "memory_padding_mask": source_padding_mask}
        return self.decoder.generate(tokens, **given, **options)


NextLogits = Callable[[Int64[Tensor, "B N"]], Float[Tensor, "B V"]]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options to draw the next token from its logits, as in `LongNet.generate`; validated on construction."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if require_finite("temperature", self.temperature) < 0:
            raise ValueError(f"temperature must be at least 0; got temperature={self.temperature}")
        if self.top_k is not None:
            require_int("top_k", self.top_k, minimum=1)
        if self.top_p is not None and not 0 < require_finite("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got top_p={self.top_p}")

    def draw(self, logits: Float[Tensor, "B V"]) -> Int64[Tensor, " B"]:
        """Return one token id per sequence, drawn from the logits; the most likely one if temperature is 0."""
        if self.temperature == 0:
            return logits.argmax(-1)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        likely, tokens = wide.sort(dim=-1, descending=True)
        # Subtracting the largest logit avoids overflow at any temperature.
        temperature = max(self.temperature, torch.finfo(wide.dtype).tiny)
        probabilities = ((likely - likely[:, :1]) / temperature).softmax(-1)
        if self.top_k is not None:
            probabilities[:, self.top_k :] = 0
        if self.top_p is not None:
            before = probabilities.cumsum(-1) - probabilities
            beyond = before >= self.top_p * probabilities.sum(-1, keepdim=True)
            probabilities[:, 1:][beyond[:, 1:]] = 0
        drawn = torch.multinomial(probabilities, 1, generator=self.generator)
        return tokens.gather(-1, drawn).squeeze(-1)


def generate(
    next_logits: NextLogits,
    tokens: Int64[Tensor, "B N"],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    stop: int | None = None,
    prefill_chunk: int = 8192,
) -> Int64[Tensor, "B new"]:
    """Return only the new tokens, drawn one by one, that follow `tokens`.

    Their number is max_new_tokens, or less if all sequences have drawn `stop` earlier.

    stop: after its first new `stop` a sequence contains only `stop`; None for no such token.
    next_logits: function that takes the next tokens (B, n) and returns the logits (B, V) of the token after them; it
        must remember the tokens of earlier calls. It is called with the prompt in chunks of prefill_chunk tokens, then
        with each new token except the last.
    """
    require_int("prefill_chunk", prefill_chunk, minimum=1)
    if stop is not None:
        require_int("stop", stop, minimum=0)
    new = tokens.new_empty(tokens.shape[0], 0)
    if max_new_tokens == 0:
        return new
    *earlier, ahead = tokens.split(prefill_chunk, dim=1)
    for chunk in earlier:
        next_logits(chunk)
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    while True:
        token = sampling.draw(next_logits(ahead))
        if stop is not None:
            token = token.masked_fill(stopped, stop)
            stopped = stopped | (token == stop)
        ahead = token.unsqueeze(1)
        new = torch.cat([new, ahead], dim=1)
        if new.shape[1] == max_new_tokens or (stop is not None and bool(stopped.all())):
            return new
