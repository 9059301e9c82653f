"""Keys to servers, from the environment. No torch."""

from __future__ import annotations

import os

from rlhf_tasks.errors import UserError


def read_key(variable: str, subject: str) -> str:
    """The key to a server, from the environment; `subject` begins the message.

    Raises:
        UserError: if the variable holds no key that a request can carry.
    """
    key = os.environ.get(variable, "").strip()
    if not key or not (key.isascii() and key.isprintable()):
        raise UserError(
            f"{subject}: the environment variable {variable} holds no key; export it, or set key_variable to "
            "null for a server that needs none"
        )
    return key
