"""Simulation: what attention over many ranks sends, computes, holds and takes, from the plan alone, on no rank at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from .._memory import AttentionMemory, AttentionSize, attention_memory
from ..masks._cost import cost_of
from ..masks._layout import Layout
from ..masks._machine_in_use import machine_of
from ..masks._pattern import Expression
from ..masks._planner import plan
from ._codec import Codec, codec_named, gradient_codec
from ._exchange_plan import token_counts
from ._links import Links
from ._schedule import ScheduleChoice, choose_schedule
from ._sharding import Sharding
from ._volumes import Volume, all_gather_tokens, exchange_tokens, held_tokens, ring_tokens
from ._work import work_of_ranks
