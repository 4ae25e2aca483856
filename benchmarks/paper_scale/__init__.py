"""The papers' models on the papers' devices, simulated: where weft's model agrees with their claims, and where not.

WPipe reports 1.4 x the throughput of PipeDream-2BW and 36 % less memory, XPipe that its pipeline hardly idles. Nothing
is timed here: every figure follows from `shapes.py` (what the models are), `devices.py` (what a device does), the
schedules, and the assumptions of `cells.py`, which `sensitivity.py` changes one at a time.
"""
