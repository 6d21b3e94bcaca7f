"""`phalanx.cluster.local_ranks` with the modules that tests import loaded in advance as well."""

from functools import partial

from phalanx.cluster import local_ranks

_PRELOADED = ("pytest", *local_ranks.PRELOADED)

run_ranks = partial(local_ranks.run_ranks, preload=_PRELOADED)
fork_server = partial(local_ranks.fork_server, _PRELOADED)
