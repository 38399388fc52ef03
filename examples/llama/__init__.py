"""A small Llama, written by hand, and greedy decoding with it."""
