"""The command group `whimbrel bench`: options, progress and output of benchmarks."""
