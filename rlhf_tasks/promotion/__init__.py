"""Whether a policy becomes champion: `verdict` decides, `command` acts, `registry` remembers."""
