"""The parts of `scripts/chaos.py`."""
