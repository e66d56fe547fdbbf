"""Plans for AWS Neuron: how a model is spread over NeuronCores, and what bounds it there."""
