"""`params.yaml` as frozen, typed sections.

The types hold names, units, ranges, rules and defaults; `params.yaml` holds what a run sets. Alternatives are
sections of several kinds. An optional feature is a section that is null when it is off.
"""

from rlhf_tasks.config.judge import Judging
from rlhf_tasks.config.load import (
    differences,
    in_force,
    in_yaml,
    is_given,
    load,
    merge,
    nested,
    parse,
    read_text,
    round_trip,
    validate,
    values,
    written,
)
from rlhf_tasks.config.ppo import Lora, Ppo
from rlhf_tasks.config.schema import (
    Columns,
    Config,
    Data,
    Dpo,
    HubSet,
    Launch,
    Model,
    Optimization,
    Promotion,
    Reward,
    Scratch,
    TaskPolicy,
    Tracking,
)
from rlhf_tasks.config.stages import (
    VIEWS,
    BaseView,
    DpoView,
    JudgeView,
    ModelView,
    PpoView,
    PreferencesView,
    PrepareView,
    Ready,
    ReportView,
    RewardView,
    SftView,
    StageView,
    ValueView,
    VerdictView,
)
from rlhf_tasks.config.types import STAGES, Section, Split, Stage, flatten, is_hub_id
