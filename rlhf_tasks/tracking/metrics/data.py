"""Metrics of the stages that make data: prepare and preferences."""

from __future__ import annotations

from functools import partial

from rlhf_tasks.tracking.metrics.kinds import Metric

_prepare = partial(Metric, stage="prepare")
_preferences = partial(Metric, stage="preferences")

PREPARE = (
    _prepare(
        name="rows/ROLE/SPLIT", label="ROLE: SPLIT rows",
        unit="rows", formula="rows written, by role and split",
    ),
    _prepare(
        name="duplicates", label="Rows that repeat an earlier one",
        unit="rows", formula="rows that repeat an earlier row of the same role",
        reading="They are part of `quarantined`.",
    ),
    _prepare(
        name="quarantined", label="Rows left out", unit="rows", formula="rows that cannot be used",
        reading="Above 0 only with `data.on_bad_row: quarantine`. data/quarantine names each row and its "
        "reason.",
    ),
    _prepare(
        name="quarantined/REASON", label="Rows left out: REASON",
        unit="rows", formula="rows that cannot be used, by reason",
    ),
    _prepare(
        name="tokens/prompt_mean", label="Mean length of a prompt",
        unit="tokens", formula="mean length of a prompt, over all roles",
    ),
    _prepare(
        name="tokens/prompt_max", label="Length of the longest prompt",
        unit="tokens", formula="length of the longest prompt",
        reading="At most `data.max_prompt_tokens`.",
    ),
    _prepare(
        name="tokens/completion_mean", label="Mean length of a completion", unit="tokens",
        formula="mean length of a completion, chosen or rejected text, with its EOS",
    ),
    _prepare(
        name="tokens/completion_max", label="Length of the longest completion",
        unit="tokens", formula="length of the longest such text",
        reading="At most `data.max_completion_tokens`.",
    ),
    _prepare(
        name="tokens/unknown", label="Unknown tokens of demonstrations", unit="share",
        formula="tokens of held-out demonstrations that the tokenizer maps to `<unk>` / all of their tokens",
        reading="Above 1%, raise `model.scratch.vocab_size` or choose `tokenizer: bpe`.",
    ),
)  # fmt: skip

PREFERENCES = (
    _preferences(
        name="pairs/SPLIT/ORIGIN", label="SPLIT pairs: ORIGIN",
        unit="pairs", formula="pairs in data/comparisons, by split and origin"
    ),
    _preferences(
        name="flipped", label="Pairs with exchanged labels", unit="pairs",
        formula="train pairs whose chosen and rejected text were exchanged",
        reading="Label noise of the synthetic task, set by `preferences.label_noise`.",
        when="`data.source: synthetic`",
    ),
)  # fmt: skip
