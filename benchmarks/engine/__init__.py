"""What an action costs beyond its kernels, by part, and what schedules with more actions pay for them."""
