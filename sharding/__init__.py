"""Where arrays live: meshes, rules from logical dims to mesh axes, and moving weights between two layouts."""
