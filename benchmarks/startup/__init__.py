"""Start-up: how long `import weft` takes, and a schedule drawn in the terminal, beside an empty interpreter."""
