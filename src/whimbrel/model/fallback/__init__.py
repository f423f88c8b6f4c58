"""PyTorch's products with stable bits, where our own do not run: private calls, trials of shapes, and blocks of rows."""
