"""Judges of responses, their results and statistics, and what training has cost the model."""
