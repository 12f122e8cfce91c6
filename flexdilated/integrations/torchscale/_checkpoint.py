"""Load parameters of a checkpoint into a module; one error names all keys that do not fit."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

_MOST_NAMED = 12


def require_weights(name: str, value: object) -> None:
    """Raise TypeError unless value is a mapping."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be what torch.load(path, weights_only=True) gives; got {type(value).__name__}")


def load(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Load all parameters. Raises ValueError with missing, foreign and misshapen keys before any change."""
    own = module.state_dict()
    sizes = {name: (tuple(state_dict[name].shape), tuple(own[name].shape)) for name in own if name in state_dict}
    faults = {
        "missing": [name for name in own if name not in state_dict],
        "foreign": [name for name in state_dict if name not in own],
        "misshapen": [f"{name} {got} for {needed}" for name, (got, needed) in sizes.items() if got != needed],
    }
    if any(faults.values()):
        listed = "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names)
        raise ValueError(f"the state_dict must have exactly the parameters of {type(module).__name__}; {listed}")
    module.load_state_dict(dict(state_dict))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
