"""Errors that are shown as one message, without a traceback."""


class UserError(Exception):
    """A mistake that the user can fix. The message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """Every problem of a parameter file, in one message."""


class OutsideFault(Exception):
    """A fault of another program, which another try may not meet: one message, and exit status 1."""
