"""Executors of static shapes: NPUMoE's capacities and the algorithms of AWS Neuron's guide, with what it
says of spreading experts over devices."""
