"""Moving bytes between ranks: messages, links and shared memory, transports, collective calls.

It knows ranks and messages, not what they mean: chunks, versions and updates are other rooms'.
"""

from weft.runtime.comm.collectives import Collectives
from weft.runtime.comm.messages import Key, Message, describe_key, incoming_key, outgoing_key
from weft.runtime.comm.shared_memory import SHARED_MEMORY_SWITCH
from weft.runtime.comm.transport import AllReduce, Inbox, InProcessTransport, ProcessTransport, Send, Transport

__all__ = [
    "SHARED_MEMORY_SWITCH",
    "AllReduce",
    "Collectives",
    "InProcessTransport",
    "Inbox",
    "Key",
    "Message",
    "ProcessTransport",
    "Send",
    "Transport",
    "describe_key",
    "incoming_key",
    "outgoing_key",
]
