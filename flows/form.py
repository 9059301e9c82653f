"""The fields of the run form, typed so that Prefect's UI draws them, and how invalid ones are refused.

No torch here.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Failed
from pydantic import ConfigDict, Field, create_model

from rlhf_tasks import config, presets
from rlhf_tasks.config import Config
from rlhf_tasks.config.types import LAST_SEED, description, section_of
from rlhf_tasks.errors import UserError
from rlhf_tasks.presets import Request
from rlhf_tasks.project import dvc_files, git

ENGINE_LOGS = ("prefect.flow_runs", "prefect.engine")  # where Prefect logs the error of a failed run

# The docstrings of the flows describe the fields: Prefect takes the form's descriptions from there. Its form
# has no editor for a nullable object or list and no choice for a nullable enum, so that no field is one.
DEFAULT = "default"
PresetName = Annotated[str, Field(json_schema_extra={"enum": [DEFAULT, *presets.names()]})]
Seed = Annotated[int, Field(ge=0, le=LAST_SEED)]
Overrides = Annotated[dict[str, Any], Field(examples=[{"ppo.kl_coef": 0.05}])]
Hours = Annotated[float, Field(gt=0, le=10_000)]
Where = Literal["workspace", "checkout"]
ExperimentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$", max_length=100)]
Revision = Annotated[str, Field(min_length=1, examples=["HEAD", "v1.0", "3f2a9c1"])]


# What presets and people change most; `seed` is a field of its own.
COMMON = {
    "kl_coef": "ppo.kl_coef",
    "learning_rate": "ppo.learning_rate",
    "total_episodes": "ppo.total_episodes",
    "rollout_batch_size": "ppo.rollout_batch_size",
    "num_ppo_epochs": "ppo.num_ppo_epochs",
    "response_length": "ppo.response_length",
    "temperature": "ppo.temperature",
    "reward_epochs": "reward.num_epochs",
    "sft_epochs": "sft.num_epochs",
}


def _field(key: str) -> Any:
    """The field of a key of params.yaml, with its type, range and description; None changes nothing."""
    section, _, name = key.partition(".")
    owner = section_of(Config, section, {})
    assert owner is not None
    field = owner.model_fields[name]
    kind: Any = Annotated[field.annotation, *field.metadata]
    return kind | None, Field(None, title=key, description=description(owner, name))


Common: Any = create_model(
    "Common", __config__=ConfigDict(extra="forbid"), **{name: _field(key) for name, key in COMMON.items()}
)
NONE = Common()


def build_request(
    preset: str | None, seed: int | None, common: Any, overrides: dict[str, Any] | None
) -> Request:
    """The request of the form's fields. Raises UserError for a value that is given twice."""
    fields = Common.model_validate(common or {}).model_dump(exclude_none=True)
    given, overrides = {COMMON[name]: value for name, value in fields.items()}, overrides or {}
    if twice := [*given.keys() & overrides]:
        raise UserError(f"{', '.join(twice)}: `common` and `overrides` both give it; leave it out of one")
    if seed is not None and "seed" in overrides:
        raise UserError("seed: the field and `overrides` both give it; leave it out of one")
    if overrides.keys() == {"preset"}:
        raise UserError("overrides: `preset` alone only names the run; choose a preset in its field")
    return Request(preset_of(preset), seed, given | overrides)


def preset_of(name: str | None) -> str | None:
    """The preset of the form's field; None for params.yaml as it is."""
    return None if name == DEFAULT else name


def resolve(root: Path, request: Request, commit: str | None) -> tuple[str, Config, list[str]]:
    """The text of the run's params.yaml, its values, and the changes that the request makes.

    `commit`: the commit of the run; None for a run in the checkout.

    Raises UserError for values that config refuses, and for stages that dvc.yaml does not have.
    """
    if commit is not None:
        text, values, changes = request.resolve(git.committed(root, "params.yaml", commit))
        stages = dvc_files.graph_in(git.committed(root, "dvc.yaml", commit), text)
    elif not request.is_empty:
        raise UserError(
            "preset, seed and overrides change params.yaml; a run in the checkout does not change it: set "
            "`where` to workspace, or edit params.yaml"
        )
    else:
        values, changes = config.load(root / "params.yaml"), []
        text = (root / "params.yaml").read_text(encoding="utf-8")  # `load` has checked that it is readable
        stages = dvc_files.graph(root)
    unknown = [name for name in values.service.stages if name not in (*stages, *config.STAGES)]
    if unknown:
        raise UserError(
            f"service.stages names {', '.join(unknown)}; the stages of dvc.yaml are {', '.join(stages)}"
        )
    return text, values, changes


def commit_of(root: Path, where: Where, revision: str | None, name: str | None) -> str | None:
    """The hash of the commit that the run works on; None for a run in the checkout.

    Raises UserError for an invalid revision, or a field that has no effect where the run works.
    """
    if where == "workspace":
        return git.resolve(root, revision)
    if given := [what for what, value in (("revision", revision), ("name", name)) if value is not None]:
        raise UserError(
            f"{' and '.join(given)} cannot be given for a run in the checkout, which uses the working tree "
            "and makes no experiment: set `where` to workspace, or leave the field empty"
        )
    return None


def fail_with(error: Exception) -> State[Any]:
    """The failed state for a mistake that the user can fix: one message, in the log and in the state.

    The caller of the flow gets the error itself.
    """
    get_run_logger().error("%s", error)
    silence(error)
    return Failed(message=str(error), data=error)


def silence(error: Exception) -> None:
    """Keep Prefect's engine, which gets the error of a final state, from logging it with a traceback."""
    for name in ENGINE_LOGS:
        logging.getLogger(name).addFilter(
            lambda record: record.exc_info is None or record.exc_info[1] is not error
        )
