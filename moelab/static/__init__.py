"""Executors of static shapes: NPUMoE's capacities and the algorithms of AWS Neuron's guide."""
