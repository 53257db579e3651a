"""Static limits of the CUDA kernels, read from what nvcc makes of them."""
