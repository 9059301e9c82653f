"""A file per stage of dvc.yaml, and what runs them: `runner`, with `preflight` before and `after` behind."""
