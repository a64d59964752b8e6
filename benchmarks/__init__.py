"""Speed, measured side by side: ``python -m benchmarks`` prints ratios of medians from one interleaved run."""
