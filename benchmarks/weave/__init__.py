"""Weave beside wpipe, 2bw, zb-h1 and torch's zero-bubble schedules, on 2, 4 and 8 real ranks.

Layers that sleep show what the order of work and the runtime cost, with links that take 0, 5 and 20 ms and with uneven
stages; a transformer and a ResNeXt on two ranks show what actions cost; virtual ranks count what is held.
"""
