"""Which kept responses are used again."""

from __future__ import annotations

import inspect

from rlhf_tasks.data.batches import collate
from rlhf_tasks.judging import responses
from rlhf_tasks.models.load import load_causal
from rlhf_tasks.models.sampling import sample_responses
from rlhf_tasks.models.stop_tokens import close_responses, ends_of, has_ended


def test_kept_responses_are_used_only_with_the_code_that_made_them() -> None:
    makers = (load_causal, collate, sample_responses, ends_of, close_responses, has_ended)
    assert {inspect.getsourcefile(one) for one in makers} == set(responses.CODE)
