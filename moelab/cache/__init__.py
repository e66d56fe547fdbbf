"""Which experts stay in memory: residency decides, by the pools F ≺ C ≺ S ≺ E and their eviction
policies."""
