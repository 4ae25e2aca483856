"""Weight prediction: what it does to learning (`learning.py`), and what it costs on two real ranks (`ranks.py`)."""
