"""Why a server did not take a trace: MLflow's exporter logs it, and raises nothing."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mlflow.exceptions import MlflowException

EXPORTER = "mlflow.tracing.export.mlflow_v3"
LATER = (401, 403, 408, 425, 429)  # of 4xx, those that another key or another hour mends
MAX_REASON = 300  # characters


class _Errors(logging.Handler):
    """Keeps the errors that are logged while they are handled."""

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[BaseException] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            self.errors.append(error)


@contextmanager
def heard() -> Iterator[list[BaseException]]:
    """The errors that MLflow's exporter of traces logs meanwhile."""
    handler, logger = _Errors(), logging.getLogger(EXPORTER)
    logger.addHandler(handler)
    try:
        yield handler.errors
    finally:
        logger.removeHandler(handler)


def reason(error: BaseException) -> str | None:
    """Why the server would never take it; None where it may later, or did not answer."""
    if not isinstance(error, MlflowException):
        return None
    told = re.search(r"failed with error code (\d{3})", str(error))  # MLflow knows a few codes only
    status = int(told[1]) if told else error.get_http_status_code()  # type: ignore[no-untyped-call]
    of_database = error.error_code == "BAD_REQUEST"  # what MLflow makes of any trouble with its database
    if not 400 <= status < 500 or status in LATER or of_database:
        return None
    return " ".join(f"status {status}: {type(error).__name__}: {error}".split())[:MAX_REASON]
