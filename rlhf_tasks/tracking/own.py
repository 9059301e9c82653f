"""Metrics of the user's functions. It decides no result: stages that import it need not run again."""

from __future__ import annotations

import re

from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking import catalogue

NAME = re.compile(r"(?=.{1,250}$)[\w:-][\w .:-]*(/[\w:-][\w .:-]*)*")


def check_name(name: str, metric: object) -> None:
    """Check the name under which a loss of PPO's, which messages call `name`, gives a metric.

    Raises:
        UserError: if MLflow would refuse it, or if PPO itself has such a metric.
    """
    if not (isinstance(metric, str) and NAME.fullmatch(metric)):
        raise UserError(
            f"{name}: MLflow takes no metric {metric!r}; it may have letters, "
            "digits, blanks, _ - . : and, between parts, /"
        )
    if metric != "policy/clipfrac_avg" and catalogue.find("ppo", metric) is not None:
        raise UserError(f"{name}: {metric} is a metric of PPO's own; give another name")
