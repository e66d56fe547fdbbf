"""GPU and near-data processing: schedules of experts on a GPU and N modules of memory that compute.

Source: "A Scheduling Framework for Efficient MoE Inference on Edge GPU-NDP Systems" (Wu et al.). A
`System` plans a layer's experts, the closed form or the event simulation times the plan, `simulate`
runs a prompt and its answer.

>>> from moelab.ndp.assumptions import Assumptions
>>> from moelab.ndp.simulation import simulate
>>> a = Assumptions()
>>> routing = a.routing("Qwen3-30B-A3B", seed=0)
>>> result = simulate(a.hardware(6), a.system("NDP+TP+LB+PRE"), routing)
>>> result.prefill, result.decode, result.end_to_end        # seconds, modelled
"""
