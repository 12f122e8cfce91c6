"""Observation of a process: compilations, profiles, statistics, and attention received."""

from ._compilations import compilations
from ._profile import VARIABLE, folder_from_environment, profile_process
from ._received import attention_received
from ._received_picture import plot_attention_received
from ._stats import stats
