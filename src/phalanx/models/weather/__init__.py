"""The weather family: a Vision Transformer over fields on a grid, which covers ClimaX and ORBIT.

Shapes in names: B samples, V variables, H by W grid points, L locations (patches of the grid), P points a patch, K tokens a
location, S = L*K tokens in the order of locations, D model width, A attention heads, E head width, G groups of variables.
"""
