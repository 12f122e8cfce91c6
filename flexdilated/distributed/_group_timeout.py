"""How long a process group waits for its ranks."""

from datetime import timedelta

import torch
from torch.distributed import default_pg_timeout

from ._ranks import Ranks, group_of


def timeout_of(ranks: Ranks) -> timedelta:
    """How long a transfer may take; torch's default where the backend of this kind of device does not say."""
    try:
        backend = group_of(ranks.name)._get_backend(torch.device(ranks.device_type))
    except RuntimeError:  # the group has no backend for it, which `check_device` answers
        return default_pg_timeout
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
