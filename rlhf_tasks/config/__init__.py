"""`params.yaml` as frozen, typed sections.

`params.yaml` holds the values. The types of this package hold names, units, ranges and rules, and no
defaults: each value is in one place. An optional feature is a section that is null when it is off.
"""

from rlhf_tasks.config.data import Columns, Data, HubSet, HubSources, Model, Scratch
from rlhf_tasks.config.judge import Judging
from rlhf_tasks.config.params import (
    Config,
    Launch,
    Resume,
    Tracking,
    load,
    missing_keys,
    parse,
    read_text,
    validate,
)
from rlhf_tasks.config.ppo import Ppo
from rlhf_tasks.config.promotion import Promotion
from rlhf_tasks.config.service import Service, TaskPolicy
from rlhf_tasks.config.stage_views import (
    VIEWS,
    BaseView,
    JudgeView,
    PpoView,
    PreferencesView,
    PrepareView,
    ReportView,
    RewardView,
    SftView,
    StageView,
    VerdictView,
)
from rlhf_tasks.config.training import Optimisation, Preferences, Reward, Sft
from rlhf_tasks.config.types import STAGES, Section, Split, Stage, flatten, is_hub_id

__all__ = [
    "STAGES", "VIEWS", "BaseView", "Columns", "Config", "Data", "HubSet", "HubSources", "JudgeView",
    "Judging", "Launch", "Model", "Optimisation", "Ppo", "PpoView", "Preferences", "PreferencesView",
    "PrepareView", "Promotion", "ReportView", "Resume", "Reward", "RewardView", "Scratch", "Section",
    "Service", "Sft", "SftView", "Split", "Stage", "StageView", "TaskPolicy", "Tracking", "VerdictView",
    "flatten", "is_hub_id", "load", "missing_keys", "parse", "read_text", "validate",
]  # fmt: skip
