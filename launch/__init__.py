"""WHO starts it: command line, torchrun, process groups, supervision. Nothing imports it."""
