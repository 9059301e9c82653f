"""What turns files, hub sets and functions of the user into rows, by the table shapes.yaml."""
