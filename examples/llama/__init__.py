"""A small hand-written Llama, and greedy decoding with it."""
