"""Moving bytes between ranks: transports, links, shared memory, collective calls."""

from weft.runtime.comm.gather import gather_json
from weft.runtime.comm.messages import Key, Message, describe, key_of
from weft.runtime.comm.shared_memory import SHARED_MEMORY_SWITCH
from weft.runtime.comm.transport import AllReduce, InProcessTransport, ProcessTransport, Transport

__all__ = [
    "SHARED_MEMORY_SWITCH",
    "AllReduce",
    "InProcessTransport",
    "Key",
    "Message",
    "ProcessTransport",
    "Transport",
    "describe",
    "gather_json",
    "key_of",
]
