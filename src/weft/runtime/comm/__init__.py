"""Move bytes between ranks: messages, links and shared memory, transports, collectives.

This room knows ranks and messages. What they mean (chunks, versions, updates) belongs to the rooms above it.
"""

from weft.runtime.comm.collectives import Collectives
from weft.runtime.comm.links import LinkError, link_errors
from weft.runtime.comm.messages import Key, Message, describe_key, incoming_key, outgoing_key
from weft.runtime.comm.process_transport import ProcessTransport
from weft.runtime.comm.shared_memory import SHARED_MEMORY_SWITCH
from weft.runtime.comm.transport import AllReduce, Inbox, InProcessTransport, Send, Transport

__all__ = [
    "SHARED_MEMORY_SWITCH",
    "AllReduce",
    "Collectives",
    "InProcessTransport",
    "Inbox",
    "Key",
    "LinkError",
    "Message",
    "ProcessTransport",
    "Send",
    "Transport",
    "describe_key",
    "incoming_key",
    "link_errors",
    "outgoing_key",
]
