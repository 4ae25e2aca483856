"""`weft doctor`: whether this machine can train, proved on its own devices.

checks       what a check is, and what comes of it
machine      Python, torch, cores, memory, shared memory, ports, accelerators, clock; cgroups reads the limits
peers        what ranks of torchrun compare
ranks        runs checks on real or virtual ranks, within a budget of time
messages     latency, bandwidth and shared memory between two ranks
training     the law of each method against `oracle`, a save and a resume, a killed rank
command      the command: which checks, a table or JSON
"""

from weft.doctor.command import doctor

__all__ = ["doctor"]
