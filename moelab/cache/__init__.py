"""Which experts stay in memory: eviction policies, the pools F ≺ C ≺ S ≺ E, their ceilings and
their planning."""
