"""Side-by-side measurements against peers: every contender in a process of its own, turns taken in one run."""
