"""PPO from the rollout to the checkpoint that is kept; `train` is the loop, and the place to begin."""
