"""What stages that train share: launch, a rank's step, the supervised loop and its tasks, snapshots."""
