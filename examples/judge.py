"""A judge: `{kind: function, name: shorter, function: "examples.judge:shorter", pairwise: true}`."""


def shorter(prompts: list[str], a: list[str], b: list[str]) -> list[float | None]:
    """The probability that `a` is better, the higher the fewer words it has; None: both are empty."""
    lengths = [(len(x.split()), len(y.split())) for x, y in zip(a, b, strict=True)]
    return [y / (x + y) if x + y else None for x, y in lengths]
