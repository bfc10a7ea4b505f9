"""What things cost, measured side by side in one run: the regularizer, a training step, an epoch. Ratios count."""
