"""A file per stage of dvc.yaml, and what runs them: `runner`, with `trial` before and `after` behind."""
