"""Modules come back the same, copied, pickled, saved and in folders; no derivative of a model passes a tie."""

import copy
import json
import pickle
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.testing import assert_close

import flexdilated as fd
from flexdilated import masks
from flexdilated.integrations.torchscale import LongNetEncoder, LongNetEncoderConfig
from tests.support.longnet_oracle import TINY
from tests.support.ties import NoTies, tied

PATTERN = masks.longnet([8, 16], [2, 4]) & masks.causal()
BY_PATTERN = {"segment_lengths": None, "dilation_rates": None, "pattern": masks.local_window(left=5, right=0)}
ENCODER = replace(TINY, causal=False, depth=1)
SELECTION = fd.SelectedLayers(block=8, most=2, layers=(0,), always="chunked(8)", gradient="bias")
TOKENS = torch.randint(TINY.vocab_size, (2, 37), generator=torch.Generator().manual_seed(5))
QKV = tuple(torch.randn(3, 2, 4, 37, 8, generator=torch.Generator().manual_seed(5)))
X = torch.randn(3, 11, 12, generator=torch.Generator().manual_seed(5))
MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[torch.Tensor, ...]]] = {
    "BlockSparseAttention": (
        lambda: fd.BlockSparseAttention(PATTERN, sinks=True, num_heads=4, scale=0.5, block_size=(16, 32)),
        QKV,
    ),
    "DilatedAttention": (lambda: fd.DilatedAttention((8, 16), (1, 2), True, scale=0.5), QKV),
    "Multihead": (lambda: fd.MultiheadDilatedAttention(12, 2, (4,), (1,)), (X, X, X)),
    "LongNet": (
        lambda: fd.LongNet(replace(TINY, tie_embeddings=True, num_kv_heads=2, position="learned", max_positions=40)),
        (TOKENS,),
    ),
    "LongNet in residue order": (lambda: fd.LongNet(replace(TINY, layout="residue")), (TOKENS,)),
    "LongNet by a pattern": (lambda: fd.LongNet(replace(TINY, **BY_PATTERN)), (TOKENS,)),
    "LongNet that selects": (lambda: fd.LongNet(replace(TINY, selection=SELECTION)), (TOKENS,)),
    "LongNetBackbone": (lambda: fd.LongNetBackbone(replace(TINY, bias=True, subln=True)), (TOKENS,)),
    "LongNetClassifier": (lambda: fd.LongNetClassifier(TINY, 3, pooling="last"), (TOKENS,)),
    "LongNetEncoderDecoder": (
        lambda: fd.LongNetEncoderDecoder(ENCODER, TINY, dtype=torch.bfloat16),
        (TOKENS[:, :31], TOKENS[:, :12]),
    ),
}


@pytest.mark.parametrize(("make", "inputs"), MODULES.values(), ids=MODULES)
def test_a_module_comes_back_the_same(make, inputs, tmp_path: Path) -> None:
    def answer(each: nn.Module) -> Any:
        out = each(*inputs)
        return out[0] if isinstance(out, tuple) else out

    torch.manual_seed(0)
    module, other = make().eval(), make().eval()
    for parameter in module.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    expected, again = answer(module), [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    torch.save(module.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    if hasattr(module, "save_pretrained"):
        folder = tmp_path / "new" / "folder"
        module.save_pretrained(folder)
        again.append(type(module).from_pretrained(folder))
        assert again[-1].made_of() == module.made_of()
        wide = type(module).from_pretrained(folder, dtype=torch.float64)
        assert {each.dtype for each in wide.parameters()} == {torch.float64}
    if isinstance(config := getattr(module, "config", None), fd.LongNetConfig):
        assert fd.LongNetConfig(**json.loads(json.dumps(asdict(config)))) == config
    for each in (*again, other):
        assert not each.training
        assert {x.dtype for x in each.parameters()} == {x.dtype for x in module.parameters()}
        assert_close(answer(each), expected, rtol=0, atol=0)
    if parameters := tuple(again[-1].train().parameters()):  # it is a module like any other
        answer(again[-1]).float().square().mean().backward()
        assert all(parameter.grad is not None for parameter in parameters)


def test_bad_folders_are_named(tmp_path: Path) -> None:
    model = fd.LongNet(TINY)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is of a LongNet: call LongNet.from_pretrained; got LongNetClassifier"):
        fd.LongNetClassifier.from_pretrained(tmp_path)
    weights, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    wrong = {name: each for name, each in weights.items() if name != "norm.weight"}
    wrong |= {"stranger": torch.ones(1), "blocks.0.qkv.weight": torch.ones(2, 3)}
    save_file(wrong, tmp_path / "model.safetensors")
    named = r"norm.weight is missing; stranger is unknown; blocks.0.qkv.weight has shape \(2, 3\) instead of \(72, 24\)"
    with pytest.raises(ValueError, match=named):
        fd.LongNet.from_pretrained(tmp_path)
    for changed, says in (
        ({**config, "arguments": {**config["arguments"], "rate": 3}}, "arguments that LongNet does not know: rate"),
        ({**config, "arguments": {"config": {**config["arguments"]["config"], "speed": 3}}}, "does not know: speed"),
        ({"model": "LongNet"}, "must be as save_pretrained writes it"),
        ([], "must be as save_pretrained writes it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=says):
            fd.LongNet.from_pretrained(tmp_path)


def test_without_safetensors_it_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr("flexdilated.nn._pretrained.import_module", missing)
    for call in (fd.LongNet(TINY).save_pretrained, fd.LongNet.from_pretrained):
        with pytest.raises(ImportError, match=r"pip install 'flexdilated\[pretrained\]'"):
            call(tmp_path)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "model.backbone.", "model._orig_mod."])
def test_weights_that_a_wrapper_named(prefix, tmp_path: Path) -> None:
    """The error says how to strip the prefix, which then loads; a prefix of some weights alone is torch's error."""
    model = fd.LongNet(TINY)
    named = {f"{prefix}{name}": each for name, each in model.state_dict().items()}
    says = f"each begins with '{prefix}', .*: load {{name.removeprefix"
    with pytest.raises(ValueError, match=says):
        model.load_state_dict(named)
    model.load_state_dict({name.removeprefix(prefix): each for name, each in named.items()})
    model.save_pretrained(tmp_path)
    save_file(named, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=says):
        fd.LongNet.from_pretrained(tmp_path)
    named["norm.weight"] = named.pop(f"{prefix}norm.weight")
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(named)
    assert model.load_state_dict(named, strict=False).unexpected_keys


TIED: Any = {"embed_dim": 16, "depth": 2, "num_heads": 4, "segment_lengths": (8, 16), "dilation_rates": (1, 2)}


def finite_gradients(module: nn.Module, *inputs: Tensor, **options: Any) -> None:
    """Calls the module under the watch, with all weights -1, 0 or 1, and asserts that its gradients are finite."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randint(-1, 2, weight.shape, generator=generator))
    with NoTies():
        out = module(*inputs, **options)
    out = out[0] if isinstance(out, tuple) else out
    for grad in torch.autograd.grad(out.sin().sum(), (*inputs, *module.parameters()), allow_unused=True):
        assert grad is None or grad.isfinite().all()


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("norms", [{}, {"subln": True}, {"deepnorm": True}], ids=["plain", "subln", "deepnorm"])
def test_classifiers(pooling, norms):
    """One of the sequences is padding but for a token."""
    config = fd.LongNetConfig(**TIED, **norms, vocab_size=None, causal=False)
    padding = torch.arange(21) >= torch.tensor([[21], [1]])
    module = fd.LongNetClassifier(config, 3, pooling=pooling, dtype=torch.float64)
    finite_gradients(module, tied(2, 21, 16, seed=0), key_padding_mask=padding)


def test_other_modules():
    x, y = tied(2, 21, 16, seed=0), tied(2, 4, 21, 4, seed=1)
    finite_gradients(fd.MultiheadDilatedAttention(16, 4, (8, 16), (1, 2), batch_first=True, dtype=x.dtype), x, x, x)
    finite_gradients(fd.BlockSparseAttention(masks.longnet([8, 16], [1, 2])), y, y, y)
    finite_gradients(LongNetEncoder(LongNetEncoderConfig(**TIED)).double(), x)
