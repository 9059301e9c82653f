"""Versions of the policy in MLflow's model registry, and who is champion. No torch here; MLflow when opened.

    challenger   the policy that was put to the gate last, unless it was promoted
    champion     the one that passed last

A version is one policy: the same bytes (DVC's md5) are registered once. The weights stay with DVC; the
version's tags say where. `champion.before` of a version lists the champions before it, the last first, so
that rolling back goes down that list. Every step may be repeated after a kill, and the alias moves last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from rlhf_tasks.config import Tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking.context import bound_requests, uri

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"
MD5, BEFORE, LEFT, NONE = "dvc.md5", "champion.before", "champion.rolled_back", "none"
MAX_BEFORE = 100  # champions remembered
MAX_TAG = 5000  # characters, as MLflow allows
SHOWN_REASON = 160
NOT_THERE = "RESOURCE_DOES_NOT_EXIST"


class Unreachable(Exception):
    """MLflow does not answer now: nothing was decided for good, and the same command goes on later."""


@dataclass(frozen=True)
class Version:
    """One registered policy."""

    number: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def md5(self) -> str:
        return self.tags.get(MD5, "")

    @property
    def before(self) -> list[str]:
        """The numbers of the champions before it, the last first."""
        told = self.tags.get(BEFORE, NONE)
        return [] if told == NONE else told.split(",")


@contextmanager
def reaching() -> Iterator[None]:
    """Tells a server that is away from a request that it refused.

    Raises:
        Unreachable: for the first.
        UserError: for the second, with the server's words.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
        if status >= 500:
            raise Unreachable(_said(error)) from None
        raise UserError(f"MLflow refused: {_said(error)}") from None
    except (SQLAlchemyError, OSError) as error:
        raise Unreachable(_said(error)) from None


def _said(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= SHOWN_REASON else f"{text[:SHOWN_REASON]}…"


@dataclass(frozen=True)
class Registry:
    client: MlflowClient
    name: str

    @classmethod
    def open(cls, settings: Tracking, home: Path, name: str) -> Registry:
        """The registry of the store that the runs are in.

        Raises:
            Unreachable: if it does not answer.
            UserError: with `tracking.enabled: false`; for a store by a relative path.
        """
        if not settings.enabled:
            raise UserError(
                "tracking.enabled is false, and the champion is kept in MLflow's registry; set it to true"
            )
        bound_requests()
        from mlflow.tracking import MlflowClient

        from rlhf_tasks.tracking.store import embedded_uri

        home.mkdir(parents=True, exist_ok=True)
        with reaching(), FileLock(home / "mlflow.lock"):  # the first to open it makes the database
            registry = cls(MlflowClient(uri(settings) or embedded_uri(home)), name)
            registry._aliases()
        return registry

    # ------------------------------------------------------------------------------- looking

    def champion(self) -> Version | None:
        with reaching():
            number = self._aliases().get(CHAMPION)
            return None if number is None else self._version(number)

    def of_md5(self, md5: str) -> Version | None:
        """The version of a policy with these bytes."""
        with reaching():
            wanted = f"name = '{self.name}' and tags.`{MD5}` = '{md5}'"
            found = sorted(self.client.search_model_versions(wanted), key=lambda v: int(v.version))
            return _version(found[0]) if found else None

    def run_of(self, key: str, experiment: str) -> str | None:
        """The MLflow run by the key of a stage's run."""
        with reaching():
            known = self.client.get_experiment_by_name(experiment)
            if known is None:
                return None
            found = self.client.search_runs(
                [known.experiment_id], f"tags.`rlhf.run` = '{key}'", max_results=1
            )
            return str(found[0].info.run_id) if found else None

    def _aliases(self) -> dict[str, str]:
        from mlflow.exceptions import MlflowException

        try:
            return {k: str(v) for k, v in self.client.get_registered_model(self.name).aliases.items()}
        except MlflowException as error:
            if error.error_code != NOT_THERE:
                raise
            return {}

    def _version(self, number: str) -> Version | None:
        from mlflow.exceptions import MlflowException

        try:
            return _version(self.client.get_model_version(self.name, number))
        except MlflowException as error:
            if error.error_code != NOT_THERE:
                raise
            return None

    # ------------------------------------------------------------------------------- writing

    def register(self, md5: str, path: str, tags: Mapping[str, str], run: str | None) -> Version:
        """The version of these bytes, made if there is none, with these tags either way."""
        known = self.of_md5(md5)
        with reaching():
            if known is not None:
                self._tag(known.number, {k: v for k, v in tags.items() if known.tags.get(k) != v})
                return Version(known.number, {**known.tags, **tags})
            self._make_model()
            outside = ".." in Path(path).parts  # which MLflow's server takes for a trick
            shown = Path(path).name if outside else path.strip("/")
            found = self.client.create_model_version(
                self.name, f"dvc:/{shown}/{md5}", run_id=run, tags={**tags, MD5: md5},
                await_creation_for=0,
            )  # fmt: skip
            return _version(found)

    def _make_model(self) -> None:
        from mlflow.exceptions import MlflowException

        text = "Policies that were put to the gate (`promotion` in params.yaml); their weights are in DVC."
        try:
            self.client.create_registered_model(self.name, description=text)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    def challenge(self, version: Version) -> None:
        """It is looked at now."""
        with reaching():
            self.client.set_registered_model_alias(self.name, CHALLENGER, version.number)

    def record(self, version: Version, told: Mapping[str, str], text: str) -> None:
        """The gate's verdict as tags `verdict`, `verdict.…` in place of the last one, and as description."""
        with reaching():
            tags = {f"verdict.{k}" if k else "verdict": v for k, v in told.items()}
            old = [k for k in version.tags if k.split(".")[0] == "verdict" and k not in tags]
            for key in old:
                self.client.delete_model_version_tag(self.name, version.number, key)
            self.client.update_model_version(self.name, version.number, text)
            self._tag(version.number, tags)

    def crown(self, version: Version, over: Version | None) -> None:
        """Make it champion over the one that it was judged against.

        Raises:
            UserError: if another has become champion since.
        """
        now = self.champion()
        if (now and now.number) != (over and over.number):
            raise UserError(
                f"version {now.number if now else 'none'} has become champion while version {version.number} "
                "was judged against another; put it to the gate again"
            )
        before = [over.number, *over.before][:MAX_BEFORE] if over else []
        with reaching():
            self._tag(version.number, {BEFORE: ",".join(before) or NONE})
            self._untag(version.number, LEFT)
            if self._aliases().get(CHALLENGER) == version.number:
                self.client.delete_registered_model_alias(self.name, CHALLENGER)
            self.client.set_registered_model_alias(self.name, CHAMPION, version.number)

    def give_back(self, when: str) -> tuple[Version, Version]:
        """Who was champion, and who was before it and is again.

        Raises:
            UserError: if there is no champion, or none was before it.
        """
        now = self.champion()
        if now is None:
            raise UserError(f"{self.name} has no champion; `rlhf promote` makes one")
        with reaching():
            there = [v for number in now.before if (v := self._version(number))]  # others were deleted
            if not there:
                raise UserError(
                    f"version {now.number} of {self.name} is the first champion: there is none to go back to"
                )
            former, *left = there
            self._tag(former.number, {BEFORE: ",".join(v.number for v in left) or NONE})
            self._tag(now.number, {LEFT: when})
            self.client.set_registered_model_alias(self.name, CHAMPION, former.number)
        return now, former

    def _tag(self, number: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, number, key, value[:MAX_TAG])

    def _untag(self, number: str, key: str) -> None:
        found = self._version(number)
        if found is not None and key in found.tags:
            self.client.delete_model_version_tag(self.name, number, key)


def _version(found: ModelVersion) -> Version:
    tags: dict[str, Any] = dict(found.tags)
    return Version(str(found.version), {key: str(value) for key, value in tags.items()})
