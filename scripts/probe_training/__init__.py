"""What trains the embedded model, apart from the command itself (`scripts/train_probe.py`)."""
