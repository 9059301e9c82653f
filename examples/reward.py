"""A reward, a scorer of PPO: `{kind: function, weight: 1.0, function: "examples.reward:brevity"}`."""


def brevity(prompts: list[str], responses: list[str]) -> list[float]:
    """Score a response by its number of words: 1 for none, and less for each word."""
    return [1 / (1 + len(response.split())) for response in responses]
