"""Observation: profiles and statistics of a process, and the attention that each key receives."""

from ._profile import VARIABLE, folder_from_environment, profile_process
from ._received import attention_received, plot_attention_received
from ._stats import stats
