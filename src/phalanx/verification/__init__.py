"""A layout against one rank: same loss, same gradients, same updated parameters, or the first module that differs."""
