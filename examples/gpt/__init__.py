"""The parts of examples/train_gpt.py: text, model, training run and report."""
