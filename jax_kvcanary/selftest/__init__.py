"""A little serving loop of its own, legal traffic and planted faults: whether an installation finds what it must, and nothing else."""
