"""One protocol for what gives a response a number, its kinds, and the client of language models."""
