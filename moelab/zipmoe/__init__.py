"""ZipMoE: how compressible weights are (§2.2), planning of pools (§3.4), cache-affinity scheduling
(Algorithm 1) and its bounds."""
