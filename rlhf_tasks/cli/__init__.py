"""The `rlhf` command: a function per subcommand, in a file per topic."""
