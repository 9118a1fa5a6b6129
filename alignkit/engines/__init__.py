"""What the adapters of all engines are made of: the patch, seams, versions and the policy. No engine is imported."""
