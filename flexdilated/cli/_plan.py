"""plan: how a pattern is computed at a size, what else was weighed, and what it holds in memory."""

from __future__ import annotations

import json
import sys

from ._plan_budget import budget_data, budget_text
from ._plan_report import report_data, report_text
from ._plan_settings import PlanSettings
from ._terminal import terminal_of
from ._usage import UsageError


def plan(settings: PlanSettings) -> int:
    """Print the plan, or what fits into the budget. Raises UsageError for sizes at which the pattern has no meaning."""
    try:
        data = budget_data(settings) if settings.budgets else report_data(settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if settings.as_json:
        print(json.dumps(data, indent=1, ensure_ascii=False))
    else:
        print(budget_text(data) if settings.budgets else report_text(data, columns=terminal_of(sys.stdout).columns))
    return 0
