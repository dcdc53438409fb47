"""One Python file is one experiment: `get_config()`, and a docstring with command, hardware, time and number."""
