"""The ledger of any real module: two training steps run on fake tensors, as CUDA would run them."""
