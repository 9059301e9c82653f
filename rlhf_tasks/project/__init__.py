"""The project's folder: paths, git, DVC, the inputs of a stage, processes, workspaces, lineage."""
