"""Slow links: two hosts, one rank on each, and how much of the communication each method hides behind compute.

Every contender runs on every link, one link right after the other, in several rounds. A slowdown is over the
contender's own time on the unshaped link in the same round. Bytes are counted by the network device. `hosts.py` makes
the network, `driver.py` starts the ranks and sends them commands.
"""
