"""Training: the loop, the step, the optimizer, checkpoints, metrics and the run directory."""

import sys

from phalanx.callable_package import CallablePackage

# `phalanx.train` is this package and a function of the Python interface.
sys.modules[__name__].__class__ = CallablePackage
