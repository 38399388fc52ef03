"""What the inference examples share."""
