"""What a stage logs: a local record first, delivered to MLflow from there. No torch or MLflow here."""

from rlhf_tasks.tracking.tracker import NullTracker, Tracker, open_run

__all__ = ["NullTracker", "Tracker", "open_run"]
