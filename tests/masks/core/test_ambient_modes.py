"""Plans under any mode of torch: made cold in one, they are those made without it, and serve calls outside of it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import flexdilated as fd
from flexdilated import masks

H, N, D = 2, 40, 8


class NoTensors(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        assert not isinstance(found, Tensor), f"planning called {func}"
        return found


class NoOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"planning dispatched {func}")


@contextmanager
def default(setting: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    setting(value)
    try:
        yield
    finally:
        setting(before)


@contextmanager
def level(enter: Callable[..., Any], leave: Callable[[], Any], *arguments: Any) -> Iterator[None]:
    enter(*arguments)
    try:
        yield
    finally:
        leave()


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fake": FakeTensorMode,
    "fake beside real": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "dispatch mode": NoOperations,
    "function mode": NoTensors,
    "device context": lambda: torch.device("meta"),
    "default device": lambda: default(torch.set_default_device, "meta", None),
    "float64": lambda: default(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: default(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "deterministic": lambda: default(torch.use_deterministic_algorithms, True, False),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "vmap": lambda: level(_functorch._vmap_increment_nesting, _functorch._vmap_decrement_nesting, 2, "error"),
    "grad": lambda: level(_functorch._grad_increment_nesting, _functorch._grad_decrement_nesting),
    "jvp": lambda: level(_functorch._jvp_increment_nesting, _functorch._jvp_decrement_nesting),
}
# These change, or forbid, what a call itself computes with a caller's tensors.
OTHER_RESULTS = ("fake", "fake beside real", "dispatch mode", "function mode", "autocast")
PATTERNS = [
    masks.longnet([8, 16], [1, 2]) & masks.causal(),
    masks.local_window(left=5, right=3) | masks.global_tokens(2),
    masks.strided(4),
    masks.random_blocks(N, block=4, count=2, seed=1) & masks.causal(),
    masks.custom(lambda b, h, q, k: (q - k) % 3 == 0),
    masks.longnet([8, 16], [1, 2]).per_document(torch.tensor([0] * 15 + [1] * 25)),
]


def blocks(pattern: Any) -> list[Any]:
    mask = masks.block_mask(pattern, N, num_heads=H, block_size=8)
    return [mask.kv_num_blocks.tolist(), mask.kv_indices.tolist()]


QKV = torch.randn(3, 1, H, N, D, generator=torch.Generator().manual_seed(0), device="cpu").unbind()
# What tells of a pattern, and reads no tensor of the caller's but run-time ones.
TELLING: dict[str, Callable[[Any], Any]] = {
    "describe": lambda pattern: str(masks.describe(pattern, N, num_heads=H)),
    "explain": lambda pattern: str(masks.explain(pattern, query=17, key=5, num_heads=H, num_tokens=N)),
    "block_mask": blocks,
    "attend": lambda pattern: fd.attend(*QKV, pattern).flatten().tolist(),
}


@cache
def without_a_mode(entry: str, pattern: int) -> Any:
    masks.cache().clear()
    return TELLING[entry](PATTERNS[pattern])


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cache = fd.KVCache(PATTERNS[0], num_heads=H)
    return torch.cat(
        [cache.attend(*(x[:, :, at] for x in (q, k, v))) for at in (slice(0, 30), slice(30, 37), slice(37, N))], 2
    )


CONFIG = fd.LongNetConfig(
    vocab_size=11, embed_dim=16, num_heads=H, depth=1, segment_lengths=[8, 16], dilation_rates=[1, 2], causal=True
)
torch.manual_seed(0)
MODULE, LONGNET = fd.MultiheadDilatedAttention(16, H, [8], [2], batch_first=True), fd.LongNet(CONFIG)
TOKENS, FEATURES = torch.arange(N)[None] % 11, torch.randn(1, N, 16)
# What computes: the call, and its tensors.
COMPUTING: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "attend": (lambda q, k, v: fd.attend(q, k, v, PATTERNS[4]), QKV),
    "KVCache": (cached, QKV),
    "MultiheadDilatedAttention": (lambda x: MODULE(x, x, x)[0], (FEATURES,)),
    "LongNet": (LONGNET, (TOKENS,)),
}


@cache
@torch.no_grad()
def computed(name: str) -> Tensor:
    call, tensors = COMPUTING[name]
    masks.cache().clear()
    return call(*tensors)


@pytest.mark.parametrize("mode", list(MODES))
def test_a_mode_changes_nothing_that_is_planned(mode: str) -> None:
    """Every mode meets every entry and every pattern; over all modes, every entry meets every pattern."""
    place = [*MODES].index(mode)
    for number, entry in enumerate(TELLING):
        pattern = (number + place) % len(PATTERNS)
        expected = without_a_mode(entry, pattern)
        masks.cache().clear()
        if entry != "attend" or mode not in OTHER_RESULTS:
            with MODES[mode]():
                assert TELLING[entry](PATTERNS[pattern]) == expected, entry
            assert TELLING[entry](PATTERNS[pattern]) == expected, entry
    for number in (place, place + 1 + place // 4) if mode not in OTHER_RESULTS else ():
        name = [*COMPUTING][number % 4]
        (call, tensors), expected = COMPUTING[name], computed(name)
        masks.cache().clear()
        with torch.no_grad():
            with MODES[mode]():
                call(*tensors)
            assert_close(call(*tensors), expected)


@pytest.mark.parametrize("name", COMPUTING)
def test_fake_tensors_go_through_cold(name: str) -> None:
    """Shapes and dtypes of real ones; and what was planned on the way serves these afterwards."""
    (call, tensors), expected = COMPUTING[name], computed(name)
    with torch.no_grad():
        masks.cache().clear()
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            found = call(*(fake.from_tensor(x) for x in tensors))
        assert (found.shape, found.dtype, found.stride()) == (expected.shape, expected.dtype, expected.stride())
        assert_close(call(*tensors), expected)
