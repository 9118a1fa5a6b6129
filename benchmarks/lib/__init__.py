"""Helpers shared by the benchmark scripts, which import them from their own folder without an installation."""
