"""Several trained models as one: chosen, averaged, and with an uncertainty that is calibrated and checked."""

from phalanx.errors import PhalanxError

try:
    import scipy  # noqa: F401
except ImportError as error:
    raise PhalanxError('ensembles need scipy: pip install "phalanx-train[materials]"') from error
