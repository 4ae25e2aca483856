"""Many stages: pipelines of layers that sleep, on 4 and 8 real ranks, over the simulated throughput.

Sleeping takes no core, so two cores run eight ranks: what is measured is the runtime (engine, messages, order), not the
layers. All contenders have the same layers, two a rank. With uneven stages, two neighbouring layers are slower: one
rank holds both in a pipeline of one chunk a rank, two ranks hold one each in a pipeline of two.
"""
