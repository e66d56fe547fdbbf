"""The simulator: the engine's policies on the costs of a machine, without threads, files or clock."""
