"""What ranks of torchrun compare: versions and clocks."""

from __future__ import annotations

import socket
import time

from weft.doctor.checks import Broken, Check, Found, NotHere
from weft.doctor.machine import device_kinds, versions
from weft.doctor.ranks import Place

ROUNDS = 5
CLOCK_OFFSET = 1.0  # seconds between the clocks of two ranks


def peer_checks() -> list[Check]:
    return [
        Check(name="peers' versions", run=same_versions, remedy="install the same versions on all machines"),
        Check(name="peers' clocks", run=same_clocks, remedy="run a time service such as chrony on all machines"),
    ]


def same_versions(place: Place) -> Found:
    """Of all that ranks must have in common; and the same kinds of devices."""
    peers = place.gather(versions() | {"devices": ", ".join(device_kinds())})
    if len(peers) < 2:
        raise NotHere("there is one rank")
    for rank, peer in enumerate(peers):
        for name in {**peers[0], **peer}:
            if (version := peers[0].get(name)) != (other := peer.get(name)):
                raise Broken(f"{name}: rank 0 has {version}, rank {rank} has {other}")
    return f"{len(peers)} ranks agree", peers[0]


def same_clocks(place: Place) -> Found:
    """How far clocks are from rank 0's, as far as messages can show."""
    offsets = []
    for _ in range(ROUNDS):
        place.gather("")  # all leave it at almost the same time
        times = place.gather(time.time())
        offsets.append(times[place.rank] - times[0])
    peers = place.gather([min(offsets, key=abs), socket.gethostname()])
    if len(peers) < 2:
        raise NotHere("there is one rank")
    rank = max(range(len(peers)), key=lambda rank: abs(peers[rank][0]))
    offset, host = peers[rank]
    found = f"{abs(offset) * 1000:.3g} ms apart (rank {rank} on {host})"
    if abs(offset) > CLOCK_OFFSET:
        raise Broken(found)
    return f"at most {found}", {"offset_seconds": offset}
