"""A layout against one rank: same loss, same gradients, same updated parameters, or the first module that differs."""

import sys

from phalanx.callable_package import CallablePackage

# `phalanx.verify` is this package and a function of the Python interface.
sys.modules[__name__].__class__ = CallablePackage
