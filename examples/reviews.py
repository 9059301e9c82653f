"""Sentences of movie reviews that twenty people each have rated: `rlhf preset reviews`.

    data: {source: "examples.reviews:reviews"}

The model is given the first words of a sentence and writes the rest. The 10,605 sentences of Rotten Tomatoes
and their ratings lie in the source archive of vaderSentiment (Hutto and Gilbert 2014, MIT license), which
`FETCH` brings to where `ARCHIVE` is.
"""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import Ridge
from sklearn.pipeline import Pipeline, make_pipeline

from rlhf_tasks.data.splits import hash_rank
from rlhf_tasks.errors import UserError

FETCH = "pip download --no-deps --no-binary vaderSentiment --dest ~/.cache/rlhf vaderSentiment==3.3.2"
ARCHIVE = Path("~/.cache/rlhf/vaderSentiment-3.3.2.tar.gz").expanduser()
RATED = ("additional_resources/hutto_ICWSM_2014.tar.gz", "movieReviewSnippets_GroundTruth.txt")
HEADING = "Film review: "
"""Begins every prompt, so that the model tells reviews from other text, of which it then forgets less."""
PROMPT_WORDS = 4
DEMONSTRATED = 0.5  # of the train sentences; the others give the prompts of pairs, critic and PPO


def reviews(seed: int, num_validation: int, num_test: int) -> dict[str, list[dict[str, Any]]]:
    """Demonstrations, and prompts with what the reviewer wrote as the reference.

    Of sentences that begin alike one is kept. A reward model starts as the SFT model, and should not take a
    text that it has seen for a good one: no train sentence serves both roles.
    """
    sentences: dict[str, str] = {}
    for text, _ in rated_sentences():
        words = text.split()
        if len(words) >= 2 * PROMPT_WORDS:
            beginning = HEADING + " ".join(words[:PROMPT_WORDS])
            sentences.setdefault(beginning, " " + " ".join(words[PROMPT_WORDS:]))
    order = sorted(sentences, key=lambda prompt: hash_rank(seed, prompt))
    heldout = num_validation + num_test
    shown = heldout + int(DEMONSTRATED * (len(order) - heldout))
    rows: dict[str, list[dict[str, Any]]] = {"sft": [], "prompts": []}
    for i, prompt in enumerate(order):
        split = "validation" if i < num_validation else "test" if i < heldout else "train"
        if i < shown:
            rows["sft"].append({"prompt": prompt, "completion": sentences[prompt], "split": split})
        if i < heldout or i >= shown:
            rows["prompts"].append({"prompt": prompt, "reference": sentences[prompt], "split": split})
    return rows


def people(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """What people would rate each sentence, from −4 (bad) to 4 (good), by a regression on their ratings.

    It knows the ratings of all sentences, those of the test prompts too: a label, and no judge of its own.
    """
    sentences = [a.removeprefix(HEADING) + b for a, b in zip(prompts, responses, strict=True)]
    ratings = regression().predict(sentences)
    return [float(rating) for rating in ratings]


@cache
def regression() -> Pipeline:
    """Ridge regression on the words and pairs of words of all sentences."""
    texts, ratings = zip(*rated_sentences(), strict=True)
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2)
    return make_pipeline(words, Ridge(alpha=1.0)).fit(texts, ratings)


@cache
def rated_sentences() -> list[tuple[str, float]]:
    """Each sentence with its mean rating."""
    if not ARCHIVE.exists():
        raise UserError(f"{ARCHIVE} is missing; fetch it with: {FETCH}")
    inner, name = RATED
    try:
        ratings = _member(ARCHIVE.read_bytes(), f"{ARCHIVE.name.removesuffix('.tar.gz')}/{inner}")
        lines = _member(ratings, f"hutto_ICWSM_2014/{name}").decode("utf-8").splitlines()
    except (tarfile.TarError, EOFError, zlib.error, KeyError) as error:
        raise UserError(f"{ARCHIVE} is damaged; delete it, and fetch it with: {FETCH}") from error
    fields = [line.split("\t", 2) for line in lines]
    return [(" ".join(text.split()), float(mean)) for _, mean, text in fields]


def _member(archive: bytes, name: str) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as file:
        member = file.extractfile(name)
        assert member is not None, f"{name} is no file"
        return member.read()


def reads() -> dict[str, str]:
    """Stage prepare runs again when the archive changes."""
    return {ARCHIVE.name: hashlib.md5(ARCHIVE.read_bytes()).hexdigest()} if ARCHIVE.exists() else {}
