"""Executors of static shapes: NPUMoE's capacities and the algorithms of AWS Neuron's guide, and what
its quantisation costs in accuracy."""
