"""The offloading engine and what belongs to it: memory, threads, what was measured, and the
simulator."""
