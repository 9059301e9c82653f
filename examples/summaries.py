"""Scores of a sentence that summarizes a function: nearness to the author's sentence, and retrieval.

They need no model. The preset docstrings labels its pairs by `chrf`, and judges by both.
"""

import keyword
import math
import re
from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.chrf import CHRF
from sklearn.feature_extraction.text import TfidfVectorizer

from rlhf_tasks.data.splits import hash_rank

CANDIDATES = 50
# `def`, up to the first line that ends in a colon
_SIGNATURE = re.compile(r"^[ \t]*(?:@|async def |def ).*?:[ \t]*(#[^\n]*)?\n", re.DOTALL | re.MULTILINE)
# the parts of snake_case and CamelCase
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# a word of prose between blanks: no underscore, bracket, dot or capital inside
_PROSE = re.compile(r"(?<!\S)[\"'(]?([A-Z]?[a-z]+)[\"'.,;:!?)]*(?!\S)")


def chrf(prompts: Sequence[str], responses: Sequence[str], summary: Sequence[str]) -> list[float]:
    """chrF1 (Popović 2015), a character F-score from 0 to 100, of each response against the `summary`.

    sacrebleu's default, chrF2, counts recall twice, so that the longer one of two sentences is the nearer one
    more often than not.
    """
    metric = CHRF(beta=1)
    return [
        float(metric.sentence_score(response, [reference]).score)
        for response, reference in zip(responses, summary, strict=True)
    ]


def retrieval(
    prompts: Sequence[str], responses: Sequence[str], package: Sequence[str], summary: Sequence[str]
) -> list[float]:
    """1 / the rank of the right function among up to 50 of its `package`, searched for by the response.

    The functions are those of `prompts`; so scores for different sets of prompts do not compare, and this is
    no reward for PPO, which sees few prompts at a time. NaN for a function that is alone in its package, and
    where no `summary` there has a word.

    What is searched are the authors' sentences, which are ranked by cosine of TF-IDF of character n-grams;
    functions that are equally near share the mean of their ranks. Only a response's words of prose count, and
    none of the right function's signature or of Python's keywords: one that repeats the function's name or
    its code finds less than one that describes it.
    """
    scores = np.full(len(prompts), math.nan)
    for name in sorted(set(package)):
        rows = [i for i, one in enumerate(package) if one == name]
        summaries = {prompts[i]: summary[i] for i in rows}
        functions = sorted(summaries, key=lambda prompt: hash_rank(0, prompt))
        documents = [" ".join(_split_names(summaries[function])) for function in functions]
        if len(functions) < 2 or not any(documents):
            continue
        vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
        indexed = vectorizer.fit_transform(documents)
        number = {function: j for j, function in enumerate(functions)}
        right = [number[prompts[i]] for i in rows]
        queries = [" ".join(_words_that_count(responses[i], prompts[i])) for i in rows]
        cosines = (vectorizer.transform(queries) @ indexed.T).toarray()  # (rows, functions)
        for i, j, similar in zip(rows, right, cosines, strict=True):
            # the right one is compared with those that follow it in hashed order, in a circle
            others = similar[[(j + k) % len(functions) for k in range(1, min(CANDIDATES, len(functions)))]]
            rank = 1 + (others > similar[j]).sum() + (others == similar[j]).sum() / 2
            scores[i] = 1 / rank
    return scores.tolist()


def _split_names(text: str) -> list[str]:
    return [part.lower() for part in _PART.findall(text)]


def _words_that_count(response: str, prompt: str) -> list[str]:
    signature = _SIGNATURE.search(prompt)
    known = set(_split_names(signature[0])) if signature else set()
    words = (word.lower() for word in _PROSE.findall(response))
    return [word for word in words if word not in known and not keyword.iskeyword(word)]
