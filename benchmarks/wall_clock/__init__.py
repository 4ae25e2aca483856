"""What a language model learns in the same time on two real ranks: asynchronous schedules beside synchronous ones.

Each schedule gets as many updates as it can make in that time, and a learning rate that falls over that number.
"""
