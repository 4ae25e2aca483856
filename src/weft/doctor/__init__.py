"""`weft doctor`: whether this machine can train, proved on its own devices.

checks      what a check is, and what comes of it
machine     versions, cores, memory, ports, accelerators, clock; `cgroups` reads the limits of containers
ranks       runs checks on real or virtual ranks, within a budget of time
peers       what ranks of torchrun compare
messages    latency, bandwidth and shared memory between ranks
training    each method against `oracle`, its formula; a save and a resume; a killed rank
command     which checks run where; `table` prints what they find
"""

from weft.doctor.command import doctor

__all__ = ["doctor"]
