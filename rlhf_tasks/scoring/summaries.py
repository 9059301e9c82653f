"""How well a sentence summarizes a function: against the author's own, and by what it finds. No model.

Of preset docstrings: `chrf` labels its pairs, `retrieval` is its judge.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics.chrf import CHRF
from sklearn.feature_extraction.text import TfidfVectorizer

from rlhf_tasks.data.docstrings import SUFFIX
from rlhf_tasks.data.splits import hash_rank

CANDIDATES = 50
_SIGNATURE = re.compile(
    r".*?:[ \t]*(#[^\n]*)?\n", re.DOTALL
)  # `def`, up to the first line that ends in a colon
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # the parts of snake_case and CamelCase


def chrf(prompts: Sequence[str], responses: Sequence[str], summary: Sequence[str]) -> list[float]:
    """chrF2 (Popović 2015), a character F-score from 0 to 100, of each response against the `summary`."""
    metric = CHRF()
    return [
        float(metric.sentence_score(response, [own]).score)
        for response, own in zip(responses, summary, strict=True)
    ]


def retrieval(prompts: Sequence[str], responses: Sequence[str], package: Sequence[str]) -> list[float]:
    """1 / the rank of the right function among up to 50 of its `package`, by what a response says of it.

    The functions are those of `prompts`, by their bodies. Cosine of TF-IDF of character n-grams ranks them.
    The words of the right function's signature do not count, so that a repeated name finds nothing. Equal
    functions share the mean of their ranks.
    """
    scores = np.zeros(len(prompts))
    for name in sorted(set(package)):
        rows = [i for i, one in enumerate(package) if one == name]
        functions = sorted({prompts[i] for i in rows}, key=lambda prompt: hash_rank(0, prompt))
        place = {function: j for j, function in enumerate(functions)}
        signatures, bodies = zip(*map(_parts, functions), strict=True)
        vectorizer = TfidfVectorizer(analyzer="char_wb", ngram_range=(3, 5), sublinear_tf=True)
        bodies_by_ngrams = vectorizer.fit_transform([" ".join(words) for words in bodies])
        own = [place[prompts[i]] for i in rows]
        said = [
            " ".join(word for word in _words(responses[i]) if word not in signatures[j])
            for i, j in zip(rows, own, strict=True)
        ]
        cosines = (vectorizer.transform(said) @ bodies_by_ngrams.T).toarray()  # (rows, functions)
        for i, j, found in zip(rows, own, cosines, strict=True):
            # the right one and those that follow it in hashed order, in a circle
            others = found[[(j + k) % len(functions) for k in range(1, min(CANDIDATES, len(functions)))]]
            rank = 1 + (others > found[j]).sum() + (others == found[j]).sum() / 2
            scores[i] = 1 / rank
    return scores.tolist()


def _parts(prompt: str) -> tuple[set[str], list[str]]:
    """The words of a function's signature, and those of its body."""
    code = prompt.removesuffix(SUFFIX)
    signature = _SIGNATURE.match(code)
    end = signature.end() if signature else 0
    return set(_words(code[:end])), _words(code[end:])


def _words(text: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(text)]
