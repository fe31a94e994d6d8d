"""What trains the embedded reasoning model, apart from the command itself (`scripts/train_reasoner.py`)."""
