"""Scorers of responses: reward models, functions, services, verifiers, a penalty; and their weighted sum.

PPO's reward and judges use them. A scorer maps token ids to scores: (B,) float32 on the CPU, in the order
of the rows. Functions and services receive texts: the prompt as the model reads it (with special tokens
and chat template) and the response without its EOS. Texts from a `words` tokenizer have one space between
words, whatever the original white space was. They also get the kept columns of the prompts' rows.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import httpx
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_tasks.config import scorers as config
from rlhf_tasks.data.batches import Ids, load_tokenizer, text_of
from rlhf_tasks.data.columns import NONE, Columns, take
from rlhf_tasks.errors import UserError
from rlhf_tasks.modeling import checks, contracts
from rlhf_tasks.modeling.combining import combined, length_penalties
from rlhf_tasks.modeling.functions import TextFunction
from rlhf_tasks.modeling.load import TokenScores, load_reward
from rlhf_tasks.modeling.placement import OneDevice, Placement
from rlhf_tasks.modeling.retokenised import Retokenised
from rlhf_tasks.modeling.reward_scorer import RewardScorer
from rlhf_tasks.modeling.tensors import NonFiniteError
from rlhf_tasks.modeling.verifier import Verifier

NUM_TRIES = 5
BACK_OFF_SECONDS = 1.0  # doubles from try to try
LONGEST_WAIT_SECONDS = 30.0
SHOWN_CHARACTERS = 200
CPU = torch.device("cpu")


class Scorer(Protocol):
    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        """(B,) float32 on the CPU, in the order of the rows; `columns` are those of the prompts' rows."""


class ScorerError(RuntimeError):
    """A scorer returned no finite number for a response, or could not be reached."""


class UnusableScores(ScorerError, UserError):
    """A scorer returned a wrong type or number of scores, or refused the request; the user can fix it."""


class NonFiniteScore(NonFiniteError, ScorerError):
    """A scorer returned NaN or infinity; PPO's guards handle it."""


# --------------------------------------------------------------------------------------- scorers


class FunctionScorer:
    """`module:function`, called once with all prompts and all responses; it returns a float for each.

    Raises:
        UserError: as `TextFunction`; `columns` are the names of the kept columns.
    """

    def __init__(
        self, function: str, tokenizer: PreTrainedTokenizerBase, root: Path, columns: Collection[str] = ()
    ) -> None:
        self._tokenizer, self._function = tokenizer, TextFunction(function, "ppo.scorers", root, columns)

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        if not queries:
            return torch.zeros(0)
        name, found = (
            self._function.name,
            self._function(*texts(self._tokenizer, queries, responses), columns),
        )
        return _finite(name, numbers(name, found, len(queries)))


class HttpScorer:
    """A service that receives {"prompts": […], "responses": […]} and returns {"scores": […]}.

    Where columns are kept, it also receives {"columns": {NAME: […]}}.

    A request is tried NUM_TRIES times, after 429, 5xx, a timeout or a broken connection. The wait doubles
    from try to try, or is that of `Retry-After`. Any other status or content is an error at once.
    `timeout_seconds` limits the connection, each pause, and the whole reply.
    """

    def __init__(
        self,
        url: str,
        tokenizer: PreTrainedTokenizerBase,
        *,
        timeout_seconds: float,
        batch_size: int,
        key: str | None = None,
        back_off_seconds: float = BACK_OFF_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL as error:
            raise UserError(f"ppo.scorers: {url!r} is not a URL: {error}") from error
        if not parsed.host or (parsed.port or 0) > 65535:
            raise UserError(f"ppo.scorers: {url!r} names no host and port")
        shown = parsed.copy_with(username=None, password=None, query=None)  # without parts that may be secret
        self._url, self._name, self._tokenizer = url, f"http scorer {shown}", tokenizer
        self._timeout, self._batch_size = timeout_seconds, batch_size
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._back_off, self._sleep = back_off_seconds, sleep

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        prompts, answers = texts(self._tokenizer, queries, responses)
        parts = [torch.zeros(0)]
        # a client for each call: the service would close an idle connection between updates
        with httpx.Client(timeout=self._timeout) as client:
            for start in range(0, len(prompts), self._batch_size):
                rows = slice(start, start + self._batch_size)
                request: dict[str, Any] = {"prompts": prompts[rows], "responses": answers[rows]}
                if columns:
                    request["columns"] = take(columns, range(len(prompts))[rows])
                parts.append(self._scores(self._answer(client, request), len(request["prompts"])))
        return torch.cat(parts)

    def _scores(self, body: bytes, count: int) -> Tensor:
        try:
            answer = json.loads(body)
        except ValueError as error:
            raise UnusableScores(f"{self._name} must return JSON, but returned {_shown(body)}") from error
        if not (isinstance(answer, dict) and isinstance(answer.get("scores"), list)):
            raise UnusableScores(f'{self._name} must return {{"scores": […]}}, but returned {_shown(body)}')
        return _finite(self._name, numbers(self._name, answer["scores"], count))

    def _answer(self, client: httpx.Client, request: Mapping[str, Any]) -> bytes:
        """The body of a successful reply, after at most NUM_TRIES tries."""
        problem = ""
        for number in range(NUM_TRIES):
            wait = self._back_off * 2**number
            try:
                status, headers, body = self._request(client, request)
            except httpx.RequestError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if 200 <= status < 300:
                    return body
                problem = f"status {status}: {_shown(body)}"
                if status != 429 and status < 500:
                    raise UnusableScores(f"{self._name} rejected the request: {problem}")
                wait = _retry_after(headers, wait)
            if number < NUM_TRIES - 1:
                self._sleep(min(wait, LONGEST_WAIT_SECONDS))
        raise ScorerError(f"{self._name} returned no scores in {NUM_TRIES} tries; the last error: {problem}")

    def _request(self, client: httpx.Client, request: Mapping[str, Any]) -> tuple[int, httpx.Headers, bytes]:
        """Limits the whole reply; the timeout of httpx limits only each pause in it."""
        deadline = time.monotonic() + self._timeout
        body = b""
        with client.stream("POST", self._url, json=request, headers=self._headers) as response:
            for chunk in response.iter_bytes():
                body += chunk
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"the reply was not complete after {self._timeout} s")
        return response.status_code, response.headers, body


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UserError(
            f"ppo.scorers: the environment variable {variable} holds no key; export it, or set key_variable "
            "to null for a server that needs none"
        )
    return key


def _retry_after(headers: httpx.Headers, otherwise: float) -> float:
    """Seconds to wait by the Retry-After header (RFC 9110, 10.2.3); its dates are not read."""
    seconds = headers.get("Retry-After", "")
    return float(seconds) if seconds.isdecimal() else otherwise


class LengthPenalty:
    """The soft over-length penalty: 0 to −1."""

    def __init__(self, max_tokens: int, buffer: int) -> None:
        self._max_tokens, self._buffer = max_tokens, buffer

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        return length_penalties([len(response) for response in responses], self._max_tokens, self._buffer)


class VerifierScorer:
    """Checks of the answers against the columns, and the format's weight."""

    def __init__(self, verifier: Verifier, tokenizer: PreTrainedTokenizerBase) -> None:
        self._verifier, self._tokenizer = verifier, tokenizer

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        answers = [text_of(self._tokenizer, response) for response in responses]
        return torch.tensor(self._verifier.scores(answers, columns), dtype=torch.float32)


class DummyScorer:
    """Zero for every response: it runs the pipeline with nothing to learn."""

    def __call__(self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE) -> Tensor:
        return torch.zeros(len(queries))


# ---------------------------------------------------------------------------------- weighted sum


class Part(NamedTuple):
    name: str
    weight: float
    scorer: Scorer
    reward_model: TokenScores | None
    """The model behind the scorer; None if it is no reward model."""


class WeightedSum:
    """Σ weight · score over the parts, of which the reward models are combined first by `combine`.

    Each part can be logged on its own.
    """

    def __init__(self, parts: Sequence[Part], combine: config.Combination = "sum") -> None:
        self._parts, self._combine = tuple(parts), combine
        self.reward_models = [part.reward_model for part in parts if part.reward_model is not None]

    def parts(
        self, queries: Sequence[Ids], responses: Sequence[Ids], columns: Columns = NONE
    ) -> dict[str, Tensor]:
        """Each part's scores, unweighted: (B,) float32 on the CPU.

        Raises:
            ScorerError: if one of them is not finite.
        """
        # reward models first: where they are sharded, all processes make their passes together, and a part
        # that raises must not keep one process from them
        order = sorted(self._parts, key=lambda part: part.reward_model is None)
        found = {part.name: part.scorer(queries, responses, columns) for part in order}
        return {part.name: _finite(part.name, found[part.name]) for part in self._parts}

    def total(self, found: Mapping[str, Tensor]) -> Tensor:
        """The combined scores of the reward models, plus Σ weight · score over the other parts; (B,)."""
        weighted = [part.weight * found[part.name] for part in self._parts]
        if self._combine != "sum":
            flags = [part.reward_model is not None for part in self._parts]
            rewards = [row for row, flag in zip(weighted, flags, strict=True) if flag]
            others = [row for row, flag in zip(weighted, flags, strict=True) if not flag]
            weighted = [combined(torch.stack(rewards), self._combine), *others]
        return torch.stack(weighted).sum(dim=0)


def build(
    settings: Sequence[config.Scorer],
    tokenizer: PreTrainedTokenizerBase,
    *,
    reward_model: TokenScores | None,
    max_tokens: int,
    root: Path,
    combine: config.Combination = "sum",
    placement: Placement | None = None,
    columns: Collection[str] = (),
) -> WeightedSum:
    """The scorers of `ppo.scorers`; the kind `reward_model` with a null path needs `reward_model`.
    Functions are imported from files below `root`; the folders of reward models are below it too, and those
    models are put into the `placement`, by default on the CPU. `columns` are the names of the kept columns.

    Raises:
        UserError: for a function that cannot be imported or needs a column that is not kept, an invalid
            URL, or a folder without a trained reward model.
    """
    parts: list[Part] = []
    scorer: Scorer
    model: TokenScores | None
    for name, one in zip(config.scorer_names(settings), settings, strict=True):
        weight = 0.0 if isinstance(one, config.DummyScorer) else one.weight
        if isinstance(one, config.RewardModelScorer) and one.path is not None:
            scorer, model = load_reward_scorer(root / one.path, tokenizer, max_tokens, placement)
        else:
            scorer = _one(one, tokenizer, reward_model, max_tokens, root, columns, placement)
            model = reward_model if isinstance(one, config.RewardModelScorer) else None
        parts.append(Part(name, weight, scorer, model))
    return WeightedSum(parts, combine)


def load_reward_scorer(
    folder: Path, policy: PreTrainedTokenizerBase, max_tokens: int, placement: Placement | None = None
) -> tuple[Scorer, TokenScores]:
    """The reward model of a folder, and a scorer of the policy's token ids through its own tokenizer.

    Raises:
        ContractError: if the folder holds no reward model with a trained head, or a tokenizer that does not
            fit it.
        ModelFault: if the scores of a padded batch are not those of each row alone.
    """
    own, model = load_tokenizer(folder), load_reward(folder)
    contracts.check_fits(model.model, own, str(folder))
    placement = placement or OneDevice(CPU)
    with placement.on_device(model.requires_grad_(False)) as is_used:
        if is_used:
            rows = checks.random_rows(model.model.config)
            checks.require(checks.check_scores(model, rows, pad=own.pad_token_id), str(folder))
    placement.put(model)
    scorer = RewardScorer(model, own, max_tokens, placement)
    settings = model.model.config
    bounds = getattr(settings, "max_position_embeddings", None), checks.find_rescaling_length(settings)
    longest = min((bound for bound in bounds if bound is not None), default=None)
    return Retokenised(scorer, own, policy, folder, longest), model


def _one(
    one: config.Scorer,
    tokenizer: PreTrainedTokenizerBase,
    reward_model: TokenScores | None,
    max_tokens: int,
    root: Path,
    columns: Collection[str],
    placement: Placement | None,
) -> Scorer:
    if isinstance(one, config.RewardModelScorer):
        assert reward_model is not None, "the config guarantees a reward model"
        return RewardScorer(reward_model, tokenizer, max_tokens, placement)
    if isinstance(one, config.FunctionScorer):
        return FunctionScorer(one.function, tokenizer, root, columns)
    if isinstance(one, config.HttpScorer):
        return HttpScorer(
            one.url, tokenizer, timeout_seconds=one.timeout_seconds, batch_size=one.batch_size,
            key=_key(one.key_variable),
        )  # fmt: skip
    if isinstance(one, config.LengthPenalty):
        return LengthPenalty(one.max_tokens, one.buffer)
    if isinstance(one, config.VerifierScorer):
        return VerifierScorer(Verifier(one.checks, one.format), tokenizer)
    return DummyScorer()


# ------------------------------------------------------------------------------- texts and checks


def texts(
    tokenizer: PreTrainedTokenizerBase, queries: Sequence[Ids], responses: Sequence[Ids]
) -> tuple[list[str], list[str]]:
    """Prompts as the model reads them, and responses without their EOS."""
    prompts = [str(tokenizer.decode(query, skip_special_tokens=False)) for query in queries]
    return prompts, [text_of(tokenizer, response) for response in responses]


def numbers(name: str, found: Any, count: int) -> Tensor:
    """The scores of a function or service as (count,) float32.

    Raises:
        UnusableScores: with the value that is not `count` numbers.
    """
    try:
        given = list(found)
        if any(isinstance(x, str | bytes) for x in given):
            raise TypeError("text is not a number")
        scores = torch.tensor([float(x) for x in given], dtype=torch.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableScores(
            f"{name} must return one number per response, but returned {_shown(found)}: {error}"
        ) from error
    if len(scores) != count:
        raise UnusableScores(
            f"{name} must return one number per response, but gave {len(scores)} for {count}"
        )
    return scores


def _finite(name: str, scores: Tensor) -> Tensor:
    wrong = (~scores.isfinite()).nonzero().flatten().tolist()
    if wrong:
        raise NonFiniteScore(
            f"{name} gave {float(scores[wrong[0]])} for response {wrong[0]} of {len(scores)} "
            f"({len(wrong)} of them are not finite)"
        )
    return scores


def _shown(found: Any) -> str:
    text = found.decode(errors="replace") if isinstance(found, bytes) else repr(found)
    return text[:SHOWN_CHARACTERS] + ("…" if len(text) > SHOWN_CHARACTERS else "")
