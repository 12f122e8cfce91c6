"""Engine "flash" without FlashAttention: what it refuses, in which blocks it computes, what FlexAttention is handed."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.torch_version import TorchVersion

import flexdilated as fd
from bench._catalogue import ENTRIES
from flexdilated import _engine_choice, masks
from flexdilated._attend import checked_call
from flexdilated._validate import Place
from flexdilated.engines import Features, _run
from flexdilated.engines.flex import _flash, _flex_op
from flexdilated.engines.flex._flash import NOT_NVIDIA, capability
from flexdilated.engines.flex._kernel_call import call_kernel, options_text
from flexdilated.masks import Pattern

CUDA = torch.device("cuda")
FLASH = options_text((("BACKEND", "FLASH"),))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An NVIDIA H200 with everything that the engine needs; each may be changed."""
    found = SimpleNamespace(capability=(9, 0), package="4.0.0b36")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.15.0"))
    monkeypatch.setattr(_flash, "_installed_version", lambda: found.package)
    monkeypatch.setattr(_flash, "capability", lambda _: found.capability)
    return found


def cannot(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, sides: tuple[int, ...] = ()) -> str | None:
    return _flash.flash_cannot(CUDA, dtype, head_dim, sides)


def test_capability_is_that_of_nvidia_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr(torch.version, "hip", None)
    assert (capability(CUDA), capability(torch.device("cpu"))) == ((9, 4), NOT_NVIDIA)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert capability(CUDA) == NOT_NVIDIA


NEEDS = "flash needs the package flash-attn-4, 4.0.0b17 or later;"
INSTALL = "pip install --pre \"flash-attn-4>=4.0.0b17\". engine='flex' serves it"
HALF = "flash has kernels for float16 and bfloat16; got"
DIMS = "flash takes head dims that are multiples of 8, 16 to"
PAD = "pad q, k and v with zeros and keep the scale, or engine='flex'"
# (what the device has, what the call asks for, why it cannot).
REASONS: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    *(({"package": package}, {}, None) for package in ("4.0.0b17", "4.0.0", "4.1")),
    ({}, {"dtype": torch.float16}, None),
    ({"package": "4.0.0b16"}, {}, f"{NEEDS} got 4.0.0b16: {INSTALL}"),
    ({"package": None}, {}, f"{NEEDS} it is not installed: {INSTALL}"),
    (
        {"capability": (12, 0)},
        {},
        "flash has kernels with block lists for compute capability 9.x, 10.x, 11.x; got 12.0. engine='flex' serves it",
    ),
    (
        {"capability": NOT_NVIDIA, "torch": "2.13.1"},
        {},
        "flash runs on NVIDIA devices; got tensors on cuda. engine=None chooses an engine for that device",
    ),
    ({"torch": "2.13.1"}, {}, "flash needs torch 2.14 or later; got 2.13.1. engine='flex' serves it"),
    ({}, {"dtype": torch.float32}, f"{HALF} torch.float32. engine='flex' serves it"),
    ({}, {"dtype": torch.float64}, f"{HALF} torch.float64. engine='portable' serves it"),
    *(({"capability": (major, 0)}, {"head_dim": most}, None) for major, most in ((9, 256), (10, 128), (11, 128))),
    ({}, {"head_dim": 8}, f"{DIMS} 256 on capability 9.x; got 8: {PAD}"),
    ({}, {"head_dim": 20}, f"{DIMS} 256 on capability 9.x; got 20: {PAD}"),
    ({}, {"head_dim": 264}, f"{DIMS} 256 on capability 9.x; got 264: {PAD}"),
    ({"capability": (10, 0)}, {"head_dim": 136}, f"{DIMS} 128 on capability 10.x; got 136: {PAD}"),
]


@pytest.mark.parametrize(("has", "asked", "why"), REASONS)
def test_what_it_needs(device, monkeypatch, has, asked, why):
    if "torch" in has:
        monkeypatch.setattr(torch, "__version__", TorchVersion(has["torch"]))
    vars(device).update(has)
    assert cannot(**asked) == why


@pytest.mark.parametrize(
    ("capability", "head_dim", "own", "others", "wrong"),
    [
        ((9, 0), 64, (128, 128), [(256, 128), (384, 128)], [(64, 128), (128, 256), (128, 64)]),
        ((9, 0), 192, (128, 96), [(256, 96)], [(128, 128), (128, 192)]),
        ((9, 0), 256, (128, 64), [(256, 64)], [(128, 128)]),
        ((10, 0), 128, (256, 128), [(512, 128), (256, 256)], [(128, 128), (256, 64)]),
        ((10, 3), 16, (256, 128), [(256, 384)], [(384, 128)]),
    ],
)
def test_sides_of_blocks(device, capability, head_dim, own, others, wrong):
    device.capability = capability
    assert _flash.flash_sides(CUDA, head_dim) == own
    for sides in (own, *others):
        assert cannot(head_dim=head_dim, sides=sides) is None
    keys = f"{own[1]}" if capability[0] == 9 else f"a multiple of {own[1]}"
    for sides in wrong:
        assert cannot(head_dim=head_dim, sides=sides) == (
            f"flash takes blocks of a multiple of {own[0]} queries by {keys} keys on capability {capability[0]}.x "
            f"at head dim {head_dim}; got {sides[0]} by {sides[1]}: take such blocks, or engine='flex'"
        )


@pytest.fixture
def served(device, monkeypatch):
    """Tensors on the CPU pass for some that the engine takes."""
    monkeypatch.setattr(_engine_choice, "flash_cannot", lambda *_: None)
    return device


def test_gradients(served):
    q = torch.randn(1, 2, 8, 8)
    slopes = torch.ones(2, requires_grad=True)

    def sloped(score, b, h, q_idx, k_idx):
        return score + slopes[h] * (q_idx - k_idx)

    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context(), pytest.raises(ValueError, match="flash takes no score_mod of tensors that require a"):
            fd.attend(q, q, q, masks.causal(), engine="flash", score_mod=sloped)
    wants = q.clone().requires_grad_()
    for k, v in ((wants, q), (q, wants)):
        with pytest.raises(ValueError, match=r"only if q requires one: call q.requires_grad_\(\), or write"):
            _engine_choice.choose_engine("flash", q, k, v, masks.causal(), Features(1.0))
        with torch.no_grad():
            assert _engine_choice.choose_engine("flash", q, k, v, masks.causal(), Features(1.0)) == "flash"
    assert _chosen(q.requires_grad_()) == "flash"
    try:
        torch.use_deterministic_algorithms(True)
        with pytest.raises(ValueError, match="on, and flash has no deterministic backward; engine='flex' has"):
            _chosen(q)
        assert _chosen(q.detach()) == "flash"
        torch.use_deterministic_algorithms(True, warn_only=True)
        assert _chosen(q) == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


def _chosen(q: Tensor, engine: str | None = "flash") -> str:
    return _engine_choice.choose_engine(engine, q, q, q, masks.causal(), Features(1.0))


def test_by_name_only(served, monkeypatch):
    monkeypatch.setattr(_engine_choice, "_has_triton", lambda: True)
    assert _chosen(torch.randn(1, 1, 4, 8), None) == "aten"
    elsewhere: Any = SimpleNamespace(is_meta=False, device=CUDA, dtype=torch.bfloat16, shape=(1, 1, 4, 64))
    assert _chosen(elsewhere, None) == "flex"


@pytest.mark.parametrize(("capability", "given", "sides"), [
    ((9, 0), None, (128, 128)), ((10, 0), None, (256, 128)), ((10, 0), (512, 128), (512, 128))
])  # fmt: skip
def test_a_call_has_the_blocks_of_its_device(served, capability, given, sides):
    served.capability = capability
    q = torch.randn(1, 1, 8, 64)
    with patch.object(_run, "flex", return_value=(q, None)) as flex:
        fd.attend(q, q, q, masks.causal(), engine="flash", block_size=given, kernel_options={"NAME": 2})
    assert flex.call_args.args[4].block_size == sides
    assert json.loads(flex.call_args.args[5].kernel_options) == {"BACKEND": "FLASH", "NAME": 2}


def test_tables_of_selected_blocks_have_to_fit(served):
    q = torch.randn(1, 1, 300, 64)
    chosen = torch.zeros(1, 3, 1, dtype=torch.int64)
    pattern = masks.selected_blocks("chosen", block=(128, 256), most=1)
    with (
        patch.object(_flex_op, "flash_cannot", wraps=lambda *given: cannot(sides=given[3])),
        pytest.raises(ValueError, match=r"selected blocks of \(128, 256\): flash takes blocks .* got 128 by 256"),
    ):
        fd.attend(q, q, q, pattern, engine="flash", bindings={"chosen": chosen})


def test_it_runs_whole_sequences(served):
    from flexdilated.engines import placed_engine

    with pytest.raises(ValueError, match="engine='flash' runs whole sequences only"):
        placed_engine("flash", CUDA)
    q = torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match=r"autotune=True needs engine .* got engine='flash'"):
        fd.attend(q, q, q, masks.causal(), engine="flash", autotune=True)


def _handed(
    kernel_options: str, tokens: int, width: int, *, head_dim: int = 64, is_complex: bool = True
) -> dict[str, Any]:
    """What FlexAttention is called with on an accelerator, by tables that list this number of blocks."""
    found: dict[str, Any] = {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, **options: Any):
        found.update(options)
        return q, SimpleNamespace(lse=q[..., 0])

    q, blocks = torch.empty(1, 1, tokens, head_dim, dtype=torch.bfloat16, device="meta"), -(-tokens // 128)
    tables = {}
    for prefix in ("kv", "full_kv", "q", "full_q"):
        tables[f"{prefix}_num_blocks"] = torch.zeros(1, 1, blocks, dtype=torch.int32, device="meta")
        tables[f"{prefix}_indices"] = torch.zeros(1, 1, blocks, width, dtype=torch.int32, device="meta")
    features = Features(1.0, kernel_options=kernel_options)
    mask_mod, sides = (lambda b, h, q, k: q >= k), (128, 128)
    call_kernel(kernel, q, q, q, tables, mask_mod, sides=sides, features=features, is_complex=is_complex)
    return found


def test_flash_is_handed_no_option_of_triton():
    assert _handed(FLASH, 300, 2)["kernel_options"] == {"BACKEND": "FLASH"}
    assert _handed("", 300, 2)["kernel_options"] == {"IS_DIVISIBLE": False, "fwd_num_warps": 8}
    given = options_text((("fwd_num_warps", 4),))
    assert _handed(given, 256, 2)["kernel_options"] == {"IS_DIVISIBLE": True, "fwd_num_warps": 4}
    given = options_text((("num_warps", 4),))
    assert _handed(given, 256, 2)["kernel_options"] == {"IS_DIVISIBLE": True, "num_warps": 4}


@pytest.mark.parametrize("name", ["kv_indices", "full_kv_indices", "q_indices", "full_q_indices"])
def test_lists_of_flash_are_no_longer_than_rows(name):
    """FlashAttention raises for others."""
    assert getattr(_handed(FLASH, 100, 2)["block_mask"], name).shape[-1] == 1
    assert getattr(_handed(FLASH, 300, 2)["block_mask"], name).shape[-1] == 2
    assert getattr(_handed("", 100, 2)["block_mask"], name).shape[-1] == 2


GRIDS = (
    masks.neighborhood((2, 300), kernel_size=(2, 298), stride=(1, 45), causal=(True, False)),
    masks.neighborhood((600,), kernel_size=280, rate=2, stride=31, causal=True),
    masks.neighborhood((2, 300), kernel_size=(2, 29), rate=(1, 2), stride=(1, 5), wrap=True),
    *(masks.neighborhood((1 << 11, 1 << 11, 1 << 6), 3, wrap=wrap) for wrap in (False, True)),  # more than 32 bits
)


@pytest.mark.parametrize("entry", [*ENTRIES, *GRIDS], ids=str)
def test_functions_of_masks_keep_to_what_flash_can_lower(entry):
    """No arithmetic of a captured tensor and a plain number, which has no index in it."""
    rule, heads = entry, 2
    if not isinstance(entry, Pattern):
        heads = max(2, entry.num_heads)
        q = torch.empty(1, heads, 8192, 8)
        pattern = entry.pattern(8192)  # has to live on
        _, call, found, _ = checked_call(q, q, pattern, Place(), None, None)
        rule = call.rules(found)
    for branch in rule.branches():
        mod = branch.mask_mod(num_heads=heads, device=torch.device("meta"))
        index = torch.empty(1, dtype=torch.int32, device="meta")
        nodes = make_fx(mod)(index, index, index, index).graph.nodes
        for node in nodes:
            if node.all_input_nodes and all(given.op == "get_attr" for given in node.all_input_nodes):
                assert not any(isinstance(x, int | float) for x in node.args), node.format_node()


def test_the_page_has_every_engine():
    page = Path(__file__).parents[2].joinpath("docs/concepts/engines.md").read_text(encoding="utf-8")
    assert [name for name in _engine_choice.ENGINES if f"\n| `{name}` |" not in page] == []
