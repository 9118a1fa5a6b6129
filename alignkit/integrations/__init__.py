"""alignkit in RL frameworks that start both engines themselves: one line in a recipe, and what a recipe asks for.

`verl` is the module that the line names; importing it patches. `recipe` is `alignkit doctor --recipe`.
"""
