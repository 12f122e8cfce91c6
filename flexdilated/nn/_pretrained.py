"""Models in a folder: configurations as JSON, weights as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from ._longnet_config import LongNetConfig

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


class Pretrained(nn.Module):
    """Base class that adds `save_pretrained` and `from_pretrained` to models that implement `made_of`."""

    def made_of(self) -> dict[str, Any]:
        """Return the constructor arguments to save, by name: configurations and plain data."""
        raise NotImplementedError  # every model overrides it

    def save_pretrained(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a folder, which is created if needed.

        The weights are the state_dict, in its dtype. Constructor arguments that `made_of` does not return, such as the
        device, a mesh or memory_dim, are not saved: give them to `from_pretrained`.
        Raises ImportError without safetensors (pip install 'flexdilated[pretrained]').

        >>> import tempfile
        >>> config = fd.LongNetConfig(
        ...     vocab_size=256, embed_dim=64, depth=2, num_heads=4, segment_lengths=(64, 256), dilation_rates=(1, 4)
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     fd.LongNet(config).save_pretrained(folder)
        ...     model = fd.LongNet.from_pretrained(folder)
        >>> model.config == config
        True
        """
        store = _safetensors()
        arguments = {
            name: asdict(value) if isinstance(value, LongNetConfig) else value for name, value in self.made_of().items()
        }
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        store.save_file({name: each.contiguous() for name, each in self.state_dict().items()}, place / _WEIGHTS)
        written = {"model": type(self).__name__, "arguments": arguments}
        (place / _CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state_dict as `nn.Module.load_state_dict` does, and return its result.

        With strict=True, raises ValueError if every key begins with one prefix that the model's names do not have, such
        as "module.", which a module around the model adds.
        """
        if strict:
            _check_prefix(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Self:
        """Return the model that `save_pretrained` wrote into a folder, in evaluation mode.

        device, dtype: of the model's weights; dtype None keeps the saved dtype.
        options: further constructor arguments, such as a mesh.

        Raises FileNotFoundError for a folder without the two files; ValueError for a folder of another model class, for
        a configuration that this version does not know, and for weights that are missing, unknown or of another shape;
        ImportError without safetensors.
        """
        store, place = _safetensors(), Path(folder)
        for name in (_CONFIG, _WEIGHTS):
            if not (place / name).is_file():
                raise FileNotFoundError(f"a model's folder must hold {_CONFIG} and {_WEIGHTS}; {place} has no {name}")
        model = cls(**_read_arguments(cls, place / _CONFIG), **options, device="meta")
        weights = store.load_file(place / _WEIGHTS, device=str(device))
        _check_weights(model, weights)
        model.load_state_dict({name: each.to(dtype) for name, each in weights.items()}, assign=True)
        return model.eval()


def _safetensors() -> Any:
    try:
        return import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            "save_pretrained and from_pretrained need safetensors: pip install 'flexdilated[pretrained]'"
        ) from error


def _read_arguments(cls: type[nn.Module], path: Path) -> dict[str, Any]:
    """Return {name: value} of the constructor arguments of `cls` in the config.json at `path`.

    Raises ValueError if the file is invalid, of another class, or has unknown arguments or fields.
    """
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        name, arguments = written["model"], dict(written["arguments"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} must be as save_pretrained writes it; reading it failed: {error!r}") from error
    if name != cls.__name__:
        raise ValueError(f"{path} is of a {name}: call {name}.from_pretrained; got {cls.__name__}")
    known = set(signature(cls).parameters)
    if strangers := [each for each in arguments if each not in known]:
        raise ValueError(f"{path} has arguments that {name} does not know: {', '.join(strangers)}")
    return {each: _config_from(value, path) if isinstance(value, dict) else value for each, value in arguments.items()}


def _config_from(data: dict[str, Any], path: Path) -> LongNetConfig:
    known = {each.name for each in fields(LongNetConfig)}
    if strangers := [name for name in data if name not in known]:
        raise ValueError(f"{path} has fields that LongNetConfig does not know: {', '.join(strangers)}")
    return LongNetConfig(**data)


def _check_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Raise ValueError if weights are missing, unknown to the model, or of another shape; the error names them.

    If all names have a prefix that the model's names lack, the error names that prefix instead.
    """
    _check_prefix(model, weights)
    expected = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    wrong = [f"{name} is missing" for name in expected if name not in weights]
    wrong += [f"{name} is unknown" for name in weights if name not in expected]
    wrong += [
        f"{name} has shape {tuple(each.shape)} instead of {expected[name]}"
        for name, each in weights.items()
        if name in expected and tuple(each.shape) != expected[name]
    ]
    if wrong:
        raise ValueError(f"weights must be those of the configuration; {'; '.join(wrong)}")


def _check_prefix(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise ValueError if all names of `weights` begin with a prefix that the model's names lack, such as "module."."""
    name = next(iter(model.state_dict()))
    found = next((each for each in weights if each.endswith(f".{name}")), "")
    prefix = found.removesuffix(name)
    if prefix and all(each.startswith(prefix) for each in weights):
        raise ValueError(
            f"weights must have the model's own names; here each begins with {prefix!r}, as a module around the model "
            f"adds it: load {{name.removeprefix({prefix!r}): each for name, each in weights.items()}}"
        )
