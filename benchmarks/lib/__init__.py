"""What the measurements share. Scripts of benchmarks/ find it beside themselves; nothing needs to be installed."""
