"""What trains the embedded model, apart from the command itself (`train_probe.py`)."""
