"""The parts of `scripts/gpu`: each measures one thing on a card, in a process of its own."""
