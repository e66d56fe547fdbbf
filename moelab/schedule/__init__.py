"""What a layer's misses leave to do, and in which order: ZipMoE's cache-affinity scheduling (§3.3,
appendices A, B)."""
