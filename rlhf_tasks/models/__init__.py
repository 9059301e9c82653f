"""Language models and their heads: loading, checks, sampling, log-probs, adapters, identity, saving."""
