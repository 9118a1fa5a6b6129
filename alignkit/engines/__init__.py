"""Building blocks shared by all engine adapters: patch, hook points, versions, policy. Imports no engine."""
