"""The serving benchmark: datasets, a fast streaming client, metrics and the report.

Torch-free. ``runner.run_benchmark`` is the entry point; ``fenceline.bench_serving`` is the command line.
"""
