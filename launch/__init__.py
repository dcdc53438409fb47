"""Entry points, run as `python -m launch.NAME`; the only package that reads `configs`."""
