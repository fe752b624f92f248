"""CUDA devices: which GPUs CUDA shows this process, under which ordinals, and which ranks share them."""
