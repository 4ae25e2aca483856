"""What an action costs beyond its kernels."""
