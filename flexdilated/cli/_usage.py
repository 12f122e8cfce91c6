"""UsageError: the command cannot do what it was asked to; it says why in one line and ends with status 2."""


class UsageError(Exception):
    """The message states the rule and what came."""
