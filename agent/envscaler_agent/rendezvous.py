"""Values that only a node of a running attempt knows, inserted into its command.

A launcher's options use them: ``torchrun --rdzv_endpoint=$ENVSCALER_RENDEZVOUS``. No shell reads the command,
so the wrapper inserts the values.
"""

from __future__ import annotations

import re
from typing import Dict, List, Mapping, Sequence

ADDRESS = "ENVSCALER_RENDEZVOUS"
"""Environment variable with ``host:port`` of node 0, the rendezvous of the processes of all nodes."""
_WORD = re.compile(r"\$ENVSCALER_(RENDEZVOUS_HOST|RENDEZVOUS_PORT|RENDEZVOUS|NODE)(?![A-Za-z0-9_])")


def expand(words: Sequence[str], environ: Mapping[str, str]) -> List[str]:
    """Return *words* with ``$ENVSCALER_RENDEZVOUS``, its ``_HOST`` and ``_PORT``, and ``$ENVSCALER_NODE``.

    Names without a value in *environ* are unchanged.
    """
    known = _known(environ)
    return [_WORD.sub(lambda match: known.get(match[1], match[0]), word) for word in words]


def _known(environ: Mapping[str, str]) -> Dict[str, str]:
    known = {}
    address = environ.get(ADDRESS)
    if address:
        host, _, port = address.rpartition(":")
        known = {"RENDEZVOUS": address, "RENDEZVOUS_HOST": host.strip("[]"), "RENDEZVOUS_PORT": port}
    if environ.get("ENVSCALER_NODE"):
        known["NODE"] = environ["ENVSCALER_NODE"]
    return known
