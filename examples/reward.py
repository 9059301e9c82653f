"""A reward of one's own: `ppo.scorers: [{kind: function, weight: 1.0, function: "examples.reward:brevity"}]`."""


def brevity(prompts: list[str], responses: list[str]) -> list[float]:
    """Give a response the less, the more words it has: from 1 for none towards 0."""
    return [1 / (1 + len(response.split())) for response in responses]
