"""Table of the private names of torch that this package uses; no other file uses any directly.

Other files import a name from here or, if only some calls need it, read it as an attribute of this module. The name is
looked up in torch at that moment, so nothing is imported early. If the installed torch lacks it, an ImportError names a
remedy, instead of an AttributeError inside a call. docs/contributing/private_names.md shows the table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pkgutil import resolve_name
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad

F = TypeVar("F", bound=Callable[..., Any])


def _constant_mark() -> bool:
    return torch.compiler.assume_constant_result(lambda: None)._dynamo_marked_constant


def _encoder_layer_attribute() -> str:
    """Return "_qkv_same_embed_dim" if `nn.TransformerEncoderLayer` reads that attribute; else raise AttributeError."""
    names = nn.TransformerEncoderLayer.forward.__code__.co_names
    if "_qkv_same_embed_dim" not in names:
        raise AttributeError("_qkv_same_embed_dim")
    return "_qkv_same_embed_dim"


@dataclass(frozen=True)
class Name:
    """One private name of torch that this package uses, and what happens if the installed torch lacks it.

    path: "module:attributes", such as "torch._C:DisableTorchFunction".
    use: its purpose, as a phrase.
    error: the event at which an ImportError is raised if torch lacks the name.
    instead: a remedy other than installing another torch, "" for none.
    public: path of a public name in newer torch, which is tried first, "" for none.
    absent: text on the behaviour without the name, if no error is raised.
    probe: function that returns the object or raises AttributeError, for a name that cannot be looked up by path.
    seen: versions of torch in which the name has this meaning.
    """

    path: str
    use: str
    error: str = "flexdilated is imported"
    instead: str = ""
    public: str = ""
    absent: str = ""
    probe: Callable[[], object] | None = None
    seen: tuple[str, ...] = ("2.11.0", "2.13.0", "2.15.0")

    @property
    def dotted(self) -> str:
        return self.path.replace(":", ".")

    @property
    def without(self) -> str:
        """Text for the documentation on the behaviour if torch lacks the name."""
        first = f"`{self.public.replace(':', '.')}`, which is taken where torch has it; else " if self.public else ""
        return self.absent or f"{first}ImportError when {self.error}"

    def find(self) -> Any:
        """Return the object of the public name, else of the private one, or the result of `probe`.

        Raises ImportError if torch has none of them.
        """
        for path in (self.public, self.path):
            try:
                if path:
                    return self.probe() if self.probe else resolve_name(path)
            except (ImportError, AttributeError):
                continue
        raise self.missing_error()

    def missing_error(self) -> ImportError:
        return ImportError(
            f"torch {torch.__version__} has no {self.dotted}, which flexdilated needs: it {self.use}. "
            f"Install torch 2.11 to 2.15{self.instead and f', or {self.instead}'}"
        )


def _kernel_name(operator: str, where: str) -> Name:
    use = f"computes {'the gradient of attention' if '_backward' in operator else 'attention with its lse'} on {where}"
    others = "" if where == "CPU" else "switch this kernel off by torch.nn.attention.sdpa_kernel, or "
    return Name(
        f"torch:ops.aten._scaled_dot_product_{operator}",
        use,
        f"engine 'aten' calls this kernel on {where}",
        f"{others}call with engine='flex'",
    )


_RECORDED = "the backward of a selection or of a ring runs"
_ACCELERATED = "engine 'flex' runs on an accelerator"
_RANKS = "flexdilated.distributed is used"

NAMES = {
    # Modes and transforms around a call
    "peek_interpreter_stack": Name(
        "torch._C._functorch:peek_interpreter_stack", "tells whether a transform of torch.func is open"
    ),
    "temporarily_clear_interpreter_stack": Name(
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "suspends the transforms of torch.func while a plan is made",
    ),
    "is_batchedtensor": Name("torch._C._functorch:is_batchedtensor", "tells whether torch.vmap maps a tensor"),
    "forward_level": Name(
        "torch.autograd.forward_ad:_current_level", "tells whether forward-mode AD is on", "attention is called"
    ),
    "len_torch_function_stack": Name("torch._C:_len_torch_function_stack", "counts the TorchFunctionModes that are on"),
    "len_torch_dispatch_stack": Name("torch._C:_len_torch_dispatch_stack", "counts the TorchDispatchModes that are on"),
    "len_torch_dispatch_stack_pre_dispatch": Name(
        "torch._ops:_len_torch_dispatch_stack_pre_dispatch", "counts the modes of torch.export that are on"
    ),
    "disable_current_modes": Name(
        "torch.utils._python_dispatch:_disable_current_modes", "suspends TorchDispatchModes while a plan is made"
    ),
    "DisableTorchFunction": Name(
        "torch._C:DisableTorchFunction", "suspends default devices and other TorchFunctionModes while a plan is made"
    ),
    "TorchDispatchMode": Name(
        "torch.utils._python_dispatch:TorchDispatchMode", "sees each operation, to count memory and to trace rules"
    ),
    "sparse_indices": Name(
        "torch:Tensor._indices", "reads the indices of a sparse tensor as it holds them", "masks.sparse is called"
    ),
    "sparse_values": Name(
        "torch:Tensor._values", "reads the values of a sparse tensor as it holds them", "masks.sparse is called"
    ),
    "tree_leaves": Name("torch.utils._pytree:tree_leaves", "lists the tensors in nested arguments"),
    "tree_map_only": Name("torch.utils._pytree:tree_map_only", "moves the tensors in nested arguments"),
    # Operators of this package
    "make_autograd_impl": Name(
        "torch._library.autograd:make_autograd_impl", "makes the kernel by which an own operator is recorded"
    ),
    "DispatchKey": Name("torch._C:DispatchKey", "names the keys of autograd, to record in an operator", _RECORDED),
    "dispatch_tls_local_exclude_set": Name(
        "torch._C:_dispatch_tls_local_exclude_set",
        "holds the keys that are off, to record in an operator",
        _RECORDED,
    ),
    "dispatch_tls_local_include_set": Name(
        "torch._C:_dispatch_tls_local_include_set",
        "holds the keys that are on, to record in an operator",
        _RECORDED,
    ),
    "ForceDispatchKeyGuard": Name(
        "torch._C:_ForceDispatchKeyGuard", "turns the keys of autograd on, to record in an operator", _RECORDED
    ),
    # Kernels
    "flash_attention_for_cpu": _kernel_name("flash_attention_for_cpu", "CPU"),
    "flash_attention_for_cpu_backward": _kernel_name("flash_attention_for_cpu_backward", "CPU"),
    "flash_attention": _kernel_name("flash_attention.default", "CUDA"),
    "flash_attention_backward": _kernel_name("flash_attention_backward.default", "CUDA"),
    "cudnn_attention": _kernel_name("cudnn_attention.default", "CUDA"),
    "cudnn_attention_backward": _kernel_name("cudnn_attention_backward.default", "CUDA"),
    "efficient_attention": _kernel_name("efficient_attention.default", "CUDA"),
    "efficient_attention_backward": _kernel_name("efficient_attention_backward.default", "CUDA"),
    # torch.compile
    "check": Name("torch:_check", "bounds a number that a compiled graph reads from a tensor"),
    "assert_async": Name("torch:ops.aten._assert_async.msg", "checks the values of a mask when a compiled graph runs"),
    "marked_constant": Name(
        "torch:compiler.assume_constant_result._dynamo_marked_constant",
        "makes results constants of a graph as assume_constant_result does, which would import the compiler",
        absent="the graph breaks at such a function; with fullgraph=True that is an error of torch.compile",
        probe=_constant_mark,
    ),
    "mark_static": Name("torch._dynamo:mark_static", "keeps sizes constant in a compiled program", _ACCELERATED),
    "duck_shape": Name(
        "torch.fx.experimental._config:use_duck_shape",
        "tells equal sizes of a compiled program apart",
        _ACCELERATED,
    ),
    "has_triton": Name(
        "torch.utils._triton:has_triton",
        "tells whether Triton serves the accelerator",
        "an engine is chosen on CUDA or XPU",
        "call with engine='portable'",
    ),
    "FakeTensor": Name(
        "torch._subclasses.fake_tensor:FakeTensor",
        "tells that a tensor has no values to read or to measure with",
        "a call has a BlockMask, an eager score_mod or autotune",
    ),
    # Ranks
    "resolve_process_group": Name(
        "torch.distributed.distributed_c10d:_resolve_process_group", "finds a process group by its name", _RANKS
    ),
    "get_backend": Name(
        "torch.distributed:ProcessGroup._get_backend",
        "gives the backend of a process group on a device",
        _RANKS,
        public="torch.distributed:ProcessGroup.get_backend",
    ),
    "timeout": Name(
        "torch._C._distributed_c10d:Backend.Options._timeout",
        "bounds how long a transfer may take",
        absent="`torch.distributed.default_pg_timeout` is taken",
    ),
    # Modules
    "apply": Name("torch.nn:Module._apply", "tells ImportanceTracker that its buffers are about to move"),
    "qkv_same_embed_dim": Name(
        "torch.nn:MultiheadAttention._qkv_same_embed_dim",
        "keeps nn.TransformerEncoderLayer from running its own dense kernel",
        probe=_encoder_layer_attribute,
    ),
    # Operators in rules that the viewer traces
    "to_copy": Name("torch:ops.aten._to_copy", "converts, in rules that the viewer traces", "the viewer is imported"),
    "unsafe_view": Name(
        "torch:ops.aten._unsafe_view", "reshapes, in rules that the viewer traces", "the viewer is imported"
    ),
}


def __getattr__(name: str) -> Any:
    """Return the object of torch for a key of NAMES; it is looked up on first access, and kept.

    Raises ImportError if torch lacks it, and AttributeError for a name that is no key.
    """
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = NAMES[name].find()
    return found


# Values that change while a program runs are read at each use.


def in_forward_mode() -> bool:
    """Return True inside a level of forward-mode AD, such as torch.func.jvp or torch.autograd.forward_ad.dual_level."""
    try:
        return forward_ad._current_level >= 0
    except AttributeError:
        raise NAMES["forward_level"].missing_error() from None


@contextmanager
def equal_sizes_apart() -> Iterator[None]:
    """Context in which torch.compile gives each size its own symbol, even if two sizes are equal in the first call."""
    before = NAMES["duck_shape"].find()
    config = sys.modules["torch.fx.experimental._config"]
    config.use_duck_shape = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        config.use_duck_shape = before  # type: ignore[attr-defined]


def timeout_of(backend: object) -> timedelta | None:
    """Return the timeout of transfers of a process group's backend; None if the backend has no such option."""
    return getattr(getattr(backend, "options", None), "_timeout", None)


# Attributes that torch looks for on objects.


def graph_constant(function: F) -> F:
    """Make torch.compile run `function` while it traces, and treat the result as a constant of the graph.

    A decorator: it marks the function in place and returns it. Arguments and results must be plain values, not tensors.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class DisablesFusedEncoder(nn.Module):
    """Base class of attention modules that may be the `self_attn` of an `nn.TransformerEncoderLayer`.

    It makes the layer, and `nn.TransformerEncoder`, call the module. Otherwise the layer, in eval mode and without
    gradients, would run its own dense kernel on the module's weights.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        NAMES["qkv_same_embed_dim"].find()
        super().__init_subclass__(**kwargs)

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """False, so that the layer does not run its own dense kernel."""
        return False
