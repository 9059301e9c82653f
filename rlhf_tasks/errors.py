"""Mistakes that a user can fix: shown as one message, without a traceback, and exit status 2."""


class UserError(Exception):
    """A mistake that the user can fix. The message says what was given, what is allowed and what to do."""


class ConfigError(UserError):
    """Every problem of a parameter file, in one message."""
