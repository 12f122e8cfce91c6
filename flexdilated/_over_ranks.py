"""Attention of a module over the ranks of a device mesh, and texts for the repr of modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from .engines import ScoreMod
from .masks import Mixture, Pattern
from .masks.core import require_choice, shortened

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .distributed import Sharding
    from .distributed.group import Ranks
    from .distributed.wire import CodecChoice, PoolChoice


SCHEDULES = ("auto", "exchange", "ring", "heads")

# B batch, H query heads, G key/value heads, L tokens of this rank's shard, D head dim


@dataclass(frozen=True)
class OverRanks:
    """Immutable settings for the attention of a module whose tokens are sharded over the ranks of a mesh.

    mesh: a DeviceMesh of one dimension.
    schedule: as in `distributed.attend`, or "heads": each rank attends over the whole sequence for some of the heads.
    sharding: assignment of tokens to ranks, for calls of one sequence length; None: contiguous shards of equal length.
    codec, error_bound, pool: as in `distributed.attend`; with "heads", codec and pool must be None.
    ranks: this process's group and rank, derived from the mesh.

    `ranks` is not pickled: a process that loads a pickle derives it from the mesh.

    Raises ValueError or TypeError for settings that do not fit together.
    """

    mesh: DeviceMesh
    schedule: str = "auto"
    sharding: Sharding | None = None
    codec: CodecChoice = None
    error_bound: float | None = None
    pool: PoolChoice = None
    ranks: Ranks = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from .distributed.group import Ranks, check_sharding
        from .distributed.wire import check_codec, name_of

        require_choice("schedule", self.schedule, SCHEDULES)
        object.__setattr__(self, "ranks", Ranks.of(self.mesh))
        if self.sharding is not None:
            check_sharding(self.sharding, self.ranks)
        check_codec(self.codec, self.error_bound, torch.float32)
        name_of(self.pool)
        if self.schedule == "heads" and (self.codec is not None or self.pool is not None):
            raise ValueError(
                "codec and pool apply to the schedules 'exchange' and 'ring': with 'heads' leave them None; got "
                f"codec={self.codec!r}, pool={self.pool!r}"
            )

    def __reduce__(self) -> tuple:
        return OverRanks, (self.mesh, self.schedule, self.sharding, self.codec, self.error_bound, self.pool)

    def __deepcopy__(self, memo: dict) -> OverRanks:
        return self

    def sharding_of(self, length: int) -> Sharding:
        """Return `sharding` or, if it is None, a sharding into contiguous shards of `length` tokens on each rank.

        Raises ValueError if `sharding` is None and length is 0.
        """
        from .distributed.group import equal_shards

        return equal_shards(length, self.ranks) if self.sharding is None else self.sharding

    def positions(self, length: int, device: torch.device) -> Int64[Tensor, " L"]:
        """Return the positions, in the whole sequence, of the `length` tokens on this rank.

        Raises ValueError if `sharding` assigns another number of tokens to this rank, or is None and length is 0.
        """
        sharding, rank = self.sharding_of(length), self.ranks.rank
        if sharding.length(rank) != length:
            raise ValueError(
                f"the input must be this rank's shard, {sharding.length(rank)} of {sharding.num_tokens} tokens for "
                f"rank {rank} of {self.ranks.size}; got {length}"
            )
        return sharding.positions(rank, device)

    def attend(
        self,
        q: Float[Tensor, "B H L D"],
        k: Float[Tensor, "B G L D"],
        v: Float[Tensor, "B G L D"],
        pattern: Pattern | Mixture,
        *,
        sharding: Sharding | None = None,
        score_mod: ScoreMod | None = None,
        bindings: Mapping[str, Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Compute attention of this rank's queries over the keys of all ranks.

        Returns the output (B, H, L, D) or, with return_lse=True, (output, natural lse (B, H, L)). All ranks must call
        this method, and run its backward.

        sharding: assignment of tokens to ranks for this call; None: `sharding_of(L)`.
        options: further keywords of `distributed.attend`, such as scale.

        Raises as `distributed.attend` does, and ValueError with "heads" unless the number of ranks divides H.
        """
        sharding = self.sharding_of(q.shape[2]) if sharding is None else sharding
        options |= {"score_mod": score_mod, "bindings": bindings, "sharding": sharding}
        if self.schedule == "heads":
            from .distributed._heads import attend_heads

            return attend_heads(q, k, v, pattern, ranks=self.ranks, **options)
        from .distributed import attend

        options |= {"mesh": self.mesh, "schedule": self.schedule}
        options |= {"codec": self.codec, "error_bound": self.error_bound, "pool": self.pool}
        return attend(q, k, v, pattern, **options)

    @property
    def mesh_text(self) -> str:
        """Size of the mesh, and name of its axis, if any, for a repr, such as "mesh=8 ranks of axis 'sp'"."""
        named = f" of axis {self.mesh.mesh_dim_names[0]!r}" if self.mesh.mesh_dim_names else ""
        return f"mesh={self.ranks.size} rank{'' if self.ranks.size == 1 else 's'}{named}"

    def __str__(self) -> str:
        options = {"sharding": self.sharding, "codec": self.codec, "error_bound": self.error_bound}
        rest = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
        pool = "" if self.schedule == "heads" else f", pool={self.pool!r}"
        return f"{self.mesh_text}, schedule={self.schedule!r}{rest}{pool}"


def over_ranks(mesh: DeviceMesh | None, *, schedule: str, **rest: Any) -> OverRanks | None:
    """Return the `OverRanks` of these arguments, or None if mesh is None.

    rest: the other fields of `OverRanks`, by name.

    Raises ValueError without a mesh if schedule is not "auto" or a field is not None.
    """
    if mesh is not None:
        return OverRanks(mesh, schedule, **rest)
    require_choice("schedule", schedule, SCHEDULES)
    for name, value in {"schedule": None if schedule == "auto" else schedule, **rest}.items():
        if value is not None:
            raise ValueError(f"{name} needs mesh=, the ranks that share the work; got {name}={value!r} without a mesh")
    return None


LONGEST_PATTERN_TEXT = 400  # characters, so that a repr of several modules stays readable


def pattern_text(pattern: Pattern | Mixture) -> str:
    """Return the repr of a pattern; if it is longer than 400 characters, its first 400 or fewer and an ellipsis."""
    return shortened(repr(pattern), LONGEST_PATTERN_TEXT)


def engine_text(engine: str | None) -> str:
    """Return text for a repr, such as "engine='flex'"; for None it is "engine=None (aten on CPU, flex on CUDA)"."""
    return f"engine={engine!r}{' (aten on CPU, flex on CUDA)' if engine is None else ''}"


def ranks_text(over_ranks: OverRanks | None) -> str:
    """Return ", mesh=..., schedule=..." and other settings, to append to the repr of a module; "" for None."""
    return "" if over_ranks is None else f", {over_ranks}"
