"""One definition of a decoder for trainer and engine: config, layers, attention contexts, checkpoints in and out."""
