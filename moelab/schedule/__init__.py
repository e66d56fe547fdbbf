"""What a layer's misses leave to do, and in which order: ZipMoE's cache-affinity scheduling (§3.3, appendices A, B).

`requests` holds the delays of a machine, the tasks and their graphs; `affinity` is Algorithm 1; `execution` plays
an order in simulated time; `load_queue` holds the loads in flight, of the engine and in simulation; `optimum` has lower
bounds and the exact optimum of small instances. Import the module that you need; nothing is loaded here.
"""
