"""The simulator at scale: seconds and memory up to 1,024 stages x 4,096 micro-batches.

Every sample is a process on one core, through the command line as a user runs it. Repeats are interleaved, so that a
busy minute affects all rows alike.
"""
