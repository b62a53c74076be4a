"""The compiled CPU kernels: LLVM IR written in Python, compiled for the CPU at hand. docs/kernels.md explains them."""
