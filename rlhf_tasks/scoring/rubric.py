"""A language model behind an endpoint that scores each response on a scale. B responses."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlhf_tasks.config.scorers import LlmScorer
from rlhf_tasks.project.paths import Paths
from rlhf_tasks.scoring.chat import ChatClient, Failure, Record, describe_reply, last_line, read_completion
from rlhf_tasks.scoring.protocol import Responses, ScorerError, ServiceFailed, UnusableScores
from rlhf_tasks.scoring.retokenize import remove_names
from rlhf_tasks.scoring.templates import fill_template, load_template

FILE = "scores.jsonl"
PROMPTS = Path(__file__).parent / "prompts"
_SCORE = re.compile(r"[\s*]*(?:(?i:score|grade|rating)[\s*:=]+)?(-?[0-9]+(?:\.[0-9]+)?)[\s*.]*")


class RubricScorer:
    """A `Scorer`: what the model replies is the score, and a reply that is none ends the stage.

    The prompt's file is below `paths.root`; replies are kept in `paths.home`, so that a resumed run asks
    nothing twice. A reply without a score is not kept: another run asks again.

    Raises:
        UserError: if the environment lacks the key, or the prompt cannot be read.
    """

    def __init__(self, settings: LlmScorer, name: str, paths: Paths, special: Collection[str] = ()) -> None:
        """The texts `special` are removed, which may be special tokens of the model too."""
        self._settings, self._name, self._special = settings, f"ppo.scorers: {name}", special
        fields = ["prompt", "response", *(["reference"] if settings.column else [])]
        self._prompt = load_template(settings.prompt, "ppo.scorers", paths.root, PROMPTS, fields)
        self._client = ChatClient(
            settings,
            self._name,
            paths.home / FILE,
            read_body=read_completion,
            find_problem=self._find_problem,
            keeps_unusable=False,
        )

    def __call__(self, rows: Responses) -> Tensor:
        """(B,) scores from `lowest` to `highest`.

        Raises:
            ScorerError: if the server is busy or away after all retries.
            UserError: if a reply is no score, the budget is spent, or the server refuses.
        """
        replies = self._client.ask([self._fill(rows, i) for i in range(len(rows))], self._stop)
        scores = [self._read(one) for one in replies if not isinstance(one, Failure)]
        assert len(scores) == len(rows), "a failure ends the work"
        return torch.tensor(scores)

    def _fill(self, rows: Responses, number: int) -> str:
        settings = self._settings
        values = {"prompt": rows.prompts[number], "response": rows.texts[number]}
        values |= {"lowest": f"{settings.lowest:g}", "highest": f"{settings.highest:g}"}
        if settings.column is not None:
            reference = rows.columns[settings.column][number]
            if reference is None:
                raise UnusableScores(
                    f"{self._name}: the column {settings.column} is null for the prompt "
                    f"{rows.prompts[number][:80]!r}; give every prompt a right answer"
                )
            is_text = isinstance(reference, str)
            values["reference"] = reference if is_text else json.dumps(reference, ensure_ascii=False)
        return remove_names(fill_template(self._prompt, values), self._special)

    def _read(self, record: Record) -> float | str:
        """The number on the last line, where nothing else stands but a word such as `Score:`, or a problem.

        A number beside the scale is none, and so is one that may lack digits.
        """
        settings = self._settings
        if record.get("is_cut"):
            return f"the reply was cut at {settings.max_reply_tokens} tokens; raise max_reply_tokens"
        match = _SCORE.fullmatch(last_line(record))
        if match is not None and settings.lowest <= (score := float(match[1])) <= settings.highest:
            return score
        scale = f"{settings.lowest:g} to {settings.highest:g}"
        return f"the reply does not end with a number from {scale}: {describe_reply(record)}"

    def _find_problem(self, record: Record) -> str:
        score = self._read(record)
        return score if isinstance(score, str) else ""

    def _stop(self, failures: Sequence[Failure]) -> ScorerError:
        reason, is_temporary = failures[0]
        kind = ServiceFailed if is_temporary else UnusableScores
        return kind(
            f"{self._name}: a response has no score, and none is made up: {reason.rstrip('.')}. The scores "
            "so far are kept, and the same command continues from the last snapshot"
        )
