"""Throughput on two real ranks, over what both cores can do, beside what people would use instead.

`engine.py` measures the cost of an action on virtual ranks.
"""
