"""A judge: `judge.judges: [{kind: function, name: shorter, function: "examples.judge:shorter", pairwise: true}]`."""


def shorter(prompts: list[str], a: list[str], b: list[str]) -> list[float | None]:
    """Prefer the response with fewer words: the probability that `a` is better, or None for two empty ones."""
    lengths = [(len(x.split()), len(y.split())) for x, y in zip(a, b, strict=True)]
    return [y / (x + y) if x + y else None for x, y in lengths]
