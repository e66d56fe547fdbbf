"""The simulator: the policies of the engine on the costs of a machine, without threads, files or clock."""
