"""What the benchmarks share: starting contestants, reading what their ranks stamped, medians and tables. Nothing here knows which number is being
measured."""
