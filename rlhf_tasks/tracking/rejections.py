"""Why MLflow did not accept a trace: its exporter of traces logs the error instead of raising it."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException

EXPORTER = "mlflow.tracing.export.mlflow_v3"
LATER = (401, 403, 408, 425, 429)  # of 4xx, those that another key or a later try can fix
MAX_REASON = 300  # characters


class _Errors(logging.Handler):
    """Collects the exceptions that are being handled when something is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self.errors.append(error)


@contextmanager
def logged_errors() -> Iterator[list[BaseException]]:
    """The errors that MLflow's exporter of traces logs inside the block."""
    handler, logger = _Errors(), logging.getLogger(EXPORTER)
    logger.addHandler(handler)
    try:
        yield handler.errors
    finally:
        logger.removeHandler(handler)


def reason(error: BaseException) -> str | None:
    """Why the server will never accept the trace; None if it may later, or did not answer."""
    if not isinstance(error, MlflowException):
        return None
    code = re.search(r"failed with error code (\d{3})", str(error))  # MLflow knows a few codes only
    status = int(code[1]) if code else error.get_http_status_code()  # type: ignore[no-untyped-call]
    of_database = error.error_code == "BAD_REQUEST"  # MLflow's code for every error of its database
    if not 400 <= status < 500 or status in LATER or of_database:
        return None
    return " ".join(f"status {status}: {type(error).__name__}: {error}".split())[:MAX_REASON]
