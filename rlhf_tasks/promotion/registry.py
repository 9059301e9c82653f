"""Versions of the policy in MLflow's model registry. No torch here; MLflow is imported when it is opened.

    challenger   the policy that the gate judged last, unless it was promoted
    champion     the policy that was promoted last, unless it was rolled back

A version is one policy: the same bytes (DVC's md5) are registered once. DVC keeps the weights, and the tags
of the version say where. The tag `champion.before` lists the champions before a version, the last one first;
a rollback goes down that list. Each step can be repeated after a kill, and the alias moves last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_tasks.config import Tracking
from rlhf_tasks.errors import UserError
from rlhf_tasks.tracking.context import bound_requests, uri

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion
    from mlflow.tracking import MlflowClient

CHAMPION, CHALLENGER = "champion", "challenger"
MD5, BEFORE, ROLLED_BACK, NONE = "dvc.md5", "champion.before", "champion.rolled_back", "none"
MAX_BEFORE = 100  # former champions in the tag
MAX_TEXT = 5000  # characters of a tag or a description, as MLflow's database has room for
MAX_REASON = 160  # characters
NOT_FOUND, ALREADY_EXISTS = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
DESCRIPTION = "Policies that the gate judged (`promotion` in params.yaml). DVC keeps their weights."


class Unreachable(Exception):
    """MLflow does not answer now. Nothing final has happened, and the same command can be repeated."""


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
        """The numbers of the champions before it, the last one first."""
        numbers = self.tags.get(BEFORE, NONE)
        return [] if numbers == NONE else numbers.split(",")


@contextmanager
def translate_errors() -> Iterator[None]:
    """Separate a server that does not answer from a request that it refused.

    Raises:
        Unreachable: if the server does not answer.
        UserError: if it refused the request, with its reason.
    """
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except MlflowException as error:
        status: int = error.get_http_status_code()  # type: ignore[no-untyped-call]
        if status >= 500:
            raise Unreachable(_reason(error)) from None
        raise UserError(f"MLflow refused: {_reason(error)}") from None
    except (SQLAlchemyError, OSError) as error:
        raise Unreachable(_reason(error)) from None


@contextmanager
def _ignore(code: str) -> Iterator[None]:
    """Let MLflow's errors of this code pass."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != code:
            raise


def _reason(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


@dataclass(frozen=True)
class Registry:
    """The registered model of one name."""

    client: MlflowClient
    name: str

    @classmethod
    def open(cls, settings: Tracking, home: Path, name: str) -> Registry:
        """Open the registry of the store that keeps the runs.

        Raises:
            Unreachable: if it does not answer.
            UserError: with `tracking.enabled: false`, or for a store with a relative path.
        """
        if not settings.enabled:
            raise UserError(
                "tracking.enabled is false, and the champion is kept in MLflow's registry; set it to true"
            )
        bound_requests()
        from rlhf_tasks.tracking.store import open_store

        with translate_errors():
            registry = cls(open_store(uri(settings), home), name)
            registry._aliases()
        return registry

    def champion(self) -> Version | None:
        with translate_errors():
            number = self._aliases().get(CHAMPION)
            return None if number is None else self._version(number)

    def find_version(self, md5: str) -> Version | None:
        """The version of the policy with these bytes."""
        with translate_errors():
            query = f"name = '{self.name}' and tags.`{MD5}` = '{md5}'"
            versions = sorted(self.client.search_model_versions(query), key=lambda v: int(v.version))
            return _version(versions[0]) if versions else None

    def find_run(self, key: str, experiment: str) -> str | None:
        """The id of the MLflow run that has the key of a stage's run."""
        with translate_errors():
            known = self.client.get_experiment_by_name(experiment)
            if known is None:
                return None
            query = f"tags.`rlhf.run` = '{key}'"
            runs = self.client.search_runs([known.experiment_id], query, max_results=1)
            return str(runs[0].info.run_id) if runs else None

    def _aliases(self) -> dict[str, str]:
        with _ignore(NOT_FOUND):
            return {k: str(v) for k, v in self.client.get_registered_model(self.name).aliases.items()}
        return {}

    def _version(self, number: str) -> Version | None:
        with _ignore(NOT_FOUND):
            return _version(self.client.get_model_version(self.name, number))
        return None

    def register(self, md5: str, path: str, tags: Mapping[str, str], run: str | None) -> Version:
        """Return the version of these bytes with these tags. It is created if it does not exist."""
        known = self.find_version(md5)
        with translate_errors():
            if known is not None:
                self._tag(known.number, {k: v for k, v in tags.items() if known.tags.get(k) != v})
                return Version(known.number, {**known.tags, **tags})
            with _ignore(ALREADY_EXISTS):
                self.client.create_registered_model(self.name, description=DESCRIPTION)
            # MLflow's server refuses a source with `..` in it.
            shown = Path(path).name if ".." in Path(path).parts else path.strip("/")
            source, all_tags = f"dvc:/{shown}/{md5}", {**tags, MD5: md5}
            return _version(
                self.client.create_model_version(
                    self.name, source, run_id=run, tags=all_tags, await_creation_for=0
                )
            )

    def challenge(self, version: Version) -> None:
        """Move the alias `challenger` to a version."""
        with translate_errors():
            self.client.set_registered_model_alias(self.name, CHALLENGER, version.number)

    def record(self, version: Version, tags: Mapping[str, str], page: str) -> None:
        """Write the gate's verdict: its tags `verdict` and `verdict.…`, and `page` as the description.

        The tags of an earlier verdict are removed.
        """
        with translate_errors():
            for key in [k for k in version.tags if k.split(".")[0] == "verdict" and k not in tags]:
                self.client.delete_model_version_tag(self.name, version.number, key)
            self.client.update_model_version(self.name, version.number, page[:MAX_TEXT])
            self._tag(version.number, tags)

    def promote(self, version: Version, over: Version | None) -> None:
        """Make a version champion in place of `over`, the champion that it was judged against.

        Raises:
            UserError: if another version has become champion since.
        """
        now = self.champion()
        if (now and now.number) != (over and over.number):
            raise UserError(
                f"version {now.number if now else 'none'} became champion while version {version.number} "
                "was judged against another one; run `rlhf promote` again"
            )
        before = [over.number, *over.before][:MAX_BEFORE] if over else []
        with translate_errors():
            self._tag(version.number, {BEFORE: ",".join(before) or NONE})
            if ROLLED_BACK in version.tags:
                self.client.delete_model_version_tag(self.name, version.number, ROLLED_BACK)
            if self._aliases().get(CHALLENGER) == version.number:
                self.client.delete_registered_model_alias(self.name, CHALLENGER)
            self.client.set_registered_model_alias(self.name, CHAMPION, version.number)

    def rollback(self, time: str) -> tuple[Version, Version]:
        """Make the former champion champion again. Returns the version that leaves and the former one.

        Raises:
            UserError: if there is no champion, or no former one.
        """
        now = self.champion()
        if now is None:
            raise UserError(f"{self.name} has no champion; `rlhf promote` makes one")
        with translate_errors():
            # A version that somebody deleted from the registry is passed over.
            remaining = [v for number in now.before if (v := self._version(number))]
            if not remaining:
                raise UserError(
                    f"version {now.number} of {self.name} is the first champion; there is no former one to "
                    "roll back to"
                )
            former, *earlier = remaining
            self._tag(former.number, {BEFORE: ",".join(v.number for v in earlier) or NONE})
            self._tag(now.number, {ROLLED_BACK: time})
            self.client.set_registered_model_alias(self.name, CHAMPION, former.number)
        return now, former

    def _tag(self, number: str, tags: Mapping[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_model_version_tag(self.name, number, key, value[:MAX_TEXT])


def _version(model_version: ModelVersion) -> Version:
    tags: dict[str, Any] = dict(model_version.tags)
    return Version(str(model_version.version), {key: str(value) for key, value in tags.items()})
