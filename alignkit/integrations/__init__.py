"""Integrations with RL frameworks that start both engines, enabled by one setting in a recipe.

Importing `verl` or `nemo_rl` patches the framework. `recipe` implements `alignkit recipe`. Users' recipes
contain the module names `alignkit.integrations.verl` and `alignkit.integrations.startup`.
"""
