"""One module for each source of data, with a function `read(options, *, seed, inputs, targets) -> Data`.

The options class of a source names its module (`reader`), which is imported only when a job uses it.
"""
