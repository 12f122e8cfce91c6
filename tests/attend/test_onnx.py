"""ONNX files of models that call attend, run by onnx's evaluator, and calls that the exporter rejects."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks

NEEDS = "needs onnx and onnxscript: make test-onnx"
pytest.importorskip("onnxscript", reason=NEEDS)
reference = pytest.importorskip("onnx.reference", reason=NEEDS)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the exporter warns of torch's and its own names

WINDOW, CAUSAL = masks.local_window(left=8, right=3), masks.causal()
LONGNET = masks.longnet((8, 16), (1, 2)) & CAUSAL
OPEN = tuple({0: torch.export.Dim("batch"), 2: torch.export.Dim("tokens")} for _ in range(3))


class Attends(nn.Module):
    """Module that calls attend, with `sinks` as a parameter."""

    def __init__(self, pattern: Any, sinks: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.pattern, self.options = pattern, options
        self.sinks = None if sinks is None else nn.Parameter(sinks)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return fd.attend(q, k, v, self.pattern, sinks=self.sinks, **self.options)


class Together(nn.Module):
    """All outputs of several modules for the same inputs, as one tuple."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleDict(modules)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = (module(q, k, v) for module in self.each.values())
        return tuple(x for outputs in found for x in (outputs if isinstance(outputs, tuple) else (outputs,)))


def qkv(tokens: int, *, batch: int = 2, heads: int = 4, kv_heads: int = 4, keys: int = 0, width: int = 4) -> tuple:
    generator = torch.Generator().manual_seed(tokens)
    sizes = ((heads, tokens, 8), (kv_heads, keys or tokens, 8), (kv_heads, keys or tokens, width))
    return tuple(torch.randn(batch, *size, generator=generator) for size in sizes)


def export(model: nn.Module, inputs: tuple, **options: Any) -> Any:
    program = torch.onnx.export(model.eval(), inputs, dynamo=True, verbose=False, **options)
    assert program is not None
    return reference.ReferenceEvaluator(program.model_proto)


def assert_computes(file: Any, model: nn.Module, inputs: tuple) -> None:
    """Compare the file's outputs with those of the model on float64 inputs, computed by another engine of `attend`."""
    found = file.run(None, dict(zip(file.input_names, (x.numpy() for x in inputs), strict=True)))
    with torch.no_grad():
        expected = model(*(x.double() if x.is_floating_point() else x for x in inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for index, (one, true) in enumerate(zip(map(torch.from_numpy, found), expected, strict=True)):
        text = f"output {index}: {{}}".format
        assert_close(one, true.to(one.dtype), rtol=1e-4, atol=1e-5, msg=text)


def shifted(score, b, h, q_idx, k_idx):
    return score + (k_idx - q_idx) * 0.125 * (h + 1)


OPEN_CASES: dict[str, nn.Module] = {
    "window": Attends(WINDOW),
    "a mixture counts pairs": Attends(LONGNET),
    "rows without keys, with lse": Attends(~CAUSAL, return_lse=True),
    "sinks, scale, lse": Attends(LONGNET, torch.tensor([0.5, -1.0, 2.0, 0.0]), scale=0.25, return_lse=True),
    "score_mod": Attends(WINDOW, score_mod=shifted),
    "heads of several devices": Attends(masks.dilated(12, 3), head_offset=2, num_heads_global=8),
    "a table of blocks": Attends(masks.block_list([[0], [0, 1], [2]], block=8)),
    "a function": Attends(masks.custom(lambda b, h, q, k: (q - k) % 3 == h % 3) & CAUSAL),
    "each head its own": Attends(masks.per_head([CAUSAL, WINDOW, masks.strided(3), masks.every()])),
}


def test_a_file_with_open_batch_and_length() -> None:
    """All cases in one file, as the exporter takes seconds for each file."""
    model = Together(OPEN_CASES)
    file = export(model, qkv(20), dynamic_shapes=OPEN)
    for inputs in (qkv(20), qkv(33, batch=3), qkv(3)):
        assert_computes(file, model, inputs)


FIXED_CASES = {
    "a grid": (masks.neighborhood((4, 5), (1, 2)), {}, {}),
    "zeros that pad": (masks.longnet((8, 16), (1, 4), padding="zeros"), {}, {}),
    "an order of tokens": (LONGNET, {"layout": masks.layout(LONGNET, 20)}, {}),
    "grouped": (LONGNET, {"enable_gqa": True}, {"kv_heads": 2}),
    "offsets": (WINDOW, {"q_offset": 12, "k_offset": 2}, {"keys": 30}),
}


@pytest.mark.parametrize("name", FIXED_CASES)
def test_a_file_with_fixed_sizes(name: str) -> None:
    pattern, options, sizes = FIXED_CASES[name]
    model, inputs = Attends(pattern, **options), qkv(20, **sizes)
    assert_computes(export(model, inputs), model, inputs)


def test_a_longnet_with_open_length() -> None:
    branches = {"segment_lengths": (8, 32), "dilation_rates": (1, 4), "causal": True}
    model = fd.LongNet(fd.LongNetConfig(vocab_size=64, embed_dim=16, num_heads=4, depth=2, **branches))
    tokens = torch.arange(80).view(2, 40) % 64
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("tokens", max=1 << 12)}
    file = export(model, (tokens,), dynamic_shapes=(sizes,))
    for inputs in (tokens, tokens.view(1, 80)[:, :63]):
        assert_computes(file, model, (inputs,))


REFUSED = {
    "run-time tensors": (Attends(masks.lengths([20, 9])), {}, "an ONNX file takes no run-time tensors: write an AOT"),
    "dropout": (Attends(WINDOW, dropout_p=0.5), {}, "without dropout: call model.eval.., or write dropout_p=0"),
    "a named engine": (Attends(WINDOW, engine="aten"), {}, "leave engine=None; got engine='aten'"),
    "a grid of open length": (
        Attends(masks.neighborhood((4, 5), (1, 2))),
        {"dynamic_shapes": OPEN},
        "open lengths needs a pattern for any number of tokens: export fixed lengths; got neighborhood",
    ),
    "zeros of open length": (
        Attends(masks.longnet((8, 16), (1, 4), padding="zeros")),
        {"dynamic_shapes": OPEN},
        "open lengths takes no padding='zeros': export fixed lengths",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_file_can_hold_is_refused(name: str) -> None:
    model, options, says = REFUSED[name]
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match=f"ValueError.*{says}"):
        torch.onnx.export(model, qkv(20), dynamo=True, verbose=False, **options)
    assert fd.attend(*qkv(20), WINDOW).shape == (2, 4, 20, 4)  # later eager calls still work


def test_the_older_exporter_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"attend is exported to ONNX by .*dynamo=True\); got dynamo=False"):
        torch.onnx.export(Attends(WINDOW), qkv(20), tmp_path / "old.onnx", dynamo=False)


def test_other_exports_keep_the_operator() -> None:
    """An import of torch.onnx does not change the result of torch.export."""
    with warnings.catch_warnings(action="ignore"):
        exported = torch.export.export(Attends(WINDOW).eval(), qkv(20))
    assert "flexdilated.aten" in {str(node.target).removesuffix(".default") for node in exported.graph.nodes}
