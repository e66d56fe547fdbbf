"""What all rooms use: what a model and a machine are, names, files, arguments, progress."""
